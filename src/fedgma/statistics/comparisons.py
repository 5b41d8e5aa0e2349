"""Compare two arms: pair runs by seed and settings, test each setting (a cell), and correct for multiple tests.

Only runs with equal identities of data and model are paired; the comparison names those without such a partner.
"""

import difflib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedgma.aggregation.rules import BASELINE
from fedgma.errors import ConfigError
from fedgma.records.format import PARTS
from fedgma.records.reader import Run
from fedgma.statistics.arms import Summary, frozen, score, telling_names, trait, traits
from fedgma.statistics.labels import (
    AGGREGATION_SETTINGS,
    VERSIONS,
    plain,
    sortable,
    spelt,
    spoken,
)
from fedgma.statistics.verdicts import Outcome, Verdict, holm, p_value, paired, sign_test

SIGNIFICANT = 0.05  # p below which a difference is significant
WORDS = ("aggregator", "algorithm", "dataset", "model")  # settings in which a bare word such as `gma` is searched


class Cell(NamedTuple):
    """One setting in which both arms ran."""

    label: dict[str, str]
    seeds: tuple[int, ...]
    differences: tuple[float, ...]  # first minus second, points, by seed
    verdict: Verdict
    p: float
    corrected: float  # p value with Holm's correction over the cells

    @property
    def where(self) -> str:
        """The setting in words; empty if there is only one."""
        return ", ".join(spelt(name, value) for name, value in self.label.items() if value != "")

    @property
    def outcome(self) -> Outcome:
        """Which arm is ahead after the correction."""
        if self.verdict.significant and self.corrected >= SIGNIFICANT:
            return "inconclusive"
        return self.verdict.outcome

    def says(self, names: tuple[str, str]) -> str:
        """The outcome in words."""
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
    alone: int  # runs of either arm that have no partner
    apart: tuple[Run, ...] = ()  # runs whose only partners are of other data or of another model
    versions: tuple[str, ...] = ()  # how their data or models differ, in words

    @property
    def tests(self) -> int:
        """The number of cells with two seeds or more, which can be tested."""
        return sum(cell.verdict.of > 1 for cell in self.cells)

    @property
    def signs(self) -> str:
        """In how many settings each arm is ahead, with the p value of the sign test."""
        means = [cell.verdict.mean for cell in self.cells]
        ahead, behind = sum(mean > 0 for mean in means), sum(mean < 0 for mean in means)
        words = f"settings in which {self.names[0]} is ahead: {ahead}, behind: {behind}, of {len(means)}"
        return f"{words}; sign test p = {sign_test(ahead, behind):.2g}"

    @property
    def text(self) -> str:
        """The verdict as a sentence: on the only cell, or over all cells."""
        if not self.cells:
            because = f": {' and '.join(self.versions)}" if self.versions else ""
            return f"no two finished runs share seed and settings, so nothing can be paired{because}"
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
    """Pair the finished runs of two arms by seed and settings; the arms may differ in the settings `apart`.

    They may also differ in every setting of which they share no value. Without a pair there is no cell.
    """
    if metric not in Summary._fields:
        raise ConfigError(f"unknown metric {metric!r}; known: {', '.join(Summary._fields)}")
    free = {*apart, *_disjoint(first, second), "seed"}
    pairs, alone = _pairs(first, second, free)
    other = _of_other_versions(first, second, alone, free)
    groups: dict[str, dict[int, tuple[Run, Run]]] = {}
    for a, b in pairs:
        cell = frozen(traits(a)) + frozen(traits(b))
        groups.setdefault(cell, {}).setdefault(a.seed, (a, b))
    cells = _cells([by_seed(group) for group in groups.values()], names, metric, split)
    differ = tuple(name for name in sorted(free - {"seed"}) if any(_differs(a, b, name) for a, b in pairs))
    return Comparison(
        names=names,
        metric=metric,
        split=split,
        differ=differ,
        cells=tuple(cells),
        alone=len(alone) - len(other),
        apart=tuple(run for run, _ in other),
        versions=_counted(other) if cells else _different(other),
    )


