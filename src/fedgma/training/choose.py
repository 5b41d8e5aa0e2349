"""Chooses the trainer of a fleet; only this module uses the hand-written parts in `fast`.

Everything here works for any module: the loop, lanes by `torch.func`, and the engine that compiles and captures them.
Where `fast` has a model written out by hand, its gradients, its evaluation or its CPU kernel take their place.
"""

import copy
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgma.data.pools import Pool
from fedgma.errors import ConfigError
from fedgma.training import lanes, loop
from fedgma.training.compile import compiled
from fedgma.training.cuda_graphs import Engine, float32_precision
from fedgma.training.evaluation import Scorer, run_forward, scorer
from fedgma.training.fast import gpu, resnet18
from fedgma.training.fast.cpu.trainer import kernel_of, kernel_scorer, kernel_trainer
from fedgma.training.fast.grouped import with_lanes
from fedgma.training.fast.written import Form, cnn_form, form_gradients, lenet_form, logistic_form
from fedgma.training.gradients import check_precision, lane_gradients, named_tensors, why_not_lanes
from fedgma.training.lane_batch import Assignment, LocalTrainer, Trained, keyed_generators
from fedgma.training.models import MLP, LeNet, Logistic, ResNet18, SmallCNN, parameter_count
from fedgma.training.stacked import Stacked
from fedgma.training.task import Task, columns_of
from fedgma.training.tasks import CLASSIFICATION, classifies, smoothed
from fedgma.training.threads.safety import why_not_threads
from fedgma.training.threads.trainer import SMALL, Threads, workers_for

log = logging.getLogger(__name__)
MOST = 1024  # lanes of a round whose kernels are compiled before its arrays are there
TRAINERS = ("auto", "engine", "kernels", "lanes", "loop", "threads")
FORMS: dict[type[nn.Module], Callable[[Any], Form | None]] = {  # models that are written out by hand
    Logistic: lambda model: logistic_form(),
    LeNet: lambda model: lenet_form(),
    SmallCNN: lambda model: cnn_form(model.dropout),
    ResNet18: resnet18.form_of,
}


def choose(
    trainer: str,
    model: nn.Module,
    pools: Sequence[Pool],
    *,
    precision: str = "fp32",
    form: bool = True,
    task: Task = CLASSIFICATION,
    smoothing: float = 0.0,
    beyond_kernels: Sequence[str] = (),
    lane_bytes: int = 0,
) -> LocalTrainer:
    """The trainer with the given name.

    "loop" trains one client at a time, "threads" one on each core, "lanes" all at once, "engine" the same compiled and
    captured for a GPU, "kernels" is compiled CPU code for LeNet and logistic regression. "auto" is the engine on a GPU;
    on a CPU the kernels where there are any, else threads for small models and the loop for others (lanes for dense
    layers alone). `form=False` uses torch's own gradients where hand-written ones exist; these and the kernels are for
    classification. `smoothing` is that of the labels. `beyond_kernels` names settings of the runs that the CPU kernels
    do not have. `lane_bytes` is the memory that a lane takes, if it is known.
    """
    check_precision(precision)
    if trainer not in TRAINERS:
        raise ConfigError(f"unknown trainer {trainer!r}; known: {', '.join(TRAINERS)}")
    if trainer in ("auto", "kernels") and (kernel := _cpu_kernel(trainer, model, pools, task, beyond_kernels)):
        return kernel_trainer(kernel, pools)
    on_gpu, goal = pools[0].y.device.type == "cuda", smoothed(task, smoothing)
    if trainer == "auto":
        trainer = "engine" if on_gpu else _on_cpu(model, pools, goal)
    written = written_form(model) if form and classifies(task) else None
    reason = _why_not(trainer, model, pools[0], goal, written)
    if reason is not None:
        log.warning("%s; training one client at a time", reason)
    if trainer == "loop" or reason is not None:
        return WithPrecision(precision, functools.partial(loop.train, task=goal))
    if trainer == "threads":
        return WithPrecision(precision, Threads(goal, workers_for(lane_bytes)))
    gradients = form_gradients(written, precision, smoothing) if written else lane_gradients(model, precision, goal)
    shared: dict[str, Any] = {"padding": written is not None, "measures": columns_of(task, model, pools[0]).number}
    if trainer == "lanes":
        return WithPrecision(precision, functools.partial(lanes.train, gradients=gradients, **shared))
    rehearse = gpu.rehearse if written is not None and on_gpu else None
    order = written.order if written is not None and precision == "bf16" else None
    change = with_lanes if written is None and precision == "bf16" and _convolves(model) else None
    shared.update(precision=precision, compile=on_gpu, rehearse=rehearse, order=order, change=change)
    return Engine(gradients, **shared)


def _why_not(trainer: str, model: nn.Module, pool: Pool, task: Task, written: Form | None) -> str | None:
    """Why a trainer cannot train this model, so that the loop takes its place; None if it can."""
    if trainer == "threads":
        return why_not_threads(model, pool, task)
    return why_not_lanes(model, pool, task) if trainer != "loop" and written is None else None


