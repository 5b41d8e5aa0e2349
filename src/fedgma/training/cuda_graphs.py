"""Lanes on a GPU: the step is compiled, captured in a CUDA graph and replayed. A round never waits for the device.

A CUDA graph always works on the same memory. So a `Station` holds tensors of fixed size and address for a number of
lanes: a `Bench` (the working tensors of the lanes, see `lanes`) and the graphs that were captured on it. A round copies
its arrays into them, resets the weights, and replays one graph for each step, or for several equal steps after the
first rounds; a counter on the device selects the row of the batch table. A lane batch with fewer lanes is padded with
idle lanes, so that few shapes are compiled. In the first rounds of a run, which are `early`, nothing is compiled (see
`compile`).
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedgma.data.pools import Pool
from fedgma.training import lanes
from fedgma.training.compile import Table, compiled
from fedgma.training.gradients import GradientFunction, mixes_samples
from fedgma.training.hints import without_hints
from fedgma.training.lane_batch import LANE_WISE, Assignment, LaneBatch, Tilt, Trained, keyed_generators
from fedgma.training.lanes import Bench, Features, Work
from fedgma.training.replay import capturing
from fedgma.training.stacked import Stacked, ship, ship_many

log = logging.getLogger(__name__)
SHRINK = 4  # each number of lanes is compiled separately, so there should be few
FEWEST = 8  # steps that are worth compiling a further size
WARM_UP = 3  # calls before a capture: autotuning, workspaces
MANY = 64  # steps of the longest graph
SOON = 2  # rounds before graphs of several steps are captured, so that the first ones do not wait for them
SHORT = 0.05  # seconds that capturing a step takes at most for that: beyond, the device is busy with one step


@contextmanager
def float32_precision(precision: str) -> Iterator[None]:
    """Inside, float32 products are exact to float32 ("fp32") or may use TF32 ("tf32", "bf16"); then it is reset."""
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    loose = precision != "fp32"
    torch.set_float32_matmul_precision("high" if loose else "highest")
    torch.backends.cudnn.allow_tf32 = loose
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = cudnn


@dataclass
class Steps:
    """Equal steps of a station: how to take one, and the graphs of so many of them."""

    take: Callable[[], None]
    graphs: dict[int, Callable[[], None]]  # by number of steps, powers of two
    seconds: float  # that capturing one took
    rounds: int = 0  # in which they were taken


@dataclass
class Station:
    """Tensors at fixed addresses for a number of lanes, and the CUDA graphs that were captured on them."""

    bench: Bench
    rows: Tensor  # [lane]: row of the starting weights
    step: Tensor  # [1], the next row of the batch table
    features: Features
    graphs: dict[tuple[int, int, int, bool, bool], Steps] = field(default_factory=dict)
    # by pool, lanes, batch, whether all are busy, and whether it is uncompiled

    @property
    def lanes(self) -> int:
        """How many lanes fit."""
        return len(self.rows)


class Engine:
    """A local trainer for a GPU, called like `lanes.train`. It keeps compiled steps, but no state of a run."""

    def __init__(
        self,
        gradients: GradientFunction,
        *,
        padding: bool = False,
        precision: str = "fp32",
        compile: bool = True,
        graphs: bool = True,
        measures: int = 1,
        rehearse: Callable[[Callable[[], None]], None] | None = None,
        order: Callable[[Stacked], Stacked] | None = None,
        change: Callable[[Table], Table] | None = None,
    ) -> None:
        self.gradients = gradients
        self.padding = padding  # whether the gradients ignore padding in any batch
        self.precision = precision
        self.graphs = graphs
        self.measures = measures  # columns that the gradient function returns beside the loss
        self.rehearse = rehearse  # called with a step before it is first taken; what the step computes is forgotten
        self.order = order  # gives stacked parameters the order in memory that the gradients want
        self.compiles = compile
        self.learn: Callable[..., None] = compiled(_step, change) if compile else _step
        self.start_up = 0.0  # seconds spent on compiling and capturing
        self._stations: list[Station] = []
        self._memory: Any = None  # of the graphs

    @without_hints()
    def __call__(self, assignment: Assignment, *, early: bool = False) -> Trained:
        """Train all lanes of the batch; see `lanes.train`. A graph reads one pool, so pools are trained one by one.

        With `early` nothing is compiled.
        """
        lane_batch, pools = assignment.lane_batch, assignment.pools
        groups = [np.flatnonzero(lane_batch.pool == index) for index in np.unique(lane_batch.pool)]
        if len(groups) == 1:
            return self._train(assignment, pools[lane_batch.pool[0]], early)
        device = pools[0].y.device
        parts = []
        for rows in groups:
            parts.append(self._train(assignment.take(rows), pools[lane_batch.pool[rows[0]]], early))
        return joined(parts, ship(np.argsort(np.concatenate(groups)), device))

    def _train(self, assignment: Assignment, pool: Pool, early: bool) -> Trained:
        """Train lanes whose samples are all in one pool."""
        order = np.argsort(-assignment.lane_batch.steps, kind="stable")
        assignment = assignment.take(order)
        model, lane_batch, start, device = assignment.model, assignment.lane_batch, assignment.start, pool.y.device
        model.train()
        exact = not self.padding and mixes_samples(model)
        with float32_precision(self.precision), keyed_generators(device, int(lane_batch.seeds[0])):
            station = self._station(assignment, device)
            filled = _filled(lane_batch, station)
            works = lanes.schedule(filled.counts, exact=exact, batch=lane_batch.batch, shrink=SHRINK, fewest=FEWEST)
            if not all(work.all_busy for work in works):  # one variant for all steps: half as much to compile
                works = [work._replace(all_busy=False) for work in works]
            _load(station, filled, assignment)
            for _, equal in itertools.groupby(works, lambda work: work[1:]):
                self._play(station, list(equal), pool, early)
            trained = lanes.finish(station.bench, start, station.rows, order)
            # copies, because the next lane batch uses the same tensors
            tilt = None if trained.tilt is None else trained.tilt.mapped(_cloned)
            return trained._replace(buffers=_cloned(trained.buffers), tilt=tilt)

    def _play(self, station: Station, works: Sequence[Work], pool: Pool, early: bool) -> None:
        """Take steps that differ in their number alone."""
        work = works[0]
        if not isinstance(work.lanes, int):
            alone = np.zeros(station.lanes, np.int64)
            for work in works:
                lanes.play(station.bench, work, (pool,), alone, station.features, self.gradients)
            station.step.fill_(work.step + 1)
            return
        key = (id(pool), work.lanes, work.batch, work.all_busy, early)
        # warming up and capturing must not change the round's random draws
        if key not in station.graphs:
            if not early:
                self._forget_early(station)
            with keyed_generators(station.step.device, 0):
                station.graphs[key] = self._prepare(station, work, pool, early)
        steps = station.graphs[key]
        steps.rounds += 1
        most = MANY if steps.rounds > SOON and steps.seconds < SHORT else 1
        for count in portions(len(works), most):
            if count not in steps.graphs:
                with keyed_generators(station.step.device, 0):
                    steps.graphs[count] = self._repeated(steps, count, station.step.device)
            steps.graphs[count]()

    def _forget_early(self, station: Station) -> None:
        """Drop the graphs of the first rounds, which are not used again."""
        if station.step.device.type == "cuda" and station.graphs:
            torch.cuda.synchronize(station.step.device)
        station.graphs = {key: steps for key, steps in station.graphs.items() if not key[-1]}
        if not any(other.graphs for other in self._stations):
            self._memory = None  # it was freed with its last graph

    def _prepare(self, station: Station, work: Work, pool: Pool, early: bool) -> Steps:
        """The step for this number of lanes, compiled unless `early`, and captured; changes none of the tensors."""
        assert isinstance(work.lanes, int)
        part = station.bench if work.lanes == station.lanes else lanes.take_part(station.bench, slice(work.lanes))
        begun, kept = time.perf_counter(), [value.clone() for value in _changing(station)]

        def restore() -> None:
            for value, old in zip(_changing(station), kept, strict=True):
                value.copy_(old)

        def step_with(learn: Callable[..., None]) -> Callable[[], None]:
            return lambda: learn(part, station.step, pool, station.features, self.gradients, work.batch, work.all_busy)

        if self.rehearse is not None:
            self.rehearse(step_with(_step))
            restore()
        call = step_with(_step if early else self.learn)
        try:
            call()
        except Exception as error:  # compilers fail in many ways; the step itself is fine
            if early:
                raise
            log.warning("the step could not be compiled and runs uncompiled: %s", str(error).splitlines()[0])
            log.debug("why it could not", exc_info=True)
            self.learn = _step
            call = step_with(self.learn)
        restore()
        taken, capturing = call, time.perf_counter()
        if self.graphs and station.step.device.type == "cuda":
            taken = self._captured(call, restore)
        seconds = time.perf_counter() - begun
        self.start_up += seconds
        how = "without compiling" if early else "with its compiling"
        log.info("prepared a step of %d lanes x %d samples %s in %.1f s", work.lanes, work.batch, how, seconds)
        return Steps(call, {1: taken}, (time.perf_counter() - capturing) / (1 + WARM_UP))

    def _captured(self, step: Callable[[], None], restore: Callable[[], None]) -> Callable[[], None]:
        """The step, warmed up and captured in a CUDA graph."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step()
                restore()
        torch.cuda.current_stream().wait_stream(stream)
        return self._graph(step)

    def _repeated(self, steps: Steps, count: int, device: torch.device) -> Callable[[], None]:
        """So many equal steps as one call."""

        def repeat() -> None:
            for _ in range(count):
                steps.take()

        captured = device.type == "cuda" and steps.graphs[1] is not steps.take
        return self._graph(repeat) if captured else repeat

    def _graph(self, step: Callable[[], None]) -> Callable[[], None]:
        """What was warmed up, captured; itself if it cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        try:
            # graphs of an engine never run at the same time and keep nothing, so they share their memory
            self._memory = self._memory or torch.cuda.graph_pool_handle()
            with capturing(graph, self._memory):
                step()
        except RuntimeError as error:
            log.warning(
                "the step could not be captured in a CUDA graph and runs without one: %s", str(error).splitlines()[0]
            )
            self._memory = None
            return step
        return graph.replay

    def _station(self, assignment: Assignment, device: torch.device) -> Station:
        """A station that has room for the lane batch and is more than half used by it; a new one if there is none."""
        features, lane_batch = lanes.features_of(assignment), assignment.lane_batch
        steps = lane_batch.counts.shape[1]
        for station in self._stations:
            room = station.lanes // 2 < lane_batch.size <= station.lanes and steps <= len(station.bench.counts)
            if room and station.features == features:
                return station
        self._stations = [s for s in self._stations if s.lanes != lane_batch.size or s.features != features]
        if not any(station.graphs for station in self._stations):
            self._memory = None  # it was freed with its last graph
        rows = ship(lane_batch.run, device)
        bench = lanes.lay_out(
            lane_batch, features, assignment.start, assignment.buffers, rows, self.measures, self.order
        )
        # room for other lane batches: the number of steps is part of the compiled shape
        room = max(FEWEST, 1 << (steps - 1).bit_length()) - steps
        bench.counts = F.pad(bench.counts, (0, 0, 0, room))
        bench.index = F.pad(bench.index, (0, 0, 0, 0, 0, room))
        bench.lr = F.pad(bench.lr, (0, 0, 0, room if features.schedule else 0))
        station = Station(bench, rows, torch.zeros(1, dtype=torch.int64, device=rows.device), features)
        self._stations.append(station)
        return station


def _step(
    bench: Bench,
    step: Tensor,
    pool: Pool,
    features: Features,
    gradients: GradientFunction,
    batch: int,
    all_busy: bool,
) -> None:
    """Train on the next batch, and advance the counter."""
    index = bench.index.index_select(0, step)[0, :, :batch]
    count = bench.counts.index_select(0, step)[0]
    x, y = pool.batch(index, bench.client[:, None])
    lanes.learn(bench, x, y, count, step, features, gradients, all_busy=all_busy)
    step.add_(1)


def portions(steps: int, most: int) -> Iterator[int]:
    """So many steps as powers of two up to `most`, the largest first: few different graphs take any number of steps.

    >>> list(portions(19, 64)), list(portions(3, 1))
    ([16, 2, 1], [1, 1, 1])
    """
    while steps:
        size = min(most, 1 << (steps.bit_length() - 1))
        yield size
        steps -= size


def joined(parts: Sequence[Trained], back: Tensor) -> Trained:
    """The results of lanes that were trained in groups; `back` restores the order of the lanes."""
    buffers = _joined([part.buffers for part in parts], back)
    flat, loss, measures = (
        torch.cat(column)[back] for column in zip(*((p.flat, p.loss, p.measures) for p in parts), strict=True)
    )
    tilts = [part.tilt for part in parts if part.tilt is not None]
    tilt = Tilt(*(_joined(column, back) for column in zip(*tilts, strict=True))) if tilts else None
    return Trained(flat, parts[0].shapes, buffers, loss, measures, tilt)


def _joined(parts: Sequence[Stacked], back: Tensor) -> Stacked:
    return {name: torch.cat([part[name] for part in parts])[back] for name in parts[0]}


def _cloned(stacked: Stacked) -> Stacked:
    return {name: value.clone() for name, value in stacked.items()}


def _changing(station: Station) -> list[Tensor]:
    """The tensors that a step changes; they are restored after a step is prepared."""
    bench = station.bench
    return [*(v for part in lanes.changing(bench) for v in part.values()), bench.loss, bench.measures, station.step]


def _filled(lane_batch: LaneBatch, station: Station) -> LaneBatch:
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


def _load(station: Station, lane_batch: LaneBatch, assignment: Assignment) -> None:
    """Copy a round into the station's tensors, without waiting for the device."""
    bench, steps = station.bench, lane_batch.counts.shape[1]
    orders, order, *sent = ship_many(
        [
            *(lane_batch.orders.transpose(1, 0, 2), lane_batch.order, lane_batch.run, lane_batch.client),
            *(lane_batch.counts.T, lanes.step_rates_of(lane_batch, station.features), lane_batch.rates.T),
        ],
        station.rows.device,
    )
    bench.index[:steps].copy_(orders.index_select(1, order))  # each order is sent once
    bench.counts[steps:].zero_()
    places = [station.rows, bench.client, bench.counts[:steps], bench.lr[: len(sent[3])], bench.rates]
    torch._foreach_copy_(places, sent)
    for source, targets in ((assignment.start, (bench.params, bench.anchor)), (assignment.buffers, (bench.buffers,))):
        for target in targets:
            _copy_rows(source, station.rows, target)
    given = [
        (bench.correction, assignment.correction or {}),
        *zip(bench.tilt or (), assignment.tilt or (), strict=True),
    ]
    for target, lane_wise in given:
        for name, value in lane_wise.items():
            target[name][: len(value)].copy_(value)
    torch._foreach_zero_([*bench.momentum.values(), *bench.squares.values(), bench.loss, bench.measures])
    station.step.zero_()


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
