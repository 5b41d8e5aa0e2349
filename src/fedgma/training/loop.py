"""The reference trainer: one client after the other, in plain torch.

The tests compare all other trainers with it. It also trains models that cannot be vectorised over lanes.
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedgma.data.pools import Pool
from fedgma.training.gradients import named_tensors
from fedgma.training.lane_batch import RATES, Assignment, LaneBatch, Tilt, Trained, keyed_generators
from fedgma.training.perturbations import TINY
from fedgma.training.stacked import Stacked, copy_all, shapes_of, unflatten
from fedgma.training.task import Task, mean_loss, measure_sums
from fedgma.training.tasks import CLASSIFICATION

Batches = Iterator[tuple[Tensor, Tensor, float]]  # samples, targets and learning rate of each step


class Parts(NamedTuple):
    """What surrounds the steps of a lane: in plain torch here, to the same bits in fewer calls in `threads`."""

    load: Callable[[nn.Module, Mapping[str, Tensor]], object]  # named values into a model
    optimizer: Callable[[list[nn.Parameter], LaneBatch, int], Any]  # used like one of torch's
    batches: Callable[[LaneBatch, int, Pool], Batches]
    means: Callable[[Task, torch.device], "Means"]


class LaneInput(NamedTuple):
    """What one lane trains on, and where it begins."""

    lane_batch: LaneBatch
    lane: int  # its number in the batch
    pool: Pool
    start: Stacked
    correction: Stacked | None = None
    tilt: Tilt | None = None  # changed in place


def train(assignment: Assignment, *, task: Task = CLASSIFICATION) -> Trained:
    """Train each lane of the batch."""
    model, assignment = copy.deepcopy(assignment.model).train(), own_tilt(assignment)
    trainable, ends, means = trainable_of(model), ends_of(assignment, room_for(assignment)), []
    for lane in range(assignment.lane_batch.size):
        with keyed_generators(assignment.pools[0].y.device, int(assignment.lane_batch.seeds[lane])):
            means.append(train_lane(model, trainable, assignment, lane, ends, task))
    return gather(means, ends, assignment)


def own_tilt(assignment: Assignment) -> Assignment:
    """The same with a copy of the tilt, which training changes in place."""
    if assignment.tilt is None:
        return assignment
    return assignment._replace(tilt=assignment.tilt.mapped(lambda part: {n: v.clone() for n, v in part.items()}))


def room_for(assignment: Assignment) -> Tensor:
    """Memory for the updates of all lanes: [lane, entry]."""
    values = list(assignment.start.values())
    dtype = functools.reduce(torch.promote_types, [value.dtype for value in values])
    entries = sum(shape.numel() for _, shape in shapes_of(assignment.start))
    return torch.empty(assignment.lane_batch.size, entries, dtype=dtype, device=values[0].device)


class Ends(NamedTuple):
    """What training makes of lanes, to be filled lane by lane."""

    flat: Tensor  # [lane, entry]: updates
    updates: Stacked  # the same by parameter, as views: [lane, ...]
    buffers: Stacked


def ends_of(assignment: Assignment, flat: Tensor) -> Ends:
    """Room for what training makes of all lanes, with that memory for their updates."""
    lanes = assignment.lane_batch.size
    buffers = {name: value.new_empty((lanes, *value.shape[1:])) for name, value in assignment.buffers.items()}
    return Ends(flat, unflatten(flat, shapes_of(assignment.start)), buffers)


def train_lane(
    model: nn.Module,
    trainable: dict[str, nn.Parameter],
    assignment: Assignment,
    lane: int,
    ends: Ends,
    task: Task = CLASSIFICATION,
    parts: Parts | None = None,
) -> "Means":
    """Train one lane with a model whose weights are replaced; update and buffers go to its rows of `ends`."""
    run, parts, inputs = int(assignment.lane_batch.run[lane]), parts or PLAIN, _inputs_of(assignment, lane)
    parts.load(model, {**inputs.start, **{name: value[run] for name, value in assignment.buffers.items()}})
    means = _take_steps(model, trainable, inputs, task, parts)
    updates: list[Tensor] = [trainable[name] for name in inputs.start]
    with torch.no_grad():
        torch._foreach_sub_(updates, list(inputs.start.values()))  # in place: the model gets other weights next
        copy_all([row[lane] for row in ends.updates.values()], updates)
        if ends.buffers:
            state = model.state_dict(keep_vars=True)  # a module may have replaced its buffers
            copy_all([row[lane] for row in ends.buffers.values()], [state[name] for name in ends.buffers])
    return means


def _inputs_of(assignment: Assignment, lane: int) -> LaneInput:
    _, lane_batch, pools, start, _, correction, tilt = assignment
    run, pool = int(lane_batch.run[lane]), pools[lane_batch.pool[lane]]
    return LaneInput(
        lane_batch,
        lane,
        pool,
        start={name: value[run] for name, value in start.items()},
        correction={name: value[lane] for name, value in correction.items()} if correction else None,
        tilt=None if tilt is None else tilt.mapped(lambda part: {name: value[lane] for name, value in part.items()}),
    )


def gather(means: Sequence["Means"], ends: Ends, assignment: Assignment) -> Trained:
    """The results of all lanes side by side."""
    losses, measures = means[0].of_lanes(means)
    return Trained(ends.flat, shapes_of(assignment.start), ends.buffers, losses, measures, assignment.tilt)


def train_client(
    model: nn.Module,
    lane_batch: LaneBatch,
    lane: int,
    pool: Pool,
    start: Stacked,
    task: Task = CLASSIFICATION,
) -> tuple[Stacked, Tensor, Tensor]:
    """One client's local training: buffers, means of loss and measures over the training batches.

    The model starts with the global weights, of which `start` is a copy, and ends with the client's.
    """
    with keyed_generators(pool.y.device, int(lane_batch.seeds[lane])):
        means = _take_steps(model.train(), trainable_of(model), LaneInput(lane_batch, lane, pool, start), task, PLAIN)
        losses, measures = means.of_lanes([means])
        return {name: value.clone() for name, value in named_tensors(model)[1].items()}, losses[0], measures[0]


def trainable_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that training changes."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def _take_steps(
    model: nn.Module, trainable: dict[str, nn.Parameter], inputs: LaneInput, task: Task, parts: Parts
) -> "Means":
    """All local steps of a lane: loss and measures."""
    optimizer = parts.optimizer(list(trainable.values()), inputs.lane_batch, inputs.lane)
    means, rate = parts.means(task, inputs.pool.y.device), rates_of(inputs.lane_batch, inputs.lane)
    for x, y, lr in parts.batches(inputs.lane_batch, inputs.lane, inputs.pool):
        optimizer.zero_grad()
        output = model(x)
        loss = mean_loss(task, output, y)
        loss.backward()  # type: ignore[no-untyped-call]
        if rate["blend"]:
            _take_second_gradient(model, trainable, (task, x, y), rate, inputs.tilt)
        _adjust(trainable, inputs.start, inputs.correction, rate)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        means.add(loss, output, y)
    return means


def rates_of(lane_batch: LaneBatch, lane: int) -> dict[str, float]:
    """The `RATES` of a lane by name."""
    return dict(zip(RATES, lane_batch.rates[lane].tolist(), strict=True))


def load_state(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Replace the model's weights and buffers; of tied weights only the first name is given."""
    model.load_state_dict(values, strict=False)


