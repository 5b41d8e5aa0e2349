"""The settings of an attack: what malicious clients send in place of their updates."""

from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from fedgma.experiments.settings.section import Count, Positive, Section, Share
from fedgma.simulation.attacks import ATTACKS


class AttackSettings(Section):
    """What malicious clients send in place of their updates."""

    name: Literal["none", *ATTACKS] = Field(default="none", description="kind of attack")  # type: ignore[valid-type]
    share: Share = Field(default=0.2, description="share of the clients that attack; the seed decides which")
    scale: Positive | None = Field(
        default=None, description="factor that scales the attack; by default 1, 1.5 for `alie`"
    )
    target: Count = Field(default=0, description="for `backdoor`: the class that the trigger stands for")
    poisoned: Share = Field(default=0.5, description="for `backdoor`: share of an attacker's samples with the trigger")


def completed(attack: AttackSettings) -> AttackSettings:
    """The settings with the attack's own scale, unless another is given; the defaults where no client attacks."""
    if attack.name == "none":
        return AttackSettings()
    return attack.model_copy(update={"scale": attack.scale or ATTACKS[attack.name].scale})


def _of_kind(*known: str) -> Callable[[Any], bool]:
    return lambda settings: settings.attack.name in known


# settings that only some runs use
USED: dict[str, Callable[[Any], bool]] = {
    "attack.share": _of_kind(*ATTACKS),
    "attack.scale": _of_kind(*(name for name in ATTACKS if name != "zero")),
    "attack.target": _of_kind("backdoor"),
    "attack.poisoned": _of_kind("backdoor"),
}
