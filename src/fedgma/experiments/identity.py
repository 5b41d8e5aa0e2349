"""The identity of a run's data and model: checksums of everything besides its settings that decides its outcome.

The checksum of a model covers its structure, its initial weights and the code that will be executed (`records.code`).
"""

import hashlib
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedgma.data.files import Dataset
from fedgma.data.partitions import Divider
from fedgma.records.checkpoints import digest
from fedgma.records.code import ModelIdentity, Walk
from fedgma.records.format import built_in
from fedgma.training.models import MODELS, Model, build, factory_of, parameter_count, waits_for_input
from fedgma.training.task import Task

SEED = 0  # of the initial weights that are compared; each run draws its own
MODULE_STATE = frozenset(vars(nn.Module())) - {
    "training"
}  # attributes of every module; those that matter are visited by name
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def data_identity(data: Dataset, *, handed_over: bool, divider: Divider | None = None) -> dict[str, str]:
    """Checksums of a data set: of its files, or of the arrays and the owners of their samples.

    If a user's function divides the samples, its code stands for the owners too.
    """
    if divider is not None:
        walk, known = ModelWalk(), data_identity(data, handed_over=handed_over)
        walk.visit(divider)
        walk.put(known.get("clients"))
        return {**known, "clients": walk.result().text}
    if not handed_over:
        return {"data": _read_as(data)}
    splits = {"train": data.train, "test": data.test, **data.more_tests}
    arrays = {f"{name}.{part}": getattr(split, part) for name, split in splits.items() for part in ("x", "y")}
    words = np.frombuffer(repr((data.classes, data.shift)).encode(), np.uint8)
    owners = {name: split.client for name, split in splits.items() if split.client is not None}
    return {"data": digest({**arrays, "words": words})} | ({"clients": digest(owners)} if owners else {})


def _read_as(data: Dataset) -> str:
    """The checksum of a data set's files, and of how they were understood if not as they are."""
    if not data.reading:
        return data.source.sha256
    return hashlib.sha256("\n".join([data.source.sha256, *data.reading]).encode()).hexdigest()


def model_identity(model: Model, shape: tuple[int, ...], classes: int) -> ModelIdentity:
    """The identity of a model: name and size of a built-in one, else a checksum.

    >>> model_identity("logistic", (1, 28, 28), 10)
    ModelIdentity(text='logistic, 7850 parameters', unknown=())
    """
    if isinstance(model, str) and model in MODELS:
        return ModelIdentity(built_in(model, parameter_count(build(model, shape, classes, SEED))))
    walk = ModelWalk()
    if isinstance(model, nn.Module):
        walk.visit(build(model, shape, classes, SEED) if waits_for_input(model) else model)
        return walk.result()
    factory = factory_of(model)
    walk.visit(factory)
    first, again = (ModelWalk(), ModelWalk())
    network = build(factory, shape, classes, SEED)
    first.visit(network)
    again.visit(build(factory, shape, classes, SEED))
    if first.result().text == again.result().text:
        walk.visit(network)
    else:
        walk.unknown["first weights that the seed alone does not decide"] = None
        walk.put(*(f"{name} {tuple(value.shape)}" for name, value in network.state_dict().items()))
    return walk.result()


def task_identity(task: Task) -> ModelIdentity:
    """The identity of a user's task: a checksum of its functions and of what it says about them."""
    walk = ModelWalk()
    for part in ("loss", "metrics", "weight", "summary"):
        walk.visit(getattr(task, part))
    walk.put(list(task.better.items()), sorted(task.units.items()), task.target)
    for name, metric in task.whole.items():
        walk.put(name)
        walk.visit(metric)
    return walk.result()


def code_identity(code: Any) -> ModelIdentity:
    """The identity of a user's function, class or rule: a checksum of its code and of all that it reads."""
    walk = ModelWalk()
    walk.visit(code)
    return walk.result()


class ModelWalk(Walk):
    """Visits tensors and modules of torch too."""

    def kinds(self) -> tuple[tuple[Any, str], ...]:
        """Kinds of objects, and the method that visits each."""
        return ((Tensor, "_tensor"), (nn.Module, "_network"), *super().kinds())

    def _tensor(self, value: Tensor) -> None:
        self.put(str(value.dtype), value.requires_grad)
        try:
            self.put(tuple(value.shape))
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, TypeError, NotImplementedError):  # sparse, quantised, or without content yet
            self.unknown[f"a tensor of type {type(value).__name__}"] = None
        else:
            self._hash.update(content.tobytes())

    def _network(self, value: nn.Module) -> None:
        kind = type(value)
        self.visit(kind)
        self.put(_version_of(kind))
        for group in (value.named_parameters(recurse=False), value.named_buffers(recurse=False)):
            self._named(dict(group))
        self._named(dict(value.named_children()))
        self._named({name: held for name, held in vars(value).items() if name not in MODULE_STATE})
        for name in HOOKS:
            self._listed(list(getattr(value, name, {}).values()))
        if isinstance(value, torch.jit.ScriptModule):
            self.unknown[f"compiled module {kind.__qualname__}"] = None


def _version_of(kind: type) -> str:
    """The version of the installed package that a model is from; empty for torch, whose layers are taken as stable."""
    top = kind.__module__.partition(".")[0]
    return "" if top in ("torch", "fedgma") else str(getattr(sys.modules.get(top), "__version__", ""))
