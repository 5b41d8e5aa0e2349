"""The tally of many runs at once: weighted sums in float64 and integer sign votes, run axis first, then the mean.

The same kernels as in a single tally compute the sums, so a run in a fleet has the same bits as with `fedgma.Tally`. A
client whose update is not finite is left out of mean and count. Clients are added in order, so the size of chunks does
not change a bit.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgma.aggregation import kernels
from fedgma.arrays import to_native
from fedgma.training.stacked import Stacked, flatten, ship, ship_many


@dataclass
class Sums:
    """Sums over the clients counted so far, for each run; changed in place."""

    total: Tensor  # float64 [run, entry]: weighted sum of updates
    rest: Tensor  # float32 [run, entry]: what `total` rounded away
    votes: Tensor  # int32 [run, entry]
    weight: Tensor  # float64 [run]
    clients: Tensor  # int64 [run]
    buffers: Stacked  # float64 sums or integer maxima [run, ...]
    metrics: Tensor  # float64 [run, 1 + column]: weighted loss and measures of the task
    further: Stacked = field(default_factory=dict)  # [run, entry]: sums that some run's rule asks for, by their names

    @property
    def entries(self) -> kernels.plain.Sums:
        """The sums of the parameters, as a single tally has them."""
        return kernels.plain.Sums(self.total, self.rest, self.votes, **self.further)


class Broken(NamedTuple):
    """Which runs' rules gave values that are not finite, and the names of all rules."""

    runs: Tensor  # bool [run]
    names: tuple[str, ...]


class Merged(NamedTuple):
    """Mean and mask of every run, and the buffers' new values."""

    mean: Tensor  # float32 [run, entry]
    mask: Tensor | None  # float32 [run, entry]; None is all ones
    buffers: Stacked
    alive: Tensor  # bool [run]: at least one client was counted
    length: Tensor | None = None  # [run, entry]: mask of the step whose length a run takes; None: no run does
    scaled: Tensor | None = None  # the runs whose step takes that length
    state: Stacked = {}  # noqa: RUF012  [run, entry] by name: what rules hand to the next round
    broken: Broken | None = None  # None: no rule could be


class Owners(NamedTuple):
    """The weights and runs of lanes, on the device."""

    weight: Tensor  # float64 [lane]
    edges: Tensor  # int64 [run + 1]: the first lane of each run, and the end
    owner: Tensor  # bool [run, lane]: which lanes are whose


def owners_of(run: np.ndarray, weights: np.ndarray, runs: int, device: torch.device) -> Owners:
    """The runs [lane], rising, and weights of lanes, sent to the device."""
    return Owners(ship(weights.astype(np.float64), device), *_shares(run.tobytes(), runs, device))


@lru_cache(maxsize=16)
def _shares(run: bytes, runs: int, device: torch.device) -> list[Tensor]:
    """The lanes of each run, on the device; most rounds of a fleet have the same."""
    owner = np.frombuffer(run, np.int64)
    edges = np.searchsorted(owner, np.arange(runs + 1))
    return ship_many([edges, owner == np.arange(runs)[:, None]], device)


def empty(params: Tensor, buffers: Stacked, measures: int = 1, further: Collection[str] = ()) -> Sums:
    """Sums before the first client, laid out as parameters [run, entry] and buffers [run, ...]."""
    device, (runs, entries) = params.device, params.shape
    types = {"positives": torch.int32, "positive_rest": torch.float32, "squares_rest": torch.float32}
    names = [name for group in further for name in kernels.plain.FURTHER[group]]
    sums = {name: _empty_buffer(value) for name, value in buffers.items()}
    return Sums(
        total=torch.zeros((runs, entries), dtype=torch.float64, device=device),
        rest=torch.zeros((runs, entries), device=device),
        votes=torch.zeros((runs, entries), dtype=torch.int32, device=device),
        weight=torch.zeros(runs, dtype=torch.float64, device=device),
        clients=torch.zeros(runs, dtype=torch.int64, device=device),
        buffers=sums,
        metrics=torch.zeros((runs, 1 + measures), dtype=torch.float64, device=device),
        further={n: torch.zeros((runs, entries), dtype=types.get(n, torch.float64), device=device) for n in names},
    )


def _empty_buffer(value: Tensor) -> Tensor:
    if value.is_floating_point():
        return torch.zeros_like(value, dtype=torch.float64)
    return torch.full_like(value, torch.iinfo(value.dtype).min if value.dtype != torch.bool else 0)