def against_baseline(runs: Sequence[Run], *, metric: str = "last10", split: str = "test") -> list[Comparison]:
    """Compare every other aggregator with the plain mean, GMA first, if they share seeds and settings."""
    base = [run for run in runs if run.settings["aggregator"] == BASELINE]
    others = sorted(
        {str(run.settings["aggregator"]) for run in runs} - {BASELINE}, key=lambda name: (name != "gma", name)
    )
    arms = {name: [run for run in runs if run.settings["aggregator"] == name] for name in others if base}
    return [
        compare(arm, base, (spoken(name), spoken(BASELINE)), metric=metric, split=split) for name, arm in arms.items()
    ]


def _cells(groups: Sequence[Sequence[tuple[Run, Run]]], names: tuple[str, str], metric: str, split: str) -> list[Cell]:
    """A cell for each group of pairs; cells with one seed are not tested and not counted in the correction."""
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
    """The pairs of a cell, sorted by seed."""
    return [group[seed] for seed in sorted(group)]


def select(runs: Sequence[Run], wanted: str) -> tuple[list[Run], list[str]]:
    """The runs that an arm such as `gma` or `aggregator=gma,tau=0.4` selects, and the settings in it."""
    chosen, spoken = list(runs), []
    for part in wanted.split(","):
        name, mark, value = (text.strip() for text in part.partition("="))
        name, value = (_known(runs, name), value) if mark else (_word(runs, name), name)
        chosen = [run for run in chosen if _same(trait(run, name), value)]
        spoken.append(name)
    if not chosen:
        raise ConfigError(f"no run matches {wanted!r}; the runs have {_choices(runs, spoken[0])}")
    return chosen, spoken


def where(runs: Sequence[Run], filters: str | Sequence[str]) -> list[Run]:
    """The runs that match every filter such as `dataset=t.npz` or `algorithm=fedavg,fedadam`.

    Any of several values matches; a bare word such as `gma` works as in an arm.
    """
    chosen = list(runs)
    for text in [filters] if isinstance(filters, str) else filters:
        for name, values in _conditions(runs, text):
            kept = [run for run in chosen if any(_same(trait(run, name), value) for value in values)]
            if not kept:
                raise ConfigError(f"no run has {name}={','.join(values)}; the runs have {_choices(chosen, name)}")
            chosen = kept
    return chosen


def _conditions(runs: Sequence[Run], text: str) -> list[tuple[str, list[str]]]:
    """Parse `dataset=a,b,tau=0.4` into names with their accepted values."""
    conditions: list[tuple[str, list[str]]] = []
    for part in text.split(","):
        name, mark, value = (piece.strip() for piece in part.partition("="))
        if mark:
            conditions.append((_known(runs, name), [value]))
        elif conditions:
            conditions[-1][1].append(name)
        else:
            conditions.append((_word(runs, name), [name]))
    return conditions


def _known(runs: Sequence[Run], name: str) -> str:
    """The full name of a setting: `clients` is `partition.clients` if no other setting ends so."""
    names = list(dict.fromkeys(key for run in runs for key in (*run.settings, *traits(run))))
    fits = [key for key in names if key == name] or [key for key in names if key.endswith(f".{name}")]
    if len(fits) != 1:
        near = fits or difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:10]
        raise ConfigError(f"{name!r} does not name exactly one setting; did you mean {' or '.join(near)}?")
    return fits[0]


def _word(runs: Sequence[Run], word: str) -> str:
    for name in WORDS:
        if any(_same(run.settings.get(name), word) for run in runs):
            return name
    known = "; ".join(f"{name}: {_choices(runs, name)}" for name in WORDS)
    raise ConfigError(f"no run has {word!r} ({known}); give a folder, one of these, or setting=value")


def _choices(runs: Sequence[Run], name: str) -> str:
    return ", ".join(sorted({plain(trait(run, name)) for run in runs} - {""})) or "none"


def _same(value: Any, text: str) -> bool:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value) == float(text)
        except ValueError:
            return False
    return text in (str(value), plain(value))


def _disjoint(first: Sequence[Run], second: Sequence[Run]) -> list[str]:
    """Settings of which the arms share no value; an aggregation setting that an arm does not use is not counted.

    An attack never is one of them: arms under different attacks are paired only if the user asks for it by name.
    """
    sides = [[traits(run) for run in side] for side in (first, second)]
    names = dict.fromkeys(name for side in sides for known in side for name in known if name not in VERSIONS.values())
    disjoint = []
    for name in (name for name in names if not name.startswith("attack.")):
        optional = name in AGGREGATION_SETTINGS or name.endswith(".seed")
        values = [{plain(known.get(name)) for known in side if name in known or not optional} for side in sides]
        if not values[0] & values[1]:
            disjoint.append(name)
    return disjoint


