"""The paper's experiments as they stand in this folder: one TOML each, with claims, settings and printed tables.

title, source, statistic        what it is, where it is printed, and which number of a run is printed: best or last10
printed = [{ file, where }]     tables of printed numbers, and which of their rows
splits = ["test", ...]          what is compared beside test accuracy
figures, axis                   pictures to draw again, and what stands on their horizontal axis
analysis                        whether there is an analysis of that number in `fedgma.paper.analyses`
[settings]                      as in a settings file: lists make a sweep; shared by all parts
[[parts]]                       name, further settings, `rates` (see `Part`), and how the paper names its cells
[[claims]]                      what the paper says, in our words, and which cells show it
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from fedgma.errors import ConfigError, DataError

SEEDS = 4
STATISTICS = ("best", "last10")
RATES = ("shared", "own", "setting")


class Claim(NamedTuple):
    """Something that the paper says of some cells; `kind` names how it is looked at."""

    text: str
    kind: str = "ahead"
    where: Mapping[str, Any] = {}  # settings of the cells that it is about
    split: str = "test"
    axis: str = ""
    arm: str = "gma"
    first: str = ""
    second: str = ""
    at: float | None = None
    finding: str = ""  # of an analysis: the id of its finding, or the path above several


class Part(NamedTuple):
    """Cells that share their rounds."""

    name: str
    settings: Mapping[str, Any] = {}
    # one pair of learning rates for all arms ("shared"), each arm its own ("own"), or each arm its own for this very
    # partition and number of clients ("setting")
    rates: str = "shared"
    printed: bool = True  # whether the printed tables have these cells
    printed_as: Mapping[str, str] = {}  # columns of the printed table that our settings say otherwise

    @property
    def own_rates(self) -> bool:
        """Whether each arm has rates of its own."""
        return self.rates != "shared"


class Printed(NamedTuple):
    """Rows of a printed table."""

    file: str
    where: Mapping[str, str] = {}


class Experiment(NamedTuple):
    """One table or figure of the paper."""

    id: str
    title: str
    source: str
    statistic: str
    parts: tuple[Part, ...] = ()
    claims: tuple[Claim, ...] = ()
    printed: tuple[Printed, ...] = ()
    splits: tuple[str, ...] = ("test",)
    figures: tuple[str, ...] = ()
    axis: str = ""
    seeds: int = SEEDS
    analysis: bool = False
    notes: tuple[str, ...] = ()


@cache
def catalogue() -> Mapping[str, Experiment]:
    """Every experiment by its number, in order.

    >>> list(catalogue())[:3], catalogue()["E4"].source
    (['E1', 'E2', 'E3'], 'Figure 3d')
    """
    files = {file.name: file for file in resources.files("fedgma.paper").iterdir() if file.name.endswith(".toml")}
    found = [_experiment(name, files[name].read_text(encoding="utf-8")) for name in sorted(files) if name != CHOSEN]
    return {one.id: one for one in sorted(found, key=lambda one: (one.id[0] != "E", one.id[0], int(one.id[1:])))}


CHOSEN = "chosen.toml"


def experiment(name: str) -> Experiment:
    """The experiment of that number; `e1` is E1."""
    known = catalogue()
    if name.upper() not in known:
        raise ConfigError(f"the paper has no experiment {name!r} here; known: {', '.join(known)}")
    return known[name.upper()]


def _experiment(file: str, text: str) -> Experiment:
    """A TOML file as an experiment; every name in it is checked."""
    held = tomllib.loads(text)
    common = held.pop("settings", {})
    stem = file.removesuffix(".toml")
    lists: dict[str, Any] = {
        "claims": tuple(_made(Claim, one, file) for one in held.pop("claims", [])),
        "printed": tuple(_made(Printed, one, file) for one in held.pop("printed", [])),
        "parts": tuple(_part(one, common, file) for one in held.pop("parts", [])),
        **{name: tuple(held.pop(name)) for name in ("splits", "figures", "notes") if name in held},
    }
    made: Experiment = _made(Experiment, {"id": f"{stem[0].upper()}{int(stem[1:])}", **held, **lists}, file)
    if made.statistic not in STATISTICS:
        raise DataError(f"{file}: statistic should be one of {', '.join(STATISTICS)}, got {made.statistic!r}")
    return made


def _part(held: Mapping[str, Any], common: Mapping[str, Any], file: str) -> Part:
    part: Part = _made(Part, {**held, "settings": merged(common, held.get("settings", {}))}, file)
    if part.rates not in RATES:
        raise DataError(f"{file}: rates of a part should be one of {', '.join(RATES)}, got {part.rates!r}")
    return part


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others on top; sections are merged key by key.

    >>> merged({"rounds": 60, "partition": {"name": "iid"}}, {"partition": {"clients": 10}})
    {'rounds': 60, 'partition': {'name': 'iid', 'clients': 10}}
    """
    both = {name for name in first if isinstance(first[name], Mapping) and isinstance(second.get(name), Mapping)}
    return {**first, **{name: merged(first[name], held) if name in both else held for name, held in second.items()}}


def _made(kind: Any, held: Mapping[str, Any], file: str) -> Any:
    unknown = sorted(set(held) - set(kind._fields))
    if unknown:
        raise DataError(f"{file}: unknown {', '.join(unknown)} in a {kind.__name__.lower()}; known: {kind._fields}")
    return kind(**held)
