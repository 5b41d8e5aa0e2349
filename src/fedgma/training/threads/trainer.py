"""The loop in threads: each thread trains whole clients with its own copy of the model and one thread of torch.

A client's training is the same sequence of operations as in `loop` on one thread of torch, so the bits are the same,
whatever the number of threads. Models for which that would not hold stay with the loop (see `safety`).
"""

import copy
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedgma.machine import available_cores
from fedgma.training import loop
from fedgma.training.lane_batch import Assignment, Trained
from fedgma.training.task import Task
from fedgma.training.tasks import CLASSIFICATION
from fedgma.training.threads.dropout import draw_apart
from fedgma.training.threads.light_parts import LIGHT
from fedgma.training.threads.pages import LARGEST_KEPT, keep_pages, use_huge_pages
from fedgma.training.threads.pooling import pool_in_vectors
from fedgma.training.threads.safety import GlobalGenerators

SMALL = 1_000_000  # parameters; below this, steps are too short to gain from several threads of torch
GAIN = 1.05  # threads that train fewer steps a second than one of them times this are not used for a while
OFTEN = 32  # calls, until they are measured again


def cores() -> int:
    """How many threads to use: the cores of this process, or fewer where the environment says so.

    OMP_NUM_THREADS limits a process's threads. torchrun starts LOCAL_WORLD_SIZE processes, which share the cores.
    """
    shared = max(1, available_cores() // _number("LOCAL_WORLD_SIZE", 1))
    return min(shared, _number("OMP_NUM_THREADS", shared))


def workers_for(lane_bytes: int) -> int:
    """How many lanes of this size to train at a time: one on each core, in a quarter of the machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return min(cores(), max(1, memory // 4 // lane_bytes)) if memory > 0 and lane_bytes else cores()


def _number(name: str, otherwise: int) -> int:
    """A number above zero in the environment."""
    first = os.environ.get(name, "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else otherwise


class Copy(NamedTuple):
    """The model of one thread, and what its dropout draws from."""

    model: nn.Module
    trainable: dict[str, nn.Parameter]
    generator: torch.Generator


@dataclass
class Threads:
    """A local trainer, called like `loop.train`. It keeps no state of a run, only whether threads are of use."""

    task: Task = CLASSIFICATION
    workers: int = field(default_factory=cores)
    calls: int = 0
    useful: bool = True  # whether several threads train faster than one: not where Python takes most of the time
    doubted: bool = False  # whether the last comparison said otherwise: a second one decides
    draws: bool = False  # whether the model was seen to draw random numbers: it stays with the loop
    copies: dict[int, Copy] = field(default_factory=dict)  # of the model, one for each thread
    copied: nn.Module | None = None  # which model that is
    room: np.ndarray | None = None  # memory for updates
    lent: "weakref.ref[np.ndarray] | None" = None  # the part of it in use: it lives as long as a tensor made of it

    def __call__(self, assignment: Assignment) -> Trained:
        """Train each lane of the batch."""
        steps, several = assignment.lane_batch.steps, self.workers > 1
        self.calls += 1
        due = several and (self.doubted or self.calls % OFTEN == 2)
        measured = due and len(steps) > 2 * self.workers and steps.min() > 0
        workers = min(self.workers, len(steps)) if self.useful or measured else 1
        with one_thread():
            if self.draws:
                return loop.train(assignment, task=self.task)
            before = GlobalGenerators.read()
            keep_pages()
            train = self._measure if measured else self._train
            trained = train(loop.own_tilt(assignment), self._room_for(assignment), workers)
            self.draws = before.have_moved()
            if not self.draws:
                return trained
            before.restore()
            return loop.train(assignment, task=self.task)

    def _train(self, assignment: Assignment, flat: Tensor, workers: int) -> Trained:
        """All lanes in threads."""
        ends = loop.ends_of(assignment, flat)
        return loop.gather(self._share(assignment, _longest_first(assignment), ends, workers), ends, assignment)

    def _room_for(self, assignment: Assignment) -> Tensor:
        """Memory for the updates of all lanes; that of the last call if nobody holds it, for new pages take time."""
        flat = loop.room_for(assignment)
        if flat.nbytes <= LARGEST_KEPT:  # the process keeps it anyway
            return flat
        in_use = self.lent is not None and self.lent() is not None
        if self.room is None or self.room.nbytes < flat.nbytes or in_use:
            self.room = np.empty(flat.nbytes, np.uint8)
            use_huge_pages(self.room.ctypes.data, self.room.nbytes)
        part = self.room[: flat.nbytes]
        self.lent = weakref.ref(part)
        return torch.from_numpy(part).view(flat.dtype).view(flat.shape)

    def _measure(self, assignment: Assignment, flat: Tensor, workers: int) -> Trained:
        """A quarter of the lanes in one thread, then the others in several: are they faster?"""
        steps, order = assignment.lane_batch.steps, _longest_first(assignment)
        ends, few = loop.ends_of(assignment, flat), max(1, len(steps) // 4)
        begun = time.perf_counter()
        first = self._share(assignment, order[:few], ends, 1)
        middle = time.perf_counter()
        others = self._share(assignment, order[few:], ends, workers)
        alone, together = middle - begun, time.perf_counter() - middle
        faster = bool(steps[order[few:]].sum() * alone > GAIN * steps[order[:few]].sum() * together)
        self.doubted = faster != self.useful and not self.doubted  # once may be the noise of a busy machine
        self.useful = self.useful if self.doubted else faster
        return loop.gather([b if a is None else a for a, b in zip(first, others, strict=True)], ends, assignment)

    def _share(self, assignment: Assignment, lanes: Sequence[int], ends: loop.Ends, workers: int) -> list[Any]:
        """The means of these lanes at their places; threads take lanes from one queue."""
        means: list[Any] = [None] * assignment.lane_batch.size
        waiting = list(reversed(lanes))
        if self.copied is not assignment.model:
            self.copies, self.copied = {}, assignment.model

        def work(thread: int) -> None:
            if thread not in self.copies:
                self.copies[thread] = _copy_of(assignment.model)
            model, trainable, generator = self.copies[thread]
            while waiting:
                try:
                    lane = waiting.pop()
                except IndexError:  # another thread took the last one
                    return
                generator.manual_seed(int(assignment.lane_batch.seeds[lane]))
                try:
                    means[lane] = loop.train_lane(model, trainable, assignment, lane, ends, self.task, LIGHT)
                except BaseException:  # an error, or Ctrl-C: no further lane begins
                    waiting.clear()
                    raise

        if workers < 2:
            work(0)
            return means
        with ThreadPoolExecutor(workers - 1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            others = [pool.submit(work, thread) for thread in range(1, workers)]
            work(0)  # this thread trains too
            for other in others:
                other.result()
        return means


def _copy_of(model: nn.Module) -> Copy:
    generator = torch.Generator()
    copied = draw_apart(pool_in_vectors(copy.deepcopy(model).train()), generator)
    return Copy(copied, loop.trainable_of(copied), generator)


def _longest_first(assignment: Assignment) -> list[int]:
    lanes: list[int] = np.argsort(-assignment.lane_batch.steps, kind="stable").tolist()
    return lanes


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, torch computes on one thread: for small models as fast, the same bits on any machine, and no waiting.

    Several threads synchronise at every small sum. On a busy machine each waits for the slowest: minutes instead of
    seconds.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
