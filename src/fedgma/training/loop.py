"""The reference trainer: one client after the other, in plain torch.

The tests compare all other trainers with it. It also trains models that cannot be vectorised over lanes.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedgma.data.pools import Pool
from fedgma.training.gradients import named_tensors
from fedgma.training.lane_batch import RATES, Assignment, LaneBatch, Tilt, Trained, keyed_generators
from fedgma.training.perturbations import TINY
from fedgma.training.stacked import Stacked, shapes_of, stack, unflatten
from fedgma.training.task import Task, mean_loss, measure_sums
from fedgma.training.tasks import CLASSIFICATION

Result = tuple[Stacked, Tensor, Tensor]  # buffers, means of loss and measures over the training batches
MakeOptimizer = Callable[[list[nn.Parameter], LaneBatch, int], Any]  # used like one of torch's


def train(assignment: Assignment, *, task: Task = CLASSIFICATION) -> Trained:
    """Train each lane of the batch."""
    model, assignment, flat = copy.deepcopy(assignment.model), own_tilt(assignment), room_for(assignment)
    device, trained = assignment.pools[0].y.device, []
    for lane in range(assignment.lane_batch.size):
        with keyed_generators(device, int(assignment.lane_batch.seeds[lane])):
            trained.append(train_lane(model, assignment, lane, flat, task))
    return gather(trained, flat, assignment)


def own_tilt(assignment: Assignment) -> Assignment:
    """The same with a copy of the tilt, which training changes in place."""
    if assignment.tilt is None:
        return assignment
    return assignment._replace(tilt=assignment.tilt.mapped(lambda part: {n: v.clone() for n, v in part.items()}))


def room_for(assignment: Assignment) -> Tensor:
    """Memory for the updates of all lanes: [lane, entry]."""
    values = list(assignment.start.values())
    kind = functools.reduce(torch.promote_types, [value.dtype for value in values])
    entries = sum(shape.numel() for _, shape in shapes_of(assignment.start))
    return torch.empty(assignment.lane_batch.size, entries, dtype=kind, device=values[0].device)


def train_lane(
    model: nn.Module,
    assignment: Assignment,
    lane: int,
    flat: Tensor,
    task: Task = CLASSIFICATION,
    make_optimizer: MakeOptimizer | None = None,
) -> Result:
    """Train one lane with a model whose weights are replaced by those of its run; the update goes to its row."""
    _, lane_batch, pools, start, buffers, correction, tilt = assignment
    run = int(lane_batch.run[lane])
    weights = {name: value[run] for name, value in start.items()}
    extra = {name: value[lane] for name, value in correction.items()} if correction else None
    turned = None if tilt is None else Tilt(*({n: v[lane] for n, v in part.items()} for part in tilt))
    # not strict: of tied weights only the first name is given
    model.load_state_dict({**weights, **{name: value[run] for name, value in buffers.items()}}, strict=False)
    pool, make = pools[lane_batch.pool[lane]], make_optimizer or torch_optimizer
    found = _take_steps(model, lane_batch, lane, pool, weights, extra, turned, task, make)
    trained = dict(model.named_parameters())
    for name, row in unflatten(flat[lane : lane + 1], shapes_of(start)).items():
        torch.sub(trained[name].detach(), weights[name], out=row[0])
    return found


def gather(trained: Sequence[Result], flat: Tensor, assignment: Assignment) -> Trained:
    """The results of all lanes side by side."""
    after, losses, measures = zip(*trained, strict=True)
    shapes = shapes_of(assignment.start)
    return Trained(flat, shapes, stack(after), torch.stack(losses), torch.stack(measures), assignment.tilt)


def train_client(
    model: nn.Module,
    lane_batch: LaneBatch,
    lane: int,
    pool: Pool,
    start: Stacked,
    task: Task = CLASSIFICATION,
) -> Result:
    """One client's local training: buffers, means of loss and measures over the training batches.

    The model starts with the global weights, of which `start` is a copy, and ends with the client's.
    """
    with keyed_generators(pool.y.device, int(lane_batch.seeds[lane])):
        return _take_steps(model, lane_batch, lane, pool, start, None, None, task, torch_optimizer)


def _take_steps(
    model: nn.Module,
    lane_batch: LaneBatch,
    lane: int,
    pool: Pool,
    start: Stacked,
    correction: Stacked | None,
    tilt: Tilt | None,
    task: Task,
    make_optimizer: MakeOptimizer,
) -> Result:
    """All local steps of a client; its tilt is changed in place."""
    trainable = {name: value for name, value in model.named_parameters() if value.requires_grad}
    optimizer = make_optimizer(list(trainable.values()), lane_batch, lane)
    device, who = pool.y.device, int(lane_batch.client[lane])
    loss_sum, measured, seen = torch.zeros((), device=device), torch.zeros((), device=device), 0
    model.train()
    batches = lane_batch.orders[lane_batch.order[lane]].astype(np.int64)
    plan = zip(batches, lane_batch.counts[lane].tolist(), lane_batch.lr[lane].tolist(), strict=True)
    for index, count, lr in plan:
        if count == 0:
            break
        x, y = pool.batch(torch.from_numpy(index[:count]).to(device), torch.tensor(who, device=device))
        optimizer.zero_grad()
        output = model(x)
        loss = mean_loss(task, output, y)
        loss.backward()  # type: ignore[no-untyped-call]
        if lane_batch.rate("blend")[lane]:
            _take_second_gradient(model, trainable, (task, x, y), lane_batch, lane, tilt)
        _adjust(trainable, start, correction, lane_batch, lane)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        seen += count
        loss_sum += loss.detach() * count
        measured = measured + measure_sums(task, output.detach(), y)
    after = {name: value.clone() for name, value in named_tensors(model)[1].items()}
    return after, loss_sum / max(seen, 1), measured / max(seen, 1)


def torch_optimizer(trainable: list[nn.Parameter], lane_batch: LaneBatch, lane: int) -> torch.optim.Optimizer:
    """The lane's optimiser, with fresh moments; the rate is set before every step."""
    rate = dict(zip(RATES, lane_batch.rates[lane].tolist(), strict=True))
    decay = rate["weight_decay"]
    if lane_batch.optimizer == "adamw":
        betas = (rate["beta1"], rate["beta2"])
        return torch.optim.AdamW(trainable, betas=betas, eps=rate["epsilon"], weight_decay=decay)
    nesterov = bool(rate["nesterov"])
    # foreach: the same operations in fewer calls
    return torch.optim.SGD(trainable, momentum=rate["momentum"], weight_decay=decay, nesterov=nesterov, foreach=True)


