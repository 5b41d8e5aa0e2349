"""Two arms over seeds and settings: runs that share both are paired, each setting is a cell, cells are corrected."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedgma.errors import ConfigError
from fedgma.records.reader import Run
from fedgma.statistics.arms import (
    AGGREGATOR_SETTINGS,
    BASELINE,
    Summary,
    applicable,
    frozen,
    plain,
    score,
    sortable,
    spelt,
    spoken,
    telling_names,
)
from fedgma.statistics.verdicts import Outcome, Verdict, holm, p_value, paired, sign_test

SIGNIFICANT = 0.05  # p below which a difference is significant
WORDS = ("aggregator", "algorithm", "dataset", "model")  # where a bare word such as `gma` is looked for


class Cell(NamedTuple):
    """One setting in which both arms ran."""

    label: dict[str, str]
    seeds: tuple[int, ...]
    differences: tuple[float, ...]  # first minus second, points, by seed
    verdict: Verdict
    p: float
    corrected: float  # by Holm, over the cells

    @property
    def where(self) -> str:
        """The setting in a few words; empty where there is but one."""
        return ", ".join(spelt(name, value) for name, value in self.label.items() if value != "")

    @property
    def outcome(self) -> Outcome:
        """Who is ahead after the correction."""
        if self.verdict.significant and self.corrected >= SIGNIFICANT:
            return "inconclusive"
        return self.verdict.outcome

    def says(self, names: tuple[str, str]) -> str:
        """The outcome in a few words."""
        match self.outcome:
            case "first ahead":
                return f"{names[0]} ahead"
            case "second ahead":
                return f"{names[1]} ahead"
            case "inconclusive" if self.verdict.significant:
                return "not significant after correction"
            case outcome:
                return outcome


class Comparison(NamedTuple):
    """Two arms, cell by cell."""

    names: tuple[str, str]
    metric: str
    split: str
    differ: tuple[str, ...]  # the settings in which the arms differ
    cells: tuple[Cell, ...]
    alone: int  # runs of either arm that found no partner

    @property
    def tests(self) -> int:
        """Cells that can be tested: those with two seeds or more."""
        return sum(cell.verdict.of > 1 for cell in self.cells)

    @property
    def signs(self) -> str:
        """In how many settings either arm is ahead, and how likely so uneven a count is by chance."""
        means = [cell.verdict.mean for cell in self.cells]
        ahead, behind = sum(mean > 0 for mean in means), sum(mean < 0 for mean in means)
        words = f"settings in which {self.names[0]} is ahead: {ahead}, behind: {behind}, of {len(means)}"
        return f"{words}; sign test p = {sign_test(ahead, behind):.2g}"

    @property
    def text(self) -> str:
        """The verdict in plain words: of the one cell, or over all."""
        if not self.cells:
            return "no two finished runs share seed and settings, so nothing can be paired"
        return self.cells[0].verdict.text if len(self.cells) == 1 else _over_cells(self)


def compare(
    first: Sequence[Run],
    second: Sequence[Run],
    names: tuple[str, str],
    *,
    metric: str = "last10",
    split: str = "test",
    apart: Sequence[str] = (),
) -> Comparison:
    """Pair the finished runs of two arms by seed and settings; `apart` are settings in which they may differ.

    Settings whose values the arms do not share at all are added to those. There may be no pair, and then no cell.
    """
    if metric not in Summary._fields:
        raise ConfigError(f"unknown metric {metric!r}; known: {', '.join(Summary._fields)}")
    free = {*apart, *_disjoint(first, second), "seed"}
    pairs, alone = _pairs(first, second, free)
    groups: dict[str, dict[int, tuple[Run, Run]]] = {}
    for a, b in pairs:
        cell = frozen(applicable(a.settings)) + frozen(applicable(b.settings))
        groups.setdefault(cell, {}).setdefault(a.seed, (a, b))
    cells = _cells([by_seed(group) for group in groups.values()], names, metric, split)
    differ = tuple(name for name in sorted(free - {"seed"}) if any(_differs(a, b, name) for a, b in pairs))
    return Comparison(names, metric, split, differ, tuple(cells), alone)


def against_baseline(runs: Sequence[Run], *, metric: str = "last10", split: str = "test") -> list[Comparison]:
    """Every other aggregator against the plain mean, GMA first, where they share seeds and settings."""
    base = [run for run in runs if run.settings["aggregator"] == BASELINE]
    others = sorted(
        {str(run.settings["aggregator"]) for run in runs} - {BASELINE}, key=lambda name: (name != "gma", name)
    )
    arms = {name: [run for run in runs if run.settings["aggregator"] == name] for name in others if base}
    return [
        compare(arm, base, (spoken(name), spoken(BASELINE)), metric=metric, split=split) for name, arm in arms.items()
    ]


def _cells(groups: Sequence[Sequence[tuple[Run, Run]]], names: tuple[str, str], metric: str, split: str) -> list[Cell]:
    """A cell for each group of pairs; those with one seed are no tests and count for none in the correction."""
    scored = [[score(a, metric, split) - score(b, metric, split) for a, b in group] for group in groups]
    p_values = [p_value(differences) for differences in scored]
    tested = iter(holm([p for p, differences in zip(p_values, scored, strict=True) if len(differences) > 1]))
    cells = [
        Cell(
            label=label,
            seeds=tuple(a.seed for a, _ in group),
            differences=tuple(differences),
            verdict=paired(differences, names),
            p=p,
            corrected=next(tested) if len(differences) > 1 else 1.0,
        )
        for label, group, differences, p in zip(_labels([g[0] for g in groups]), groups, scored, p_values, strict=True)
    ]
    return sorted(cells, key=lambda cell: [sortable(value) for value in cell.label.values()])


def by_seed(group: Mapping[int, tuple[Run, Run]]) -> list[tuple[Run, Run]]:
    """A cell's pairs in the order of their seeds."""
    return [group[seed] for seed in sorted(group)]


