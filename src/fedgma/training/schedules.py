"""How a client's learning rate changes: a factor for every round, and one for every local step of a round.

The rate of a step is `client_learning_rate` times the factor of the round times the factor of the step. A factor
depends on the position alone, so a resumed run has the rates that it would have had.
"""

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


def factors(schedule: Schedule, position: np.ndarray, total: int) -> np.ndarray:
    """What the full rate is multiplied with at positions 0, 1, ... of `total` units, in float64.

    >>> factors(Schedule("exponential", decay=0.5), np.arange(4), 4).tolist()
    [1.0, 0.5, 0.25, 0.125]
    >>> factors(Schedule("step", warm_up=1, decay=0.1, every=2), np.arange(5), 5).tolist()
    [0.5, 1.0, 1.0, 0.1, 0.1]
    """
    past = np.maximum(position - schedule.warm_up, 0).astype(np.float64)
    shape = np.ones(len(past))
    if schedule.name == "exponential":
        shape = np.maximum(schedule.decay**past, schedule.floor)
    elif schedule.name == "step":
        shape = np.maximum(schedule.decay ** (past // schedule.every), schedule.floor)
    elif schedule.name == "cosine":
        length = schedule.length or max(1, total - schedule.warm_up)
        wave = (1 + np.cos(np.pi * np.minimum(past / length, 1))) / 2
        shape = schedule.floor + (1 - schedule.floor) * wave
    rising = (position + 1) / (schedule.warm_up + 1)
    return np.where(position < schedule.warm_up, rising, shape)


def factor(schedule: Schedule, round: int, rounds: int) -> float:
    """The factor of one round; rounds are counted from 1.

    >>> factor(Schedule("cosine"), 6, 10)
    0.5
    """
    return float(factors(schedule, np.array([round - 1]), rounds)[0]) if schedule.changes else 1.0