def one_batch_at_a_time(lane_batch: LaneBatch, lane: int, pool: Pool) -> Batches:
    """The batches of a lane, each made when it is used."""
    device, client = pool.y.device, torch.tensor(int(lane_batch.client[lane]), device=pool.y.device)
    batches = lane_batch.orders[lane_batch.order[lane]].astype(np.int64)
    for index, count, lr in zip(batches, lane_batch.counts[lane].tolist(), lane_batch.lr[lane].tolist(), strict=True):
        if count == 0:
            return
        yield *pool.batch(torch.from_numpy(index[:count]).to(device), client), lr


class Means:
    """Loss and measures over the training batches of a lane."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, self.seen = task, 0
        self.loss, self.measured = torch.zeros((), device=device), torch.zeros((), device=device)

    def add(self, loss: Tensor, output: Tensor, y: Tensor) -> None:
        """Add a batch: its mean loss, output and targets."""
        self.seen += len(y)
        self.loss += loss.detach() * len(y)
        self.measured = self.measured + measure_sums(self.task, output.detach(), y)

    @staticmethod
    def of_lanes(lanes: Sequence["Means"]) -> tuple[Tensor, Tensor]:
        """The means over the samples of each lane."""
        losses, measures = torch.stack([lane.loss for lane in lanes]), torch.stack([lane.measured for lane in lanes])
        seen = torch.tensor([max(lane.seen, 1) for lane in lanes], device=losses.device)
        return losses / seen, measures / seen.view(-1, *[1] * (measures.dim() - 1))


def torch_optimizer(trainable: list[nn.Parameter], lane_batch: LaneBatch, lane: int) -> torch.optim.Optimizer:
    """The lane's optimiser, with fresh moments; the rate is set before every step."""
    rate = rates_of(lane_batch, lane)
    decay = rate["weight_decay"]
    if lane_batch.optimizer == "adamw":
        betas = (rate["beta1"], rate["beta2"])
        return torch.optim.AdamW(trainable, betas=betas, eps=rate["epsilon"], weight_decay=decay)
    nesterov = bool(rate["nesterov"])
    # foreach: the same operations in fewer calls
    return torch.optim.SGD(trainable, momentum=rate["momentum"], weight_decay=decay, nesterov=nesterov, foreach=True)


