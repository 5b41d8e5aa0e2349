"""The task of a run: from its name in the settings, or from what a user passed in Python."""

from collections.abc import Callable
from pathlib import Path

from fedgma.data.files.dataset import Dataset
from fedgma.data.files.own.targets import WANTED
from fedgma.errors import ConfigError
from fedgma.experiments.own.files import load_code
from fedgma.experiments.settings.partition import OWN
from fedgma.records.format import MetricFacts
from fedgma.training.own_task import as_task
from fedgma.training.task import Task
from fedgma.training.tasks import CLASSIFICATION, TASKS


def task_name(given: object) -> str | None:
    """The name in the settings of a task that was passed in Python; None if none was."""
    if given is None or isinstance(given, str):
        return given
    kind = given if isinstance(given, type) else type(given)
    return OWN + (given.name if isinstance(given, Task) else kind.__name__)


def make_task(name: str, given: object, file_of: Callable[[str, str], Path | None]) -> Task:
    """The task of that name: of the library, passed in Python as `given`, or of the user's file that is found."""
    short = name.rpartition(":")[2]
    if name in TASKS:
        return TASKS[name]
    if name.startswith(OWN):
        if given is None:
            raise ConfigError(f"task {name!r} was passed in Python; pass it again as task=...")
        return as_task(given, short)
    file = file_of(name, "task")
    if file is None:
        raise ConfigError(f"task: expected a known task or 'file.py:Name', got {name!r}")
    return as_task(load_code(file, short, setting="task", arguments=""), short)


def metric_facts(task: Task) -> tuple[MetricFacts, ...]:
    """The metrics of a task for the record of a run; none for a classification."""
    ways = {} if task is CLASSIFICATION else dict(task.better) or {"loss": "lower"}
    return tuple(MetricFacts(name=name, better=way, unit=task.units.get(name, "")) for name, way in ways.items())


def _hint(target: str) -> str:
    """Which settings fit targets of a kind."""
    fitting = " or ".join(f"task={name}" for name, task in TASKS.items() if task.target == target)
    return f"set {fitting or 'a task of your own'} for these"


def fitting(task: Task, data: Dataset) -> Dataset:
    """The data set; an error if its targets are not those of the task, or if there is nothing to test on."""
    if not len(data.test.y):
        count, labels = len(data.train.y), len(data.classes)
        ids = "; labels that differ in every sample are ids, or numbers to predict (task=regression)"
        raise ConfigError(
            f"{data.name}: {count} samples leave none for testing; give more, or a test part (x_test, y_test)"
            f"{ids if data.target == 'class' and labels == count else ''}"
        )
    if task.target not in ("any", data.target):
        raise ConfigError(
            f"task {task.name} needs targets that are {WANTED[task.target]}; those of {data.name} are "
            f"{WANTED[data.target]}; {_hint(data.target)}"
        )
    return data
