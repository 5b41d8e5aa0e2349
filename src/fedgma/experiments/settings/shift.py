"""The settings of a feature shift: how the images of clients differ from each other in appearance."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from fedgma.errors import ConfigError
from fedgma.experiments.settings.section import Angle, Section, Share

SHIFTED = {"fedcmnist": "colour", "fedrotmnist": "rotation"}  # data set -> its own shift


class ShiftSettings(Section):
    """How the images of clients differ from each other in appearance."""

    name: Literal["none", "colour", "rotation"] | None = Field(
        default=None, description="kind of shift; by default the one that belongs to the data set"
    )
    palette: Literal["shared", "private"] = Field(
        default="shared", description="for `colour`: whether clients share the base colours"
    )
    coloring: Literal["foreground", "foreground_background"] = Field(
        default="foreground", description="for `colour`: what is coloured"
    )
    test_coloring: Literal["unseen", "permuted", "random"] = Field(
        default="unseen", description="for `colour`: colours of the test images"
    )
    jitter: Share = Field(default=0.1, description="for `colour`: size of each client's variation of a colour")
    flip_low: Share = Field(
        default=0.1, description="for `colour`: least share of images in the colour of another class"
    )
    flip_high: Share = Field(default=0.2, description="for `colour`: largest such share")
    palette_seed: int = Field(default=0, description="for `colour`: seed of the base colours")
    low: Angle = Field(default=0.0, description="for `rotation`: least angle of a client, in degrees")
    high: Angle = Field(default=75.0, description="for `rotation`: largest angle of a client, in degrees")
    test: Angle = Field(default=90.0, description="for `rotation`: angle of the test images, in degrees")


def completed(shift: ShiftSettings, dataset: str) -> ShiftSettings:
    """The settings with the shift that belongs to the data set, unless another is named."""
    name = shift.name or SHIFTED.get(dataset, "none")
    if dataset in SHIFTED and name == "none":
        raise ConfigError(
            f"{dataset} needs its shift, got shift.name = 'none'; for images without one use dataset = 'mnist'"
        )
    return shift.model_copy(update={"name": name})


def _of_kind(known: str) -> Callable[[Any], bool]:
    return lambda settings: (settings.shift.name or SHIFTED.get(settings.dataset)) == known


COLOUR = ("palette", "coloring", "test_coloring", "jitter", "flip_low", "flip_high", "palette_seed")

# settings that only some runs use
USED: dict[str, Callable[[Any], bool]] = {
    **{f"shift.{name}": _of_kind("colour") for name in COLOUR},
    **{f"shift.{name}": _of_kind("rotation") for name in ("low", "high", "test")},
}
