"""Lanes on a GPU: the step is compiled, captured in a CUDA graph and replayed. A round never waits for the device.

A CUDA graph always works on the same memory. So a `Station` (see `stations`) holds tensors of fixed size and address
for a number of lanes: a `Bench` (the working tensors of the lanes) and the graphs that were captured on
it. A round sends its arrays to them, resets the weights, and replays one graph for each step, or for several equal
steps after the first rounds; a counter on the device selects the row of the batch table. A lane batch with fewer lanes
is padded with idle lanes, so that few shapes are compiled. In the first rounds of a run, which are `early`, nothing is
compiled (see `compile`).
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedgma.data.pools import Pool
from fedgma.training import lanes
from fedgma.training.compile import Table, compiled
from fedgma.training.features import Features, features_of
from fedgma.training.gradients import GradientFunction, mixes_samples
from fedgma.training.hints import without_hints
from fedgma.training.lane_batch import Assignment, Tilt, Trained, keyed_generators, random_states
from fedgma.training.lanes import Work
from fedgma.training.replay import capturing
from fedgma.training.stacked import Stacked, ship
from fedgma.training.stations import FEWEST, Station, Steps, begin, build_station, filled, finish, send
from fedgma.training.workbench import Bench, changing, take_part

log = logging.getLogger(__name__)
SHRINK = 4  # each number of lanes is compiled separately, so there should be few
WARM_UP = 3  # calls before a capture: autotuning, workspaces


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

    def __call__(self, assignment: Assignment, *, early: bool = False) -> Trained:
        """Train all lanes of the batch; see `lanes.train`. A graph reads one pool, so pools are trained one by one.

        With `early` nothing is compiled.
        """
        lane_batch, pools = assignment.lane_batch, assignment.pools
        if len(pools) == 1 or (lane_batch.pool == lane_batch.pool[0]).all():
            return self._train(assignment, pools[lane_batch.pool[0]], early)
        groups = [np.flatnonzero(lane_batch.pool == index) for index in np.unique(lane_batch.pool)]
        device = pools[0].y.device
        parts = []
        for rows in groups:
            parts.append(self._train(assignment.take(rows), pools[lane_batch.pool[rows[0]]], early))
        return joined(parts, ship(np.argsort(np.concatenate(groups)), device))

    def _train(self, assignment: Assignment, pool: Pool, early: bool) -> Trained:
        """Train lanes whose samples are all in one pool."""
        order = np.argsort(-assignment.lane_batch.steps, kind="stable")
        assignment = assignment.take(order)
        model, lane_batch = assignment.model, assignment.lane_batch
        station = self._station(assignment, pool.y.device)
        sent = filled(lane_batch, station)
        exact = not self.padding and mixes_samples(model)
        works = lanes.schedule(sent.counts, exact=exact, batch=lane_batch.batch, shrink=SHRINK, fewest=FEWEST)
        if not all(work.all_busy for work in works):  # one variant for all steps: half as much to compile
            works = [work._replace(all_busy=False) for work in works]
        send(station, sent, order)
        ends = begin(station, assignment, len(order), self.graphs)
        groups = [list(equal) for _, equal in itertools.groupby(works, lambda work: work[1:])]
        alone = all(self._is_replayed(station, equal, pool, early) for equal in groups)
        with nullcontext() if alone else self._around(model, pool.y.device, int(lane_batch.seeds[0])):
            for equal in groups:
                self._play(station, equal, pool, early)
        return finish(station, ends, assignment, order)

    @contextmanager
    def _around(self, model: nn.Module, device: torch.device, seed: int) -> Iterator[None]:
        """What steps may depend on, unless they are replayed and draw nothing."""
        model.train()
        with without_hints(), float32_precision(self.precision), keyed_generators(device, seed):
            yield

    def _is_replayed(self, station: Station, works: Sequence[Work], pool: Pool, early: bool) -> bool:
        """Whether equal steps are captured, as many at a time as will be taken, and draw no random numbers."""
        steps = station.graphs.get(_key(works[0], pool, early)) if isinstance(works[0].lanes, int) else None
        return steps is not None and steps.alone and all(count in steps.graphs for count in steps.portions(len(works)))

    def _play(self, station: Station, works: Sequence[Work], pool: Pool, early: bool) -> None:
        """Take steps that differ in their number alone."""
        work = works[0]
        if not isinstance(work.lanes, int):
            alone = np.zeros(station.lanes, np.int64)
            for work in works:
                lanes.play(station.bench, work, (pool,), alone, station.features, self.gradients)
            station.step.fill_(work.step + 1)
            return
        key = _key(work, pool, early)
        # warming up and capturing must not change the round's random draws
        if key not in station.graphs:
            if not early:
                self._forget_early(station)
            with keyed_generators(station.step.device, 0):
                station.graphs[key] = self._prepare(station, work, pool, early)
        steps = station.graphs[key]
        for count in steps.portions(len(works)):
            if count not in steps.graphs:
                with keyed_generators(station.step.device, 0):
                    steps.graphs[count] = self._repeated(steps, count, station.step.device)
            steps.graphs[count]()
        steps.rounds += 1

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
        part = station.bench if work.lanes == station.lanes else take_part(station.bench, slice(work.lanes))
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
        taken, alone, capturing = call, False, time.perf_counter()
        if self.graphs and station.step.device.type == "cuda":
            before = random_states(station.step.device)
            taken = self._captured(call, restore)
            drawn = not all(map(torch.equal, before, random_states(station.step.device)))
            alone = taken is not call and not drawn
        seconds = time.perf_counter() - begun
        self.start_up += seconds
        how = "without compiling" if early else "with its compiling"
        log.info("prepared a step of %d lanes x %d samples %s in %.1f s", work.lanes, work.batch, how, seconds)
        return Steps(call, {1: taken}, (time.perf_counter() - capturing) / (1 + WARM_UP), alone)

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

        if device.type != "cuda" or steps.graphs[1] is steps.take:
            return repeat
        taken = self._graph(repeat)
        steps.alone = steps.alone and taken is not repeat
        return taken

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
        features, lane_batch = features_of(assignment), assignment.lane_batch
        steps = lane_batch.counts.shape[1]
        for station in self._stations:
            room = station.lanes // 2 < lane_batch.size <= station.lanes and steps <= len(station.bench.counts)
            if room and station.features == features:
                return station
        self._stations = [s for s in self._stations if s.lanes != lane_batch.size or s.features != features]
        if not any(station.graphs for station in self._stations):
            self._memory = None  # it was freed with its last graph
        station = build_station(assignment, features, self.measures, self.order)
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


def _key(work: Work, pool: Pool, early: bool) -> tuple[int, int, int, bool, bool]:
    """What steps are captured for, on a station."""
    assert isinstance(work.lanes, int)
    return id(pool), work.lanes, work.batch, work.all_busy, early


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


def _changing(station: Station) -> list[Tensor]:
    """The tensors that a step changes; they are restored after a step is prepared."""
    bench = station.bench
    return [*(v for part in changing(bench) for v in part.values()), bench.sums, station.step]
