"""Summaries of runs: best, last10 and final score, their spread over seeds, and the settings that tell runs apart.

`best` is selected on the test data, so it is always reported together with `last10`, the mean over the evaluations in
the last ten rounds; verdicts use `last10`. Accuracies and other shares are in percent, other metrics in their unit.

Runs of one arm differ only in the seed: settings, data and model are the same. A setting that is None was not used by
the run and makes no difference.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from fedgma.aggregation.rules import BASELINE
from fedgma.errors import DataError
from fedgma.records.reader import Run
from fedgma.statistics.labels import (
    AGGREGATION_SETTINGS,
    ARM,
    LEFT_OUT,
    VERSIONS,
    arm,
    rank,
    sortable,
    title_of,
    versions,
)
from fedgma.statistics.metrics import ACCURACY, Metric, course, metrics_of

WINDOW = 10  # rounds
VERSIONED = ("dataset", "shift.name", "model")  # settings whose content may have several versions


class Summary(NamedTuple):
    """A run's scores: accuracy in percent, or another metric."""

    best: float
    last10: float
    final: float


class Spread(NamedTuple):
    """Mean and sample standard deviation over seeds; one seed has no deviation."""

    mean: float
    deviation: float | None
    of: int


class Row(NamedTuple):
    """Runs that differ only in their seed."""

    label: dict[str, Any]  # the settings that tell it from other rows
    runs: tuple[Run, ...]
    scores: dict[str, Spread]  # best, last10, final; empty if nothing was evaluated
    metric: Metric = ACCURACY  # what the scores are

    @property
    def name(self) -> str:
        """A short name: the settings that tell the row from others, then its aggregation."""
        return ", ".join(filter(None, [title_of(self.label), arm(self.runs[0], list(self.label))]))


def summarise(values: Mapping[int, float], metric: Metric = ACCURACY) -> Summary:
    """Recorded scores by round -> scores of the run; shares become percent.

    >>> summarise({1: 0.5, 5: 0.7, 10: 0.6, 15: 0.7, 20: 0.5})
    Summary(best=70.0, last10=60.0, final=50.0)
    """
    if not values:
        raise DataError("expected at least one evaluation, but the run has none; set evaluate_every to 1 or more")
    last, factor = max(values), metric.factor
    late = [value for round, value in values.items() if round > last - WINDOW]
    best = factor * metric.best(list(values.values()))
    return Summary(best=best, last10=factor * math.fsum(late) / len(late), final=factor * values[last])