def add(
    sums: Sums,
    run: np.ndarray,
    weights: np.ndarray,
    updates: Tensor,
    buffers: Stacked,
    metrics: Tensor,
    refused: Tensor | None = None,
    owners: Owners | None = None,
) -> Tensor:
    """Add lanes to the sums; `run` [lane], rising, is the run of each. Returns which lanes were counted.

    `refused` [lane] are lanes that are not to be counted, beside those that are not finite. `owners` are run and
    weights, where these have been sent to the device before.
    """
    owners = owners or owners_of(run, weights, len(sums.weight), updates.device)
    joined = _joined(buffers)
    fine = torch.ones(len(updates), dtype=torch.bool, device=updates.device) if refused is None else ~refused
    for kind in joined:
        fine = fine & (torch.isfinite(kind.values).all(1) if kind.values.is_floating_point() else True)
    gpu = kernels.gpu_kernels_for(updates)
    first = gpu is None and updates.device.type == "cpu" and not bool(sums.clients.any())
    added = first and _add_first(sums, run, fine, weights, updates)  # a pass less
    if not added:
        fine = fine & _are_finite(updates)
    weight = owners.weight * fine
    if gpu is not None:
        gpu.add_runs(sums.entries, updates, weight, fine.to(torch.uint8), owners.edges)
    elif not added:
        _add_lanes(sums, run, fine, weights, updates)
    for names, values in joined:
        _add_buffers([sums.buffers[name] for name in names], values, slots(run, updates.device), fine, weight)
    _add_numbers(sums, owners.owner, fine, weight, metrics)
    return fine


def rehearse(params: Stacked) -> None:
    """What a round does with updates, so that its kernels are compiled; `params` are those of one lane."""
    updates = flatten(params)
    add(empty(updates, {}), np.zeros(1, np.int64), np.ones(1), updates, {}, updates[:, :2])


def _are_finite(updates: Tensor) -> Tensor:
    """Which rows hold neither a NaN nor an infinity, without a copy of them."""
    if updates.device.type == "cpu":
        large = updates.shape[1] >= kernels.LARGE
        if large and kernels.first_nonfinite([to_native(updates.reshape(-1))]) is None:  # all threads, one pass
            return torch.ones(len(updates), dtype=torch.bool)
        return updates.amax(1).isfinite() & updates.amin(1).isfinite()  # a NaN is the largest of all
    largest: Tensor = torch.linalg.vector_norm(updates, math.inf, dim=1)
    return largest.isfinite()


def _add_first(sums: Sums, run: np.ndarray, fine: Tensor, weights: np.ndarray, updates: Tensor) -> bool:
    """Add lanes to sums that are still empty; False, and the sums are empty again, if a sum is not finite."""
    if _add_lanes(sums, run, fine, weights, updates):
        return True
    for part in sums.entries:
        if part is not None:
            part.zero_()
    return False


def _add_lanes(sums: Sums, run: np.ndarray, fine: Tensor, weights: np.ndarray, updates: Tensor) -> bool:
    """Add the lanes of one run after those of the other, with the kernel of a single tally: are all sums finite?"""
    parts, rows, finite = _native(sums), to_native(updates), True
    counted, weights = fine.cpu().numpy(), weights.astype(np.float64)
    for owner in np.unique(run):
        first, last = np.searchsorted(run, [owner, owner + 1])
        all_counted = bool(counted[first:last].all())
        lanes = slice(first, last) if all_counted else first + np.flatnonzero(counted[first:last])
        finite &= kernels.add_rows(kernels.plain.select(parts, owner), rows[lanes], weights[lanes])
    return finite


def _native(sums: Sums) -> kernels.plain.Sums:
    """The sums of the parameters as arrays of numpy, where they are on a CPU."""
    return kernels.plain.Sums(*(None if part is None else to_native(part) for part in sums.entries))


def _add_numbers(sums: Sums, owner: Tensor, fine: Tensor, weight: Tensor, metrics: Tensor) -> None:
    """Add weights, counts, loss and measures: one matrix product over the lanes of each run."""
    weighted = torch.where(fine[:, None], metrics.double(), 0.0) * weight[:, None]
    columns = torch.cat([weight[:, None], fine.double()[:, None], weighted], 1)
    totals = owner.double() @ columns
    sums.weight += totals[:, 0]
    sums.clients += totals[:, 1].round().to(torch.int64)
    sums.metrics += totals[:, 2:]


class Joined(NamedTuple):
    """Buffers of one kind side by side: their names, and their values [lane, entry]."""

    names: list[str]
    values: Tensor


