"""Which trainer plays: lanes where they pay, the loop where a model cannot be vectorised or the loop is faster."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Protocol

from torch import nn

from fedgma.errors import ConfigError
from fedgma.models import Logistic
from fedgma.trainers import lanes, loop
from fedgma.trainers.cohorts import Cohort, Pool, Stacked, Trained
from fedgma.trainers.engine import Engine
from fedgma.trainers.forms import Blocks, form_gradients, form_of
from fedgma.trainers.gradients import check_precision, lane_gradients, why_not_lanes

log = logging.getLogger(__name__)
TRAINERS = ("auto", "engine", "lanes", "loop")


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


def choose(
    trainer: str,
    model: nn.Module,
    pool: Pool,
    *,
    precision: str = "fp32",
    form: bool = True,
    blocks: tuple[int, int] | None = None,
) -> LocalTrainer:
    """The trainer of that name.

    "loop" is one client at a time, "lanes" all at once, "engine" the same compiled and captured for a GPU; "auto" takes
    the engine on a GPU, and on a CPU the loop, or lanes for logistic regression. `form=False` leaves the hand-written
    gradients of the small models aside, and `blocks` tunes their convolutions.
    """
    check_precision(precision)
    if trainer not in TRAINERS:
        raise ConfigError(f"unknown trainer {trainer!r}; known: {', '.join(TRAINERS)}")
    if trainer == "auto":
        trainer = "lanes" if type(model) is Logistic else "loop"  # convolutions of lanes do not pay on a CPU
        trainer = "engine" if pool.y.device.type == "cuda" else trainer
    if trainer == "loop":
        return loop.train
    reason = why_not_lanes(model, pool)
    if reason is not None:
        log.warning("%s; training one client at a time", reason)
        return loop.train
    written = form_of(model, Blocks(*blocks) if blocks else None) if form else None
    gradients = form_gradients(written, precision) if written else lane_gradients(model, precision)
    if trainer == "lanes":
        return partial(lanes.train, gradients=gradients)
    return Engine(gradients, precision=precision, compile=pool.y.device.type == "cuda")
