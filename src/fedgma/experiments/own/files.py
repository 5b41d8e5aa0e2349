"""A user's functions and classes, named in the settings as `file.py:name`."""

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fedgma.errors import ConfigError
from fedgma.records.code import is_installed


def file_of(name: str) -> str | None:
    """The file of a name such as `file.py:name`; None for other names.

    >>> file_of("nets/mine.py:Net"), file_of("lenet")
    ('nets/mine.py', None)
    """
    file = name.rpartition(":")[0]
    return file if file.endswith(".py") else None


def load_code(file: Path, name: str, *, setting: str, arguments: str) -> Callable[..., Any]:
    """The function or class `name` of a Python file; errors name the setting and the arguments it is called with."""
    spec = importlib.util.spec_from_file_location(f"fedgma_own_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{setting}: {file.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        with _fresh_imports(file.resolve().parent):
            spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{setting}: {file.name} could not be executed ({type(error).__name__}: {error})") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{setting}: {file.name} has no {name!r} that can be called as {name}({arguments})")
    _make_importable(module)
    return function  # type: ignore[no-any-return]


def _make_importable(module: ModuleType) -> None:
    """Let torch's compiler import the module by its name, unless another file has that name.

    An older version of the same file makes way. Code that cannot be imported runs uncompiled.
    """
    before = sys.modules.get(module.__name__)
    if before is None or before.__file__ == module.__file__:
        sys.modules[module.__name__] = module


def import_code(name: str, *, setting: str) -> Callable[..., Any]:
    """The function or class of a name such as `package.module:name`."""
    module, _, short = name.rpartition(":")
    try:
        function = getattr(importlib.import_module(module), short, None)
    except Exception as error:  # an import may raise anything
        raise ConfigError(f"{setting}: {module!r} could not be imported ({type(error).__name__}: {error})") from error
    if not callable(function):
        raise ConfigError(f"{setting}: module {module!r} has no function or class {short!r}")
    return function  # type: ignore[no-any-return]


@contextlib.contextmanager
def _fresh_imports(folder: Path) -> Iterator[None]:
    """Inside, a file imports the current versions of the modules in its folder, even if older ones are loaded.

    So the code that runs is the code that was fingerprinted, in a notebook too. Modules that were loaded before are
    put back afterwards.
    """

    def beside() -> dict[str, Any]:
        files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
        inside = {name for name, file in files.items() if file.startswith(f"{folder}{os.sep}")}
        return {name: sys.modules[name] for name in inside if name != "__main__" and not is_installed(files[name])}

    aside, written = beside(), sys.dont_write_bytecode
    for name in aside:
        del sys.modules[name]
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True  # leaves no __pycache__ in the user's folder
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.dont_write_bytecode = written
        with contextlib.suppress(ValueError):
            sys.path.remove(str(folder))
        for name in beside():
            del sys.modules[name]
        sys.modules.update(aside)
