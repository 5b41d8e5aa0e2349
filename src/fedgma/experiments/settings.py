"""The settings of one run: names, types, ranges, defaults (the paper's, SPEC 7), and how they are recorded.

A settings file holds only what differs from these defaults. A setting left open (None here) is filled in from what the
paper uses for the data set or the algorithm; one that the run does not use, such as `tau` under the plain mean, is
None in the record and in the fingerprint.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedgma.aggregation.rules import RULES
from fedgma.data.files.locate import names as dataset_names
from fedgma.errors import ConfigError

Whole = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]

MODELS = ("cnn", "lenet", "logistic", "resnet18-bn", "resnet18-gn")

# algorithm -> server optimiser and its default rate; adaptive steps have a size near 1, so their rates are small
ALGORITHMS: dict[str, tuple[str, float]] = {
    "fedavg": ("sgd", 1.0),
    "fedprox": ("sgd", 1.0),
    "scaffold": ("sgd", 1.0),
    "fedavgm": ("momentum", 1.0),
    "fedadagrad": ("adagrad", 0.01),
    "fedadam": ("adam", 0.01),
    "fedyogi": ("yogi", 0.01),
}

# data set -> model, local epochs, classes per client (SPEC 4.1); others are taken as small pictures
PAPER: dict[str, tuple[str, int, int]] = {
    "cifar10": ("resnet18-gn", 3, 2),
    "cifar100": ("resnet18-gn", 3, 10),
    "tinyimagenet": ("resnet18-gn", 12, 20),
    "femnist": ("lenet", 5, 2),
    "femnist-62": ("lenet", 5, 2),
    "femnist-by-sample": ("lenet", 5, 2),
}
OWN = "own:"  # before the name of data or of a model that was handed over in Python
SHIFTED = {"fedcmnist": "colour", "fedrotmnist": "rotation"}


# settings that belong to the rule; its own `seed` is that of the run
RULE_SETTINGS = tuple(dict.fromkeys(name for row in RULES.values() for name in row.settings if name != "seed"))


def _readers(name: str) -> str:
    """The rules that read a setting, in words."""
    return ", ".join(rule for rule, row in RULES.items() if name in row.settings)


class Section(BaseModel):
    """A group of settings: unknown names are refused, nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class PartitionSettings(Section):
    """Which client holds which samples."""

    name: Literal["iid", "label_skew", "dirichlet", "quantity", "natural"] = Field(
        default="label_skew", description="how samples are dealt to clients"
    )
    clients: Whole | None = Field(default=None, description="how many; 100, or for `natural` one for each owner")
    classes_per_client: Whole | None = Field(
        default=None, description="of `label_skew`: 2, 10 for cifar100, 20 for tinyimagenet"
    )
    mode: Literal["exact", "shards"] = Field(
        default="exact", description="of `label_skew`: distinct classes, or plain shards"
    )
    alpha: Positive = Field(default=0.5, description="of `dirichlet`: small is strong skew")
    beta: Positive = Field(default=0.5, description="of `quantity`: small is strong skew")
    min_size: Count | None = Field(
        default=None, description="least samples of a client: 10 of `dirichlet`, 1 of `quantity`"
    )
    held_out: Count = Field(default=0, description="of `natural`: owners kept out of training")
    seed: int | None = Field(
        default=None, description="of the dealing; the run's own seed, so that seeds differ in it too"
    )


class ShiftSettings(Section):
    """How the same picture looks at each client."""

    name: Literal["none", "colour", "rotation"] | None = Field(
        default=None, description="the one that belongs to the data set"
    )
    palette: Literal["shared", "private"] = Field(
        default="shared", description="of `colour`: base colours shared, or not"
    )
    coloring: Literal["foreground", "foreground_background"] = Field(default="foreground", description="of `colour`")
    test_coloring: Literal["unseen", "permuted", "random"] = Field(default="unseen", description="of `colour`")
    jitter: Share = Field(default=0.1, description="of `colour`: each client's variation of a colour")
    flip_low: Share = Field(
        default=0.1, description="of `colour`: least share of images in the colour of another class"
    )
    flip_high: Share = Field(default=0.2, description="of `colour`: largest such share")
    palette_seed: int = Field(default=0, description="of `colour`: which base colours")
    low: float = Field(default=0.0, description="of `rotation`: least angle of a client, in degrees")
    high: float = Field(default=75.0, description="of `rotation`: largest angle of a client")
    test: float = Field(default=90.0, description="of `rotation`: angle of the test pictures")


