"""Where an engine trains lanes: tensors of fixed size and address, what is sent to them, and a round's ends.

A round sends its arrays in one transfer, resets the weights, and at its end subtracts where they began. On small models
these are a few dozen launches of a microsecond each, so they are captured in CUDA graphs as the steps are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgma.training import lanes
from fedgma.training.features import Features
from fedgma.training.lane_batch import LANE_WISE, RATES, Assignment, LaneBatch, Trained
from fedgma.training.replay import LARGEST, Fixed
from fedgma.training.stacked import Parcel, Shapes, Stacked, copies, copy_all, shapes_of, ship
from fedgma.training.workbench import Bench, Rows, lay_out, step_rates_of, take_rows

FEWEST = 8  # steps that are worth compiling a further size
MANY = 64  # steps of the longest graph
SOON = 2  # rounds before graphs of several steps are captured, so that the first ones do not wait for them
SHORT = 0.05  # seconds that capturing a step takes at most for that: beyond, the device is busy with one step


@dataclass
class Steps:
    """Equal steps of a station: how to take one, and the graphs of so many of them."""

    take: Callable[[], None]
    graphs: dict[int, Callable[[], None]]  # by number of steps, powers of two
    seconds: float  # that capturing one took
    alone: bool  # captured, and draws no random numbers: nothing around a replay matters
    rounds: int = 0  # in which they were taken

    def portions(self, steps: int) -> list[int]:
        """How many steps the graphs hold that take so many together."""
        return list(portions(steps, MANY if self.rounds >= SOON and self.seconds < SHORT else 1))


@dataclass
class Ends:
    """The first and the last part of a round, for a number of starting weights and of lanes."""

    given: list[Tensor]  # parameters and buffers to start from, at fixed addresses
    begin: Fixed
    finish: Fixed


@dataclass
class Station:
    """Tensors at fixed addresses for a number of lanes, and the CUDA graphs that were captured on them."""

    bench: Bench
    parcel: Parcel  # has the next two, and clients, batches, counts and rates of the bench
    rows: Tensor  # [lane]: row of the starting weights
    back: Tensor  # [lane]: where the results of each lane of the batch are
    step: Tensor  # [1], the next row of the batch table
    features: Features
    shapes: Shapes  # of the parameters
    small: bool  # launches take longer than what they do to the weights
    graphs: dict[tuple[int, int, int, bool, bool], Steps] = field(default_factory=dict)
    # by pool, lanes, batch, whether all are busy, and whether it is uncompiled
    ends: dict[tuple[int, int], Ends] = field(default_factory=dict)  # by starting weights and lanes

    @property
    def lanes(self) -> int:
        """How many lanes fit."""
        return len(self.rows)


def build_station(assignment: Assignment, features: Features, measures: int, order: Any) -> Station:
    """A station for this lane batch, with room for others: the number of steps is part of the compiled shape."""
    lane_batch, device = assignment.lane_batch, assignment.pools[0].y.device
    rows = ship(lane_batch.run, device)
    bench = lay_out(lane_batch, features, assignment.start, assignment.buffers, rows, measures, order)
    size, steps = lane_batch.size, lane_batch.counts.shape[1]
    room = max(FEWEST, 1 << (steps - 1).bit_length())
    places: list[tuple[tuple[int, ...], str]] = [*[((size,), "int64")] * 3, ((room, size), "int64")]
    places += [((room if features.schedule else 1, size), "float32"), ((len(RATES), size), "float32")]
    parcel = Parcel([*places, ((room, size, lane_batch.batch), "int64")], device)
    rows, back, bench.client, bench.counts, bench.lr, bench.rates, bench.index = parcel.tensors
    step = torch.zeros(1, dtype=torch.int64, device=device)  # changes, so the compiler must not see it share memory
    entries = sum(value.numel() for value in bench.params.values())
    return Station(bench, parcel, rows, back, step, features, shapes_of(bench.params), small=entries <= LARGEST)


def send(station: Station, lane_batch: LaneBatch, order: np.ndarray) -> None:
    """Send a round's arrays to the station; `order` is how its lanes were sorted, without those that are idle."""
    bench, idle = station.bench, station.lanes - len(order)
    counts, lr = np.zeros(bench.counts.shape, np.int64), np.zeros(bench.lr.shape, np.float32)
    counts[: lane_batch.counts.shape[1]] = lane_batch.counts.T
    rates = step_rates_of(lane_batch, station.features)
    lr[: len(rates)] = rates
    back = np.concatenate([np.argsort(order), np.zeros(idle, np.int64)])
    own = len(lane_batch.orders) == len(lane_batch.order) and np.array_equal(
        lane_batch.order, np.arange(len(lane_batch.order))
    )
    orders = lane_batch.orders if own else lane_batch.orders[lane_batch.order]
    each = (lane_batch.run, back, lane_batch.client, counts, lr, lane_batch.rates.T, orders.transpose(1, 0, 2))
    station.parcel.send(each)


