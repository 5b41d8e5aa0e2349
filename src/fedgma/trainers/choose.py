"""Which trainer plays: lanes where they pay, the loop where a model cannot be vectorised or the loop is faster."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from torch import nn

from fedgma.errors import ConfigError
from fedgma.trainers import lanes, loop
from fedgma.trainers.cohorts import Cohort, Pool, Stacked, Trained
from fedgma.trainers.gradients import check_precision, lane_gradients, why_not_lanes

log = logging.getLogger(__name__)
TRAINERS = ("auto", "lanes", "loop")


class LocalTrainer(Protocol):
    """Local training of a cohort; see `loop.train`."""

    def __call__(
        self,
        model: nn.Module,
        cohort: Cohort,
        pools: Sequence[Pool],
        start: Stacked,
        buffers: Stacked,
        correction: Stacked | None = None,
    ) -> Trained:
        """Train all lanes of the cohort."""


def choose(trainer: str, model: nn.Module, pool: Pool, *, precision: str = "fp32") -> LocalTrainer:
    """The trainer of that name; "auto" takes the lanes on a GPU and the loop on a CPU."""
    check_precision(precision)
    if trainer not in TRAINERS:
        raise ConfigError(f"unknown trainer {trainer!r}; known: {', '.join(TRAINERS)}")
    if trainer == "auto":
        trainer = "lanes" if pool.y.device.type == "cuda" else "loop"
    if trainer == "lanes":
        reason = why_not_lanes(model, pool)
        if reason is None:
            return partial(lanes.train, gradients=lane_gradients(model, precision))
        log.warning("%s; training one client at a time", reason)
    return loop.train
