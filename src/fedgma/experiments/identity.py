"""The identity of a run's data and model: checksums of everything besides its settings that decides its outcome.

The checksum of a model covers its structure, its initial weights and the code that will be executed: the compiled
functions and classes of the user and what they read (globals, closures, defaults, arguments of a `functools.partial`,
the user's other modules). Of installed packages only the name is used. So a changed comment makes no difference, and an
edited file counts once it is loaded.
"""

import contextlib
import dataclasses
import dis
import functools
import hashlib
import importlib.util
import inspect
import os
import re
import site
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedgma.data.files import Dataset
from fedgma.data.partitions import Divider
from fedgma.records.checkpoints import digest
from fedgma.records.format import built_in
from fedgma.training.models import MODELS, Model, build, factory_of, parameter_count, waits_for_input
from fedgma.training.task import Task

SEED = 0  # of the initial weights that are compared; each run draws its own
PACKAGE = str(Path(__file__).resolve().parents[1])
INSTALLED = tuple(
    os.path.realpath(folder) + os.sep
    for folder in {
        PACKAGE,
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)
MODULE_STATE = frozenset(vars(nn.Module())) - {
    "training"
}  # attributes of every module; those that matter are visited by name
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range, slice)


class ModelIdentity(NamedTuple):
    """A model's checksum (or name and size), and the parts of it that could not be fingerprinted."""

    text: str
    unknown: tuple[str, ...] = ()


def data_identity(data: Dataset, *, handed_over: bool, divider: Divider | None = None) -> dict[str, str]:
    """Checksums of a data set: of its files, or of the arrays and the owners of their samples.

    If a user's function divides the samples, its code stands for the owners too.
    """
    if divider is not None:
        walk, known = Walk(), data_identity(data, handed_over=handed_over)
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
    walk = Walk()
    if isinstance(model, nn.Module):
        walk.visit(build(model, shape, classes, SEED) if waits_for_input(model) else model)
        return walk.result()
    factory = factory_of(model)
    walk.visit(factory)
    first, again = (Walk(), Walk())
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
    walk = Walk()
    for part in ("loss", "metrics", "weight", "summary"):
        walk.visit(getattr(task, part))
    walk.put(list(task.better.items()), sorted(task.units.items()), task.target)
    return walk.result()


def code_identity(code: Any) -> ModelIdentity:
    """The identity of a user's function, class or rule: a checksum of its code and of all that it reads."""
    walk = Walk()
    walk.visit(code)
    return walk.result()


def is_installed(file: str | None) -> bool:
    """Whether a file belongs to Python or to an installed package, and not to the user."""
    if not file or file.startswith("<"):
        return (file or "").startswith("<frozen")
    path = os.path.realpath(file)
    return path.startswith(INSTALLED) or "site-packages" in path or "dist-packages" in path


