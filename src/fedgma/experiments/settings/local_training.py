"""The settings of local training that need more than a range: rate schedules, and what excludes what."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from fedgma.errors import ConfigError
from fedgma.experiments.settings.section import Count, Factor, Section, Share, Whole
from fedgma.simulation.algorithms import ALGORITHMS
from fedgma.training.schedules import SCHEDULES, Schedule, check_last_rate

Run = Any  # the settings of a run, whose class has sections of this module
AXES = ("round_schedule", "step_schedule")
SMOOTHED = ("classification", "imbalanced", "next_token")  # tasks whose labels can be smoothed
# recorded only where they differ from these defaults, so that runs from before they existed keep their fingerprints
OFF: dict[str, Any] = {"client_optimizer": "sgd", "nesterov": False, "weight_decay": 0.0, "label_smoothing": 0.0}


class ScheduleSettings(Section):
    """How the clients' learning rate changes, over the rounds or over the local steps of a round."""

    name: Literal[*SCHEDULES] = Field(  # type: ignore[valid-type]
        default="constant", description="how the rate falls after the warm-up"
    )
    warm_up: Count = Field(default=0, description="first rounds or steps, in which the rate rises to its full value")
    decay: Factor | None = Field(
        default=None, description="for `exponential` and `step`: what the rate is multiplied with each time; required"
    )
    every: Whole | None = Field(
        default=None, description="for `step`: rounds or steps from one decay to the next; required"
    )
    length: Whole | None = Field(
        default=None, description="for `cosine`: rounds or steps of the fall; by default all after the warm-up"
    )
    floor: Share = Field(default=0.0, description="least share of the full rate after the warm-up")


def schedule_of(section: ScheduleSettings) -> Schedule:
    """The schedule that a section describes."""
    return Schedule(
        section.name, section.warm_up, section.decay or 1.0, section.every or 1, section.length, section.floor
    )


def completed(section: ScheduleSettings, rounds: int) -> ScheduleSettings:
    """The schedule over rounds with its length, so that a run of more rounds is another run."""
    if section.name != "cosine" or section.length is not None:
        return section
    return section.model_copy(update={"length": max(1, rounds - section.warm_up)})


def check_local(settings: Run) -> None:
    """Refuse settings of local training that contradict each other, or of which one is missing."""
    for axis in AXES:
        section: ScheduleSettings = getattr(settings, axis)
        needed = {"exponential": ("decay",), "step": ("decay", "every")}.get(section.name, ())
        for name in needed:
            if getattr(section, name) is None:
                raise ConfigError(f"{axis}: {section.name!r} needs {name}; set {axis}.{name}")
    if settings.label_smoothing and settings.task not in SMOOTHED:
        tasks = f"{', '.join(SMOOTHED[:-1])} and {SMOOTHED[-1]}"
        raise ConfigError(f"label_smoothing is for the tasks {tasks}, got task = {settings.task!r}")
    check_last_rate(settings.client_learning_rate, schedule_of(settings.round_schedule), settings.rounds)
    if settings.nesterov and settings.client_optimizer == "sgd" and not settings.momentum:
        raise ConfigError("nesterov: expected momentum above 0, got momentum = 0")
    if ALGORITHMS[settings.algorithm].make().reads_gradients and settings.client_optimizer != "sgd":
        raise ConfigError(
            f"client_optimizer: {settings.algorithm} reads the clients' mean gradient from how far SGD moved them, so "
            f"it needs 'sgd', got {settings.client_optimizer!r}"
        )


def _by(optimizer: str) -> Callable[[Run], bool]:
    return lambda settings: settings.client_optimizer == optimizer


def _falls(axis: str, *names: str) -> Callable[[Run], bool]:
    return lambda settings: getattr(settings, axis).name in names


# settings that only some runs use
USED: dict[str, Callable[[Run], bool]] = {
    **{name: _by("sgd") for name in ("momentum", "nesterov")},
    **{name: _by("adamw") for name in ("client_beta1", "client_beta2", "client_epsilon")},
    **{f"{axis}.decay": _falls(axis, "exponential", "step") for axis in AXES},
    **{f"{axis}.every": _falls(axis, "step") for axis in AXES},
    **{f"{axis}.length": _falls(axis, "cosine") for axis in AXES},
    **{f"{axis}.floor": _falls(axis, "exponential", "step", "cosine") for axis in AXES},
}


def trimmed(nested: dict[str, Any], settings: Run) -> dict[str, Any]:
    """A record without the settings of local training that are at their defaults."""
    off = {name for name, value in OFF.items() if getattr(settings, name) == value}
    kept = {name: value for name, value in nested.items() if name not in off}
    for axis in AXES:
        if not schedule_of(getattr(settings, axis)).changes:
            kept[axis] = {name: value for name, value in kept[axis].items() if name not in ("name", "warm_up")}
    return kept
