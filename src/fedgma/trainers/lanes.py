"""The engine: many clients, of one run or of many, trained at once with the lane axis in front of everything.

Lanes are sorted by their number of steps. A lane that has finished keeps its weights, momentum and buffers to the bit;
when half of the lanes at work have finished, the work shrinks to the rest. Everything a step needs is on the device
before the first one, and nothing is read back, so the steps can be compiled and captured in a CUDA graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedgma.trainers.cohorts import Cohort, Pool, Stacked, Trained, keyed_generators, ship
from fedgma.trainers.gradients import GradientFunction, lane_gradients, mixes_samples


class Work(NamedTuple):
    """One step of some lanes: which, with how many samples, and whether all of them really take it."""

    step: int
    lanes: tuple[int, ...] | int  # the first so many, or these
    batch: int
    all_busy: bool


@dataclass(frozen=True)
class Features:
    """What the lanes of a cohort need; what none of them needs is left out of the step."""

    momentum: bool
    prox: bool
    clip: bool


@dataclass
class Bench:
    """The tensors that the steps of a round work on, all on the device, lane axis first, changed in place."""

    params: Stacked
    momentum: Stacked
    buffers: Stacked
    anchor: Stacked
    correction: Stacked
    index: Tensor  # [step, lane, batch]
    counts: Tensor  # [step, lane]
    client: Tensor  # [lane]
    pool: np.ndarray  # [lane], on the host: which pool
    rates: Tensor  # [4, lane]: lr, momentum, mu, clip
    loss: Tensor  # [lane]
    hits: Tensor  # [lane]


def train(
    model: nn.Module,
    cohort: Cohort,
    pools: Sequence[Pool],
    start: Stacked,
    buffers: Stacked,
    correction: Stacked | None = None,
    *,
    gradients: GradientFunction | None = None,
) -> Trained:
    """Train all lanes of the cohort together, each from its run's row of `start` and `buffers`.

    `correction` [lane, ...] is added to every gradient: SCAFFOLD's c - c_i. The result is that of `loop.train` up to
    the rounding of float32.
    """
    order = np.argsort(-cohort.steps, kind="stable")
    cohort = cohort.take(order)
    bench = lay_out(cohort, start, buffers, _rows(correction, order), device=pools[0].y.device)
    features = features_of(cohort)
    model.train()
    with keyed_generators(pools[0].y.device, int(cohort.seeds[0])):
        for work in schedule(cohort.counts, exact=mixes_samples(model), batch=cohort.index.shape[2]):
            play(bench, work, pools, features, gradients or lane_gradients(model))
    return finish(bench, cohort, order)


def schedule(counts: np.ndarray, *, exact: bool, batch: int) -> list[Work]:
    """The steps to play, for lanes sorted by falling number of steps; `exact` keeps padding out of every batch.

    >>> [(w.lanes, w.all_busy) for w in schedule(np.array([[2, 2, 1], [2, 0, 0], [2, 0, 0]]), exact=False, batch=2)]
    [(3, True), (1, True), (1, True)]
    """
    works, size = [], len(counts)
    for step in range(counts.shape[1]):
        busy = int((counts[:, step] > 0).sum())
        if exact:
            works += _equal_batches(counts[:busy, step], step)
            continue
        size = busy if 2 * busy <= size else size
        works.append(Work(step, size, batch, busy == size))
    return works


def _equal_batches(counts: np.ndarray, step: int) -> list[Work]:
    """One piece of work for each batch size that occurs."""
    sizes = np.unique(counts)
    if len(sizes) == 1:
        return [Work(step, len(counts), int(sizes[0]), True)]
    return [Work(step, tuple(np.flatnonzero(counts == size).tolist()), int(size), True) for size in sizes]


def features_of(cohort: Cohort) -> Features:
    """What this cohort's hyper-parameters call for."""
    return Features(bool(cohort.momentum.any()), bool(cohort.mu.any()), bool(np.isfinite(cohort.clip).any()))


def lay_out(cohort: Cohort, start: Stacked, buffers: Stacked, correction: Stacked, *, device: torch.device) -> Bench:
    """Everything on the device, one copy for each array of the host."""
    rows = ship(cohort.run, device)
    params = {name: value.index_select(0, rows) for name, value in start.items()}
    rates = np.stack([cohort.lr, cohort.momentum, cohort.mu, cohort.clip]).astype(np.float32)
    return Bench(
        params=params,
        momentum={name: torch.zeros_like(value) for name, value in params.items()} if cohort.momentum.any() else {},
        buffers={name: value.index_select(0, rows) for name, value in buffers.items()},
        anchor={name: value.clone() for name, value in params.items()},
        correction=correction,
        index=ship(cohort.index.transpose(1, 0, 2), device),
        counts=ship(cohort.counts.T, device),
        client=ship(cohort.client, device),
        pool=cohort.pool,
        rates=ship(rates, device),
        loss=torch.zeros(cohort.lanes, device=device),
        hits=torch.zeros(cohort.lanes, device=device),
    )


