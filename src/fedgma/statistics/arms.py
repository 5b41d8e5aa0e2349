"""Runs in a few numbers: best, last10 and final accuracy, their spread over seeds, and which settings tell runs apart.

`best` is chosen on the test data, so `last10` (the mean over the evaluations in the last ten rounds) always stands
beside it and is what verdicts go by. Accuracies are in percent.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedgma.errors import DataError
from fedgma.records.reader import Run, curve

WINDOW = 10  # rounds
BASELINE = "mean"
# settings that only some aggregators read; for the others they are no difference between two runs
AGGREGATOR_SETTINGS = {
    "tau": ("gma", "and_mask", "damped_mean", "shuffled_mask"),
    "mask_position": ("gma", "and_mask", "rlr", "shuffled_mask"),
    "threshold": ("rlr",),
    "trim": ("trimmed_mean",),
}
NAMES = {"gma": "GMA", "and_mask": "AND-mask", "rlr": "RLR"}
ALONE = ("dataset", "partition.name", "shift.name", "model", "algorithm", "aggregator")  # words that need no name
FIRST = (
    "dataset",
    "partition.name",
    "partition.alpha",
    "partition.beta",
    "shift.name",
    "model",
    "algorithm",
)  # in labels


class Summary(NamedTuple):
    """A run's accuracy in percent."""

    best: float
    last10: float
    final: float


class Spread(NamedTuple):
    """Mean and sample deviation over seeds; one seed has no deviation."""

    mean: float
    deviation: float | None
    of: int


class Row(NamedTuple):
    """Runs that differ in nothing but their seed."""

    label: dict[str, Any]  # the settings that tell it from other rows
    runs: tuple[Run, ...]
    scores: dict[str, Spread]  # best, last10, final; empty before anything was evaluated

    @property
    def name(self) -> str:
        """The row in a few words: the settings that tell it apart, then its aggregation."""
        others = [spelt(*one) for one in self.label.items() if one[0] not in ("aggregator", *AGGREGATOR_SETTINGS)]
        return ", ".join([*others, arm(self.runs[0], list(self.label))])


def summarise(accuracies: Mapping[int, float]) -> Summary:
    """Shares by round -> percent.

    >>> summarise({1: 0.5, 5: 0.7, 10: 0.6, 15: 0.7, 20: 0.5})
    Summary(best=70.0, last10=60.0, final=50.0)
    """
    if not accuracies:
        raise DataError("a run without an evaluation has no accuracy to report; set evaluate_every to 1 or more")
    last = max(accuracies)
    late = [value for round, value in accuracies.items() if round > last - WINDOW]
    return Summary(
        best=100 * max(accuracies.values()), last10=100 * math.fsum(late) / len(late), final=100 * accuracies[last]
    )


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample deviation.

    >>> spread([1.0, 3.0])
    Spread(mean=2.0, deviation=1.4142135623730951, of=2)
    """
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Spread(mean, None, 1)
    return Spread(mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)), len(values))


def score(run: Run, metric: str = "last10", split: str = "test") -> float:
    """One summary of one run, in percent."""
    accuracies = curve(run, split, "accuracy")
    if not accuracies:
        raise DataError(f"{run.folder} holds no {split!r} accuracy; its rounds were not evaluated on that")
    return float(getattr(summarise(accuracies), metric))


def last_rounds(runs: Sequence[Run]) -> str:
    """What `last10` is the mean over, in words: finished runs may have fewer than ten rounds.

    >>> from pathlib import Path
    >>> short, long = (Run(Path(), {}, {"rounds": rounds}, (), None) for rounds in (3, 200))
    >>> last_rounds([short]), last_rounds([long]), last_rounds([short, long])
    ('last 3 rounds', 'last 10 rounds', 'last 3 to 10 rounds')
    """
    counts = [min(WINDOW, run.planned) for run in runs]
    fewest, most = min(counts), max(counts)
    if most == 1:
        return "last round"
    return f"last {most} rounds" if fewest == most else f"last {fewest} to {most} rounds"


def applicable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that tell runs apart: a plain mean has no tau, a partition dealt by the run's seed no other seed.

    >>> applicable({"aggregator": "mean", "tau": 0.4, "seed": 1, "partition.seed": 1})
    {'aggregator': 'mean', 'seed': 1}
    """
    aggregator = settings["aggregator"]
    unread = [name for name, readers in AGGREGATOR_SETTINGS.items() if aggregator not in readers]
    unread += [name for name, value in settings.items() if name.endswith(".seed") and value == settings.get("seed")]
    return {name: value for name, value in settings.items() if name not in unread}


def frozen(settings: Mapping[str, Any], without: Sequence[str] = ("seed",)) -> str:
    """Settings as text to group by."""
    return json.dumps({k: v for k, v in settings.items() if k not in without}, sort_keys=True)


def telling(runs: Sequence[Run], without: Sequence[str] = ("seed",)) -> list[str]:
    """The settings that tell the runs apart; one that follows from the others is left out."""
    known = [applicable(run.settings) for run in runs]
    return telling_names([{name: value for name, value in row.items() if name not in without} for row in known])