class Walk:
    """Visits objects and computes a checksum of their content; `unknown` names those that cannot be fingerprinted."""

    def __init__(self) -> None:
        self.unknown: dict[str, None] = {}
        self._hash = hashlib.sha256()
        self._seen: dict[int, tuple[int, Any]] = {}  # keeps the object alive, so that no other gets its id

    def result(self) -> ModelIdentity:
        """The checksum of everything visited."""
        return ModelIdentity(self._hash.hexdigest(), tuple(self.unknown))

    def put(self, *words: object) -> None:
        """Add plain values to the checksum."""
        self._hash.update(repr(words).encode() + b"\n")

    def visit(self, value: Any) -> None:
        """Add an object and its parts to the checksum."""
        if isinstance(value, PLAIN):
            self.put(type(value).__name__, value)
        elif id(value) in self._seen:
            self.put("again", self._seen[id(value)][0])
        else:
            self._seen[id(value)] = (len(self._seen), value)
            look = next((look for kind, look in KINDS if isinstance(value, kind)), Walk._object)
            self.put(type(value).__qualname__)
            look(self, value)

    def _listed(self, value: Any) -> None:
        self.put(len(value))
        for held in value:
            self.visit(held)

    def _mapping(self, value: Mapping[Any, Any]) -> None:
        self._listed([part for pair in value.items() for part in pair])

    def _unordered(self, value: Any) -> None:
        digests = []
        for held in value:
            inner = Walk()
            inner.visit(held)
            self.unknown |= inner.unknown
            digests.append(inner.result().text)
        self.put(*sorted(digests))

    def _array(self, value: Any) -> None:
        if value.dtype.hasobject:
            self._listed(value.ravel().tolist())
        else:
            self.put(digest({"": value}))

    def _tensor(self, value: Tensor) -> None:
        self.put(str(value.dtype), value.requires_grad)
        try:
            self.put(tuple(value.shape))
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, TypeError, NotImplementedError):  # sparse, quantised, or without content yet
            self.unknown[f"a tensor of type {type(value).__name__}"] = None
        else:
            self._hash.update(content.tobytes())

    def _partial(self, value: "functools.partial[Any]") -> None:
        self.visit(value.func)
        self._listed(value.args)
        self._named(value.keywords)

    def _method(self, value: types.MethodType) -> None:
        self.visit(value.__func__)
        self.visit(value.__self__)

    def _builtin(self, value: Any) -> None:
        self.put(getattr(value, "__module__", None), value.__qualname__)  # methods of built-in types have no module
        owner = getattr(value, "__self__", None)
        if owner is not None and not isinstance(owner, types.ModuleType | type):
            self.visit(owner)

    def _wrapper(self, value: Any) -> None:
        self.visit(value.__func__)

    def _property(self, value: property) -> None:
        self._listed([value.fget, value.fset, value.fdel])

    def _function(self, value: types.FunctionType) -> None:
        self.put(value.__qualname__)
        if is_installed(value.__code__.co_filename):
            self.put(value.__module__)
            self.visit(vars(value).get("__wrapped__"))
            return
        self._code(value.__code__)
        self.visit(value.__defaults__)
        self.visit(value.__kwdefaults__)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            self.put(name)
            self._listed(_content(cell))
        self._reads(value.__code__, value.__globals__)

    def _code(self, code: types.CodeType) -> None:
        self.put(code.co_code, code.co_exceptiontable, code.co_names, code.co_varnames)
        self.put(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self.visit(constant)

    def _reads(self, code: types.CodeType, names: Mapping[str, Any]) -> None:
        """Add the globals that code reads and its imports; of a user's module, the attributes that the code uses."""
        reads, attributes, imports = _names(code)
        for name in sorted(reads & set(names)):
            self.put(name)
            if isinstance(names[name], types.ModuleType):
                self._taken(names[name], attributes)
            else:
                self.visit(names[name])
        for name in sorted(imports):
            self.put(name)
            if (module := _users_module(name, str(names.get("__package__") or ""))) is not None:
                self._taken(module, attributes)

    def _taken(self, module: types.ModuleType, attributes: frozenset[str]) -> None:
        self.put(module.__name__)
        if _is_package_of_others(module) or id(module) in self._seen:
            return
        for name in sorted(attributes & set(vars(module))):
            self.put(name)
            held = vars(module)[name]
            if isinstance(held, types.ModuleType):
                self._taken(held, attributes - {name})
            else:
                self.visit(held)

    def _class(self, value: type) -> None:
        self.put(value.__qualname__)
        if _is_package_of_others(sys.modules.get(value.__module__)):
            self.put(value.__module__)
            return
        self._listed(value.__bases__)
        for name, member in sorted(vars(value).items()):
            if name == "_abc_impl":  # a cache of abc
                continue
            if not name.startswith("__") or callable(member) or isinstance(member, staticmethod | classmethod):
                self.put(name)
                self.visit(member)

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

    def _named(self, held: Mapping[str, Any]) -> None:
        for name, value in sorted(held.items()):
            self.put(name)
            self.visit(value)

    def _object(self, value: Any) -> None:
        kind = type(value)
        if (wrapped := inspect.getattr_static(value, "__wrapped__", None)) is not None:
            self.visit(wrapped)
        elif kind.__module__.startswith("fedgma.aggregation.") and dataclasses.is_dataclass(value):
            self._named({part.name: getattr(value, part.name) for part in dataclasses.fields(value)})
        elif not _is_package_of_others(sys.modules.get(kind.__module__)) and hasattr(value, "__dict__"):
            self.visit(kind)
            self._named(vars(value))
        elif isinstance(value, types.SimpleNamespace):
            self._named(vars(value))
        else:
            text = _words(value)
            self.put(kind.__module__, kind.__qualname__, text)
            if text is None:
                self.unknown[f"{kind.__module__}.{kind.__qualname__}"] = None


Look = Callable[[Walk, Any], None]
KINDS: tuple[tuple[Any, Look], ...] = (
    ((list, tuple), Walk._listed),
    ((set, frozenset), Walk._unordered),
    ((dict, types.MappingProxyType), Walk._mapping),
    ((np.ndarray, np.generic), Walk._array),
    (Tensor, Walk._tensor),
    (nn.Module, Walk._network),
    (functools.partial, Walk._partial),
    (types.FunctionType, Walk._function),
    (types.MethodType, Walk._method),
    ((types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType), Walk._builtin),
    ((staticmethod, classmethod), Walk._wrapper),
    (property, Walk._property),
    (type, Walk._class),
    (types.ModuleType, lambda walk, value: walk.put(value.__name__)),
)


def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The names of globals, attributes and imports that code reads, nested functions included."""
    reads, attributes, imports = set(), set(), set()
    for inner in _codes(code):
        for step in dis.get_instructions(inner):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                reads.add(step.argval)
            elif step.opname == "IMPORT_NAME":
                imports.add(step.argval)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
                attributes.add(step.argval)
    return frozenset(reads), frozenset(attributes), frozenset(imports)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _users_module(name: str, package: str) -> types.ModuleType | None:
    """A module of the user that a function imports; None if it is installed or cannot be found."""
    for full in (f"{package}.{name}", name) if package else (name,):
        with contextlib.suppress(Exception):  # an import may raise anything, and the function may catch it
            spec = importlib.util.find_spec(full)
            if spec is not None and spec.origin is not None and not is_installed(spec.origin):
                return importlib.import_module(full) if spec.origin.endswith(".py") else None
    return None


def _is_package_of_others(module: types.ModuleType | None) -> bool:
    """Whether a module is part of Python or of an installed package; without a file, whether it is built in."""
    if module is None or module.__name__ == "__main__":
        return False
    file = getattr(module, "__file__", None)
    return module.__name__ in sys.builtin_module_names if file is None else is_installed(file)


def _version_of(kind: type) -> str:
    """The version of the installed package that a model is from; empty for torch, whose layers are taken as stable."""
    top = kind.__module__.partition(".")[0]
    return "" if top in ("torch", "fedgma") else str(getattr(sys.modules.get(top), "__version__", ""))


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not filled yet
        return []


def _words(value: Any) -> str | None:
    """The `repr` of an object of an installed package; None if it contains a memory address."""
    try:
        text = repr(value)
    except Exception:  # a repr may raise anything
        return None
    return None if re.search(r"0x[0-9a-fA-F]{4,}", text) or inspect.isgenerator(value) else text
