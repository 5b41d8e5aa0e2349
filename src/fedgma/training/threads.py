"""The loop in threads: each thread trains whole clients with its own copy of the model and one thread of torch.

A client's training is the same sequence of operations as in `loop` on one thread of torch, so the bits are the same,
whatever the number of threads. Threads share torch's random generator and the memory of the process. A model that draws
random numbers other than by `nn.Dropout`, or that remembers something from batch to batch beside its parameters and
buffers, stays with the loop.
"""

import copy
import os
import random
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedgma.data.pools import Pool
from fedgma.machine import available_cores
from fedgma.training import loop
from fedgma.training.dropping import draw_apart
from fedgma.training.lane_batch import Assignment, Trained
from fedgma.training.light_parts import LIGHT
from fedgma.training.pages import LARGEST_KEPT, keep_pages, use_huge_pages
from fedgma.training.pooling import pool_in_vectors
from fedgma.training.stacked import Stacked
from fedgma.training.task import Task, mean_loss
from fedgma.training.tasks import CLASSIFICATION

SMALL = 1_000_000  # parameters; below this, steps are too short to gain from several threads of torch
GAIN = 1.05  # threads that train fewer steps a second than one of them times this are not used for a while
OFTEN = 32  # calls, until they are measured again
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OWN = ("_parameters", "_buffers", "_modules")  # what `state_dict` is made of


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
    generator: torch.Generator


