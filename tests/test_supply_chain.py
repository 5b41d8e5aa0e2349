"""What the source must not do with what it reads, the versions it is tested with, and the tools that check both."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from scripts import load_script

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PICKLES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load", "pd.read_pickle"}
ARGUMENTS = {("weights_only", False), ("allow_pickle", True), ("shell", True), ("verify", False)}


def dangers(source):
    """Everything in a source that runs what it reads, hands it to a shell or trusts a stranger."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from PICKLES & {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            yield from PICKLES & {(node.module or "").split(".")[0]}
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            values = {word.arg: getattr(word.value, "value", ...) for word in node.keywords}
            yield from {name} & CALLS
            yield from (f"{key}={values[key]}" for key, value in ARGUMENTS if values.get(key) is value)
            if name.endswith(("torch.load", "np.load", "numpy.load")) and not {"weights_only", "allow_pickle"} & {
                *values
            }:
                yield f"{name} that may unpickle"
            if name.endswith((".extractall", ".extract")):
                yield "an archive is unpacked to names of its own"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_nothing_that_is_read_can_be_executed(path):
    assert list(dangers(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "eval(text)",
        "exec(text)",
        "yaml.load(stream)",
        "torch.load(path, weights_only=False)",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "np.load(path)",
        "subprocess.run(text, shell=True)",
        "requests.get(url, verify=False)",
        "os.system(text)",
        "archive.extractall(folder)",
    ],
)
def test_each_danger_would_be_seen(source):
    assert list(dangers(source))


def test_the_pins_are_versions_that_the_package_accepts():
    packaging = pytest.importorskip("packaging.requirements")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(word for words in project["optional-dependencies"].values() for word in words)]
    ranges = {}
    for word in asked:
        requirement = packaging.Requirement(word)
        ranges.setdefault(requirement.name, []).append(requirement.specifier)
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert {"torch", "numpy", "flwr"} <= pins.keys()
    for name, version in pins.items():
        assert re.fullmatch(r"[\d.]+", version), name
        assert all(version in specifier for specifier in ranges.get(name, [])), name


def test_packages_that_could_not_be_looked_up_are_not_called_clean():
    audit = load_script("tools/audit.py")
    rows = [{"name": "a", "version": "1", "vulns": []}, {"name": "b", "skip_reason": "not found"}]
    said = audit.advisories(rows, ["a", "b", "c"], "")
    assert "1 of 3 packages looked up" in said
    assert "NOT CHECKED, the advisory service gave no answer for 2 packages: b, c" in said
    bad = [{"name": "a", "version": "1", "vulns": [{"id": "CVE-1"}]}]
    assert "a 1: CVE-1" in audit.advisories(bad, ["a"], "")
    assert "NOT CHECKED" not in audit.advisories(bad, ["a"], "")
    assert "name resolution failed" in audit.advisories([], ["a"], "Traceback\nname resolution failed\n")


@pytest.mark.parametrize(
    ("source", "changed"),
    [
        ("x = a < b", {"x = (a <= b)", "x = (a >= b)"}),
        ("x = a + 1", {"x = (a - 1)", "x = a + 2"}),
        ("x = a and not b", {"x = (a or not b)", "x = (not b)", "x = (a)", "x = a and (b)"}),
        ("def f(): return a", {"def f(): return None"}),
        ("f(a, b)", {"f(b, a)", "pass"}),
        ("self.x = a", {"pass"}),
        ("if a: raise Error('one word')", {"if (not a): raise Error('one word')", "if a: pass"}),
        ("def f(a: int = 0) -> int | None: ...", {"def f(a: int = 1) -> int | None: ..."}),
        ('"""A docstring."""', set()),
    ],
)
def test_mutants_are_small_changes_of_code_and_not_of_text(source, changed):
    assert {mutant.now for mutant in load_script("tools/mutations.py").mutants(source, "module.py")} == changed