def spread(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation.

    >>> spread([1.0, 3.0])
    Spread(mean=2.0, deviation=1.4142135623730951, of=2)
    """
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Spread(mean, None, 1)
    return Spread(mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)), len(values))


def score(run: Run, metric: str = "last10", split: str = "test", of: Metric = ACCURACY) -> float:
    """One summary statistic of a run: of the accuracy in percent, or of another metric."""
    values = course(run, split, of)
    if not values:
        raise DataError(f"{run.folder} has no {of.name} on {split!r}; choose a split that its rounds were evaluated on")
    return float(getattr(summarise(values, of), metric))


def summary_of(run: Run, split: str = "test") -> Summary | None:
    """The scores of a run by its first metric; None if nothing was evaluated."""
    metric = metrics_of(run)[0]
    values = course(run, split, metric)
    return summarise(values, metric) if values else None


def last_rounds(runs: Sequence[Run]) -> str:
    """The rounds that `last10` averages, in words: finished runs may have fewer than ten rounds.

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


def traits(run: Run) -> dict[str, Any]:
    """What distinguishes a run: the settings that it uses, and the versions of its data and model.

    The seed of a partition is left out if it equals the seed of the run.

    >>> from pathlib import Path
    >>> settings = {"aggregator": "mean", "tau": None, "seed": 1, "partition.seed": 1}
    >>> traits(Run(Path(), {"format": 2, "settings": {}, "identity": {"data": "v2"}}, settings, (), None))
    {'aggregator': 'mean', 'seed': 1, 'data_version': 'v2'}
    """
    seed = run.settings.get("seed")
    used = {name: value for name, value in run.settings.items() if value is not None}
    same = [name for name, value in used.items() if name.endswith(".seed") and value == seed]
    return {name: value for name, value in used.items() if name not in same} | versions(run)


def trait(run: Run, name: str) -> Any:
    """A trait as shown in a label; empty for a setting of another aggregator, attack or clock."""
    known = traits(run)
    if name in known:
        return known[name]
    if name in LEFT_OUT:
        return LEFT_OUT[name]
    if name.startswith("attack."):
        return "no attack" if name == "attack.name" else ""
    if name.startswith("clock."):
        return "no clock" if name == "clock.name" else ""
    if name in ARM or name.endswith(".seed"):
        return ""
    return "unknown" if name in (VERSIONS["data"], VERSIONS["model"]) else None


def frozen(settings: Mapping[str, Any], without: Collection[str] = ("seed",)) -> str:
    """Settings as text, as a key for grouping."""
    return json.dumps({k: v for k, v in settings.items() if k not in without}, sort_keys=True)


def telling(runs: Sequence[Run], without: Sequence[str] = ("seed",)) -> list[str]:
    """The settings that tell the runs apart, without those that the others imply."""
    known = [traits(run) for run in runs]
    return telling_names([{name: value for name, value in row.items() if name not in without} for row in known])


def telling_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names whose values tell the rows apart, the commonest first, without those that the others imply.

    The version of data or model is always included if a data set or model has several versions.

    >>> telling_names([{"mu": 0.1, "algorithm": "fedprox"}, {"mu": None, "algorithm": "fedavg"}])
    ['algorithm']
    >>> telling_names([{"partition.name": "own:halves", "client_ids": "cf"}, {"partition.name": "natural"}])
    ['partition.name']
    >>> telling_names([{"step_schedule.length": 20, "step_schedule.name": "cosine"}, {"step_schedule.name": "step"}])
    ['step_schedule.name']
    >>> telling_names([{"aggregator": "mean", "data_version": "a"}, {"aggregator": "gma", "data_version": "b"}])
    ['data_version', 'aggregator']
    """
    names = sorted(dict.fromkeys(name for row in rows for name in row), key=_place)
    clients = VERSIONS["clients"]  # a partition of the user's own has ids, and others may have none
    apart = {*VERSIONS.values()} - {*AGGREGATION_SETTINGS}
    kept = _splitting(rows, [name for name in names if name not in apart])
    versions = _splitting(rows, [name for name in names if name in apart - {clients}], VERSIONED)
    owners = _splitting(rows, [name for name in names if name == clients], (*VERSIONED, "partition.name"))
    return sorted([*kept, *versions, *owners], key=rank)


def _place(name: str) -> tuple[int, bool]:
    """The order in which names are tried: a schedule is told by its name before its numbers."""
    return rank(name), not name.endswith("_schedule.name")


def _splitting(rows: Sequence[Mapping[str, Any]], names: Sequence[str], given: Sequence[str] = ()) -> list[str]:
    """The names that, in turn, split the rows further than the `given` names and the names before them."""
    groups = [0] * len(rows)  # which group each row is in
    for name in given:
        groups = _divided(groups, [row.get(name) for row in rows])
    kept: list[str] = []
    for name in names:
        finer = _divided(groups, [row.get(name) for row in rows])
        if len(set(finer)) > len(set(groups)):
            kept, groups = [*kept, name], finer
    return kept


def _divided(groups: Sequence[int], values: Sequence[Any]) -> list[int]:
    """Groups of rows divided by the rows' values.

    >>> _divided([0, 0, 1], ["a", "b", "a"])
    [0, 1, 2]
    """
    keys = [(group, json.dumps(value, sort_keys=True)) for group, value in zip(groups, values, strict=True)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return [numbers[key] for key in keys]


def common(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries that all rows share, with the same value.

    >>> common([{"rounds": 3, "seed": 0}, {"rounds": 3, "seed": 1, "mu": None}])
    {'rounds': 3}
    """
    first = rows[0] if rows else {}
    return {name: value for name, value in first.items() if all(name in row and row[name] == value for row in rows)}


def rows(runs: Sequence[Run], of: Metric | None = None) -> list[Row]:
    """Finished runs grouped over seeds with their scores, plain means before masked ones; `of` a run's first metric."""
    groups = [row._replace(runs=first_of_each_seed(row.runs)) for row in grouped(runs)]
    metrics = [of or metrics_of(row.runs[0])[0] for row in groups]
    return [row._replace(scores=_scores(row.runs, of), metric=of) for row, of in zip(groups, metrics, strict=True)]


def grouped(runs: Sequence[Run]) -> list[Row]:
    """Runs grouped over seeds, finished or not, without scores."""
    names = telling(runs) or ["aggregator"]
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(frozen(traits(run)), []).append(run)
    arms = [_row(tuple(group), names) for group in groups.values()]
    return sorted(arms, key=lambda row: _order(row, names))


def first_of_each_seed(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Runs sorted by seed; of repeated runs only the first is kept."""
    kept: dict[int, Run] = {}
    for run in runs:
        kept.setdefault(run.seed, run)
    return tuple(kept[seed] for seed in sorted(kept))


def same_models(pairs: Sequence[tuple[Run, Run]]) -> bool | None:
    """Whether both runs of every pair ended with the same model, by its checksum; None if one has no checksum."""
    ends = [[run.done.get("sha256") if run.done else "" for run in pair] for pair in pairs]
    return all(first == second for first, second in ends) if all(all(pair) for pair in ends) else None


def without_extended(runs: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """Two lists: the runs without those that a longer finished run continues, and the latter."""
    longest: dict[str, int] = {}
    for run in runs:
        if run.finished and (lineage := run.head.get("lineage")):
            longest[lineage] = max(longest.get(lineage, 0), run.planned)
    extended = [run for run in runs if run.planned < longest.get(run.head.get("lineage", ""), 0)]
    dropped = set(map(id, extended))
    return [run for run in runs if id(run) not in dropped], extended


def _row(runs: tuple[Run, ...], names: Sequence[str]) -> Row:
    return Row({name: trait(runs[0], name) for name in names}, runs, {})


def _scores(runs: Sequence[Run], metric: Metric) -> dict[str, Spread]:
    summaries = [summarise(course(run, "test", metric), metric) for run in runs]
    return {name: spread([getattr(summary, name) for summary in summaries]) for name in Summary._fields}


def _order(row: Row, names: Sequence[str]) -> list[tuple[int, int, float, str]]:
    """Sort key: the settings in turn, those of the arm last: the mean, GMA, the others; unused settings first."""
    last = sorted(names, key=lambda name: (name in ARM, name != "server_average"))
    arms = {BASELINE: 0, "gma": 1}
    places = [arms.get(str(row.label[n]), 2) if n == "aggregator" else int(row.label[n] != "") for n in last]
    return [(place, *sortable(row.label[n])) for place, n in zip(places, last, strict=True)]
