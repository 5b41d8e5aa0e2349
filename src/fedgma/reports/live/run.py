"""One run folder as a live page shows it, brought up to date by reading only what is new in it."""

from pathlib import Path
from typing import Any

from fedgma.errors import DataError
from fedgma.records.format import Head, Record
from fedgma.records.label import LABEL, Label, read_label
from fedgma.records.reader import Run, flat, number, read_head, read_object, settings_of
from fedgma.records.state import FAILED, state_of
from fedgma.records.tail import PIECE, Place, read_on
from fedgma.reports.live.curves import Curve, Pace, is_lost, values_of
from fedgma.reports.unfinished import advice
from fedgma.statistics.labels import NAMES
from fedgma.statistics.metrics import Metric, from_facts

Stamp = tuple[int, int] | None  # time of change and size of a file


class LiveRun:
    """A run folder and what was read of it so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.changed = 0  # the number of the look that found something new
        self.arm = ""  # its name, given from outside: it depends on the other runs
        self.fresh = False  # whether the settings were read since the arm was named
        self.head: Head | None = None  # None if run.json cannot be read
        self.run: Run | None = None  # without rounds; None for a run of a Flower app
        self.label = Label()
        self.state = ""
        self.problem = ""  # why it failed, or what is wrong with its files
        self.advice = ""  # how to go on with it
        self._settings: dict[str, Any] = {}
        self._stamps: tuple[Stamp, Stamp] = (None, None)
        self._begin()

    def _begin(self) -> None:
        self._place = Place()
        self.round = 0
        self.lost = False  # whether the latest loss is not finite
        self.curves: dict[str, Curve] = {}
        self._pace = Pace()

    @property
    def planned(self) -> int | None:
        """The number of rounds in the settings; a Flower app does not say."""
        rounds = self._settings.get("rounds")
        return rounds if isinstance(rounds, int) else None

    @property
    def seed(self) -> int | None:
        """The seed in the settings."""
        seed = self._settings.get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def metric(self) -> Metric:
        """What the run is scored by; the accuracy of a Flower app may be in any unit."""
        if self.run is None:
            return Metric(unit="")
        return from_facts(self.run.head.get("metrics"))[0]

    @property
    def rule(self) -> str:
        """The name of the rule, for a run that no arm has a name for."""
        stated = self._settings.get("aggregator")
        name = stated[0] if isinstance(stated, list) and stated else stated
        return NAMES.get(str(name), str(name)) if name is not None else ""

    def look(self, most: int = PIECE) -> bool:
        """Read what is new, at most `most` bytes of rounds; whether there was something."""
        before = (self.state, self.problem, self.advice, self._place.line, self._stamps)
        again = False
        self._read_facts()
        if self.head is not None:
            records, self._place = read_on(self.folder / "rounds.jsonl", self._place, most)
            if again := self._place.again:
                place = self._place
                self._begin()
                self._place = place
            self._add(records)
            self.state = state_of(self.folder)  # after the rounds: what is done has no further ones
            self.problem = self._place.problem or self._reason()
            self.advice = advice(self.folder, self.state, self.head)
        return again or before != (self.state, self.problem, self.advice, self._place.line, self._stamps)

    @property
    def offset(self) -> int:
        """How many bytes of rounds were read."""
        return self._place.offset

    @property
    def more(self) -> bool:
        """Whether a look left something to be read."""
        return self._place.more

    def left(self, together: int) -> float | None:
        """About how many seconds the run will take, among so many that train together; None if that is not known."""
        if self.state != "running" or self.planned is None:
            return None
        return self._pace.left(max(0, self.planned - self.round), together)

    def _read_facts(self) -> None:
        """Read `run.json` and the label, if they have changed."""
        stamps = (_stamp(self.folder / "run.json"), _stamp(self.folder / LABEL))
        if stamps == self._stamps:
            return
        self._stamps, self.head, self.run, self._settings, self.fresh = stamps, None, None, {}, True
        try:
            head = read_head(self.folder)
            self._settings = dict(flat(head["settings"]))
            if self._settings.get("engine") != "flower":
                self.run = Run(self.folder, head, settings_of(self.folder, head), (), None)
            self.label = read_label(self.folder)
            self.head = head
        except DataError as error:
            self.state, self.problem = "damaged", str(error)

    def _reason(self) -> str:
        """Why a run gave up, as its folder says."""
        if self.state != "failed":
            return ""
        try:
            return str(read_object(self.folder / FAILED).get("message", ""))
        except DataError as error:
            return str(error)

    def _add(self, records: list[Record]) -> None:
        if not records:
            return
        metric, planned = self.metric, self.planned
        for record in records:
            self.round = record["round"]
            for name, value in values_of(record, metric).items():
                self.curves.setdefault(name, Curve(planned)).add(self.round, value)
        self.lost = is_lost(records[-1])
        taken = [seconds for record in records if (seconds := number(record, "seconds")) is not None]
        self._pace.add(self._place.stamp[0] / 1e9, self.round, taken)


def _stamp(file: Path) -> Stamp:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size
