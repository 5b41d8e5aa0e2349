"""The display during training (a bar for each fleet, accuracy and spark line of each arm), and signal handling."""

import contextlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedgma.cli.signals import end_now

if TYPE_CHECKING:
    from fedgma.experiments.plan import Planned
    from fedgma.experiments.play import Played

SPARKS = "▁▂▃▄▅▆▇█"


class Stopping:
    """Whether a stop was requested. The first signal lets the round finish, the second ends the process.

    With `training` in this process, a signal before the end of the first round ends the process too: there is nothing
    to save yet, and kernels may be compiling. Such an end does not wait for threads that train; run folders are safe at
    any moment.
    """

    def __init__(self, *, training: bool = False) -> None:
        self.code: int | None = None
        self._training = training
        self._asked = 0  # times; runs ask before and after a round is trained

    def __call__(self) -> bool:
        """True once a signal was received."""
        self._asked += 1
        return self.code is not None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        again, self.code = self.code is not None, 128 + number
        if self._training and (again or self._asked < 2):
            end_now(self.code)
        if again:
            raise SystemExit(self.code)


@contextlib.contextmanager
def obeying_signals(*, training: bool = False) -> Iterator[Stopping]:
    """Ctrl-C and SIGTERM set a flag instead of raising in the middle of a round; `training` as in `Stopping`."""
    stopping = Stopping(training=training)
    before = {number: signal.signal(number, stopping.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Watch:
    """Progress bars of fleets; hidden if the console is not a terminal."""

    def __init__(self, console: Console, *, quiet: bool, names: Mapping[str, str]) -> None:
        columns: Sequence[Any] = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f} rounds {task.fields[rate]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[arms]}", markup=False),
        )
        off = quiet or not console.is_terminal
        self.bars = Progress(*columns, console=console, disable=off, transient=True)
        self._names = names  # fingerprint -> arm
        self._name = ""
        self._latest: dict[str, dict[int, float]] = {}
        self._curves: dict[str, list[float]] = {}
        self._task: TaskID | None = None
        self._seconds = 0.0
        self._rounds = 0

    def begin(self, members: "Sequence[Planned]", name: str) -> None:
        """A fleet starts."""
        total = sum(run.settings.rounds for run in members)
        self._name = name
        self._task = self.bars.add_task("preparing", total=total, rate="", arms="")  # kernels may have to be compiled
        self._latest, self._curves, self._rounds, self._seconds = {}, {}, 0, 0.0
        self._at = dict.fromkeys((run.fingerprint for run in members), 0)

    def see(self, played: "Played") -> None:
        """Show a round that was completed."""
        assert self._task is not None
        self._at[played.run.fingerprint] = played.line["round"]
        self._seconds += played.line["seconds"]
        self._rounds += 1
        chosen = played.run.settings
        scores = played.line.get("test")
        accuracy = None if scores is None else scores.get("accuracy")
        if accuracy is not None:
            arm = self._names[played.run.fingerprint]
            self._latest.setdefault(arm, {})[chosen.seed] = 100 * accuracy
            seen = self._latest[arm]
            self._curves.setdefault(arm, []).append(sum(seen.values()) / len(seen))
        rate = f"{self._rounds / max(self._seconds, 1e-9):.0f}/s"
        done = sum(self._at.values())
        self.bars.update(self._task, description=self._name, completed=done, rate=rate, arms=self._arms())

    def _arms(self) -> str:
        shown = list(self._curves.items())[:4]
        more = "" if len(self._curves) <= 4 else f" and {len(self._curves) - 4} more"
        return "  ".join(f"{arm} {curve[-1]:.1f} {spark(curve)}" for arm, curve in shown) + more


def spark(values: Sequence[float], width: int = 12) -> str:
    """A curve in one line of text, on a scale from 0 to 100.

    >>> spark([10, 50, 100], width=3)
    '▁▅█'
    """
    step = max(1, -(-len(values) // width))
    points = values[::-1][::step][::-1]
    return "".join(SPARKS[min(7, max(0, int(value / 100 * 8)))] for value in points)
