"""Trains many lanes at once: clients of one run or of many, in tensors with the lane axis first.

Lanes are sorted by their number of steps. A lane that has finished keeps its weights, momentum and buffers to the bit;
when half of the active lanes have finished, only the others are computed. All inputs are on the device before the first
step, and nothing is read back, so a step can be compiled and captured in a CUDA graph (`cuda_graphs`).
"""

from collections.abc import Mapping, Sequence
from types import EllipsisType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgma.data.pools import Pool
from fedgma.training.features import Features, features_of
from fedgma.training.gradients import (
    GradientFunction,
    LaneGradients,
    Part,
    Together,
    lane_gradients,
    mixes_samples,
    multiplied,
)
from fedgma.training.hints import without_hints
from fedgma.training.lane_batch import RATES, Assignment, Trained, keyed_generators
from fedgma.training.local_steps import adamw, sgd, wide
from fedgma.training.perturbations import Ascent, second_gradients, turn
from fedgma.training.stacked import Stacked, empty_flat, shapes_of, ship, unflatten
from fedgma.training.workbench import Bench, Rows, changing, lay_out, take_part, take_rows


class Work(NamedTuple):
    """One step of some lanes: which lanes, how many samples, and whether none of these lanes is idle."""

    step: int
    lanes: tuple[int, ...] | int  # the number of first lanes, or the indices of lanes
    batch: int
    all_busy: bool


@without_hints()
def train(
    assignment: Assignment, *, gradients: GradientFunction | None = None, padding: bool = False, measures: int = 1
) -> Trained:
    """Train all lanes of the batch together; the result equals that of `loop.train` up to rounding of float32.

    `padding` means that the gradients ignore padding in any batch, also for models that mix samples. `measures` is the
    number of columns that the gradient function returns beside the loss.
    """
    order = np.argsort(-assignment.lane_batch.steps, kind="stable")
    model, lane_batch, pools, start, buffers, correction, tilt = assignment = assignment.take(order)
    device = pools[0].y.device
    features = features_of(assignment)
    rows = ship(lane_batch.run, device)
    bench = lay_out(lane_batch, features, start, buffers, rows, measures)
    bench.correction, bench.tilt = correction or {}, tilt
    gradients_of = gradients or lane_gradients(model)
    model.train()
    with keyed_generators(device, int(lane_batch.seeds[0])):
        exact = not padding and mixes_samples(model)
        for work in schedule(lane_batch.counts, exact=exact, batch=lane_batch.batch):
            play(bench, work, pools, lane_batch.pool, features, gradients_of)
    return finish(bench, start, rows, order)


