"""The shape of the package: what may import what, what is public, what a bare import costs."""

import ast
import functools
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import fedgma
from fedgma.machine import EXTRAS

ROOT = Path(__file__).parents[1]
SOURCE = Path(fedgma.__file__).parent

# Rooms from the ground up: a module imports from its own room and from those before it.
ROOMS = [
    "errors",
    "arrays",
    "seeds",
    "documents",
    "machine",
    "aggregation",
    "data",
    "training",
    "simulation",
    "records",
    "statistics",
    "reports",
    "experiments",
    "paper",
    "flower",
    "nvflare",
    "pfl",
    "cli",
    "__main__",
]
FILES = sorted(SOURCE.rglob("*.py"))
LONGEST = 400  # lines of a module
LONGEST_FUNCTION = 40  # lines of code


def module_of(path):
    """Dotted name below fedgma; a package by its own name, and "" is fedgma itself."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}


@functools.cache
def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imported(path):
    """The fedgma modules that a file imports anywhere in it."""
    return tuple(_imported(path))


def _imported(path):
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedgma":
            base = node.module.removeprefix("fedgma").lstrip(".")
            for alias in node.names:
                inner = f"{base}.{alias.name}".lstrip(".")
                yield inner if inner in MODULES else base
        elif isinstance(node, ast.Import):
            yield from [alias.name.removeprefix("fedgma.") for alias in node.names if alias.name.startswith("fedgma.")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_from_rooms_before_it(path):
    room = module_of(path).split(".")[0]
    if not room:
        return  # fedgma itself shows what the rooms hold
    assert room in ROOMS, f"{room} is no room yet: add it to ROOMS and to docs/architecture.md"
    for other in filter(None, imported(path)):
        assert ROOMS.index(other.split(".")[0]) <= ROOMS.index(room), f"{room} must not import {other}"


def test_no_module_is_longer_than_one_idea_needs():
    lines = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in MODULES.items()}
    assert {module: count for module, count in lines.items() if count > LONGEST} == {}


def lines_of_functions(tree):
    """Name -> lines of code of every function, without its docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            yield node.name, node.end_lineno - body[0].lineno + 1 if body else 0


def test_a_function_fits_a_screen():
    kernels = ("training.fast.", "aggregation.kernels.")  # a kernel is one function
    long = {
        f"{module}.{name}": lines
        for module, path in MODULES.items()
        if not module.startswith(kernels)
        for name, lines in lines_of_functions(parsed(path))
        if lines > LONGEST_FUNCTION
    }
    assert long == {}


def test_a_long_function_would_be_found():
    source = 'def f():\n    """Says what."""\n' + "    a = 1\n" * 41
    assert list(lines_of_functions(ast.parse(source))) == [("f", 41)]


def test_every_room_exists():
    assert {module.split(".")[0] for module in MODULES} - {""} == set(ROOMS)


def cycle(graph):
    """Modules that import each other in a ring, or nothing."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        path.append(module)
        ring = next((ring for other in graph[module] if (ring := visit(other))), [])
        path.pop()
        done.add(module)
        return ring

    return next((ring for module in graph if (ring := visit(module))), [])


def test_no_modules_import_each_other_in_a_ring():
    # a package's own page may name its modules, and they may use what it holds
    graph = {
        module: {other for other in imported(path) if other and other != module and not module.startswith(f"{other}.")}
        for module, path in MODULES.items()
        if module
    }
    assert cycle(graph) == []


def test_a_ring_would_be_found():
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]


def test_nothing_outside_paper_and_the_command_line_imports_paper():
    for module, path in MODULES.items():
        if module.split(".")[0] not in ("paper", "cli"):
            assert not [other for other in imported(path) if other.split(".")[0] == "paper"], module


def test_what_is_exported_is_what_is_public():
    public = {name for name, value in vars(fedgma).items() if not name.startswith("_") and not inspect.ismodule(value)}
    assert sorted(fedgma.__all__) == sorted({*public, "rounds", "run"})


def test_every_public_name_is_documented():
    for name in fedgma.__all__:
        value = getattr(fedgma, name)
        assert isinstance(value, dict) or (value.__doc__ or "").strip(), name


def modules_after(statement):
    code = f"import sys; {statement}; print(' '.join(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_a_bare_import_brings_numpy_and_nothing_else():
    heavy = {"torch", "numba", "scipy", "pydantic", "typer", "rich", "matplotlib", "PIL", "triton"}
    assert not heavy & modules_after("import fedgma")


def test_the_simulator_brings_torch_and_no_compiler():
    """A run needs torch's compiler late, or never: importing it takes as long as all the rest."""
    found = modules_after("import fedgma.simulation.fleet")
    assert "torch" in found  # so the check above can fail
    assert not {"torch._dynamo", "torch._inductor", "numba", "matplotlib"} & found


def test_masked_averaging_over_numpy_arrays_does_not_import_torch():
    statement = "import fedgma, numpy as np; fedgma.masked_mean()({'w': np.ones((3, 4))})"
    assert "torch" not in modules_after(statement)


def without(package, statement):
    """What a statement ends with where this package is not installed."""
    code = f"import sys; sys.modules[{package!r}] = None; {statement}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_without_the_simulators_packages_one_sentence_says_what_to_install():
    result = without("torch", "import fedgma; fedgma.run")
    assert result.returncode == 1
    assert "ConfigError: torch is not installed: pip install 'fedgma[sim]'" in result.stderr


@pytest.mark.parametrize(
    ("package", "words"),
    [
        ("pydantic", ["run", "rounds=1"]),
        ("torch", ["run", "rounds=1"]),
        ("rich", ["doctor"]),
        ("typer", ["--help"]),
        ("pydantic", ["paper", "list"]),
        ("flwr", ["flower", "up", ".", "--insecure"]),
    ],
)
def test_a_command_without_its_package_says_what_to_install(package, words):
    result = without(package, f"from fedgma.cli import main; sys.argv[1:] = {words}; main()")
    extra = "flower" if package == "flwr" else "sim"
    assert result.stderr == f"fedgma: {package} is not installed: pip install 'fedgma[{extra}]'\n"
    assert result.returncode == 2


def test_every_package_of_an_extra_has_an_answer():
    """Packages by the names that are imported; trackers have an answer of their own."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    imported = {"pillow": "PIL"}
    for extra in set(extras) - {"dev", "fuzz", "trackers"}:
        for requirement in extras[extra]:
            package = re.match(r"[\w.-]+", requirement)[0]
            assert imported.get(package, package) in EXTRAS, f"{package} of fedgma[{extra}]"