@dataclass
class Threads:
    """A local trainer, called like `loop.train`. It keeps no state of a run, only whether threads are of use."""

    task: Task = CLASSIFICATION
    workers: int = field(default_factory=cores)
    calls: int = 0
    useful: bool = True  # whether several threads train faster than one: not where Python takes most of the time
    draws: bool = False  # whether the model was seen to draw random numbers: it stays with the loop
    copies: dict[int, Copy] = field(default_factory=dict)  # of the model, one for each thread
    copied: nn.Module | None = None  # which model that is

    def __call__(self, assignment: Assignment) -> Trained:
        """Train each lane of the batch."""
        steps, several = assignment.lane_batch.steps, self.workers > 1
        self.calls += 1
        measured = several and self.calls % OFTEN == 2 and len(steps) > 2 * self.workers and steps.min() > 0
        workers = min(self.workers, len(steps)) if self.useful or measured else 1
        with one_thread():
            if self.draws:
                return loop.train(assignment, task=self.task)
            before = random_states()
            keep_pages()
            train = self._measure if measured else self._train
            trained = train(loop.own_tilt(assignment), _room_for(assignment), workers)
            self.draws = not same(before, random_states())
            if not self.draws:
                return trained
            restore(before)
            return loop.train(assignment, task=self.task)

    def _train(self, assignment: Assignment, flat: Tensor, workers: int) -> Trained:
        """All lanes in threads."""
        rows = loop.rows_of(flat, assignment)
        return loop.gather(self._share(assignment, _longest_first(assignment), rows, workers), flat, assignment)

    def _measure(self, assignment: Assignment, flat: Tensor, workers: int) -> Trained:
        """A quarter of the lanes in one thread, then the others in several: are they faster?"""
        steps, order = assignment.lane_batch.steps, _longest_first(assignment)
        rows, few = loop.rows_of(flat, assignment), max(1, len(steps) // 4)
        begun = time.perf_counter()
        first = self._share(assignment, order[:few], rows, 1)
        middle = time.perf_counter()
        others = self._share(assignment, order[few:], rows, workers)
        alone, together = middle - begun, time.perf_counter() - middle
        self.useful = bool(steps[order[few:]].sum() * alone > GAIN * steps[order[:few]].sum() * together)
        return loop.gather([b if a is None else a for a, b in zip(first, others, strict=True)], flat, assignment)

    def _share(self, assignment: Assignment, lanes: Sequence[int], rows: Stacked, workers: int) -> list[Any]:
        """The results of these lanes at their places; threads take lanes from one queue."""
        results: list[Any] = [None] * assignment.lane_batch.size
        waiting = list(reversed(lanes))
        if self.copied is not assignment.model:
            self.copies, self.copied = {}, assignment.model

        def work(thread: int) -> None:
            if thread not in self.copies:
                self.copies[thread] = _copy_of(assignment.model)
            model, generator = self.copies[thread]
            while waiting:
                try:
                    lane = waiting.pop()
                except IndexError:  # another thread took the last one
                    return
                generator.manual_seed(int(assignment.lane_batch.seeds[lane]))
                results[lane] = loop.train_lane(model, assignment, lane, rows, self.task, LIGHT)

        if workers < 2:
            work(0)
            return results
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            try:
                for done in [pool.submit(work, thread) for thread in range(workers)]:
                    done.result()
            except BaseException:  # an error, or Ctrl-C: no further lane begins
                waiting.clear()
                raise
        return results


def _copy_of(model: nn.Module) -> Copy:
    generator = torch.Generator()
    return Copy(draw_apart(pool_in_vectors(copy.deepcopy(model)), generator), generator)


def _room_for(assignment: Assignment) -> Tensor:
    """Memory for the updates of all lanes; it is written only once, so mapping it would take as long as that."""
    flat = loop.room_for(assignment)
    if flat.nbytes > LARGEST_KEPT:
        use_huge_pages(flat.data_ptr(), flat.nbytes)
    return flat


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


def why_not_threads(model: nn.Module, pool: Pool, task: Task = CLASSIFICATION) -> str | None:
    """Why clients of this model cannot be trained in threads, found by a trial on a few samples; None if they can."""
    name = type(model).__name__
    if pool.y.device.type != "cpu":
        return f"threads train on a CPU, but the data are on {pool.y.device.type}"
    if any(getattr(part, hooks) for part in model.modules() for hooks in HOOKS):
        return f"{name} has hooks"
    model = draw_apart(copy.deepcopy(model).train(), torch.Generator())
    before = random_states()
    try:
        _pass(model, pool, task, 0)  # what a model computes once and keeps is there after the first pass
        kept = copy.deepcopy(_remembered(model, task))
        _pass(model, pool, task, 2)
        if not same(kept, _remembered(model, task)):
            return f"{name} remembers something from batch to batch"
        if not same(before, random_states()):
            return f"{name} draws random numbers"
        if any(value.grad is not None and (value.grad.is_sparse or value.is_complex()) for value in model.parameters()):
            return f"{name} has sparse or complex gradients"
    except Exception as error:  # a module may raise anything; the loop shows it where it is of use
        return f"{name} could not be tried ({type(error).__name__})"
    finally:
        restore(before)
    return None


def _pass(model: nn.Module, pool: Pool, task: Task, first: int) -> None:
    index = torch.arange(first, first + 2) % len(pool.y)
    x, y = pool.batch(index, torch.zeros_like(index))
    mean_loss(task, model(x), y).backward()  # type: ignore[no-untyped-call]


def _remembered(model: nn.Module, task: Task) -> list[Any]:
    """What a model and a task hold beside parameters and the buffers of `state_dict`."""
    kept: list[Any] = [vars(owner) for owner in _owners(task.loss, task.metrics)]
    for part in model.modules():
        if type(part) is nn.Dropout:  # it keeps nothing, but a generator, see `draw_apart`
            continue
        kept.append({name: value for name, value in vars(part).items() if name not in OWN})
        kept.append({name: part._buffers[name] for name in part._non_persistent_buffers_set})
    return kept


def _owners(*functions: Callable[..., Any]) -> list[Any]:
    """The objects whose methods these are."""
    owners = [getattr(function, "__self__", None) for function in functions]
    return [owner for owner in owners if hasattr(owner, "__dict__")]


def same(one: Any, two: Any) -> bool:
    """Whether two values are equal, looked at part by part.

    >>> same({"a": [torch.ones(2), np.ones(2)]}, {"a": [torch.ones(2), np.ones(2)]}), same([1], [2])
    (True, False)
    """
    if one is two:
        return True
    if type(one) is not type(two):
        return False
    if isinstance(one, int | float | str):
        return bool(one == two)
    if isinstance(one, Tensor):
        return one.shape == two.shape and torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, two)
    if isinstance(one, weakref.ref):
        return same(one(), two())
    if isinstance(one, Mapping):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, nn.Module):
        return True  # every module of a model is looked at by itself
    return bool(one == two) or (bool(getattr(one, "__dict__", None)) and same(vars(one), vars(two)))


def random_states() -> tuple[Any, ...]:
    """The states of the generators that a module may draw from without being given one."""
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state()  # noqa: NPY002


def restore(states: tuple[Any, ...]) -> None:
    """Put the generators back."""
    torch.default_generator.set_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002
