"""Search of learning rates over the paper's grid (E15): validation accuracy of every cell, and the chosen pairs.

The paper uses one pair for both arms, the one with the highest mean over the arms. The search also gives the best pair
of each arm. Test data are not used.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedgma.paper.compare import Compared, Comparison
from fedgma.paper.rates import KEYS, Chosen, Pair, rule_of, where_searched, written
from fedgma.reports.tables import Table, comma_separated

SPLIT = "validation"
CLOSE = 1.0  # points of validation accuracy; pairs that are closer are not told apart
Scores = dict[Pair, float]


def choose(comparison: Comparison, *, by_setting: bool = False) -> dict[tuple[str, str, str], Pair]:
    """(data set, algorithm, `shared` or arm) -> the pair with the highest mean validation accuracy.

    The mean is over seeds and over all numbers of clients searched: a pair that diverges at one of them is not chosen.
    With `by_setting` every partition and number of clients has its own rates.
    """
    chosen = {}
    for (dataset, algorithm), cells in _groups(comparison, by_setting).items():
        for rule, pair in best_pairs(cells).items():
            chosen[dataset, algorithm, rule] = pair
    return chosen


def doubts(comparison: Comparison, *, by_setting: bool = False) -> list[str]:
    """Choices that the search does not support: pairs that it cannot tell apart, and rates at the edge of the grid."""
    doubtful = []
    for (where, algorithm), cells in _groups(comparison, by_setting).items():
        for arm, scores in _scores(cells).items():
            first, *others = sorted(scores, key=lambda pair: scores[pair], reverse=True)
            name = f"{where}, {algorithm}, {arm}"
            if others and scores[first] - scores[others[0]] < CLOSE:
                shown = [f"{scores[pair]:.1f} % at ({pair[0]:g}, {pair[1]:g})" for pair in (first, others[0])]
                doubtful.append(f"{name}: {', '.join(shown)}")
            grid = [sorted({pair[axis] for pair in scores}) for axis in (0, 1)]
            edges = [
                f"{side} rate {first[axis]:g}"
                for axis, side in enumerate(("client", "server"))
                if len(grid[axis]) > 1 and first[axis] in (grid[axis][0], grid[axis][-1])
            ]
            doubtful += [f"{name}: {' and '.join(edges)} at the edge of the grid"] if edges else []
    return doubtful


def best_pairs(cells: Sequence[Compared]) -> dict[str, Pair]:
    """The pair that is best for all arms together (`shared`), and the best pair of each arm.

    A pair's score is its mean over the cells that have it, that is, over numbers of clients.
    """
    arms = _scores(cells)
    shared = set.intersection(*(set(scores) for scores in arms.values()))
    both = {pair: _mean([scores[pair] for scores in arms.values()]) for pair in shared}
    together = {"shared": both} if both and len(arms) > 1 else {}
    return {rule: best(scores) for rule, scores in {**together, **arms}.items()}


def _groups(comparison: Comparison, by_setting: bool) -> dict[tuple[str, str], list[Compared]]:
    """The cells that were run in all their arms, by data set (or setting) and algorithm."""
    groups: dict[tuple[str, str], list[Compared]] = {}
    for compared in comparison.on(SPLIT):
        if all(scores for _, scores in _sides(compared)):
            settings = compared.cell.settings
            where = where_searched(settings, compared.cell.part) if by_setting else str(settings["dataset"])
            groups.setdefault((where, settings["algorithm"]), []).append(compared)
    return groups


def _scores(cells: Sequence[Compared]) -> dict[str, Scores]:
    """The mean validation accuracy of each arm at each pair."""
    arms: dict[str, list[tuple[Pair, float]]] = {}
    for compared in cells:
        for rule, scores in _sides(compared):
            arms.setdefault(rule, []).append((_pair(compared), _mean([*scores.values()])))
    return {rule: _by_pair(scored) for rule, scored in arms.items()}


def _sides(compared: Compared) -> list[tuple[str, Mapping[int, float]]]:
    """The arms of a cell: the key of their rates, and their scores by seed."""
    cell = compared.cell
    sides = ((cell.plain, compared.plain), (cell.masked, compared.masked))
    return [(rule_of(settings), scores) for settings, scores in sides if settings is not None]


def _by_pair(scored: Sequence[tuple[Pair, float]]) -> Scores:
    pairs = dict.fromkeys(pair for pair, _ in scored)
    return {pair: _mean([score for other, score in scored if other == pair]) for pair in pairs}


def best(scores: Scores) -> Pair:
    """The pair with the highest score; ties go to the smaller rates.

    >>> best({(0.1, 1.0): 90.0, (0.01, 1.0): 90.0, (0.01, 0.1): 80.0})
    (0.01, 1.0)
    """
    return max(sorted(scores), key=lambda pair: scores[pair])


def rates_table(comparison: Comparison) -> Table:
    """The whole search: every run's validation accuracy."""
    rows = []
    for compared in comparison.on(SPLIT):
        settings = compared.cell.settings
        for arm, scores in _sides(compared):
            where = (settings["dataset"], settings["partition.name"], settings["partition.clients"])
            named = (*where, settings["algorithm"], arm, *_pair(compared))
            rows += [(*named, seed, round(score, 4)) for seed, score in sorted(scores.items())]
    header = ("dataset", "partition", "clients", "algorithm", "aggregator", *KEYS, "seed", "validation_last10")
    once = dict.fromkeys(rows)  # a run of the mean stands beside every rule
    return Table("rates", "Search of learning rates", header, tuple(once))


def write_search(
    comparison: Comparison, before: Chosen, folder: Path, *, by_setting: bool = False
) -> dict[tuple[str, str, str], Pair]:
    """Write rates.csv and chosen.toml (earlier choices for other data sets are kept); return the new pairs."""
    chosen_pairs = choose(comparison, by_setting=by_setting)
    searched = {dataset for dataset, _, _ in chosen_pairs}
    kept = {key: pair for key, pair in before.rates.items() if key[0] not in searched}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rates.csv").write_text(comma_separated(rates_table(comparison)), encoding="utf-8")
    (folder / "chosen.toml").write_text(written({**kept, **chosen_pairs}, before.shift), encoding="utf-8")
    return chosen_pairs


def _pair(compared: Compared) -> Pair:
    client, server = (float(compared.cell.settings[key]) for key in KEYS)
    return client, server


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
