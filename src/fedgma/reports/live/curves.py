"""What a live page draws of a run: a few curves, kept short however many rounds there are, and the pace of rounds."""

from collections import deque
from typing import NamedTuple

from fedgma.records.format import Record
from fedgma.records.reader import number
from fedgma.statistics.metrics import LOSS, Metric, lacks

MOST_POINTS = 200  # of a curve; of more rounds, the last one of each stretch is kept
SPLITS = ("test", "server", "evaluate")  # where scores are recorded: by the simulator, and by a Flower app
MASKS = (("mask", "mean"), ("train", "gma-mask-mean"))  # where the mean of the mask is recorded, in the same order
PACE_SECONDS = 60.0  # over which the pace of rounds is measured
RECENT = 10  # rounds


class Curve:
    """Values by round."""

    def __init__(self, planned: int | None = None) -> None:
        self._step = max(1, -(-(planned or 0) // MOST_POINTS))
        self._points: dict[int, tuple[int, float]] = {}  # stretch of rounds -> its last value

    def add(self, round: int, value: float) -> None:
        """Add the value of a later round."""
        self._points[(round - 1) // self._step] = (round, value)
        if len(self._points) > 2 * MOST_POINTS:  # more rounds than were planned
            self._step *= 2
            self._points = {(at - 1) // self._step: (at, kept) for at, kept in self._points.values()}

    @property
    def points(self) -> list[tuple[int, float]]:
        """Rounds with their values, rounded to six digits."""
        return [(round, float(f"{value:.6g}")) for round, value in self._points.values()]

    @property
    def latest(self) -> float | None:
        """The last value."""
        return self.points[-1][1] if self._points else None


def values_of(record: Record, metric: Metric) -> dict[str, float]:
    """What a round measured of what is drawn: score, loss, training loss, mean of the mask, agreement.

    >>> values_of({"test": {"accuracy": 0.5, "loss": 2.0}, "mask": {"mean": 0.75}}, Metric())
    {'score': 50.0, 'loss': 2.0, 'mask': 0.75}
    """
    scores = [number(record, split, metric.name) for split in SPLITS]
    losses = [number(record, split, "loss") for split in SPLITS]
    values = {
        "score": next((metric.factor * score for score in scores if score is not None), None),
        "loss": next((loss for loss in losses if loss is not None), None),
        "train": number(record, "train", "loss"),
        "mask": next((mean for path in MASKS if (mean := number(record, *path)) is not None), None),
        "agreement": number(record, "mask", "agreement"),
    }
    return {name: value for name, value in values.items() if value is not None}


def is_lost(record: Record) -> bool:
    """Whether the loss of a round was not finite, which is recorded as null; so is that of no client.

    >>> [is_lost({"train": {"loss": None}, "counted": counted}) for counted in (3, 0)]
    [True, False]
    """
    return record.get("counted") != 0 and lacks(record.get("train"), LOSS.name)


class Seen(NamedTuple):
    """A look at a run: when it had written so many rounds."""

    seconds: float
    round: int


class Pace:
    """How fast a run writes rounds: as seen between looks, and by the seconds that its rounds recorded."""

    def __init__(self) -> None:
        self._looks: deque[Seen] = deque()
        self._recorded: deque[float] = deque(maxlen=RECENT)

    def add(self, seconds: float, round: int, recorded: list[float]) -> None:
        """A run that had written `round` rounds by this time; `recorded` are the seconds of the new ones."""
        self._recorded.extend(recorded)
        self._looks.append(Seen(seconds, round))
        while len(self._looks) > 2 and self._looks[1].seconds <= seconds - PACE_SECONDS:
            self._looks.popleft()

    def left(self, rounds: int, together: int) -> float | None:
        """About how many seconds further rounds will take; None if that is not known.

        Before a second look, the recorded seconds of a round are taken, of as many runs as train `together`.
        """
        first, last = (self._looks[0], self._looks[-1]) if self._looks else (Seen(0, 0), Seen(0, 0))
        if last.round > first.round and last.seconds > first.seconds:
            return rounds * (last.seconds - first.seconds) / (last.round - first.round)
        if not self._recorded:
            return None
        return rounds * together * sum(self._recorded) / len(self._recorded)