def warm_up(
    trainer: str,
    model: nn.Module,
    pool: Pool,
    lanes: int,
    batch: int,
    *,
    precision: str,
    form: bool,
    task: Task,
    then: Callable[[Stacked], object],
) -> None:
    """On a GPU, compile the kernels of a round of so many lanes while torch loads libraries of its own.

    Both take seconds on a machine that has never done it. `then` is what follows training, given the parameters of a
    lane. Kernels for another shape than that of the round are of no use and do no harm.
    """
    device = pool.y.device
    if device.type != "cuda" or trainer not in ("auto", "engine") or lanes > MOST:
        return
    written = written_form(model) if form and classifies(task) and type(model) in (LeNet, SmallCNN) else None
    params_of_one = {name: value.detach()[None] for name, value in named_tensors(model)[0].items()}

    def call() -> None:
        then(params_of_one)
        if written is not None:
            params = {name: value.repeat_interleave(lanes, 0) for name, value in params_of_one.items()}
            index = torch.zeros(lanes, batch, dtype=torch.int64, device=device)
            count = torch.full((lanes,), batch, device=device)
            form_gradients(written, precision)(params, {}, *pool.batch(index, index[:, :1]), count)

    with ThreadPoolExecutor(1) as beside, float32_precision(precision), keyed_generators(device, 0):
        if any(isinstance(part, nn.Conv2d) for part in model.modules()):
            beside.submit(_load_convolutions, device)
        gpu.rehearse(call)


def _load_convolutions(device: torch.device) -> None:
    """Torch loads the libraries of convolutions at the first one."""
    with torch.cuda.device(device):
        F.conv2d(torch.zeros(1, 1, 8, 8, device=device), torch.zeros(1, 1, 3, 3, device=device))


def _on_cpu(model: nn.Module, pools: Sequence[Pool], task: Task) -> str:
    """The trainer of a model without a CPU kernel; lanes of convolutions are slower than the loop there."""
    if type(model) in (Logistic, MLP):
        return "lanes"
    # larger models use all threads of torch for one client: their bits stay as they are
    small = parameter_count(model) < SMALL
    return "threads" if small and why_not_threads(model, pools[0], task) is None else "loop"


def _convolves(model: nn.Module) -> bool:
    """Whether a model has convolutions of images."""
    return any(isinstance(part, nn.Conv2d) for part in model.modules())


def early_form(train: LocalTrainer) -> LocalTrainer | None:
    """The trainer for the first rounds of a run, in which nothing is compiled; None where nothing ever is."""
    return functools.partial(train, early=True) if isinstance(train, Engine) and train.compiles else None


def _cpu_kernel(
    trainer: str, model: nn.Module, pools: Sequence[Pool], task: Task, beyond_kernels: Sequence[str]
) -> str | None:
    """The CPU kernel that trains the model on all of these pools; without one, an error if kernels were asked for."""
    asked_for = trainer == "kernels"
    if asked_for and beyond_kernels:
        raise ConfigError(f"the CPU kernels have no {', '.join(beyond_kernels)}; use trainer 'auto'")
    classes = classifies(task)
    kernels = {kernel_of(model, pool) for pool in pools} if classes and not beyond_kernels else {None}
    kernel = kernels.pop() if len(kernels) == 1 else None
    if asked_for and kernel is None:
        what = type(model).__name__ if classes else f"the task {task.name}"
        raise ConfigError(f"no CPU kernel for {what} on this data, or numba is missing; use 'auto'")
    return kernel


@dataclass(frozen=True)
class WithPrecision:
    """A trainer with the given precision of float32 products, independent of torch's global settings."""

    precision: str
    train: LocalTrainer

    def __call__(self, assignment: Assignment) -> Trained:
        """Train all lanes of the batch."""
        with float32_precision(self.precision):
            return self.train(assignment)


def lanes_of_a_chunk(train: LocalTrainer, together: int) -> int:
    """How many lanes to hand to a trainer at a time, where so many can train together within the memory.

    Threads take more, so that none of them waits: of lanes that are not in training they keep the updates alone.
    """
    if isinstance(train, WithPrecision) and isinstance(train.train, Threads):
        return max(together, 32, 4 * train.train.workers)
    return together


def written_form(model: nn.Module) -> Form | None:
    """The hand-written form of a model, or None where there is none or part of the model is frozen."""
    make = FORMS.get(type(model))
    trainable = all(value.requires_grad for value in model.parameters())
    return make(model) if make is not None and trainable else None


def choose_scorer(
    trainer: str,
    model: nn.Module,
    pool: Pool,
    *,
    form: bool = True,
    task: Task = CLASSIFICATION,
    compile: bool = True,
) -> Scorer:
    """How runs are evaluated: by the hand-written forward pass, compiled, on a GPU; by the CPU kernel; by the module.

    Without `compile`, as in the first rounds of a run, the forward pass is not compiled. The CPU kernel evaluates only
    for the trainers "auto" and "kernels": the others serve as references.
    """
    classes = classifies(task)
    written = written_form(model) if form and classes and pool.y.device.type == "cuda" else None
    if written is None:
        plain = scorer(run_forward(copy.deepcopy(model).eval()), task)
        return kernel_scorer(model, plain, task) if classes and trainer in ("auto", "kernels") else plain
    score = form_scorer(written, task)
    return compiled(score) if compile else _rehearsed(score)


def _rehearsed(score: Scorer) -> Scorer:
    """The scorer, whose kernels are compiled at the same time at the first call of every shape."""
    known = set()

    def call(params: Stacked, buffers: Stacked, pool: Pool, index: Tensor) -> tuple[Tensor, Tensor]:
        shape = (len(index), len(next(iter(params.values()))))
        if shape not in known:
            known.add(shape)
            gpu.rehearse(lambda: score(params, buffers, pool, index))
        return score(params, buffers, pool, index)

    return call


@functools.cache
def form_scorer(form: Form, task: Task = CLASSIFICATION) -> Scorer:
    """A scorer that uses the forward pass of a form; all runs get the same samples."""

    def forward(params: Stacked, buffers: Stacked, x: Tensor) -> Tensor:
        runs = len(next(iter(params.values())))
        return form.forward({**params, **buffers}, x.expand(runs, *x.shape), None).logits

    return scorer(forward, task)