def telling_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names whose values tell the rows apart, the commonest first; one that follows from the others is left out.

    >>> telling_names([{"mu": 0.1, "algorithm": "fedprox"}, {"mu": None, "algorithm": "fedavg"}])
    ['algorithm']
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    names.sort(key=_rank)
    kept: list[str] = []
    groups = 1
    for name in names:
        split = len({frozen({k: row.get(k) for k in [*kept, name]}, without=()) for row in rows})
        if split > groups:
            kept, groups = [*kept, name], split
    return kept


def common(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all rows have, with the same value.

    >>> common([{"rounds": 3, "seed": 0}, {"rounds": 3, "seed": 1, "mu": None}])
    {'rounds': 3}
    """
    first = rows[0] if rows else {}
    return {name: value for name, value in first.items() if all(name in row and row[name] == value for row in rows)}


def rows(runs: Sequence[Run]) -> list[Row]:
    """Finished runs grouped over their seeds, plain means before masked ones, with their scores."""
    made = [row._replace(runs=first_of_each_seed(row.runs)) for row in grouped(runs)]
    return [row._replace(scores=_scores(row.runs)) for row in made]


def grouped(runs: Sequence[Run]) -> list[Row]:
    """Runs grouped over their seeds, finished or not, without scores."""
    names = telling(runs) or ["aggregator"]
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(frozen(applicable(run.settings)), []).append(run)
    made = [_row(tuple(group), names) for group in groups.values()]
    return sorted(made, key=lambda row: _order(row, names))


def first_of_each_seed(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Runs by seed; of repeats of the same run the first is kept."""
    kept: dict[int, Run] = {}
    for run in runs:
        kept.setdefault(run.seed, run)
    return tuple(kept[seed] for seed in sorted(kept))


def arm(run: Run, names: Sequence[str] = ()) -> str:
    """What to call a run's aggregation, with those of its own settings that are named.

    >>> from pathlib import Path
    >>> arm(Run(Path(), {}, {"aggregator": "gma", "tau": 0.4}, (), None), ["tau"])
    'GMA, tau 0.4'
    """
    own = [name for name in names if name in AGGREGATOR_SETTINGS and name in applicable(run.settings)]
    aggregator = str(run.settings["aggregator"])
    return ", ".join([NAMES.get(aggregator, aggregator), *(f"{name} {plain(run.settings[name])}" for name in own)])


def spoken(aggregator: str) -> str:
    """An aggregator in a sentence.

    >>> spoken("gma"), spoken("mean"), spoken("median")
    ('GMA', 'the mean', 'median')
    """
    return "the mean" if aggregator == BASELINE else NAMES.get(aggregator, aggregator)


def spelt(name: str, value: Any) -> str:
    """A setting in a title: known words alone, everything else with its name.

    >>> spelt("algorithm", "fedadam"), spelt("partition.alpha", 0.3)
    ('fedadam', 'alpha 0.3')
    """
    return plain(value) if name in ALONE else f"{short(name)} {plain(value)}"


def plain(value: Any) -> str:
    """A setting as a reader writes it.

    >>> plain(0.4), plain(None), plain([1, 2]), plain(True), plain(1e-3)
    ('0.4', 'none', '1, 2', 'yes', '0.001')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(plain, value))
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def short(name: str) -> str:
    """A setting's name for a heading.

    >>> short("partition.name"), short("partition.alpha"), short("client_learning_rate")
    ('partition', 'alpha', 'client learning rate')
    """
    return name.removesuffix(".name").rsplit(".", 1)[-1].replace("_", " ")


def _rank(name: str) -> int:
    """The aggregation comes last, so that the arms of one setting stand together."""
    if name == "aggregator" or name in AGGREGATOR_SETTINGS:
        return len(FIRST) + (1 if name == "aggregator" else 2)
    return FIRST.index(name) if name in FIRST else len(FIRST)


def _row(runs: tuple[Run, ...], names: Sequence[str]) -> Row:
    settings = applicable(runs[0].settings)
    return Row({name: settings.get(name, "") for name in names}, runs, {})


def _scores(runs: Sequence[Run]) -> dict[str, Spread]:
    summaries = [summarise(curve(run, "test", "accuracy")) for run in runs]
    return {name: spread([getattr(summary, name) for summary in summaries]) for name in Summary._fields}


def _order(row: Row, names: Sequence[str]) -> list[tuple[int, int, float, str]]:
    """By the settings in turn, the aggregation last, so that arms stand below each other: the mean, GMA, the others."""
    last = sorted(names, key=lambda name: name == "aggregator" or name in AGGREGATOR_SETTINGS)
    arms = {BASELINE: 0, "gma": 1}
    return [(arms.get(str(row.label[n]), 2) if n == "aggregator" else 0, *sortable(row.label[n])) for n in last]


def sortable(value: Any) -> tuple[int, float, str]:
    """A key that puts numbers in their order, also those written as text, before words.

    >>> sorted(["0.5", "b", 10, "2"], key=sortable)
    ['0.5', '2', 10, 'b']
    """
    try:
        return (0, float(value), "")
    except (TypeError, ValueError):
        return (1, 0.0, plain(value))
