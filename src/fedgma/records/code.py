"""A checksum of a user's code: the compiled functions and classes, and what they read.

That is globals, closures, defaults, arguments of a `functools.partial` and the user's other modules. Of installed
packages only the name is used. So a changed comment makes no difference, and an edited file counts once it is loaded.
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
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedgma.records.checkpoints import digest

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
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), range, slice)


class ModelIdentity(NamedTuple):
    """A model's checksum (or name and size), and the parts of it that could not be fingerprinted."""

    text: str
    unknown: tuple[str, ...] = ()


def own_code(value: Any) -> str | None:
    """A checksum of the user's own code in an object that may be made of parts of the library; None if it has none.

    Parts of the library do not count, so another version of the library makes no difference.

    >>> own_code(sorted) is None, own_code(lambda mean: mean) == own_code(lambda mean: -mean)
    (True, False)
    """
    walk = OwnWalk()
    walk.visit(value)
    return walk.result().text if walk.found else None


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
            look = next((look for kind, look in self.kinds() if isinstance(value, kind)), "_object")
            self.put(type(value).__qualname__)
            getattr(self, look)(value)

    def kinds(self) -> tuple[tuple[Any, str], ...]:
        """Kinds of objects, and the method that visits each."""
        return KINDS

    def _module(self, value: types.ModuleType) -> None:
        self.put(value.__name__)

    def _listed(self, value: Any) -> None:
        self.put(len(value))
        for held in value:
            self.visit(held)

    def _mapping(self, value: Mapping[Any, Any]) -> None:
        self._listed([part for pair in value.items() for part in pair])

    def _unordered(self, value: Any) -> None:
        digests = []
        for held in value:
            inner = type(self)()
            inner.visit(held)
            self.unknown |= inner.unknown
            digests.append(inner.result().text)
        self.put(*sorted(digests))

    def _array(self, value: Any) -> None:
        if value.dtype.hasobject:
            self._listed(value.ravel().tolist())
        else:
            self.put(digest({"": value}))

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
            if text is None and not isinstance(value, weakref.ref):  # what it refers to has another owner
                self.unknown[f"{kind.__module__}.{kind.__qualname__}"] = None


class OwnWalk(Walk):
    """Visits objects, but only what belongs to the user's own functions and classes counts."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self._inside = False

    def put(self, *words: object) -> None:
        """Add plain values to the checksum, inside of the user's own code."""
        if self._inside:
            super().put(*words)

    def _enter(self, own: bool, look: Callable[[Any], None], value: Any) -> None:
        before, self.found = self._inside, self.found or own
        self._inside = before or own
        look(value)
        self._inside = before

    def _function(self, value: types.FunctionType) -> None:
        self._enter(not is_installed(value.__code__.co_filename), super()._function, value)

    def _class(self, value: type) -> None:
        self._enter(not _is_package_of_others(sys.modules.get(value.__module__)), super()._class, value)

    def _object(self, value: Any) -> None:
        own = not _is_package_of_others(sys.modules.get(type(value).__module__))
        self._enter(own, super()._object, value)


KINDS: tuple[tuple[Any, str], ...] = (
    ((list, tuple), "_listed"),
    ((set, frozenset), "_unordered"),
    ((dict, types.MappingProxyType), "_mapping"),
    ((np.ndarray, np.generic), "_array"),
    (functools.partial, "_partial"),
    (types.FunctionType, "_function"),
    (types.MethodType, "_method"),
    ((types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType), "_builtin"),
    ((staticmethod, classmethod), "_wrapper"),
    (property, "_property"),
    (type, "_class"),
    (types.ModuleType, "_module"),
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
