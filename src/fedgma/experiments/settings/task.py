"""The settings that belong to a task: its name, how text is cut, and the defaults that depend on it."""

from collections.abc import Callable, Collection
from typing import Any, Protocol

from fedgma.errors import ConfigError

TASKS = ("classification", "imbalanced", "regression", "multi_label", "next_token")
OFF = "classification"  # recorded only where it is another, which keeps fingerprints from before this setting existed


class Run(Protocol):
    """The settings of a run that are read here."""

    @property
    def task(self) -> str:
        """What the model learns."""

    @property
    def model(self) -> str | None:
        """The model."""


def check_task(task: str) -> None:
    """Refuse an unknown task."""
    if ":" not in task and task not in TASKS:
        raise ValueError(f"task: unknown task {task!r}; known: {', '.join(TASKS)}, or your own as 'file.py:Name'")


def check_model(settings: Run, models: Collection[str]) -> None:
    """Refuse next-token prediction with one of the library's `models`, which put out one row for each sample."""
    if settings.task == "next_token" and settings.model in models:
        raise ConfigError("model: next_token needs a model with logits for every token; set model=file.py:Name")


def _reads_text(settings: Run) -> bool:
    return settings.task == "next_token" or ":" in settings.task


# settings that only some runs use
USED: dict[str, Callable[[Run], bool]] = dict.fromkeys(("sequence_length", "sequence_unit"), _reads_text)


def trimmed(nested: dict[str, Any]) -> dict[str, Any]:
    """A record without a task that is the default."""
    return {name: value for name, value in nested.items() if (name, value) != ("task", OFF)}
