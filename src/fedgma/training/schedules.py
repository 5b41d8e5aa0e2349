"""How a client's learning rate changes: a factor for every round, and one for every local step of a round.

The rate of a step is `client_learning_rate` times the factor of the round times the factor of the step. A factor
depends on the position alone, so a resumed run has the rates that it would have had.
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from fedgma.errors import ConfigError

SCHEDULES = ("constant", "exponential", "step", "cosine")


@dataclass(frozen=True)
class Schedule:
    """A rate over rounds, or over the local steps of a round; the unit is one round or one step.

    Over the first `warm_up` units the rate rises in equal parts, and it is full at the next. From there it is
    "constant", or falls by the factor `decay` at each unit ("exponential") or once every `every` units ("step"), or
    along half a cosine to `floor` within `length` units ("cosine"). It never falls below `floor`.
    """

    name: str = "constant"
    warm_up: int = 0
    decay: float = 1.0
    every: int = 1
    length: int | None = None  # None: all units that follow the warm-up
    floor: float = 0.0  # a share of the full rate

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ConfigError(f"unknown schedule {self.name!r}; known: {', '.join(SCHEDULES)}")
        if not 0 < self.decay <= 1 or not 0 <= self.floor <= 1:
            raise ConfigError(
                f"a schedule's decay must be above 0 and at most 1 and its floor from 0 to 1, got {self.decay} and "
                f"{self.floor}"
            )
        if self.warm_up < 0 or self.every < 1 or (self.length is not None and self.length < 1):
            raise ConfigError(
                f"a schedule's warm_up must be at least 0, its every and length at least 1, got {self.warm_up}, "
                f"{self.every} and {self.length}"
            )

    @property
    def changes(self) -> bool:
        """Whether the rate ever differs from the full rate."""
        return self.name != "constant" or self.warm_up > 0


CONSTANT = Schedule()


def factor(schedule: Schedule, position: int, total: int) -> float:
    """What the full rate is multiplied with at a position, counted from 0, of `total` units.

    >>> [factor(Schedule("step", warm_up=1, decay=0.1, every=2), position, 5) for position in range(5)]
    [0.5, 1.0, 1.0, 0.1, 0.1]
    """
    past = position - schedule.warm_up
    if past < 0:
        return (position + 1) / (schedule.warm_up + 1)
    if schedule.name == "exponential":
        return max(schedule.decay**past, schedule.floor)
    if schedule.name == "step":
        return max(schedule.decay ** (past // schedule.every), schedule.floor)
    if schedule.name == "cosine":
        length = schedule.length or max(1, total - schedule.warm_up)
        wave = (1 + math.cos(math.pi * min(past / length, 1))) / 2
        return schedule.floor + (1 - schedule.floor) * wave
    return 1.0


@functools.lru_cache(maxsize=1024)
def factors(schedule: Schedule, total: int) -> np.ndarray:
    """The factors at all positions; number by number, since numpy's functions may round by the length of an array.

    >>> factors(Schedule("exponential", decay=0.5), 4).tolist()
    [1.0, 0.5, 0.25, 0.125]
    """
    return np.array([factor(schedule, position, total) for position in range(total)])


def check_last_rate(rate: float, schedule: Schedule, rounds: int) -> None:
    """Refuse a schedule over rounds that ends at a rate of 0: nothing would be learned, and SCAFFOLD divides by it."""
    if schedule.changes and not np.float32(rate * factor(schedule, rounds - 1, rounds)) > 0:
        raise ConfigError(
            f"round_schedule: the learning rate falls to 0 before the last of {rounds} rounds; "
            "set its floor above 0, or let it fall more slowly"
        )
