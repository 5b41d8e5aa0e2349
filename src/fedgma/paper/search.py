"""Learning rates searched over the paper's grid (E15): every cell's validation accuracy, and the pairs it chooses.

The paper's rule is one pair for both arms: the one whose mean over the arms is highest. Beside it stands the best pair
of each arm on its own. Test data play no part.
"""

from collections.abc import Sequence
from pathlib import Path

from fedgma.paper.compare import Compared, Comparison
from fedgma.paper.rates import KEYS, Chosen, Pair, setting_of, written
from fedgma.reports.tables import Table, comma_separated

SPLIT = "validation"
Scores = dict[Pair, float]


def choose(comparison: Comparison, *, by_setting: bool = False) -> dict[tuple[str, str, str], Pair]:
    """(data set, algorithm, `shared` or arm) -> the pair with the highest mean validation accuracy.

    The mean is over seeds and over all numbers of clients searched: a pair that diverges at one of them is not chosen.
    With `by_setting` every partition and number of clients has rates of its own.
    """
    groups: dict[tuple[str, str], list[Compared]] = {}
    for one in comparison.on(SPLIT):
        if one.plain and one.masked:
            settings = one.cell.settings
            where = setting_of(settings) if by_setting else str(settings["dataset"])
            groups.setdefault((where, settings["algorithm"]), []).append(one)
    chosen = {}
    for (dataset, algorithm), cells in groups.items():
        arms = {
            "mean": _by_pair([(_pair(one), _mean(list(one.plain.values()))) for one in cells]),
            "gma": _by_pair([(_pair(one), _mean(list(one.masked.values()))) for one in cells]),
        }
        both = {pair: _mean([scores[pair] for scores in arms.values()]) for pair in arms["mean"]}
        for rule, scores in {"shared": both, **arms}.items():
            chosen[dataset, algorithm, rule] = best(scores)
    return chosen


def _by_pair(scored: Sequence[tuple[Pair, float]]) -> Scores:
    pairs = dict.fromkeys(pair for pair, _ in scored)
    return {pair: _mean([score for other, score in scored if other == pair]) for pair in pairs}


def best(scores: Scores) -> Pair:
    """The pair with the highest score; of equal ones that with the smaller rates.

    >>> best({(0.1, 1.0): 90.0, (0.01, 1.0): 90.0, (0.01, 0.1): 80.0})
    (0.01, 1.0)
    """
    return max(sorted(scores), key=lambda pair: scores[pair])


def rates_table(comparison: Comparison) -> Table:
    """The whole search: every run's validation accuracy."""
    rows = []
    for one in comparison.on(SPLIT):
        settings = one.cell.settings
        for arm, scores in (("mean", one.plain), ("gma", one.masked)):
            where = (settings["dataset"], settings["partition.name"], settings["partition.clients"])
            named = (*where, settings["algorithm"], arm, *_pair(one))
            rows += [(*named, seed, round(score, 4)) for seed, score in sorted(scores.items())]
    header = ("dataset", "partition", "clients", "algorithm", "aggregator", *KEYS, "seed", "validation_last10")
    return Table("rates", "Search of learning rates", header, tuple(rows))


def write_search(
    comparison: Comparison, before: Chosen, folder: Path, *, by_setting: bool = False
) -> dict[tuple[str, str, str], Pair]:
    """Write rates.csv and chosen.toml (what was chosen before for other data sets is kept); returns the new pairs."""
    found = choose(comparison, by_setting=by_setting)
    searched = {dataset for dataset, _, _ in found}
    kept = {key: pair for key, pair in before.rates.items() if key[0] not in searched}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rates.csv").write_text(comma_separated(rates_table(comparison)), encoding="utf-8")
    (folder / "chosen.toml").write_text(written({**kept, **found}, before.shift), encoding="utf-8")
    return found


def _pair(one: Compared) -> Pair:
    client, server = (float(one.cell.settings[key]) for key in KEYS)
    return client, server


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