def _take_second_gradient(
    model: nn.Module,
    trainable: dict[str, nn.Parameter],
    batch: tuple[Task, Tensor, Tensor],
    lane_batch: LaneBatch,
    lane: int,
    tilt: Tilt | None,
) -> None:
    """Blend the gradient with that at a perturbed point (see `perturbations`); weights and buffers stay as they are."""
    rho, unit, blend, tilted = (float(lane_batch.rate(name)[lane]) for name in ("rho", "unit", "blend", "tilted"))
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
    trainable: dict[str, nn.Parameter], start: Stacked, correction: Stacked | None, lane_batch: LaneBatch, lane: int
) -> None:
    """Change a gradient as the algorithm asks: proximal term, clipping, scale, correction (see `LaneBatch`)."""
    mu, clip, scale = (float(lane_batch.rate(name)[lane]) for name in ("mu", "clip", "scale"))
    for name, value in trainable.items():
        value.grad = torch.zeros_like(value) if value.grad is None else value.grad  # else it would not be decayed
        if mu:
            value.grad += mu * (value.detach() - start[name])
    if clip != float("inf"):
        nn.utils.clip_grad_norm_(trainable.values(), clip)
    for name, value in trainable.items():
        if scale != 1 and value.grad is not None:
            value.grad *= scale
        if correction and value.grad is not None:
            value.grad += correction[name]
