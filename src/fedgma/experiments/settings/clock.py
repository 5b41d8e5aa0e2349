"""The settings of a clock: how long clients take, who drops out, and when the server steps."""

import hashlib
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, Literal, Protocol

from pydantic import Field

from fedgma.data.files.own.delays import SUFFIXES, read_delays
from fedgma.documents import read_bytes
from fedgma.errors import ConfigError
from fedgma.experiments.settings.section import BelowOne, NotNegative, Positive, Section, Whole
from fedgma.simulation.clock import DISTRIBUTIONS, VOTERS, Clock, Delays

KINDS = ("compute", "network")  # of delays
SPREAD = ("uniform", "lognormal")  # distributions with a spread
FROM = f"{', '.join(DISTRIBUTIONS)}, or a file of measured seconds ({', '.join(SUFFIXES)})"


class ClockSettings(Section):
    """Simulated time: how long clients take, and when the server steps."""

    name: Literal["none", "synchronous", "asynchronous"] = Field(
        default="none", description="whether time is simulated, and what ends a round: clients or a full buffer"
    )
    compute: str = Field(default="constant", description=f"distribution over clients of the seconds per sample: {FROM}")
    compute_seconds: NotNegative = Field(default=0.0, description="mean seconds a sample")
    compute_spread: NotNegative = Field(
        default=0.5, description="for `lognormal`: deviation of the logarithm; for `uniform`: half range over mean"
    )
    network: str = Field(
        default="constant", description=f"distribution over clients and rounds of the further seconds: {FROM}"
    )
    network_seconds: NotNegative = Field(default=0.0, description="mean further seconds a round")
    network_spread: NotNegative = Field(default=0.5, description="as `compute_spread`")
    dropout: BelowOne = Field(default=0.0, description="share of the clients that never answer in a round")
    away: BelowOne = Field(
        default=0.0, description="share of the clients that are away for a period; they come back later"
    )
    away_seconds: Positive = Field(default=3600.0, description="length of such a period, in seconds")
    deadline: Positive | None = Field(
        default=None, description="seconds that the server waits for a client; by default without a limit"
    )
    over_sample: float = Field(
        default=1.0, ge=1, le=1000, description="for `synchronous`: clients asked over `clients_per_round`"
    )
    concurrency: Whole | None = Field(
        default=None, description="for `asynchronous`: clients at work at a time; by default `clients_per_round`"
    )
    staleness_power: NotNegative = Field(
        default=0.5, description="for `asynchronous`: an update n versions old is scaled by (1 + n)^-power"
    )
    voters: Literal[*VOTERS] = Field(  # type: ignore[valid-type]
        default="all", description="for `asynchronous`: whether updates of older versions vote on the mask"
    )


class Run(Protocol):
    """The settings of a run that are read here."""

    @property
    def clock(self) -> ClockSettings:
        """Simulated time."""


def is_file(source: str) -> bool:
    """Whether delays come from a file.

    >>> is_file("lognormal"), is_file("phones.csv")
    (False, True)
    """
    return source.lower().endswith(SUFFIXES)


def check_clock(section: ClockSettings) -> None:
    """Refuse an unknown distribution; what depends on other settings is checked when the clock is made."""
    for kind in KINDS:
        source = getattr(section, kind)
        if source not in DISTRIBUTIONS and not is_file(source):
            raise ValueError(f"clock.{kind}: unknown distribution {source!r}; known: {FROM}")


def completed(section: ClockSettings) -> ClockSettings:
    """The settings of a clock; the defaults where there is none."""
    return ClockSettings() if section.name == "none" else section


def clock_of(section: ClockSettings, clients_per_round: int, find: Callable[[str], Path | None]) -> Clock | None:
    """The clock of a run; None without one. `find` finds files."""
    if section.name == "none":
        return None
    names = ("dropout", "away", "away_seconds", "over_sample", "staleness_power", "voters")
    asynchronous = section.name == "asynchronous"
    return Clock(
        compute=_delays(section, "compute", find),
        network=_delays(section, "network", find),
        deadline=float("inf") if section.deadline is None else section.deadline,
        concurrency=section.concurrency or clients_per_round if asynchronous else None,
        **{name: getattr(section, name) for name in names},
    )


def _delays(section: ClockSettings, kind: str, find: Callable[[str], Path | None]) -> Delays:
    source = getattr(section, kind)
    if not is_file(source):
        return Delays(source, getattr(section, f"{kind}_seconds"), getattr(section, f"{kind}_spread"))
    return Delays(measured=read_delays(delay_file(section, kind, find)))


def delay_file(section: ClockSettings, kind: str, find: Callable[[str], Path | None]) -> Path:
    """The file that delays of a kind come from."""
    file = find(getattr(section, kind))
    if file is None:
        raise ConfigError(
            f"clock.{kind}: no file {getattr(section, kind)!r} in the current folder or in that of the settings file"
        )
    return file


def delay_files(section: ClockSettings, find: Callable[[str], Path | None]) -> dict[str, Path]:
    """The files that a clock reads, by kind."""
    if section.name == "none":
        return {}
    return {kind: delay_file(section, kind, find) for kind in KINDS if is_file(getattr(section, kind))}


def clock_identity(section: ClockSettings, find: Callable[[str], Path | None]) -> dict[str, str]:
    """The part of a run's identity that its files of measured delays decide: a checksum, if there are any."""
    files = sorted(delay_files(section, find).items())
    sums = [f"{kind} {hashlib.sha256(read_bytes(file)).hexdigest()}" for kind, file in files]
    return {"clock": hashlib.sha256("\n".join(sums).encode()).hexdigest()} if sums else {}


def located_clock(section: ClockSettings, find: Callable[[str], Path | None]) -> ClockSettings:
    """The settings with absolute paths of files."""
    files = {kind: str(file.resolve()) for kind, file in delay_files(section, find).items()}
    return section.model_copy(update=files)


def _named(*names: str) -> Callable[[Run], bool]:
    return lambda settings: settings.clock.name in names


def _drawn(kind: str, *distributions: str) -> Callable[[Run], bool]:
    def used(settings: Run) -> bool:
        source = getattr(settings.clock, kind)
        return settings.clock.name != "none" and (source in distributions if distributions else not is_file(source))

    return used


_ALWAYS = ("compute", "network", "dropout", "away", "deadline")
# settings that only some runs use
USED: dict[str, Callable[[Run], bool]] = {
    **{f"clock.{name}": _named("synchronous", "asynchronous") for name in _ALWAYS},
    "clock.away_seconds": lambda settings: settings.clock.name != "none" and settings.clock.away > 0,
    **{f"clock.{kind}_seconds": _drawn(kind) for kind in KINDS},
    **{f"clock.{kind}_spread": _drawn(kind, *SPREAD) for kind in KINDS},
    "clock.over_sample": _named("synchronous"),
    **{f"clock.{name}": _named("asynchronous") for name in ("concurrency", "staleness_power", "voters")},
}


def trimmed(nested: dict[str, Any]) -> dict[str, Any]:
    """A record without a clock that is off; of a file its last name is kept."""
    section = nested["clock"]
    if section["name"] == "none":  # keeps fingerprints from before this setting existed
        return {name: value for name, value in nested.items() if name != "clock"}
    files = {kind: PurePath(section[kind]).name for kind in KINDS if is_file(section[kind])}
    return {**nested, "clock": {**section, **files}}
