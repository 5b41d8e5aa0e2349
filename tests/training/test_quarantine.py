"""The hand-written parts in `training/fast` stand behind `choose`: everything else trains without them."""

import ast
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fedgma

SOURCE = Path(fedgma.__file__).parent
FAST = "fedgma.training.fast"
PATHS = {
    ".".join(("fedgma", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in SOURCE.rglob("*.py")
}
KERNELS = [name.removeprefix(f"{FAST}.") for name in PATHS if name.startswith(f"{FAST}.gpu.")]


def imported(path):
    """The fedgma modules that a file imports, at its top or later, or names in a string for a later import."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in PATHS else node.module for name in names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and node.value in PATHS:
            yield node.value


def test_nothing_but_choose_imports_the_fast_parts():
    importers = {
        name
        for name, path in PATHS.items()
        if not name.startswith(FAST) and any((other or "").startswith(FAST) for other in imported(path))
    }
    assert importers == {"fedgma.training.choose"}


def test_modules_of_training_do_not_import_each_other_in_circles():
    training = {name for name in PATHS if name.startswith("fedgma.training.")}
    graph = {name: {other for other in imported(PATHS[name]) if other in training - {name}} for name in training}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("fedgma.training.gradients") < order.index("fedgma.training.choose")


@pytest.mark.parametrize(
    "name", ["written", "resnet18", "layers", "torch_ops", "windows", "cpu.lenet", "cpu.logistic", *KERNELS]
)
def test_every_hand_written_part_says_what_it_buys(name):
    assert "\nBuys" in ast.get_docstring(ast.parse(PATHS[f"{FAST}.{name}"].read_text()))


WITHOUT = f"""
import sys
sys.modules["{FAST}"] = None
import torch
from fedgma.training import lanes, loop
from fedgma.training.cuda_graphs import Engine
from fedgma.training.gradients import lane_gradients
from fedgma.training.models import build
from fedgma.training.lane_batch import Assignment
from lane_twins import distance, make_lane_batch, start_of
from plain_pools import make_federation

federation, model = make_federation([9, 3, 8], (1, 8, 8)), build("logistic", (1, 8, 8), 10, seed=0)
task = Assignment(model, make_lane_batch(federation, range(3)), [federation.train], *start_of(model))
slow = loop.train(task)
for train in (lanes.train, Engine(lane_gradients(model), compile=False)):
    assert distance(slow.updates, train(task).updates) < 1e-5
try:
    import fedgma.training.choose
except ImportError:
    print("trained")
"""


def test_loop_lanes_and_engine_train_without_the_fast_parts():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "trained", done.stderr[-2000:]
