"""Whether clients of a model can train in threads: its copies must share nothing that training changes.

A model that draws random numbers other than by `nn.Dropout`, or that remembers something from batch to batch beside its
parameters and buffers, would give other results in threads than in the loop. A trial finds it. A model that draws only
later is found by the generators of the process, which have then moved.
"""

import copy
import weakref
from collections.abc import Callable, Mapping
from random import getstate, setstate  # nothing is drawn here
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedgma.data.pools import Pool
from fedgma.training.task import Task, mean_loss
from fedgma.training.tasks import CLASSIFICATION
from fedgma.training.threads.dropout import draw_apart

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
STATE = ("_parameters", "_buffers", "_modules")  # what `state_dict` is made of


class GlobalGenerators(NamedTuple):
    """The states of the generators that a module may draw from without being given one."""

    torch: Tensor
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def read(cls) -> "GlobalGenerators":
        """The states as they are now."""
        return cls(torch.default_generator.get_state(), getstate(), np.random.get_state())  # noqa: NPY002

    def have_moved(self) -> bool:
        """Whether something was drawn since."""
        now = GlobalGenerators.read()
        return not (torch.equal(self.torch, now.torch) and self.python == now.python and equal(self.numpy, now.numpy))

    def restore(self) -> None:
        """Put the generators back."""
        torch.default_generator.set_state(self.torch)
        setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002


def why_not_threads(model: nn.Module, pool: Pool, task: Task = CLASSIFICATION) -> str | None:
    """Why clients of this model cannot be trained in threads, found by a trial on a few samples; None if they can."""
    name = type(model).__name__
    if pool.y.device.type != "cpu":
        return f"threads train on a CPU, but the data are on {pool.y.device.type}"
    if any(getattr(part, hooks) for part in model.modules() for hooks in HOOKS):
        return f"{name} has hooks"
    model = draw_apart(copy.deepcopy(model).train(), torch.Generator())
    generators = GlobalGenerators.read()
    try:
        _pass(model, pool, task, 0)  # what a model computes once and keeps is there after the first pass
        kept = copy.deepcopy(_remembered(model, task))
        _pass(model, pool, task, 2)
        if not equal(kept, _remembered(model, task)):
            return f"{name} remembers something from batch to batch"
        if generators.have_moved():
            return f"{name} draws random numbers"
        if any(value.grad is not None and (value.grad.is_sparse or value.is_complex()) for value in model.parameters()):
            return f"{name} has sparse or complex gradients"
    except Exception as error:  # a module may raise anything; the loop shows it where it is of use
        return f"{name} could not be tried ({type(error).__name__})"
    finally:
        generators.restore()
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
        kept.append({name: value for name, value in vars(part).items() if name not in STATE})
        kept.append({name: part._buffers[name] for name in part._non_persistent_buffers_set})
    return kept


def _owners(*functions: Callable[..., Any]) -> list[Any]:
    """The objects whose methods these are."""
    owners = [getattr(function, "__self__", None) for function in functions]
    return [owner for owner in owners if hasattr(owner, "__dict__")]


def equal(first: Any, second: Any) -> bool:
    """Whether two values are equal, looked at part by part.

    >>> equal({"a": [torch.ones(2), np.ones(2)]}, {"a": [torch.ones(2), np.ones(2)]}), equal([1], [2])
    (True, False)
    """
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, int | float | str):
        return bool(first == second)
    if isinstance(first, Tensor):
        return first.shape == second.shape and torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second)
    if isinstance(first, weakref.ref):
        return equal(first(), second())
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, nn.Module):
        return True  # every module of a model is looked at by itself
    return bool(first == second) or (bool(getattr(first, "__dict__", None)) and equal(vars(first), vars(second)))
