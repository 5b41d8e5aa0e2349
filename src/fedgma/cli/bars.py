"""What is shown of long work: a bar for each fleet with score and spark line of each arm; a bar for each loop."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Column

from fedgma.statistics.labels import duration

if TYPE_CHECKING:
    from fedgma.experiments.plan import Planned
    from fedgma.experiments.play import Played

T = TypeVar("T")
LINE_SECONDS = 30.0  # between lines where there is no terminal
ROOMY = 90  # columns of a terminal that has place for a long bar and the pace too
FIXED, FIXED_NARROW = 66, 40  # columns that all but the arms take, about
WIDE = 60  # columns of a terminal that has place for more than rounds, time and scores
SPARKS = "▁▂▃▄▅▆▇█"


class Pace:
    """Tells when the next line is due where there is no terminal."""

    def __init__(self) -> None:
        self._printed = time.monotonic()

    def is_due(self) -> bool:
        """Whether the last line was long ago; the next one counts from now."""
        if (now := time.monotonic()) - self._printed < LINE_SECONDS:
            return False
        self._printed = now
        return True


class Display:
    """Shows how far fleets are: bars on a terminal; elsewhere, such as in a log file, a line now and then."""

    def __init__(self, console: Console, *, quiet: bool, names: Mapping[str, str]) -> None:
        from fedgma.experiments import progress  # brings torch in

        off = quiet or not console.is_terminal
        self.bars = Progress(*_columns(console.width), console=console, disable=off, transient=True, expand=True)
        self._console, self._lines = console, off and not quiet
        self._progress = progress.Progress(names)
        self._most = progress.MOST_ARMS
        self._task: TaskID | None = None
        self._pace = Pace()

    def begin(self, members: "Sequence[Planned]", name: str) -> None:
        """A fleet starts."""
        self._progress.begin(members, name)
        narrow = self._console.width < WIDE  # such a line has no place for the name of the fleet
        arms = "preparing" if narrow else "the first run here compiles for some seconds"
        self._task = self.bars.add_task("preparing", total=self._progress.total, rate="", arms=arms)

    def see(self, played: "Played") -> None:
        """Show a round that was completed."""
        assert self._task is not None
        progress = self._progress
        progress.see(played.run, played.line)
        rate = f"{progress.rate:.0f}/s" if progress.rate >= 1 else f"{1 / progress.rate:.0f} s each"
        self.bars.update(self._task, description=progress.name, completed=progress.done, rate=rate, arms=self._arms())
        if self._lines and self._pace.is_due():
            self._console.print(progress.text, soft_wrap=True)

    def _arms(self) -> str:
        """Score and curve of each arm, or the scores alone where the curves would push one out of the line."""
        scores, courses = [], []
        for arm, curve in list(self._progress.curves.items())[: self._most]:
            share = self._progress.metrics[arm].share
            scores.append(f"{arm} {curve[-1]:.1f}" if share else f"{arm} {curve[-1]:.3g}")
            courses.append(f"{scores[-1]} {spark(curve, top=100.0 if share else top_of(curve))}")
        room = self._console.width - (FIXED if self._console.width >= ROOMY else FIXED_NARROW)
        long, short = ("  ".join(words) + self._progress.more_arms for words in (courses, scores))
        return long if self._console.width >= WIDE and len(long) <= room else short


def follow(console: Console, steps: Iterable[T], total: int, what: str, /) -> Iterator[T]:
    """Hands steps on and shows how many are done: a bar on a terminal, elsewhere a line now and then."""
    began, pace = time.monotonic(), Pace()
    columns = _columns(console.width)[:-1]
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=total, rate="")
        for done, step in enumerate(steps, 1):
            yield step
            seconds = time.monotonic() - began
            bar.update(task, completed=done, rate=f"{done / max(seconds, 1e-9):.2g}/s")
            if not console.is_terminal and done < total and pace.is_due():
                left = duration((total - done) * seconds / done)
                console.print(f"{what}: {done} of {total}, about {left} left", soft_wrap=True)


def _columns(width: int) -> list[ProgressColumn]:
    """What fits into one line of a terminal; text that does not is cut off, so that the line is never broken."""

    def text(pattern: str, **options: Any) -> TextColumn:
        return TextColumn(pattern, markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", **options))

    columns: list[ProgressColumn] = [text("{task.completed:.0f}/{task.total:.0f}")]
    if width >= WIDE:
        columns[:0] = [text("{task.description}"), BarColumn(bar_width=24 if width >= ROOMY else 10)]
        columns += [text("rounds {task.fields[rate]}")] if width >= ROOMY else []
    return [*columns, TimeRemainingColumn(compact=True), text("{task.fields[arms]}", ratio=1)]


def top_of(curve: Sequence[float]) -> float:
    """The largest size of a finite value; a diverged run has others."""
    return max((abs(value) for value in curve if math.isfinite(value)), default=1.0)


def spark(values: Sequence[float], width: int = 12, top: float = 100.0) -> str:
    """A curve in one line of text, on a scale from 0 to `top`; a value that is not finite leaves a gap.

    >>> spark([10, 50, float("nan"), 100], width=4)
    '▁▅ █'
    """
    step = max(1, -(-len(values) // width))
    points = values[::-1][::step][::-1]
    return "".join(_bar(value / (top or 1.0)) if math.isfinite(value) else " " for value in points)


def _bar(share: float) -> str:
    return SPARKS[min(7, max(0, int(share * 8)))]
