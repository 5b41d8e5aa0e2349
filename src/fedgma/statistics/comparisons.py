"""Compare two arms: pair runs by seed and settings, test each setting (a cell), and correct for multiple tests.

Runs are paired as `partners` says; the comparison names those whose only partners used other data or another model. The
verdict on the comparison is over the converged cells, without those in which every pair has a diverged run: the
difference of a seed is its mean over cells, since cells that share seeds are not independent. Cells are corrected
within their table, the comparisons of a page together.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedgma.errors import ConfigError
from fedgma.records.reader import Run
from fedgma.statistics.arms import Summary, frozen, same_models, score, summarise, telling_names, trait, traits
from fedgma.statistics.convergence import Convergence, converge, is_dead
from fedgma.statistics.labels import LEFT_OUT, in_title, plain, sortable
from fedgma.statistics.metrics import ACCURACY, Metric, course, metric_of
from fedgma.statistics.partners import Pair, find_partners
from fedgma.statistics.power import LEAST_SEEDS
from fedgma.statistics.verdicts import Verdict, correct, paired

ROUNDING = 1e-12  # of a score, relative


class Cell(NamedTuple):
    """One setting in which both arms ran."""

    label: dict[str, str]
    seeds: tuple[int, ...]
    differences: tuple[float, ...]  # by how much the first is better, in points, by seed
    verdict: Verdict  # corrected within its table
    best: Verdict  # of the differences of `best`, over the rounds that both runs evaluated; not corrected
    convergence: Convergence
    settled: Verdict | None  # without the pairs of diverged runs, not corrected; None if none diverged or none is left
    lost: tuple[int, ...] = ()  # seeds of the pairs in which a run diverged
    same_models: bool | None = None  # whether both runs of every pair ended with the same model; None: not recorded

    @property
    def where(self) -> str:
        """The setting in words; empty if there is only one."""
        return ", ".join(in_title(name, value) for name, value in self.label.items() if value != "")

    @property
    def says(self) -> str:
        """The outcome in words."""
        names = {"first ahead": self.verdict.names[0], "second ahead": self.verdict.names[1]}
        if self.verdict.significant:
            return f"{names[self.verdict.outcome]} ahead"
        corrected_away = self.verdict.outcome == "inconclusive" and paired(self.differences).significant
        return "not significant after correction" if corrected_away else self.verdict.outcome

    @property
    def remark(self) -> str:
        """Whether it converged, what diverged, and the difference with that; empty if there is nothing to say."""
        if self.settled is None:
            return self.convergence.text
        of_arm = (f"{name} {count}" for name, count in zip(self.verdict.names, self.convergence.diverged, strict=True))
        lost = f"{self.convergence.text} ({', '.join(of_arm)}), and their pairs are left out"
        return f"{lost}; with them: {self.verdict.text}"

    @property
    def why_equal(self) -> str:
        """Of arms with equal scores, whether their models are equal too; empty for others, and if it is not known."""
        if any(self.differences) or self.same_models is None:
            return ""
        return f"their models {'are the same' if self.same_models else 'differ, which this score does not show'}"

    @property
    def pairs(self) -> dict[int, float]:
        """Seed -> difference."""
        return dict(zip(self.seeds, self.differences, strict=True))

    @property
    def kept(self) -> dict[int, float]:
        """Seed -> difference, without the pairs in which a run diverged."""
        return {seed: value for seed, value in self.pairs.items() if seed not in self.lost}


class Comparison(NamedTuple):
    """Two arms, cell by cell."""

    names: tuple[str, str]
    metric: str
    split: str
    differ: tuple[str, ...]  # the settings in which the arms differ
    cells: tuple[Cell, ...]
    overall: Verdict | None  # over the converged cells, or all if none has; None if they share no seed
    alone: int  # runs of either arm that have no partner
    apart: tuple[Run, ...] = ()  # runs whose only partners are of other data or of another model
    versions: tuple[str, ...] = ()  # how their data or models differ, in words
    score: Metric = ACCURACY  # what is compared

    @property
    def tests(self) -> int:
        """The number of cells with enough seeds for a test."""
        return sum(cell.verdict.of >= LEAST_SEEDS for cell in self.cells)

    @property
    def signs(self) -> str:
        """In how many settings each arm is ahead; no test, since settings that share seeds are not independent."""
        means = [cell.verdict.mean for cell in self.cells]
        ahead, behind = sum(mean > 0 for mean in means), sum(mean < 0 for mean in means)
        return f"settings in which {self.names[0]} is ahead: {ahead}, behind: {behind}, of {len(means)}"

    @property
    def text(self) -> str:
        """The verdict as a sentence: on the only cell, or over all cells."""
        if not self.cells:
            because = f": {' and '.join(self.versions)}" if self.versions else ""
            return f"no two finished runs share seed and settings, so nothing can be paired{because}"
        runs = sum(cell.convergence.of for cell in self.cells)
        if runs == sum(sum(cell.convergence.diverged) for cell in self.cells):
            return f"all {runs} runs of both arms diverged, so there is nothing to compare; use smaller learning rates"
        if len(self.cells) > 1 or self.overall is None:
            verdict = _over_cells(self)
        else:
            cell = self.cells[0]
            verdict = "; ".join(part for part in (self.overall.text, cell.why_equal, cell.remark) if part)
        return f"{verdict}; the arms trained for different numbers of rounds" if "rounds" in self.differ else verdict


def compare(
    first: Sequence[Run],
    second: Sequence[Run],
    names: tuple[str, str],
    *,
    metric: str = "last10",
    split: str = "test",
    apart: Sequence[str] = (),
    of: str | None = None,
) -> Comparison:
    """Pair the finished runs of two arms by seed and settings; the arms may differ in the settings `apart`.

    They may also differ in every setting of which they share no value, and in data or model where `apart` names these
    or no setting. Without a pair there is no cell. `metric` is the
    statistic of a run; `of` names what is scored, by default the first metric that the runs record.
    """
    if metric not in Summary._fields:
        raise ConfigError(f"unknown metric {metric!r}; known: {', '.join(Summary._fields)}")
    score = metric_of([*first, *second], of)
    found = find_partners(first, second, apart)
    groups: dict[str, dict[int, Pair]] = {}
    for a, b in found.pairs:
        cell = frozen(traits(a)) + frozen(traits(b))
        groups.setdefault(cell, {}).setdefault(a.seed, (a, b))
    cells = _cells([by_seed(group) for group in groups.values()], names, metric, split, score)
    differ = tuple(name for name in sorted(found.free) if any(_differs(a, b, name) for a, b in found.pairs))
    return Comparison(
        names=names,
        metric=metric,
        split=split,
        differ=differ,
        cells=tuple(cells),
        overall=_overall(cells, names, score),
        alone=len(found.alone),
        apart=tuple(found.apart),
        versions=found.versions,
        score=score,
    )


def over_seeds(rows: Sequence[Mapping[int, float]]) -> list[float]:
    """The mean over rows for every seed that all rows share.

    >>> over_seeds([{0: 1.0, 1: 2.0}, {0: 3.0, 1: 4.0, 2: 9.0}])
    [2.0, 3.0]
    """
    seeds = sorted(set.intersection(*(set(row) for row in rows))) if rows else []
    return [sum(row[seed] for row in rows) / len(rows) for seed in seeds]


def _overall(cells: Sequence[Cell], names: tuple[str, str], score: Metric) -> Verdict | None:
    """The verdict over the cells that count; None if they share no seed.

    Pairs in which a run diverged do not count, unless no seed is left without them.
    """
    counted = _counted_cells(cells)
    values = over_seeds([cell.kept for cell in counted]) or over_seeds([cell.pairs for cell in counted])
    return paired(values, names, score) if values else None


def _counted_cells(cells: Sequence[Cell]) -> Sequence[Cell]:
    """The cells that a verdict is over: those with a pair of runs that did not diverge, and of these the converged.

    All if every pair has a diverged run; also those that have not converged, if none has.
    """
    left = [cell for cell in cells if cell.kept] or cells
    return [cell for cell in left if cell.convergence.converged] or left


def _cells(
    groups: Sequence[Sequence[Pair]], names: tuple[str, str], metric: str, split: str, score: Metric
) -> list[Cell]:
    """A cell for each group of pairs, the verdicts corrected together."""
    labels = _labels([group[0] for group in groups])
    cells = [_cell(label, group, names, metric, split, score) for label, group in zip(labels, groups, strict=True)]
    corrected = correct([cell.verdict for cell in cells])
    cells = [cell._replace(verdict=verdict) for cell, verdict in zip(cells, corrected, strict=True)]
    return sorted(cells, key=lambda cell: [sortable(value) for value in cell.label.values()])


def _cell(
    label: dict[str, str], group: Sequence[Pair], names: tuple[str, str], metric: str, split: str, of: Metric
) -> Cell:
    differences = [_difference(pair, metric, split, of) for pair in group]
    arms = [[_course(pair[side], split, of) for pair in group] for side in (0, 1)]
    dead = [[is_dead(pair[side], split) for pair in group] for side in (0, 1)]
    convergence, lost = converge(arms, min(run.planned for pair in group for run in pair), of, dead)
    left = [d for d, *gone in zip(differences, *lost, strict=True) if not any(gone)]
    return Cell(
        label=label,
        seeds=tuple(a.seed for a, _ in group),
        differences=tuple(differences),
        verdict=paired(differences, names, of),
        best=paired([_difference(pair, "best", split, of) for pair in group], names, of),
        convergence=convergence,
        settled=paired(left, names, of) if any(convergence.diverged) and left else None,
        lost=tuple(a.seed for (a, _), *gone in zip(group, *lost, strict=True) if any(gone)),
        same_models=same_models(group),
    )


def _difference(pair: Pair, metric: str, split: str, of: Metric) -> float:
    """By how much the first run is better, in points; `best` over the rounds that both runs evaluated."""
    curves = [course(run, split, of) for run in pair]
    shared = curves[0].keys() & curves[1].keys()
    if metric == "best" and shared:
        first, second = (of.best([values[round] for round in shared]) for values in curves)
        return of.sign * of.factor * (first - second)
    first, second = (score(run, metric, split, of) for run in pair)
    if math.isclose(first, second, rel_tol=ROUNDING):  # equal scores of several rounds, added in another order
        return 0.0
    return of.sign * (first - second)


def _course(run: Run, split: str, of: Metric) -> tuple[Summary, Mapping[int, float]]:
    values = course(run, split, of)
    return summarise(values, of), values


def by_seed(group: Mapping[int, tuple[Run, Run]]) -> list[tuple[Run, Run]]:
    """The pairs of a cell, sorted by seed."""
    return [group[seed] for seed in sorted(group)]


def _differs(a: Run, b: Run, name: str) -> bool:
    values = trait(a, name), trait(b, name)
    return "" not in values and bool(values[0] != values[1])


def _labels(pairs: Sequence[tuple[Run, Run]]) -> list[dict[str, str]]:
    """The settings that tell the cells apart, e.g. {"algorithm": "fedavg", "server_learning_rate": "1 against 0.5"}."""
    full = [_label(*pair) for pair in pairs]
    kept = telling_names(full)
    left_out = {name: plain(LEFT_OUT.get(name, "")) for name in kept}
    return [{name: label.get(name, left_out[name]) for name in kept} for label in full]


def _label(a: Run, b: Run) -> dict[str, str]:
    label = {}
    for name in dict.fromkeys((*a.settings, *b.settings, *traits(a), *traits(b))):
        if name != "seed":
            values = dict.fromkeys(plain(trait(side, name)) for side in (a, b))
            label[name] = " against ".join(value for value in values if value)
    return label


def _over_cells(comparison: Comparison) -> str:
    """How many settings each arm is ahead in, the verdict over the converged ones, and single settings."""
    first, second = comparison.names
    means = [cell.verdict.mean for cell in comparison.cells]
    ahead, behind = sum(mean > 0 for mean in means), sum(mean < 0 for mean in means)
    outcomes = [cell.verdict.outcome for cell in comparison.cells]
    sure = outcomes.count("first ahead"), outcomes.count("second ahead")
    corrected = f"after Holm's correction for {comparison.tests} test{'s' if comparison.tests > 1 else ''}"
    if not comparison.tests:
        tested = f"single settings are not tested: a verdict needs at least {LEAST_SEEDS} seeds"
    elif any(sure):
        tested = f"single settings {corrected}: {first} ahead in {sure[0]}, {second} in {sure[1]}"
    else:
        tested = f"no single setting is significant {corrected}"
    over = "the settings share no seed" if comparison.overall is None else comparison.overall.text
    return (
        f"{first} ahead in {ahead} of {len(means)} settings and behind in {behind}; "
        f"over {_which(comparison.cells)}: {over}; {tested}{_lost(comparison)}"
    )


def _which(cells: Sequence[Cell]) -> str:
    """The cells that the verdict is over, in words, and how many of their seeds all of them have."""
    counted = _counted_cells(cells)
    most, shared = max(len(cell.seeds) for cell in counted), len(over_seeds([cell.pairs for cell in counted]))
    few = f", by the {shared} of up to {most} seeds that all of these have" if 0 < shared < most else ""
    converged = counted[0].convergence.converged
    if len(counted) == len(cells):
        return f"all settings{'' if converged else ', none of which converged'}{few}"
    what = (
        "that converged" if converged else f"of {len(cells)} in which not every pair diverged, none of which converged"
    )
    return f"the {len(counted)} {what}{few}"


def _lost(comparison: Comparison) -> str:
    """How many runs of which arm diverged, and the difference with their pairs, if the verdict leaves them out."""
    cells, names = comparison.cells, comparison.names
    runs = [sum(cell.convergence.diverged[arm] for cell in cells) for arm in (0, 1)]
    if not any(runs):
        return ""
    of_arm = ", ".join(f"{name} {count}" for name, count in zip(names, runs, strict=True))
    lost = f"; {sum(runs)} of {sum(cell.convergence.of for cell in cells)} runs diverged ({of_arm})"
    counted = _counted_cells(cells)
    wholly = [cell for cell in cells if not cell.kept]
    if not over_seeds([cell.kept for cell in counted]):
        return f"{lost}, and the verdict keeps pairs of theirs, since too few others are left"
    values = over_seeds([cell.pairs for cell in [*counted, *wholly]])
    left_out = f"{lost}, and the verdict is without their pairs"
    if wholly:
        left_out += f" and without the {len(wholly)} of the settings in which every pair has one"
    return f"{left_out}; with them: {paired(values, names, comparison.score).text}" if values else left_out