def schedule(counts: np.ndarray, *, exact: bool, batch: int, shrink: int = 2, fewest: int = 1) -> list[Work]:
    """The steps to train, for lanes in falling order of their number of steps; `exact` keeps padding out of batches.

    The number of active lanes is divided by `shrink` each time, so that there are few different sizes. It stays the
    same once fewer than `fewest` steps are left.

    >>> [(w.lanes, w.all_busy) for w in schedule(np.array([[2, 2, 1], [2, 0, 0], [2, 0, 0]]), exact=False, batch=2)]
    [(3, True), (1, True), (1, True)]
    """
    works: list[Work] = []
    size = len(counts)
    for step, busy in enumerate((counts > 0).sum(0).tolist()):
        if exact:
            works += _equal_batches(counts[:busy, step], step)
            continue
        while -(-size // shrink) >= busy and size > 1 and counts.shape[1] - step >= fewest:
            size = -(-size // shrink)
        works.append(Work(step, size, batch, busy == size))
    return works


def _equal_batches(counts: np.ndarray, step: int) -> list[Work]:
    """One `Work` for each batch size that occurs."""
    sizes = np.unique(counts)
    if len(sizes) == 1:
        return [Work(step, len(counts), int(sizes[0]), True)]
    return [Work(step, tuple(np.flatnonzero(counts == size).tolist()), int(size), True) for size in sizes]


def play(
    bench: Bench,
    work: Work,
    pools: Sequence[Pool],
    pool: np.ndarray,
    features: Features,
    gradients: GradientFunction,
) -> None:
    """Train one step, in place; `pool` [lane] is the pool of each lane's samples."""
    rows: Rows = slice(work.lanes)
    if not isinstance(work.lanes, int):
        rows = ship(np.array(work.lanes), bench.client.device)
    part = bench if work.lanes == len(bench.client) else take_part(bench, rows)
    host_rows = slice(work.lanes) if isinstance(work.lanes, int) else list(work.lanes)
    x, y = gather(pools, pool[host_rows], part.index[work.step, :, : work.batch], part.client)
    step = torch.full((1,), work.step, device=bench.client.device)
    learn(part, x, y, part.counts[work.step], step, features, gradients, all_busy=work.all_busy)
    if isinstance(rows, Tensor):
        _put_back(bench, part, rows)


def learn(
    bench: Bench,
    x: Tensor,
    y: Tensor,
    count: Tensor,
    step: Tensor,
    features: Features,
    gradients: GradientFunction,
    *,
    all_busy: bool,
) -> None:
    """Gradient and step of all lanes on a batch, in place; only tensor operations, to be compiled and captured.

    `step` [1] is the number of the local step, counted from 0.
    """
    grads, buffers, loss, measures = gradients(bench.params, bench.buffers, x, y, count)
    busy = None if all_busy else count > 0
    if features.second:
        grads = _second(bench, grads, (x, y, count), gradients, busy)
    descend(bench, grads, step, features, busy)
    for name, value in buffers.items():
        _replace(bench.buffers[name], value, busy)
    bench.sums.add_(torch.cat([loss[:, None], measures], 1))


def _second(
    bench: Bench,
    first: LaneGradients | Together,
    batch: tuple[Tensor, Tensor, Tensor],
    gradients: GradientFunction,
    busy: Tensor | None,
) -> Stacked:
    """The gradients, blended with those at perturbed weights; tilts change in place."""
    rates = dict(zip(RATES, bench.rates, strict=True))
    ascent = Ascent(rates["rho"], rates["unit"], rates["blend"], rates["tilted"])

    def gradients_at(params: Stacked) -> Stacked:
        return multiplied(gradients(params, bench.buffers, *batch)[0])

    grads, moves = second_gradients(gradients_at, bench.params, multiplied(first), ascent, bench.tilt)
    if bench.tilt is not None:
        turn(bench.tilt, moves, ascent, busy)
    return grads


def descend(
    bench: Bench, lane_grads: LaneGradients | Together, step: Tensor, features: Features, busy: Tensor | None
) -> None:
    """A step of every lane: the algorithm's changes to the gradient, then the optimiser; idle lanes do not change."""
    rates = dict(zip(RATES, bench.rates, strict=True))
    lr = bench.lr.index_select(0, step)[0] if features.schedule else bench.lr[0]
    if not isinstance(lane_grads, Mapping):
        if features.light:
            return lane_grads.step(bench.params, bench.momentum, lr, rates["momentum"])
        lane_grads = lane_grads.each()
    if features.plain:  # products are subtracted without computing the gradient
        for name, value in lane_grads.items():
            if not isinstance(value, Tensor):
                value.subtract_from(bench.params[name], lr)  # zero for an idle lane: it has no loss
        lane_grads = {name: value for name, value in lane_grads.items() if isinstance(value, Tensor)}
    whole = features.prox or features.correction  # terms that move every entry
    parts = {name: value for name, value in lane_grads.items() if isinstance(value, Part) and not whole}
    grads = multiplied({name: value for name, value in lane_grads.items() if name not in parts})
    grads |= {name: part.values for name, part in parts.items()}
    if features.prox:
        grads = {n: g + wide(rates["mu"], g) * (bench.params[n] - bench.anchor[n]) for n, g in grads.items()}
    if features.clip:
        norm = torch.stack([_square(g, bench.params[n]) for n, g in grads.items()]).sum(0).sqrt()
        shorter = (rates["clip"] / (norm + 1e-6)).clamp(max=1.0)
        grads = {n: g * wide(shorter, g) for n, g in grads.items()}
    if features.scale:
        grads = {n: g * wide(rates["scale"], g) for n, g in grads.items()}
    if features.correction:
        grads = {n: g + bench.correction[n] for n, g in grads.items()}
    for name, gradient in grads.items():
        part = parts.get(name)
        if part is not None and (features.decay or features.adamw):  # which also move entries without a gradient
            gradient, part = part._replace(values=gradient).tensor(), None
        place = (...,) if part is None else (..., *part.place)
        _step(bench, name, place, gradient, lr, rates, step, features, busy)


def _square(gradient: Tensor, weight: Tensor) -> Tensor:
    """The squared norm of each lane's gradient; in the order of memory, where weights have an order of their own."""
    if weight.is_contiguous():
        return gradient.flatten(1).square().sum(1)
    return gradient.square().sum(tuple(range(1, gradient.dim())))


def _step(
    bench: Bench,
    name: str,
    place: tuple[slice | EllipsisType, ...],
    gradient: Tensor,
    lr: Tensor,
    rates: Stacked,
    step: Tensor,
    features: Features,
    busy: Tensor | None,
) -> None:
    """The optimiser's step of the entries of a parameter in one place, in place."""
    weight, decay = bench.params[name][place], rates["weight_decay"] if features.decay else None
    if features.adamw:
        betas, moments = (rates["beta1"], rates["beta2"]), (bench.momentum[name], bench.squares[name])
        move, new = adamw(gradient, weight, moments, step, lr=lr, betas=betas, epsilon=rates["epsilon"], decay=decay)
        for old, value in zip(moments, new, strict=True):
            _replace(old, value, busy)
    else:
        nesterov = rates["nesterov"] if features.nesterov else None
        velocity = bench.momentum[name][place] if name in bench.momentum else None
        move, moved = sgd(gradient, weight, velocity, lr=lr, momentum=rates["momentum"], decay=decay, nesterov=nesterov)
        if velocity is not None and moved is not None:
            _replace(velocity, moved, busy)
    weight.sub_(move if busy is None else torch.where(wide(busy, move), move, 0.0))


def _replace(old: Tensor, new: Tensor, busy: Tensor | None) -> None:
    """Write new values over old ones, in place; idle lanes keep theirs."""
    old.copy_(new if busy is None else torch.where(wide(busy, new), new, old))


def finish(bench: Bench, start: Stacked, rows: Tensor, order: np.ndarray) -> Trained:
    """Updates, buffers, loss and measures of the first lanes; `order` is how they were sorted, and is undone."""
    back: Rows = slice(len(order)) if is_sorted(order) else ship(np.argsort(order), rows.device)
    flat, loss, measures = results(bench, start, rows, back)
    tilt = None if bench.tilt is None else bench.tilt.mapped(lambda part: take_rows(part, back))
    return Trained(flat, shapes_of(bench.params), take_rows(bench.buffers, back), loss, measures, tilt)


def is_sorted(order: np.ndarray) -> bool:
    """Whether an order of lanes is that which they have."""
    return np.array_equal(order, np.arange(len(order)))


def results(bench: Bench, start: Stacked, rows: Tensor, back: Rows) -> list[Tensor]:
    """Updates [lane, entry], mean loss [lane] and measures [lane, column] of these rows."""
    flat = empty_flat(bench.params)
    for name, update in unflatten(flat, shapes_of(bench.params)).items():
        began = start[name] if len(start[name]) == 1 else start[name].index_select(0, rows)
        torch.sub(bench.params[name], began, out=update)  # one pass over the weights
    means = (bench.sums / bench.counts.sum(0).clamp(min=1)[:, None])[back]
    return [flat[back], means[:, 0], means[:, 1:]]


def gather(pools: Sequence[Pool], pool: np.ndarray, index: Tensor, client: Tensor) -> tuple[Tensor, Tensor]:
    """Samples [lane, batch, ...] with the shift of each lane's client; several pools are read one by one."""
    used = np.unique(pool)
    if len(used) == 1:
        x, y = pools[used[0]].batch(index, client[:, None])
        return x, y
    groups = [ship(np.flatnonzero(pool == number), index.device) for number in used]
    parts = [pools[number].batch(index[rows], client[rows, None]) for number, rows in zip(used, groups, strict=True)]
    back = ship(np.argsort(np.argsort(pool, kind="stable"), kind="stable"), index.device)
    x, y = (torch.cat(column).index_select(0, back) for column in zip(*parts, strict=True))
    return x, y


def _put_back(bench: Bench, part: Bench, rows: Tensor) -> None:
    """Write the copies of chosen lanes back into the working tensors."""
    for whole, some in zip(changing(bench), changing(part), strict=True):
        for key, value in some.items():
            whole[key].index_copy_(0, rows, value)
    bench.sums.index_copy_(0, rows, part.sums)