def select(runs: Sequence[Run], wanted: str) -> tuple[list[Run], list[str]]:
    """The runs that an arm such as `gma` or `aggregator=gma,tau=0.4` names, and the settings it speaks of."""
    chosen, spoken = list(runs), []
    for part in wanted.split(","):
        name, mark, value = (text.strip() for text in part.partition("="))
        name, value = (_known(runs, name), value) if mark else (_word(runs, name), name)
        chosen = [run for run in chosen if _same(applicable(run.settings).get(name), value)]
        spoken.append(name)
    if not chosen:
        raise ConfigError(f"no run has {wanted!r}; there are {_choices(runs, spoken[0])}")
    return chosen, spoken


def _known(runs: Sequence[Run], name: str) -> str:
    """A setting's full name: `clients` is partition.clients where nothing else is called so."""
    names = list(dict.fromkeys(key for run in runs for key in run.settings))
    fits = [key for key in names if key == name] or [key for key in names if key.endswith(f".{name}")]
    if len(fits) != 1:
        near = fits or difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:10]
        raise ConfigError(f"no one setting is called {name!r}; did you mean {' or '.join(near)}?")
    return fits[0]


def _word(runs: Sequence[Run], word: str) -> str:
    for name in WORDS:
        if any(_same(run.settings.get(name), word) for run in runs):
            return name
    known = "; ".join(f"{name}: {_choices(runs, name)}" for name in WORDS)
    raise ConfigError(f"no run has {word!r} ({known}); give a folder, one of these, or setting=value")


def _choices(runs: Sequence[Run], name: str) -> str:
    return ", ".join(sorted({plain(run.settings[name]) for run in runs if name in run.settings})) or "none"


def _same(value: Any, text: str) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value) == float(text)
        except ValueError:
            return False
    return text in (str(value), plain(value))


def _disjoint(first: Sequence[Run], second: Sequence[Run]) -> list[str]:
    """Settings of which the arms share no value; one that an arm does not read is no difference."""
    sides = [[applicable(run.settings) for run in side] for side in (first, second)]
    names = dict.fromkeys(name for side in sides for settings in side for name in settings)
    found = []
    for name in names:
        values = [{frozen({name: settings[name]}) for settings in side if name in settings} for side in sides]
        if not values[0] & values[1]:
            found.append(name)
    return found


def _pairs(first: Sequence[Run], second: Sequence[Run], free: set[str]) -> tuple[list[tuple[Run, Run]], int]:
    """Every pair of finished runs with one seed and the same settings, and how many runs are in none."""
    without = tuple(free - {"seed"}) + tuple(AGGREGATOR_SETTINGS if "aggregator" in free else ())
    key = {id(run): frozen(applicable(run.settings), without) for run in (*first, *second)}
    partners: dict[str, list[Run]] = {}
    for run in second:
        if run.finished:
            partners.setdefault(key[id(run)], []).append(run)
    pairs = [(a, b) for a in first if a.finished for b in partners.get(key[id(a)], [])]
    met = {id(run) for pair in pairs for run in pair}
    return pairs, sum(id(run) not in met for run in (*first, *second) if run.finished)


def _differs(a: Run, b: Run, name: str) -> bool:
    one, other = applicable(a.settings), applicable(b.settings)
    return name in one and name in other and bool(one[name] != other[name])


def _labels(pairs: Sequence[tuple[Run, Run]]) -> list[dict[str, str]]:
    """What tells the cells apart, e.g. {"algorithm": "fedavg", "server_learning_rate": "1 against 0.5"}."""
    full = [_label(*pair) for pair in pairs]
    kept = telling_names(full)
    return [{name: label.get(name, "") for name in kept} for label in full]


def _label(a: Run, b: Run) -> dict[str, str]:
    one, other = applicable(a.settings), applicable(b.settings)
    label = {}
    for name in dict.fromkeys((*one, *other)):
        if name != "seed":
            values = dict.fromkeys(plain(side[name]) for side in (one, other) if name in side)
            label[name] = " against ".join(values)
    return label


def _over_cells(comparison: Comparison) -> str:
    first, second = comparison.names
    means = [cell.verdict.mean for cell in comparison.cells]
    ahead, behind = sum(mean > 0 for mean in means), sum(mean < 0 for mean in means)
    outcomes = [cell.outcome for cell in comparison.cells]
    sure = outcomes.count("first ahead"), outcomes.count("second ahead")
    corrected = f"after Holm's correction for {comparison.tests} test{'s' if comparison.tests > 1 else ''}"
    if not comparison.tests:
        tested = "one seed a setting: no test, at least two seeds are needed"
    elif any(sure):
        tested = f"significant {corrected}: {first} ahead in {sure[0]}, {second} in {sure[1]}"
    else:
        tested = f"no difference is significant {corrected}"
    return (
        f"{first} ahead in {ahead} of {len(means)} settings and behind in {behind}, "
        f"{sum(means) / len(means):+.2f} points on average; {tested}"
    )
