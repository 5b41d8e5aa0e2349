"""A user's task: a class with two functions, `loss` and `metrics`, and what it says about them.

class Task:
    better = {"within": "higher"}          # which way each metric is better; verdicts are about the first
    units = {"within": "%"}                # optional: a share, shown in percent
    target = "float"                       # optional: how a target looks

    def loss(self, output, target):        # one number for each sample
        return (output - target).abs().mean(1)

    def metrics(self, output, target):     # one number for each sample, averaged over samples
        return {"within": ((output - target).abs() < 0.1).float().mean(1)}

    whole = {"spread": spread}             # optional: functions of all outputs and targets of a split
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedgma.data.files.own.targets import TARGETS
from fedgma.errors import ConfigError
from fedgma.training.task import Means, Task


def as_task(value: Any, name: str) -> Task:
    """A user's class, or an object of it, as a task; an error says what is missing."""
    if isinstance(value, Task):
        return value
    try:
        made = value() if isinstance(value, type) else value
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(f"task {name} could not be made ({type(error).__name__}: {error})") from error
    if not callable(getattr(made, "loss", None)):
        raise ConfigError(f"task {name}: expected a class with a function loss(output, target), got none")
    task = Task(
        name=name,
        loss=made.loss,
        metrics=getattr(made, "metrics", _no_metrics),
        better=getattr(made, "better", {}),
        units=getattr(made, "units", {}),
        target=getattr(made, "target", "any"),
        weight=getattr(made, "weight", None),
        whole=getattr(made, "whole", {}),
        summary=None if getattr(made, "summary", None) is None else _row_by_row(made.summary, name),
    )
    _check(task)
    return task


def _row_by_row(summary: Callable[[Means], Means], name: str) -> Callable[[Means], Means]:
    """A user's summary, which sees the means of one run, applied to means with further axes in front."""

    def over_rows(means: Means) -> Means:
        leading = means["loss"].shape
        flat = {part: value.reshape(-1, *value.shape[len(leading) :]) for part, value in means.items()}
        rows = [
            _one_summary(summary, name, {part: value[row] for part, value in flat.items()})
            for row in range(leading.numel())
        ]
        return {part: torch.stack([row[part] for row in rows]).reshape(leading) for part in (rows[0] if rows else {})}

    return over_rows


def _one_summary(summary: Callable[[Means], Means], name: str, means: Means) -> Means:
    try:
        numbers = {part: torch.as_tensor(value, device=means["loss"].device) for part, value in summary(means).items()}
    except Exception as error:  # a user's function may raise anything
        shapes = ", ".join(f"{part} {list(value.shape)}" for part, value in means.items())
        raise ConfigError(f"task {name}: summary failed on means {shapes} ({type(error).__name__}: {error})") from error
    if wide := [f"{part!r} of shape {list(value.shape)}" for part, value in numbers.items() if value.numel() != 1]:
        raise ConfigError(f"task {name}: expected summary to return one number for each metric, got {wide[0]}")
    return {part: value.reshape(()) for part, value in numbers.items()}


def _no_metrics(output: Tensor, target: Tensor) -> Means:
    return {}


def _check(task: Task) -> None:
    for part, what in (("better", "words"), ("units", "words"), ("whole", "functions")):
        if not isinstance(getattr(task, part), Mapping):
            raise ConfigError(f"task {task.name}: `{part}` must be a mapping from metrics to {what}")
    wrong = [f"{name!r}: {way!r}" for name, way in task.better.items() if way not in ("higher", "lower")]
    if wrong:
        raise ConfigError(f"task {task.name}: `better` must say 'higher' or 'lower' for each metric, got {wrong[0]}")
    if "loss" in task.better or not all(isinstance(name, str) and name for name in task.better):
        raise ConfigError(f"task {task.name}: a metric needs a name of its own, and the name 'loss' is taken")
    for part in ("units", "whole"):
        if unknown := sorted(set(getattr(task, part)) - set(task.better)):
            raise ConfigError(f"task {task.name}: `{part}` names {unknown[0]!r}, which `better` does not")
    if task.target not in (*TARGETS, "any"):
        raise ConfigError(f"task {task.name}: unknown target {task.target!r}; known: {', '.join(TARGETS)}, any")
