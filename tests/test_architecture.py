"""The shape of the package: what may import what, what is public, what a bare import costs."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import fedgma

SOURCE = Path(fedgma.__file__).parent

# Rooms from the ground up: a module may import from its own room and from those before it.
ROOMS = [
    ["errors", "arrays", "seeds"],
    ["aggregation"],
    ["data", "training"],
    ["simulation"],
    ["records"],
    ["statistics"],
    ["experiments"],
    ["reports"],
    ["paper"],
    ["flower", "nvflare", "pfl"],
    ["cli", "__main__"],
]
FLOOR = {module: floor for floor, modules in enumerate(ROOMS) for module in modules}


def imported(path):
    """The fedgma modules that a file imports, by their first name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedgma":
            parts = node.module.split(".")
            yield from [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from [alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fedgma.")]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_up_the_page_only(path):
    module = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if module == "__init__":
        return
    assert module in FLOOR, f"{module} has no room yet: add it to ROOMS and to docs/architecture.md"
    for other in imported(path):
        assert FLOOR[other] <= FLOOR[module], f"{module} must not import {other}"


def test_every_room_exists():
    found = {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in SOURCE.rglob("*.py")}
    assert found - {"__init__"} == set(FLOOR)


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


def test_the_check_above_can_fail():
    assert "torch" in modules_after("import fedgma, torch")


def test_masked_averaging_over_numpy_arrays_does_not_import_torch():
    statement = "import fedgma, numpy as np; fedgma.masked_mean()({'w': np.ones((3, 4))})"
    assert "torch" not in modules_after(statement)


def test_without_the_simulators_packages_one_sentence_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None; import fedgma; fedgma.run"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "ConfigError: fedgma.run needs the simulator's packages: pip install 'fedgma[sim]'" in result.stderr