def play(bench: Bench, work: Work, pools: Sequence[Pool], features: Features, gradients: GradientFunction) -> None:
    """One step of some lanes, in place."""
    part = bench if work.lanes == len(bench.client) else _part(bench, work.lanes)
    x, y = _batch(part, work, pools)
    count = part.counts[work.step]
    grads, buffers, loss, hits = gradients(part.params, part.buffers, x, y, count)
    busy = None if work.all_busy else count > 0
    descend(part, grads, features, busy)
    for name, value in buffers.items():
        part.buffers[name].copy_(value if busy is None else torch.where(_wide(busy, value), value, part.buffers[name]))
    part.loss.add_(loss)
    part.hits.add_(hits)
    if not isinstance(work.lanes, int):
        _put_back(bench, part, work.lanes)


def descend(bench: Bench, grads: Stacked, features: Features, busy: Tensor | None) -> None:
    """SGD with momentum on every lane, as torch.optim.SGD does it; lanes that are not busy stay as they are."""
    lr, rho, mu, clip = bench.rates
    if features.prox:
        grads = {n: g + _wide(mu, g) * (bench.params[n] - bench.anchor[n]) for n, g in grads.items()}
    if features.clip:
        norm = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()
        scale = (clip / (norm + 1e-6)).clamp(max=1.0)
        grads = {n: g * _wide(scale, g) for n, g in grads.items()}
    for name, gradient in grads.items():
        step = gradient + bench.correction[name] if bench.correction else gradient
        if features.momentum:
            velocity = bench.momentum[name]
            step = torch.addcmul(step, velocity, _wide(rho, step))
            velocity.copy_(step if busy is None else torch.where(_wide(busy, step), step, velocity))
        move = _wide(lr, step) * step
        bench.params[name].sub_(move if busy is None else torch.where(_wide(busy, move), move, 0.0))


def finish(bench: Bench, cohort: Cohort, order: np.ndarray) -> Trained:
    """Updates, buffers, loss and accuracy in the order that the lanes came in."""
    seen = bench.counts.sum(0).clamp(min=1)
    updates = {name: value - bench.anchor[name] for name, value in bench.params.items()}
    result = Trained(updates, bench.buffers, bench.loss / seen, bench.hits / seen)
    if np.array_equal(order, np.arange(len(order))):
        return result
    back = ship(np.argsort(order), seen.device)
    updates, buffers = ({n: v.index_select(0, back) for n, v in part.items()} for part in result[:2])
    return Trained(updates, buffers, result.loss[back], result.accuracy[back])


def _batch(bench: Bench, work: Work, pools: Sequence[Pool]) -> tuple[Tensor, Tensor]:
    """The step's samples [lane, batch, ...]; lanes of several pools are gathered pool by pool."""
    index, client = bench.index[work.step, :, : work.batch], bench.client[:, None]
    used = np.unique(bench.pool)
    if len(used) == 1:
        x, y = pools[used[0]].batch(index, client)
        return x, y
    order = np.argsort(bench.pool, kind="stable")
    groups = [np.flatnonzero(bench.pool == one) for one in used]
    parts = [pools[one].batch(index[rows], client[rows]) for one, rows in zip(used, groups, strict=True)]
    back = ship(np.argsort(order), index.device)
    x, y = (torch.cat(column).index_select(0, back) for column in zip(*parts, strict=True))
    return x, y


def _part(bench: Bench, lanes: tuple[int, ...] | int) -> Bench:
    """Some lanes of the bench: the first so many as views, or copies of chosen ones."""
    if isinstance(lanes, int):
        rows: slice | Tensor = slice(lanes)
        pool = bench.pool[:lanes]
    else:
        rows = torch.tensor(lanes, device=bench.client.device)
        pool = bench.pool[list(lanes)]
    return Bench(
        params=_rows(bench.params, rows),
        momentum=_rows(bench.momentum, rows),
        buffers=_rows(bench.buffers, rows),
        anchor=_rows(bench.anchor, rows),
        correction=_rows(bench.correction, rows),
        index=bench.index[:, rows],
        counts=bench.counts[:, rows],
        client=bench.client[rows],
        pool=pool,
        rates=bench.rates[:, rows],
        loss=bench.loss[rows],
        hits=bench.hits[rows],
    )


def _put_back(bench: Bench, part: Bench, lanes: tuple[int, ...]) -> None:
    """Write the copies of chosen lanes back to their places."""
    rows = torch.tensor(lanes, device=bench.client.device)
    for name in ("params", "momentum", "buffers"):
        for key, value in getattr(part, name).items():
            getattr(bench, name)[key].index_copy_(0, rows, value)
    bench.loss.index_copy_(0, rows, part.loss)
    bench.hits.index_copy_(0, rows, part.hits)


def _rows(stacked: Stacked | None, rows: np.ndarray | slice | Tensor) -> Stacked:
    if isinstance(rows, np.ndarray):
        rows = torch.from_numpy(rows)
    return {name: value[rows] for name, value in (stacked or {}).items()}


def _wide(per_lane: Tensor, like: Tensor) -> Tensor:
    """[lane] as [lane, 1, 1, ...] to multiply with."""
    return per_lane.view(-1, *(1,) * (like.dim() - 1))