class Settings(Section):
    """Everything that decides the outcome of one run."""

    dataset: str = Field(
        default="fmnist-mini", description="a known data set, or the path of an .npz or a picture folder"
    )
    partition: PartitionSettings = PartitionSettings()
    shift: ShiftSettings = ShiftSettings()
    model: str | None = Field(
        default=None,
        description="a known model, `file.py:Name` or `package.module:Name`; lenet, resnet18-gn for cifar and up",
    )
    algorithm: Literal["fedavg", "fedprox", "fedadam", "fedyogi", "fedavgm", "fedadagrad", "scaffold"] = Field(
        default="fedavg", description="local objective and server optimiser"
    )
    aggregator: Literal[*RULES] = Field(  # type: ignore[valid-type]
        default="gma", description="the rule by which updates become one step"
    )
    tau: Share = Field(default=0.4, description=f"agreement threshold of {_readers('tau')}")
    inverse_sparsity_scale: bool = Field(default=False, description="of `and_mask`: divide by the share of survivors")
    threshold: Count = Field(default=4, description="of `rlr`: votes below which an entry's step is reversed")
    share: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.1, description="of `trimmed_mean`: part of the clients cut off at each end"
    )
    update_clip: Positive | None = Field(default=None, description="largest norm of a client's update; not clipped")
    mask_position: Literal["after", "before"] = Field(
        default="after", description="of adaptive servers with a mask: after the preconditioner (the paper's) or before"
    )
    rounds: Whole = Field(default=200, description="communication rounds")
    clients_per_round: Whole | None = Field(
        default=None, description="clients sampled a round; 10, or all where there are fewer"
    )
    local_epochs: Whole | None = Field(
        default=None, description="passes over a client's data; 1, 3 (cifar), 5, 12 (tiny)"
    )
    local_steps: Whole | None = Field(
        default=None, description="stop a client after so many steps, whatever the epochs"
    )
    batch_size: Whole = Field(default=32, description="of local training")
    augment: Literal["none", "crop_flip"] = Field(
        default="none", description="of training images: moved by up to 4 pixels and flipped, anew in every batch"
    )
    client_learning_rate: Positive = Field(default=0.05, description="of local training")
    momentum: BelowOne = Field(default=0.9, description="of local training; starts at zero in every round")
    gradient_clip: Positive | None = Field(default=None, description="largest norm of a local gradient; not clipped")
    mu: Positive = Field(default=0.01, description="of `fedprox`: proximal coefficient")
    server_learning_rate: Positive | None = Field(default=None, description="1, or 0.01 for adagrad, adam and yogi")
    beta1: BelowOne = Field(default=0.9, description="of fedadam, fedyogi (first moment) and fedavgm (momentum)")
    beta2: BelowOne = Field(default=0.99, description="of fedadam and fedyogi: second moment")
    epsilon: Positive = Field(default=1e-3, description="of fedadam, fedyogi and fedadagrad: stabiliser")
    seed: int = Field(default=0, description="of initial weights, sampling and batches")
    evaluate_every: Whole = Field(default=10, description="rounds; the last ten rounds are always evaluated")
    validation: BelowOne = Field(
        default=0.0, description="share of each client's samples held out of training and scored as `validation`"
    )
    client_test_size: Count = Field(
        default=200, description="test samples of each client with its class mix; 0 is none"
    )
    mask_every: Count = Field(default=5, description="rounds between mask statistics; 0 is never")

    @model_validator(mode="before")
    @classmethod
    def _names_alone(cls, given: Any) -> Any:
        """`partition = "iid"` is short for `partition = { name = "iid" }`."""
        if not isinstance(given, Mapping):
            return given
        short = {key: {"name": value} for key, value in given.items() if key in SECTIONS and isinstance(value, str)}
        return {**given, **short}

    @model_validator(mode="after")
    def _known_names(self) -> "Settings":
        if not is_path(self.dataset) and not self.dataset.startswith(OWN) and self.dataset not in dataset_names():
            raise ValueError(f"dataset: unknown data set {self.dataset!r}; known: {', '.join(dataset_names())}")
        if self.model is not None and ":" not in self.model and self.model not in MODELS:
            raise ValueError(
                f"model: unknown model {self.model!r}; known: {', '.join(MODELS)}, or your own as 'file.py:Name'"
            )
        if self.shift.flip_low > self.shift.flip_high or self.shift.low > self.shift.high:
            raise ValueError("shift: the low end of a range must not be above its high end")
        return self


SECTIONS = ("partition", "shift")


def is_path(dataset: str) -> bool:
    """Whether a data set is named by the path of a file or folder of the user's."""
    return dataset.endswith(".npz") or "/" in dataset or os.sep in dataset


