"""The paper's experiments: one TOML file each in the folder `experiments`, with claims, settings and printed tables.

title, source, statistic        what it is, where it is printed, and which number of a run is printed: best or last10
printed = [{ file, where }]     tables of printed numbers, and which of their rows
splits = ["test", ...]          splits to compare
seeds, first_seed               how many seeds, and the first of them
repeats = "E5"                  the experiment whose settings it repeats with these seeds alone
asks_again = "E1"               the experiment whose claims it asks again, with settings of its own
search = "C5"                   the experiment that searches its learning rates, if they are its own
universes = true                parts are the drawn universes (see `universes`)
figures, axis                   figures to reproduce, and the setting on their horizontal axis
analysis                        whether there is an analysis of that number in `fedgma.paper.analyses`
[settings]                      as in a settings file: lists make a sweep; shared by all parts
[[parts]]                       name, further settings, `rates` (see `Part`), and the paper's names of its cells
[[claims]]                      what the paper claims, in our words, and the cells that test it
"""

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from fedgma.errors import ConfigError, DataError
from fedgma.paper import universes

SEEDS = 4
MOST_SEEDS = 1_000_000_000
STATISTICS = ("best", "last10")
RATES = ("shared", "own", "setting", "part")


class Claim(NamedTuple):
    """A claim of the paper about some cells; `kind` selects the test."""

    text: str
    short: str = ""  # a few words, for figures and tables
    kind: str = "ahead"
    where: Mapping[str, Any] = {}  # settings of the cells that it is about; a list holds several values
    split: str = "test"
    axis: str = ""
    arm: str = "gma"
    first: str = ""
    second: str = ""
    at: float | None = None
    finding: str = ""  # for an analysis: the id of its finding, or a prefix of several ids


class Part(NamedTuple):
    """Cells that share their number of rounds."""

    name: str
    settings: Mapping[str, Any] = {}
    # one pair of learning rates for all arms ("shared"), each arm its own ("own"), each arm its own for this very
    # partition and number of clients ("setting"), or for this very part ("part")
    rates: str = "shared"
    printed: bool = True  # whether the printed tables have these cells
    printed_as: Mapping[str, str] = {}  # columns of the printed table whose values differ from our settings

    @property
    def own_rates(self) -> bool:
        """Whether each arm has its own rates."""
        return self.rates != "shared"

    @property
    def searched(self) -> bool:
        """Whether its rates have to be searched for it."""
        return self.rates in ("setting", "part")


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
    first_seed: int = 0  # another one for runs that share no draw with those of the other experiments
    repeats: str = ""  # the experiment of the same settings; its seeds end where those of this one begin
    asks_again: str = ""  # the experiment that has the same claims, with other settings
    search: str = ""  # the experiment that searches the rates of its parts with `rates = "setting"` or "part"
    analysis: bool = False
    universes: bool = False  # whether its parts are the universes of the multiverse
    notes: tuple[str, ...] = ()


def asks_again(experiment: Experiment) -> bool:
    """Whether it has claims of the paper that another experiment has too: with new seeds, or with other settings."""
    return any(other.startswith("E") for other in (experiment.repeats, experiment.asks_again))


@cache
def catalogue() -> Mapping[str, Experiment]:
    """Every experiment by its number, sorted.

    >>> list(catalogue())[:3], catalogue()["E4"].source
    (['E1', 'E2', 'E3'], 'Figure 3d')
    """
    files = (resources.files("fedgma.paper") / "experiments").iterdir()
    experiments = [_experiment(file.name, file.read_text(encoding="utf-8")) for file in files]
    return {
        each.id: each
        for each in sorted(experiments, key=lambda each: (each.id[0] != "E", each.id[0], int(each.id[1:])))
    }


def experiment(name: str) -> Experiment:
    """The experiment with this number, or of this table or figure of the paper; `e1` and `table 2` are E1."""
    known = catalogue()
    if name.upper() in known:
        return known[name.upper()]
    named = [id for id, listed in known.items() if id[0] == "E" and name.lower() in _printed_in(listed.source)]
    if len(named) == 1:
        return known[named[0]]
    parts = [
        f"{id} ({part})"
        for id, listed in known.items()
        for part in _printed_in(listed.source)
        if id[0] == "E" and re.fullmatch(rf"{re.escape(name.lower())}[a-z]", part)
    ]
    several = f"; {name} is in {' and '.join(named) or ', '.join(parts)}" if named or parts else ""
    raise ConfigError(f"unknown experiment {name!r}; known: {', '.join(known)}{several}")


def seeds_of(experiment: Experiment) -> range:
    """The seeds that an experiment may have: none of those before its first, or of an experiment that repeats it.

    >>> seeds_of(experiment("E5")), seeds_of(experiment("C34")).start
    (range(0, 60), 60)
    """
    again = (each.first_seed for each in catalogue().values() if each.repeats == experiment.id)
    return range(experiment.first_seed, min(again, default=MOST_SEEDS))


def _printed_in(source: str) -> set[str]:
    """The tables and figures that a source names.

    >>> sorted(_printed_in("Tables 4 and 5, Figure 3d"))
    ['figure 3d', 'table 4', 'table 5']
    """
    places = re.findall(r"(table|figure|section|appendix)s? (\w+)(?: and (\d+))?", source.lower())
    return {f"{kind} {number}" for kind, *numbers in places for number in numbers if number}


def _experiment(file: str, text: str) -> Experiment:
    """Parse a TOML file as an experiment; unknown names are refused."""
    parsed = tomllib.loads(text)
    common = parsed.pop("settings", {})
    stem = file.removesuffix(".toml")
    if parsed.get("universes", False):
        parsed["parts"] = [universes.part_of(universe, search="search" not in parsed) for universe in universes.read()]
    lists: dict[str, Any] = {
        "claims": tuple(_made(Claim, table, file) for table in parsed.pop("claims", [])),
        "printed": tuple(_made(Printed, table, file) for table in parsed.pop("printed", [])),
        "parts": tuple(_part(table, common, file) for table in parsed.pop("parts", [])),
        **{name: tuple(parsed.pop(name)) for name in ("splits", "figures", "notes") if name in parsed},
    }
    experiment: Experiment = _made(Experiment, {"id": f"{stem[0].upper()}{int(stem[1:])}", **parsed, **lists}, file)
    if experiment.statistic not in STATISTICS:
        raise DataError(f"{file}: statistic should be one of {', '.join(STATISTICS)}, got {experiment.statistic!r}")
    return experiment


def _part(given: Mapping[str, Any], common: Mapping[str, Any], file: str) -> Part:
    part: Part = _made(Part, {**given, "settings": merged(common, given.get("settings", {}))}, file)
    if part.rates not in RATES:
        raise DataError(f"{file}: rates of a part should be one of {', '.join(RATES)}, got {part.rates!r}")
    return part


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """`first` overridden by `second`; sections are merged key by key.

    >>> merged({"rounds": 60, "partition": {"name": "iid"}}, {"partition": {"clients": 10}})
    {'rounds': 60, 'partition': {'name': 'iid', 'clients': 10}}
    """
    both = {name for name in first if isinstance(first[name], Mapping) and isinstance(second.get(name), Mapping)}
    return {**first, **{name: merged(first[name], value) if name in both else value for name, value in second.items()}}


def _made(kind: Any, given: Mapping[str, Any], file: str) -> Any:
    unknown = sorted(set(given) - set(kind._fields))
    if unknown:
        raise DataError(f"{file}: unknown {', '.join(unknown)} in a {kind.__name__.lower()}; known: {kind._fields}")
    return kind(**given)
