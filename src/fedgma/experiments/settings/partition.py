"""The settings of a partition: which client holds which samples, by a known method or by a user's function."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from fedgma.data.partitions import PARTITIONS, settings_of
from fedgma.experiments.settings.section import Count, Positive, Section, Whole

OWN = "own:"  # prefix of the name of data, of a model or of a partition that was passed in Python


class PartitionSettings(Section):
    """Which client holds which samples."""

    name: str | None = Field(
        default=None,
        examples=[*PARTITIONS, "file.py:function"],
        description="how samples are divided among clients; by default `label_skew`, or `natural` if your own data "
        "name the clients",
    )
    clients: Whole | None = Field(
        default=None, description="number of clients; by default 100, or for `natural` one for each owner"
    )
    classes_per_client: Whole | None = Field(
        default=None, description="for `label_skew`: by default 2, 10 for cifar100, 20 for tinyimagenet"
    )
    mode: Literal["exact", "shards"] | None = Field(
        default=None,
        description="for `label_skew`: exactly that many classes for each client, or shards of sorted samples; by "
        "default `exact`, or `shards` if the classes of your own data cannot be shared equally",
    )
    alpha: Positive = Field(
        default=0.5, description="for `dirichlet` and `client_dirichlet`: concentration; small is strong skew"
    )
    beta: Positive = Field(default=0.5, description="for `quantity`: concentration; small is strong skew")
    min_size: Count | None = Field(
        default=None, description="least number of samples of a client; by default 10 for `dirichlet`, 1 for `quantity`"
    )
    held_out: Count = Field(default=0, description="for `natural`: owners kept out of training")
    seed: int | None = Field(
        default=None,
        description="seed of the partition; by default the run's seed, so that each seed has another partition",
    )

    @field_validator("name")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        file = (name or "").rpartition(":")[0]
        if name is None or name in PARTITIONS or name.startswith(OWN) or file.endswith(".py"):
            return name
        expected = ", ".join(map(repr, PARTITIONS)) + " or your function as 'file.py:function'"
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})


class Run(Protocol):
    """The settings of a run that are read here."""

    @property
    def partition(self) -> PartitionSettings:
        """Which client holds which samples."""


def completed(part: PartitionSettings, *, seed: int, classes: int, own: bool) -> PartitionSettings:
    """A partition with its open settings filled in; with `own` data, those that depend on the data stay open."""
    name = part.name
    if name is None:
        name = "label_skew" if not own or part.classes_per_client or part.mode else "natural" if part.held_out else None
    filled = {
        "name": name,
        "clients": part.clients if part.clients is not None or own or name == "natural" else 100,
        "classes_per_client": part.classes_per_client or (None if own else classes),
        "mode": part.mode or (None if own else "exact"),
        "min_size": (10 if name == "dirichlet" else 1) if part.min_size is None else part.min_size,
        "seed": seed if part.seed is None else part.seed,
    }
    return part.model_copy(update=filled)


READ: Mapping[str, tuple[str, ...]] = {name: settings_of(name) for name in PARTITIONS}


def details(part: PartitionSettings) -> dict[str, Any]:
    """The settings that this kind of partition reads."""
    return {name: getattr(part, name) for name in READ.get(str(part.name), ())}


def _reads(name: str) -> Callable[[Run], bool]:
    return lambda settings: name in READ.get(str(settings.partition.name), ())


USED: dict[str, Callable[[Run], bool]] = {
    f"partition.{name}": _reads(name) for name in dict.fromkeys(name for names in READ.values() for name in names)
}
