"""Gradients of many lanes at once, for any module that torch.func accepts.

A gradient function takes stacked parameters and buffers, a batch [lane, batch, ...] and the number of real samples of
each lane's batch. It returns stacked gradients of each lane's mean loss, the new buffers, and the sums of losses and of
the task's measures over the real samples. `lane_gradients` makes one from any module; `fast` has hand-written ones.
"""

import textwrap
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedgma.data.pools import Pool
from fedgma.errors import ConfigError
from fedgma.training.attention_rules import add_attention_rules
from fedgma.training.hints import without_hints
from fedgma.training.lane_batch import keyed_generators
from fedgma.training.local_steps import wide
from fedgma.training.recurrent import written_out
from fedgma.training.stacked import Stacked
from fedgma.training.task import Task, batch_loss
from fedgma.training.tasks import CLASSIFICATION


class Product(Protocol):
    """A weight gradient kept as two factors: a step can subtract their product without writing it to memory."""

    def tensor(self) -> Tensor:
        """The gradient, multiplied out."""

    def subtract_from(self, weight: Tensor, rates: Tensor) -> None:
        """Subtract `rates` [lane] times the gradient from the weights, in place."""


Place = tuple[slice, slice]  # rows and columns of a kernel


class Part(NamedTuple):
    """The gradient of kernels that is zero outside of a place: a step without other terms leaves the rest alone."""

    values: Tensor  # [lane, out, in, row, column]
    place: Place
    shape: torch.Size  # of the whole

    def tensor(self) -> Tensor:
        """The whole gradient."""
        (rows, columns), (height, width) = self.place, self.shape[-2:]
        return F.pad(self.values, (columns.start, width - columns.stop, rows.start, height - rows.stop))

    def subtract_from(self, weight: Tensor, rates: Tensor) -> None:
        """Subtract `rates` [lane] times the gradient from the weights, in place."""
        weight[..., *self.place].sub_(wide(rates, self.values) * self.values)


LaneGradients = Mapping[str, Tensor | Product]


class Together(Protocol):
    """The gradients of all parameters before they are summed: a step of SGD can apply them as it computes them."""

    def each(self) -> LaneGradients:
        """Each gradient for itself."""

    def step(self, params: Stacked, velocities: Stacked, lr: Tensor, momentum: Tensor) -> None:
        """A step of SGD in place, with momentum if there are velocities; lanes without samples do not change."""


# gradients, buffers, loss sum [lane], measures [lane, column]
Gradients = tuple[LaneGradients | Together, Stacked, Tensor, Tensor]
GradientFunction = Callable[[Stacked, Stacked, Tensor, Tensor, Tensor], Gradients]
PRECISIONS = ("fp32", "tf32", "bf16")
# any outputs will do: what fails with another task, and not with this one, is that task
OUTPUTS = Task("outputs", lambda output, y: output.flatten(1).float().sum(1), lambda output, y: {}, {})


def multiplied(grads: LaneGradients | Together) -> Stacked:
    """Gradients as plain tensors."""
    alone = grads if isinstance(grads, Mapping) else grads.each()
    return {name: value if isinstance(value, Tensor) else value.tensor() for name, value in alone.items()}


def lane_gradients(model: nn.Module, precision: str = "fp32", task: Task = CLASSIFICATION) -> GradientFunction:
    """The gradient function of any module, by `torch.func`: one forward and backward for all lanes."""
    add_attention_rules()
    half, vectorised = precision == "bf16", written_out(model)
    if vectorised is not model:
        vectorised.train()
    frozen = {name for name, value in model.named_parameters() if not value.requires_grad}

    def loss(
        params: Stacked, buffers: Stacked, x: Tensor, y: Tensor, count: Tensor
    ) -> tuple[Tensor, tuple[Stacked, Tensor, Tensor]]:
        # batch normalisation writes into these
        after = {name: value.clone() for name, value in buffers.items() if name not in frozen}
        used = {**{name: buffers[name] for name in buffers if name in frozen}, **params}
        used = (
            {n: value.bfloat16() if value.is_floating_point() else value for n, value in used.items()} if half else used
        )
        seen = x.bfloat16() if half and x.is_floating_point() else x
        output = functional_call(vectorised, {**used, **after}, (seen,))
        mean, total, measures = batch_loss(task, output.float() if half else output, y, count)
        return mean, (after, total.detach(), measures.detach())

    batched = vmap(grad(loss, has_aux=True), randomness="different")

    def gradients(params: Stacked, buffers: Stacked, x: Tensor, y: Tensor, count: Tensor) -> Gradients:
        grads, (after, total, measures) = batched(params, buffers, x, y, count)
        return grads, after, total, measures

    return gradients


def mixes_samples(model: nn.Module) -> bool:
    """Whether a sample's output may depend on the rest of its batch, so that padding must not reach the model."""
    kinds = (nn.modules.batchnorm._BatchNorm,)
    return any(isinstance(part, kinds) for part in model.modules()) or any(True for _ in model.buffers())


def why_not_lanes(model: nn.Module, pool: Pool, task: Task = CLASSIFICATION) -> str | None:
    """Why a model cannot be trained in lanes, found by a trial on two lanes of two samples; None if it can."""
    device = pool.y.device
    params, buffers = ({n: torch.stack([v.detach()] * 2) for n, v in part.items()} for part in named_tensors(model))
    index, count = torch.zeros((2, 2), dtype=torch.int64, device=device), torch.tensor([2, 2], device=device)
    x, y = pool.batch(index, index)
    try:
        with keyed_generators(device, 0), without_hints():
            lane_gradients(model, task=task)(params, buffers, x, y, count)
    except Exception as error:  # a module may raise anything; the reason is returned
        first = textwrap.shorten(str(error).strip().partition("\n")[0], 300, placeholder=" ...")
        alone = task is not OUTPUTS and why_not_lanes(model, pool, OUTPUTS) is None
        what = f"the loss or the metrics of task {task.name}" if alone else type(model).__name__
        return f"{what} cannot be vectorised over lanes: {first}"
    return None


def named_tensors(model: nn.Module) -> tuple[Stacked, Stacked]:
    """A module's trainable parameters, and everything else in its state: buffers and frozen parameters.

    A tensor that the module holds under several names, such as tied weights, is here once, under the first of them.
    """
    params: Stacked = {name: value for name, value in model.named_parameters() if value.requires_grad}
    state, seen = model.state_dict(keep_vars=True), {id(value) for value in params.values()}
    rest: Stacked = {}
    for name, value in state.items():
        if id(value) not in seen:
            seen.add(id(value))
            rest[name] = value.detach()
    return params, rest


def tied_names(model: nn.Module) -> dict[str, str]:
    """Further names of tensors that a module holds under several: name -> the first name, under which it trains.

    >>> tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> tied[1].weight = tied[0].weight
    >>> tied_names(tied)
    {'1.weight': '0.weight'}
    """
    first: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    return {name: first[id(value)] for name, value in state.items() if first.setdefault(id(value), name) != name}


def check_precision(precision: str) -> str:
    """The precision, checked."""
    if precision not in PRECISIONS:
        raise ConfigError(f"unknown precision {precision!r}; known: {', '.join(PRECISIONS)}")
    return precision
