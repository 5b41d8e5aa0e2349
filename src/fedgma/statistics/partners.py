"""Which runs of two arms are partners: those of the same seed, settings, data and model, but for what makes the arms.

Arms that are meant to differ in model or data differ in its version too. Their runs are partners if every model and
data set has one version: of several, nobody knows which is meant.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from fedgma.records.format import PARTS
from fedgma.records.reader import Run
from fedgma.statistics.arms import frozen, traits
from fedgma.statistics.labels import AGGREGATION_SETTINGS, ARM, VERSIONS, plain

Pair = tuple[Run, Run]
NAMED = "name"  # what a user calls runs: two arms so called may differ in anything
# parts of the identity that differ where a setting does: a model also has another shape on another data set
FOLLOWING = {
    "dataset": ("data", "clients", "model"),
    "shift.name": ("data",),
    "partition.name": ("clients",),
    "model": ("model",),
}


class Partners(NamedTuple):
    """The pairs of two arms, and the runs without a partner."""

    pairs: list[Pair]
    alone: list[Run]
    apart: list[Run]  # runs whose only partners used other data or another model
    free: frozenset[str]  # the settings in which the two runs of a pair may differ
    versions: tuple[str, ...]  # how data or models of the runs apart differ, in words


def find_partners(first: Sequence[Run], second: Sequence[Run], apart: Collection[str] = ()) -> Partners:
    """Pair the finished runs of two arms; they may differ in the settings `apart`, and where they share no value."""
    disjoint = _disjoint(first, second)
    free = {*apart, *disjoint, "seed"}
    meant = _meant(disjoint, apart)
    parts = {part for name in meant for part in FOLLOWING[name]}
    several = _several([*first, *second], parts)
    freed = parts - several.keys()
    pairs, left = _pairs(first, second, (_without(free) | {VERSIONS[part] for part in freed}) - {"seed"})
    other = _of_other_versions(first, second, left, free - (FOLLOWING.keys() - meant), freed)
    of_other = {id(run) for run, _ in other}
    return Partners(
        pairs=pairs,
        alone=[run for run in left if id(run) not in of_other],
        apart=[run for run, _ in other],
        free=frozenset(free - {"seed"}),
        versions=_counted(other, freed) if pairs else _different(other, freed, several),
    )


def _meant(disjoint: Sequence[str], apart: Collection[str]) -> set[str]:
    """The settings among those of `FOLLOWING` that two arms are meant to differ in.

    Arms that are folders, or names of runs, may differ in all; others in the settings that their names give.

    >>> _meant(["model", "rounds"], ["name"]), _meant(["model"], ["aggregator"])
    ({'model'}, set())
    """
    given = set(apart) - {NAMED}
    return {name for name in disjoint if name in FOLLOWING and (name in given or not given)}


def _several(runs: Sequence[Run], parts: Collection[str]) -> dict[str, set[str]]:
    """Part of the identity -> names of what has several versions in runs of the same settings; only such parts."""
    groups = _finished_by_traits(runs, {"seed", *VERSIONS.values(), *ARM})
    several: dict[str, set[str]] = {}
    for part in parts:
        for group in groups.values():
            if len({run.identity.get(part) for run in group}) > 1:
                several.setdefault(part, set()).add(_owner(part, group[0]))
    return several


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


def _pairs(first: Sequence[Run], second: Sequence[Run], without: Collection[str]) -> tuple[list[Pair], list[Run]]:
    """The pairs of finished runs with the same traits but for those `without`; and the finished runs without a pair."""
    partners = _finished_by_traits(second, without)
    pairs = [(a, b) for a in first if a.finished for b in partners.get(frozen(traits(a), without), [])]
    met = {id(run) for pair in pairs for run in pair}
    return pairs, [run for run in (*first, *second) if run.finished and id(run) not in met]


def _finished_by_traits(runs: Sequence[Run], without: Collection[str]) -> dict[str, list[Run]]:
    """The finished runs, by their traits but for those `without`."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.finished:
            groups.setdefault(frozen(traits(run), without), []).append(run)
    return groups


def _without(free: set[str]) -> set[str]:
    """The settings in which two arms may differ, including those of the aggregation if it may differ."""
    return free | set(AGGREGATION_SETTINGS if "aggregator" in free else ())


def _of_other_versions(
    first: Sequence[Run], second: Sequence[Run], alone: Sequence[Run], free: set[str], freed: Collection[str]
) -> list[Pair]:
    """Runs whose only partners used other data or another model, each with one such partner."""
    without = _without(free) | set(VERSIONS.values())
    sides = [_finished_by_traits(runs, without) for runs in (first, second)]
    of_first = set(map(id, first))
    apart = []
    for run in alone:
        others = sides[1 if id(run) in of_first else 0].get(frozen(traits(run), without), [])
        if others and all(_parts(run, other, freed) for other in others):
            apart.append((run, min(others, key=lambda other: len(_parts(run, other, freed)))))
    return apart


def _parts(run: Run, other: Run, freed: Collection[str]) -> list[str]:
    """The parts of the identity in which two runs differ, without those in which they may."""
    return [part for part in PARTS if run.identity.get(part) != other.identity.get(part) and part not in freed]


def _counted(apart: Sequence[Pair], freed: Collection[str]) -> tuple[str, ...]:
    """In words, how many runs used other data or another model than the compared runs."""
    counts = Counter(" and ".join(_version(part, run) for part in _parts(run, other, freed)) for run, other in apart)
    return tuple(f"{count} {'run' if count == 1 else 'runs'} used {what}" for what, count in counts.items())


def _different(apart: Sequence[Pair], freed: Collection[str], several: Mapping[str, set[str]]) -> tuple[str, ...]:
    """In words, why two arms cannot be compared at all."""
    whats = dict.fromkeys(
        _version(part, run, many=True)
        for run, other in apart
        for part in _parts(run, other, freed)
        if part not in several or _owner(part, run) in several[part]
    )
    return (f"the arms used {' and '.join(whats)}",) if whats else ()


def _version(part: str, run: Run, *, many: bool = False) -> str:
    """A part of a run's identity in words: "another version of t.npz", or of several "different versions of t.npz"."""
    named = {"data": f" of {_owner('data', run)}"}
    named |= {name: f" of {name} {_owner(name, run)}" for name in ("model", "task")}
    noun = {"clients": "client ids", "precision": "precision"}.get(part, "version")
    if many:
        return f"different {noun.removesuffix('s')}s{named.get(part, '')}"
    which = "other" if part == "clients" else "another" if part in run.identity else "an unrecorded"
    return f"{which} {noun}{named.get(part, '')}"


def _owner(part: str, run: Run) -> str:
    """The name of what a part of the identity is a version of: of the data its data set."""
    return str(run.settings.get({"data": "dataset"}.get(part, part)))