PLAIN = Parts(load_state, torch_optimizer, one_batch_at_a_time, Means)


def _take_second_gradient(
    model: nn.Module,
    trainable: dict[str, nn.Parameter],
    batch: tuple[Task, Tensor, Tensor],
    rate: Mapping[str, float],
    tilt: Tilt | None,
) -> None:
    """Blend the gradient with that at a perturbed point (see `perturbations`); weights and buffers stay as they are."""
    rho, unit, blend, tilted = (rate[name] for name in ("rho", "unit", "blend", "tilted"))
    first = {n: torch.zeros_like(v) if v.grad is None else v.grad.clone() for n, v in trainable.items()}
    toward = {name: g - tilt.own[name] - tilt.shared[name] if tilt else g for name, g in first.items()}
    length = torch.stack([value.square().sum() for value in toward.values()]).sum().sqrt()
    factor = rho / (length + TINY) if unit else rho
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for name, value in toward.items():
            trainable[name].add_(factor * value)
    model.zero_grad()
    task, x, y = batch
    mean_loss(task, model(x), y).backward()  # type: ignore[no-untyped-call]
    model.load_state_dict(before)
    for name, gradient in first.items():
        second = trainable[name].grad
        trainable[name].grad = gradient if second is None else torch.lerp(gradient, second, blend)
    if tilt is not None and tilted:
        for name, value in toward.items():
            tilt.last[name].copy_(factor * value)
            tilt.own[name].add_(tilt.last[name] - tilt.shared[name])


def _adjust(
    trainable: dict[str, nn.Parameter], start: Stacked, correction: Stacked | None, rate: Mapping[str, float]
) -> None:
    """Change a gradient as the algorithm asks: proximal term, clipping, scale, correction (see `LaneBatch`)."""
    for value in trainable.values():
        if value.grad is None:
            value.grad = torch.zeros_like(value)  # else it would not be decayed
    mu, clip, scale = rate["mu"], rate["clip"], rate["scale"]
    if not mu and clip == float("inf") and scale == 1 and not correction:
        return
    for name, value in trainable.items():
        if mu and value.grad is not None:
            value.grad += mu * (value.detach() - start[name])
    if clip != float("inf"):
        nn.utils.clip_grad_norm_(trainable.values(), clip)
    for name, value in trainable.items():
        if scale != 1 and value.grad is not None:
            value.grad *= scale
        if correction and value.grad is not None:
            value.grad += correction[name]