def _joined(buffers: Stacked) -> list[Joined]:
    """Buffers by kind, floats as float64: what is added together takes few launches."""
    kinds: dict[torch.dtype, list[str]] = {}
    for name, value in buffers.items():
        kinds.setdefault(torch.float64 if value.is_floating_point() else value.dtype, []).append(name)
    return [
        Joined(names, torch.cat([_flat(buffers[name]).to(kind) for name in names], 1)) for kind, names in kinds.items()
    ]


def _add_buffers(
    totals: Sequence[Tensor],
    values: Tensor,
    slots: Sequence[tuple[slice | Tensor, slice | Tensor]],
    fine: Tensor,
    weight: Tensor,
) -> None:
    """Add the lanes' values [lane, entry] to the totals of their runs, in place, each run's lanes in their order."""
    total = torch.cat([_flat(part) for part in totals], 1)
    sure = fine[:, None]
    terms = torch.where(sure, values * weight[:, None], 0.0) if values.is_floating_point() else values
    for rows, lanes in slots:
        if values.is_floating_point():
            _add_rows(total, rows, terms[lanes])
        else:
            before = total[rows]
            total[rows] = torch.where(sure[lanes], torch.maximum(before, terms[lanes]), before)
    sizes = [_flat(part).shape[1] for part in totals]
    for part, summed in zip(totals, torch.split(total, sizes, 1), strict=True):
        part.copy_(summed.view(part.shape))


def _flat(value: Tensor) -> Tensor:
    """[row, ...] as [row, entry]."""
    return value.reshape(len(value), math.prod(value.shape[1:]))


def slots(run: np.ndarray, device: torch.device | str = "cpu") -> list[tuple[slice | Tensor, slice | Tensor]]:
    """Lanes grouped so that a group has at most one lane of each run, each run's lanes in their order: (runs, lanes).

    >>> [(runs.tolist(), lanes.tolist()) for runs, lanes in slots(np.array([0, 0, 2]))]
    [([0, 2], [0, 2]), ([0], [1])]
    """
    if not len(run):
        return []
    firsts = np.flatnonzero(np.diff(run, prepend=run[0] - 1))
    sizes = np.diff(np.append(firsts, len(run)))
    regular = len(run) > 1 and (sizes == sizes[0]).all()
    if regular and np.array_equal(run[firsts], np.arange(run[0], run[0] + len(firsts))):
        rows = slice(int(run[0]), int(run[0]) + len(firsts))
        return [(rows, slice(slot, None, int(sizes[0]))) for slot in range(int(sizes[0]))]
    rank = np.arange(len(run)) - np.repeat(firsts, sizes)
    groups = [np.flatnonzero(rank == slot) for slot in range(int(rank.max()) + 1)]
    return [(ship(run[group], device), ship(group, device)) for group in groups]


def _add_rows(total: Tensor, rows: slice | Tensor, values: Tensor) -> None:
    if isinstance(rows, slice):
        total[rows].add_(values)  # a view
    else:
        total.index_add_(0, rows, values)  # rows are distinct: deterministic on every device


def merge(sums: Sums, like: Stacked) -> Merged:
    """The mean of every run and its buffers, without masks: those are made by the rules."""
    alive = sums.clients > 0
    weight = torch.where(alive, sums.weight, 1.0)
    mean = _means(sums, weight)
    buffers = {name: _merged_buffer(total, like[name], weight, alive) for name, total in sums.buffers.items()}
    return Merged(mean, None, buffers, alive)


def _means(sums: Sums, weight: Tensor) -> Tensor:
    """The weighted mean of every run; on a CPU by the kernel of a single tally, in one pass."""
    if weight.device.type != "cpu" or not len(weight):
        return ((sums.total + sums.rest) / weight[:, None]).float()
    parts = _native(sums)
    rows = [
        kernels.mean(kernels.plain.select(parts, run), of_run, "float32") for run, of_run in enumerate(weight.tolist())
    ]
    return one_stack(rows)


def one_stack(rows: Sequence[np.ndarray]) -> Tensor:
    """Arrays of numpy as the rows of one tensor; a single one is not copied."""
    return torch.from_numpy(rows[0][None] if len(rows) == 1 else np.stack(rows))


def _merged_buffer(total: Tensor, old: Tensor, weight: Tensor, alive: Tensor) -> Tensor:
    wide = (-1, *(1,) * (old.dim() - 1))
    new = (total / weight.view(wide)).to(old.dtype) if old.is_floating_point() else total
    return torch.where(alive.view(wide), new, old)
