"""Which trainer plays: lanes where they pay, the loop where a model cannot be vectorised or the loop is faster."""

import copy
import functools
import logging
from collections.abc import Sequence

from torch import Tensor, nn

from fedgma.data.pools import Pool
from fedgma.errors import ConfigError
from fedgma.training import lanes, loop
from fedgma.training.cuda_graphs import Engine, float32_precision
from fedgma.training.evaluation import Scorer, run_forward, scorer
from fedgma.training.fast.compile import compiled
from fedgma.training.fast.cpu.trainer import kernel_of, kernel_scorer, kernel_trainer
from fedgma.training.fast.normalisations import norm_of
from fedgma.training.fast.resnet18 import residual_form
from fedgma.training.fast.written import Form, form_gradients, form_of
from fedgma.training.gradients import GradientFunction, check_precision, lane_gradients, why_not_lanes
from fedgma.training.lane_batch import Assignment, LocalTrainer, Trained
from fedgma.training.models import Logistic, ResNet18
from fedgma.training.stacked import Stacked

log = logging.getLogger(__name__)
TRAINERS = ("auto", "engine", "kernels", "lanes", "loop")


def choose(
    trainer: str,
    model: nn.Module,
    pools: Sequence[Pool],
    *,
    precision: str = "fp32",
    form: bool = True,
) -> LocalTrainer:
    """The trainer of that name.

    "loop" is one client at a time, "lanes" all at once, "engine" the same compiled and captured for a GPU, "kernels"
    compiled CPU code for LeNet and logistic regression. "auto" takes the engine on a GPU; on a CPU the kernels where
    there are some, else the loop (lanes for logistic regression). `form=False` leaves the hand-written gradients aside.
    """
    check_precision(precision)
    if trainer not in TRAINERS:
        raise ConfigError(f"unknown trainer {trainer!r}; known: {', '.join(TRAINERS)}")
    pool = pools[0]
    names = {kernel_of(model, one) for one in pools} if trainer in ("auto", "kernels") else {None}
    kernel = names.pop() if len(names) == 1 else None
    if trainer == "kernels" and kernel is None:
        raise ConfigError(f"no CPU kernel for {type(model).__name__} on this data, or numba is missing; use 'auto'")
    if kernel is not None:
        return kernel_trainer(kernel, pools)
    if trainer == "auto":
        trainer = "lanes" if type(model) is Logistic else "loop"  # convolutions of lanes do not pay on a CPU
        trainer = "engine" if pool.y.device.type == "cuda" else trainer
    if trainer == "loop":
        return _under(precision, loop.train)
    reason = why_not_lanes(model, pool)
    if reason is not None:
        log.warning("%s; training one client at a time", reason)
        return _under(precision, loop.train)
    written = written_gradients(model, precision) if form else None
    gradients, padding = written or lane_gradients(model, precision), written is not None
    if trainer == "lanes":
        return _under(precision, functools.partial(lanes.train, gradients=gradients, padding=padding))
    last = padding and type(model) is ResNet18  # its convolutions read weights so
    compile = pool.y.device.type == "cuda"
    return Engine(gradients, padding=padding, inputs_last=last, precision=precision, compile=compile)


def _under(precision: str, train: LocalTrainer) -> LocalTrainer:
    """The trainer with float32 products as exact as the setting says, whatever torch's own defaults are."""

    def call(task: Assignment) -> Trained:
        with float32_precision(precision):
            return train(task)

    return call


def written_gradients(model: nn.Module, precision: str = "fp32") -> GradientFunction | None:
    """The hand-written gradients of a model, or None where there are none."""
    form = written_form(model)
    return form_gradients(form, precision) if form else None


def written_form(model: nn.Module) -> Form | None:
    """The hand-written form of a model, or None where there is none or part of the model is frozen."""
    if not all(value.requires_grad for value in model.parameters()):
        return None
    if type(model) is ResNet18:
        _, height, width = model.shape
        whole = height % 8 == 0 and width % 8 == 0  # strides halve the images three times
        norm = norm_of(model)
        return residual_form(norm) if norm is not None and whole else None
    return form_of(model)


def choose_scorer(trainer: str, model: nn.Module, pool: Pool, *, form: bool = True) -> Scorer:
    """How runs are evaluated: by the CPU kernel, or on a GPU by the hand-written forward pass, compiled, if any.

    A trainer asked for by another name is the reference or a comparison: those are evaluated by the module itself.
    """
    written = written_form(model) if form and pool.y.device.type == "cuda" else None
    if written is None:
        plain = scorer(run_forward(copy.deepcopy(model).eval()))
        return kernel_scorer(model, plain) if trainer in ("auto", "kernels") else plain
    return compiled(form_scorer(written))


@functools.cache
def form_scorer(form: Form) -> Scorer:
    """Scores by the forward pass of a form, over runs that all see the same samples."""

    def forward(params: Stacked, buffers: Stacked, x: Tensor) -> Tensor:
        runs = len(next(iter(params.values())))
        return form.forward({**params, **buffers}, x.expand(runs, *x.shape), None).logits

    return scorer(forward)