def filled(lane_batch: LaneBatch, station: Station) -> LaneBatch:
    """The lane batch, padded with idle lanes (all steps empty) to the size of the station."""
    idle = station.lanes - lane_batch.size
    if not idle:
        return lane_batch
    counts = np.pad(lane_batch.counts, ((0, idle), (0, 0)))
    padded: dict[str, Any] = {name: _extended(getattr(lane_batch, name), idle) for name in LANE_WISE}
    return replace(lane_batch, counts=counts, lr=_extended(lane_batch.lr, idle), **padded)


def _extended(array: np.ndarray, idle: int) -> np.ndarray:
    """The array with its last row repeated."""
    return np.concatenate([array, np.repeat(array[-1:], idle, 0)])


def portions(steps: int, most: int) -> Iterator[int]:
    """So many steps as powers of two up to `most`, the largest first: few different graphs take any number of steps.

    >>> list(portions(19, 64)), list(portions(3, 1))
    ([16, 2, 1], [1, 1, 1])
    """
    while steps:
        size = min(most, 1 << (steps.bit_length() - 1))
        yield size
        steps -= size


def begin(station: Station, assignment: Assignment, size: int, captured: bool) -> Ends | None:
    """Reset the weights of a round of `size` lanes; returns the ends of the round where they are captured."""
    bench, start, buffers = station.bench, assignment.start, assignment.buffers
    ends = None
    if captured and station.small:
        ends = _ends(station, start, buffers, size)
        copy_all(ends.given, [*start.values(), *buffers.values()])
        ends.begin()
    else:
        _reset(bench, station.rows, station.step, start, buffers)
    given = [
        (bench.correction, assignment.correction or {}),
        *zip(bench.tilt or (), assignment.tilt or (), strict=True),
    ]
    for target, lane_wise in given:
        for name, value in lane_wise.items():
            target[name][: len(value)].copy_(value)
    return ends


def finish(station: Station, ends: Ends | None, assignment: Assignment, order: np.ndarray) -> Trained:
    """The results of a round in memory of their own, because the next one uses the same tensors."""
    bench, size = station.bench, len(order)
    back: Rows = slice(size) if lanes.is_sorted(order) else station.back[:size]
    if ends is None:
        flat, loss, measures = lanes.results(bench, assignment.start, station.rows, back)
    else:
        flat, loss, measures = copies(ends.finish())
    buffers = _own_rows(bench.buffers, back)
    tilt = None if bench.tilt is None else bench.tilt.mapped(lambda part: _own_rows(part, back))
    return Trained(flat, station.shapes, buffers, loss, measures, tilt)


def _own_rows(stacked: Stacked, rows: Rows) -> Stacked:
    return {name: value.clone() for name, value in take_rows(stacked, rows).items()}


def _ends(station: Station, start: Stacked, buffers: Stacked, size: int) -> Ends:
    key = len(next(iter(start.values()))), size
    if key not in station.ends:
        held = [
            {n: torch.empty(v.shape, dtype=v.dtype, device=v.device) for n, v in p.items()} for p in (start, buffers)
        ]
        bench, rows, device = station.bench, station.rows, station.rows.device
        station.ends[key] = Ends(
            [*held[0].values(), *held[1].values()],
            Fixed(partial(_reset, bench, rows, station.step, *held), device),
            Fixed(partial(lanes.results, bench, held[0], rows, station.back[:size]), device),
        )
    return station.ends[key]


def _reset(bench: Bench, rows: Tensor, step: Tensor, start: Stacked, buffers: Stacked) -> list[Tensor]:
    """Every lane's own copy of what it starts from, and zeros."""
    for source, targets in ((start, (bench.params, bench.anchor)), (buffers, (bench.buffers,))):
        for target in targets:
            _copy_rows(source, rows, target)
    torch._foreach_zero_([*bench.momentum.values(), *bench.squares.values(), bench.sums])
    step.zero_()
    return []


def _copy_rows(source: Stacked, rows: Tensor, target: Stacked) -> None:
    """Copy the row of every lane into the lanes' own tensors."""
    if target and all(len(source[name]) == 1 for name in target):  # one run: every lane has the same
        torch._foreach_copy_(list(target.values()), [source[name].expand_as(value) for name, value in target.items()])
        return
    for name, value in target.items():
        if value.is_contiguous():
            torch.index_select(source[name], 0, rows, out=value)
        else:
            value.copy_(source[name].index_select(0, rows))