def complete(settings: Settings) -> Settings:
    """Fill in what was left open, from the paper's choice for the data set and the algorithm.

    >>> full = complete(Settings(algorithm="fedyogi"))
    >>> full.model, full.partition.clients, full.clients_per_round, full.server_learning_rate
    ('lenet', 100, 10, 0.01)
    """
    model, epochs, classes = PAPER.get(settings.dataset, ("lenet", 1, 2))
    part, natural = settings.partition, settings.partition.name == "natural"
    clients = part.clients if part.clients is not None or natural else 100
    open_part = {
        "clients": clients,
        "classes_per_client": part.classes_per_client or classes,
        "min_size": (10 if part.name == "dirichlet" else 1) if part.min_size is None else part.min_size,
        "seed": settings.seed if part.seed is None else part.seed,
    }
    shift = settings.shift.name or SHIFTED.get(settings.dataset, "none")
    if settings.dataset in SHIFTED and shift == "none":
        raise ConfigError(
            f"shift.name = 'none' takes from {settings.dataset} what makes it that; use dataset = 'mnist'"
        )
    filled = settings.model_copy(
        update={
            "partition": part.model_copy(update=open_part),
            "shift": settings.shift.model_copy(update={"name": shift}),
            "model": settings.model or model,
            "local_epochs": settings.local_epochs or epochs,
            "clients_per_round": settings.clients_per_round or (10 if clients is None else min(10, clients)),
            "server_learning_rate": settings.server_learning_rate or ALGORITHMS[settings.algorithm][1],
        }
    )
    if clients is not None and filled.clients_per_round is not None and filled.clients_per_round > clients:
        raise ConfigError(
            f"clients_per_round: {filled.clients_per_round} clients cannot be sampled of partition.clients = {clients}"
        )
    return filled


def _partitions(*known: str) -> Callable[[Settings], bool]:
    return lambda settings: settings.partition.name in known


def _shifts(known: str) -> Callable[[Settings], bool]:
    return lambda settings: (settings.shift.name or SHIFTED.get(settings.dataset)) == known


def _reads(name: str) -> Callable[[Settings], bool]:
    return lambda settings: name in RULES[settings.aggregator].settings


def _algorithms(*known: str) -> Callable[[Settings], bool]:
    return lambda settings: settings.algorithm in known


# settings that only some runs use; one that no run of a file uses is refused rather than ignored
USED: dict[str, Callable[[Settings], bool]] = {
    **{name: _reads(name) for name in RULE_SETTINGS},
    "mask_position": lambda s: "votes" in RULES[s.aggregator].needs and ALGORITHMS[s.algorithm][0] != "sgd",
    "mu": _algorithms("fedprox"),
    "beta1": _algorithms("fedadam", "fedyogi", "fedavgm"),
    "beta2": _algorithms("fedadam", "fedyogi"),
    "epsilon": _algorithms("fedadam", "fedyogi", "fedadagrad"),
    "partition.classes_per_client": _partitions("label_skew"),
    "partition.mode": _partitions("label_skew"),
    "partition.alpha": _partitions("dirichlet"),
    "partition.beta": _partitions("quantity"),
    "partition.min_size": _partitions("dirichlet", "quantity"),
    "partition.held_out": _partitions("natural"),
    **{f"shift.{name}": _shifts("colour") for name in ("palette", "coloring", "test_coloring", "jitter")},
    **{f"shift.{name}": _shifts("colour") for name in ("flip_low", "flip_high", "palette_seed")},
    **{f"shift.{name}": _shifts("rotation") for name in ("low", "high", "test")},
}


def record(settings: Settings) -> dict[str, Any]:
    """Settings as they are recorded: nested, every default filled in, None where the run does not use them.

    >>> record(complete(Settings(aggregator="mean")))["tau"] is None
    True
    """
    nested = settings.model_dump()
    for dotted, used in USED.items():
        *section, name = dotted.split(".")
        if not used(settings):
            (nested[section[0]] if section else nested)[name] = None
    if not settings.inverse_sparsity_scale:  # off is as if there were no such choice
        nested["inverse_sparsity_scale"] = None
    if settings.augment == "none":  # so runs without it are named as they were when there was no such choice
        del nested["augment"]
    if is_path(settings.dataset):  # where the user's files lie is nobody's business
        nested["dataset"] = PurePath(settings.dataset).name
    file, sign, name = str(settings.model).rpartition(":")
    if file.endswith(".py"):
        nested["model"] = f"{PurePath(file).name}{sign}{name}"
    return nested