def _pairs(first: Sequence[Run], second: Sequence[Run], free: set[str]) -> tuple[list[tuple[Run, Run]], list[Run]]:
    """The pairs of finished runs with the same seed, settings, data and model; and the runs without a pair."""
    without = _without(free) - {"seed"}
    partners: dict[str, list[Run]] = {}
    for run in second:
        if run.finished:
            partners.setdefault(frozen(traits(run), without), []).append(run)
    pairs = [(a, b) for a in first if a.finished for b in partners.get(frozen(traits(a), without), [])]
    met = {id(run) for pair in pairs for run in pair}
    return pairs, [run for run in (*first, *second) if run.finished and id(run) not in met]


def _without(free: set[str]) -> set[str]:
    """The settings in which two arms may differ, including those of the aggregation if it may differ."""
    return free | set(AGGREGATION_SETTINGS if "aggregator" in free else ())


def _of_other_versions(
    first: Sequence[Run], second: Sequence[Run], alone: Sequence[Run], free: set[str]
) -> list[tuple[Run, Run]]:
    """Runs whose only partners used other data or another model, each with one such partner."""
    without = _without(free) | set(VERSIONS.values())
    sides: list[dict[str, list[Run]]] = [{}, {}]
    for side, runs in zip(sides, (first, second), strict=True):
        for run in runs:
            if run.finished:
                side.setdefault(frozen(traits(run), without), []).append(run)
    of_first = set(map(id, first))
    apart = []
    for run in alone:
        others = sides[1 if id(run) in of_first else 0].get(frozen(traits(run), without), [])
        if others and not any(other.identity == run.identity for other in others):
            apart.append((run, min(others, key=lambda other: len(_parts(run, other)))))
    return apart


def _parts(run: Run, other: Run) -> list[str]:
    """The parts of the identity in which two runs differ."""
    return [part for part in PARTS if run.identity.get(part) != other.identity.get(part)]


def _counted(apart: Sequence[tuple[Run, Run]]) -> tuple[str, ...]:
    """In words, how many runs used other data or another model than the compared runs."""
    counts = Counter(" and ".join(_version(part, run) for part in _parts(run, other)) for run, other in apart)
    return tuple(f"{count} {'run' if count == 1 else 'runs'} used {what}" for what, count in counts.items())


def _different(apart: Sequence[tuple[Run, Run]]) -> tuple[str, ...]:
    """In words, why two arms cannot be compared at all."""
    whats = dict.fromkeys(_version(part, run, many=True) for run, other in apart for part in _parts(run, other))
    return (f"the arms used {' and '.join(whats)}",) if whats else ()


def _version(part: str, run: Run, *, many: bool = False) -> str:
    """A part of a run's identity in words: "another version of t.npz", or of several "different versions of t.npz"."""
    named = {"data": f" of {run.settings.get('dataset')}", "model": f" of model {run.settings.get('model')}"}
    noun = {"clients": "client ids", "precision": "precision"}.get(part, "version")
    if many:
        return f"different {noun.removesuffix('s')}s{named.get(part, '')}"
    which = "other" if part == "clients" else "another" if part in run.identity else "an unrecorded"
    return f"{which} {noun}{named.get(part, '')}"


def _differs(a: Run, b: Run, name: str) -> bool:
    values = trait(a, name), trait(b, name)
    return "" not in values and bool(values[0] != values[1])


def _labels(pairs: Sequence[tuple[Run, Run]]) -> list[dict[str, str]]:
    """The settings that tell the cells apart, e.g. {"algorithm": "fedavg", "server_learning_rate": "1 against 0.5"}."""
    full = [_label(*pair) for pair in pairs]
    kept = telling_names(full)
    return [{name: label.get(name, "") for name in kept} for label in full]


def _label(a: Run, b: Run) -> dict[str, str]:
    label = {}
    for name in dict.fromkeys((*a.settings, *b.settings, *traits(a), *traits(b))):
        if name != "seed":
            values = dict.fromkeys(plain(trait(side, name)) for side in (a, b))
            label[name] = " against ".join(value for value in values if value)
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
