"""The settings of one run: names, types, ranges, defaults (the paper's, SPEC 7), and how they are recorded.

A settings file holds only what differs from these defaults. A setting whose default is None is filled in with the
paper's choice for the data set or the algorithm. A setting that the run does not use, such as `tau` with the plain
mean, is None in the record and in the fingerprint.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedgma.aggregation.rules import RULE_SETTINGS, RULES, unknown_rule
from fedgma.data.files.folders import SUFFIXES
from fedgma.data.files.locate import existing
from fedgma.data.files.locate import names as dataset_names
from fedgma.errors import ConfigError
from fedgma.experiments import clock_settings, local_training, partition_settings, task_settings
from fedgma.experiments.clock_settings import ClockSettings
from fedgma.experiments.local_training import ScheduleSettings
from fedgma.experiments.partition_settings import OWN, PartitionSettings
from fedgma.experiments.section import Angle, BelowOne, Count, NotNegative, Positive, Section, Share, Whole
from fedgma.simulation.algorithms import ALGORITHMS, readers
from fedgma.simulation.attacks import ATTACKS

MODELS = ("cnn", "lenet", "logistic", "mlp", "resnet18-bn", "resnet18-gn", "resnet18-gn-imagenet")

# data set -> model, local epochs, classes per client (SPEC 4.1); others get the values for small images
PAPER: dict[str, tuple[str, int, int]] = {
    "cifar10": ("resnet18-gn", 3, 2),
    "cifar100": ("resnet18-gn", 3, 10),
    "tinyimagenet": ("resnet18-gn", 12, 20),
    "femnist": ("lenet", 5, 2),
    "femnist-62": ("lenet", 5, 2),
    "femnist-by-sample": ("lenet", 5, 2),
}
SHIFTED = {"fedcmnist": "colour", "fedrotmnist": "rotation"}


# settings of algorithms; where one is None, the algorithm has a default of its own
ALGORITHM_SETTINGS = tuple(dict.fromkeys(name for row in ALGORITHMS.values() for name in row.settings))


def _readers(name: str) -> str:
    """The names of the rules that read a setting."""
    return ", ".join(rule for rule, row in RULES.items() if name in row.settings)


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


class AttackSettings(Section):
    """What malicious clients send in place of their updates."""

    name: Literal["none", *ATTACKS] = Field(default="none", description="kind of attack")  # type: ignore[valid-type]
    share: Share = Field(default=0.2, description="share of the clients that attack; the seed decides which")
    scale: Positive | None = Field(
        default=None, description="what the attack is scaled with; by default 1, 1.5 for `alie`"
    )
    target: Count = Field(default=0, description="for `backdoor`: the class that the trigger stands for")
    poisoned: Share = Field(default=0.5, description="for `backdoor`: share of an attacker's samples with the trigger")


class Settings(Section):
    """Everything that decides the outcome of one run."""

    dataset: str = Field(
        default="fmnist-mini",
        description="a known data set, or the path of your own: .npz, .csv, .parquet, text, a folder",
    )
    task: str = Field(
        default="classification",
        description=f"what the model learns: {', '.join(task_settings.TASKS)}, or your own as `file.py:Name`",
    )
    sequence_length: Whole = Field(default=64, description="for text: tokens of a sample")
    sequence_unit: Literal["window", "line"] = Field(default="window", description="for text: what a sample is")
    partition: PartitionSettings = PartitionSettings()
    shift: ShiftSettings = ShiftSettings()
    attack: AttackSettings = AttackSettings()
    clock: ClockSettings = ClockSettings()
    round_schedule: ScheduleSettings = ScheduleSettings()
    step_schedule: ScheduleSettings = ScheduleSettings()
    model: str | None = Field(
        default=None,
        description="a known model, `file.py:Name` or `package.module:Name`; by default lenet or resnet18-gn",
    )
    algorithm: Literal[*ALGORITHMS] = Field(  # type: ignore[valid-type]
        default="fedavg", description="local training and server optimiser"
    )
    aggregator: str = Field(
        default="gma",
        description=f"the rule by which updates become one step: {', '.join(RULES)}, or your own as `file.py:name`",
    )
    adapters: Literal["apart", "product"] = Field(
        default="apart",
        description="LoRA's A and B: aggregated apart, or as their product with a truncated SVD back to the rank",
    )
    tau: Share = Field(default=0.4, description=f"agreement threshold of {_readers('tau')}")
    inverse_sparsity_scale: bool = Field(
        default=False, description="for `and_mask`: divide by the share of entries that pass"
    )
    level: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.05, description="for `sign_test`: significance level at which votes are no accident"
    )
    threshold: Count = Field(default=4, description="for `rlr`: an entry with fewer votes has its step reversed")
    share: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        default=0.1,
        description="for `trimmed_mean`: share of the clients cut off at each end; for `multi_krum`: left out",
    )
    density: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.2, description="for `ties`: share of the entries of an update that count, the largest of each array"
    )
    smoothing: BelowOne = Field(
        default=0.9, description="for `wiener`: weight of the rounds before in the moments of signal and noise"
    )
    extrapolation: Positive = Field(default=1e-3, description="for `fedexp`: added to the squared norm of the mean")
    update_clip: Positive | None = Field(
        default=None, description="largest norm of a client's update; by default not clipped"
    )
    unmasked: str | None = Field(
        default=None,
        pattern=r"^[\w.*?!\[\]-]+$",
        description="pattern of arrays that are averaged without a mask, such as `fc3.*` for the output layer of lenet",
    )
    norm_factor: Positive | None = Field(
        default=None,
        description="an update of more than this many times the usual norm is refused, as in a deployment, where it "
        "is 10; by default none is",
    )
    weighting: Literal["samples", "uniform"] = Field(
        default="samples", description="weight of a client in the mean: its number of samples, or the same for all"
    )
    mask_position: Literal["after", "before"] = Field(
        default="after", description="for adaptive servers: mask after the preconditioner (as in the paper) or before"
    )
    rounds: Whole = Field(default=200, description="communication rounds")
    clients_per_round: Whole | None = Field(
        default=None, description="clients sampled in each round; by default 10, or all if there are fewer"
    )
    local_epochs: Whole | None = Field(
        default=None,
        description="passes over a client's data; by default 1, 3 for cifar, 5 for femnist, 12 for tinyimagenet",
    )
    local_steps: Whole | None = Field(
        default=None, description="largest number of local steps; by default set by `local_epochs` alone"
    )
    batch_size: Whole = Field(default=32, description="samples in a batch of local training")
    augment: Literal["none", "crop_flip", "half_crop_flip"] = Field(
        default="none",
        description="`crop_flip` shifts training images by up to 4 pixels and flips them, at random in every batch; "
        "`half_crop_flip` shifts a random half of them, with a border of the mean colour",
    )
    client_optimizer: Literal["sgd", "adamw"] = Field(
        default="sgd", description="optimiser of local training; its moments start at zero in every round"
    )
    client_learning_rate: Positive = Field(
        default=0.05, description="learning rate of local training, before `round_schedule` and `step_schedule`"
    )
    momentum: BelowOne = Field(
        default=0.9, description="momentum of local training; its buffer starts at zero in every round"
    )
    nesterov: bool = Field(default=False, description="for `sgd`: Nesterov's momentum")
    weight_decay: NotNegative = Field(
        default=0.0,
        description="decay of the weights in local training: in the gradient of `sgd`, decoupled in `adamw`",
    )
    client_beta1: BelowOne = Field(default=0.9, description="for `adamw`: decay of the first moment")
    client_beta2: BelowOne = Field(default=0.999, description="for `adamw`: decay of the second moment")
    client_epsilon: Positive = Field(default=1e-8, description="for `adamw`: added to the denominator")
    label_smoothing: BelowOne = Field(
        default=0.0, description="in local training: share of each label that is spread evenly over all classes"
    )
    gradient_clip: Positive | None = Field(
        default=None, description="largest norm of a local gradient; by default not clipped"
    )
    mu: Positive = Field(default=0.01, description="for `fedprox`: proximal coefficient")
    alpha: Positive | None = Field(default=None, description=f"as in the papers of {readers('alpha')}")
    beta: Positive | None = Field(default=None, description=f"as in the papers of {readers('beta')}")
    lambda_: Positive | None = Field(default=None, description=f"as in the papers of {readers('lambda_')}")
    rho: Positive | None = Field(default=None, description=f"size of the perturbation of {readers('rho')}")
    server_learning_rate: Positive | None = Field(
        default=None, description="by default 1; 0.01 for fedadagrad, fedadam and fedyogi"
    )
    beta1: BelowOne = Field(
        default=0.9, description="decay of the first moment of fedadam and fedyogi; momentum of fedavgm"
    )
    beta2: BelowOne = Field(default=0.99, description="decay of the second moment of fedadam and fedyogi")
    epsilon: Positive = Field(default=1e-3, description="added to the denominator in fedadam, fedyogi and fedadagrad")
    server_average: BelowOne = Field(
        default=0.0, description="evaluate an average of the server's models, in which the one before has this weight"
    )
    seed: int = Field(default=0, description="seed of initial weights, client sampling and batches")
    evaluate_every: Whole = Field(
        default=10, description="rounds between evaluations; each of the last ten rounds is evaluated"
    )
    validation: BelowOne = Field(
        default=0.0, description="share of each client's samples held out of training and scored as `validation`"
    )
    client_test_size: Count = Field(
        default=200, description="test samples for each client, drawn with its class frequencies; 0 for none"
    )
    mask_every: Count = Field(default=5, description="rounds between mask statistics; 0 for never")

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
        if is_path(self.dataset) and not looks_like_path(self.dataset) and existing(self.dataset) is None:
            raise ValueError(
                f"dataset: unknown data set {self.dataset!r}; known: {', '.join(dataset_names())}; or the path of your "
                f"own file or folder, such as {'./' + self.dataset!r}"
            )
        if self.model is not None and ":" not in self.model and self.model not in MODELS:
            raise ValueError(
                f"model: unknown model {self.model!r}; known: {', '.join(MODELS)}, or your own as 'file.py:Name'"
            )
        if unknown := unknown_rule(self.aggregator):
            hint = f"; {self.aggregator} is an algorithm" if self.aggregator in ALGORITHMS else ""
            raise ValueError(f"aggregator: {unknown}{hint}")
        task_settings.check_task(self.task)
        clock_settings.check_clock(self.clock)
        if self.shift.flip_low > self.shift.flip_high or self.shift.low > self.shift.high:
            raise ValueError("shift: the low end of a range must not be above its high end")
        return self


SECTIONS = ("partition", "shift", "attack", "clock", *local_training.AXES)


def is_path(dataset: str) -> bool:
    """Whether a data set is a user's file or folder: neither known by name nor passed in Python."""
    return not dataset.startswith(OWN) and dataset not in dataset_names()


def looks_like_path(dataset: str) -> bool:
    """Whether a name can only be the path of a file or folder."""
    return dataset.lower().endswith((*SUFFIXES, ".txt")) or "/" in dataset or os.sep in dataset


def complete(settings: Settings, *, own: bool = False) -> Settings:
    """Fill in settings that are None with the paper's choice for the data set and the algorithm.

    For a user's data (`own`, or a path) model, partition and number of clients stay open, since they depend on the
    data; `Materials.adopt` fills them in.

    >>> full = complete(Settings(algorithm="fedyogi"))
    >>> full.model, full.partition.clients, full.clients_per_round, full.server_learning_rate
    ('lenet', 100, 10, 0.01)
    """
    model, epochs, classes = PAPER.get(settings.dataset, ("lenet", 1, 2))
    own = own or is_path(settings.dataset) or settings.dataset.startswith(OWN)
    part = partition_settings.completed(settings.partition, seed=settings.seed, classes=classes, own=own)
    clients, usual = part.clients, None if own else 10
    shift = settings.shift.name or SHIFTED.get(settings.dataset, "none")
    if settings.dataset in SHIFTED and shift == "none":
        raise ConfigError(
            f"{settings.dataset} needs its shift, got shift.name = 'none'; for images without one use dataset = 'mnist'"
        )
    algorithm = ALGORITHMS[settings.algorithm]
    values = {name: value for name, value in algorithm.settings.items() if getattr(settings, name) is None}
    filled = settings.model_copy(
        update={
            **values,
            "partition": part,
            "shift": settings.shift.model_copy(update={"name": shift}),
            "attack": _complete_attack(settings.attack),
            "clock": clock_settings.completed(settings.clock),
            "round_schedule": local_training.completed(settings.round_schedule, settings.rounds),
            "model": settings.model or (None if own else model),
            "local_epochs": settings.local_epochs or epochs,
            "clients_per_round": settings.clients_per_round or (usual if clients is None else min(10, clients)),
            "server_learning_rate": settings.server_learning_rate or algorithm.learning_rate,
        }
    )
    algorithm.read(filled)  # checks its settings
    local_training.check_local(filled)
    if clients is not None and filled.clients_per_round is not None and filled.clients_per_round > clients:
        raise ConfigError(
            f"clients_per_round: expected at most partition.clients = {clients}, got {filled.clients_per_round}"
        )
    return filled


def _complete_attack(attack: AttackSettings) -> AttackSettings:
    if attack.name == "none":
        return AttackSettings()
    return attack.model_copy(update={"scale": attack.scale or ATTACKS[attack.name].scale})


def _shifts(known: str) -> Callable[[Settings], bool]:
    return lambda settings: (settings.shift.name or SHIFTED.get(settings.dataset)) == known


def _reads(name: str) -> Callable[[Settings], bool]:
    return lambda settings: settings.aggregator in RULES and name in RULES[settings.aggregator].settings


def _may_mask(settings: Settings) -> bool:
    return settings.aggregator not in RULES or RULES[settings.aggregator].may_mask


def _attacks(*known: str) -> Callable[[Settings], bool]:
    return lambda settings: settings.attack.name in known


def _algorithms(*known: str) -> Callable[[Settings], bool]:
    return lambda settings: settings.algorithm in known


# settings that only some runs use; if no run of a file uses one, the file is refused
USED: dict[str, Callable[[Settings], bool]] = {
    **{name: _reads(name) for name in RULE_SETTINGS},
    "unmasked": lambda s: _may_mask(s),
    "mask_position": lambda s: _may_mask(s) and ALGORITHMS[s.algorithm].server != "sgd",
    **{
        name: _algorithms(*(key for key, row in ALGORITHMS.items() if name in row.settings))
        for name in ALGORITHM_SETTINGS
    },
    "beta1": _algorithms("fedadam", "fedyogi", "fedavgm"),
    "beta2": _algorithms("fedadam", "fedyogi"),
    "epsilon": _algorithms("fedadam", "fedyogi", "fedadagrad"),
    **partition_settings.USED,
    **{f"shift.{name}": _shifts("colour") for name in ("palette", "coloring", "test_coloring", "jitter")},
    **{f"shift.{name}": _shifts("colour") for name in ("flip_low", "flip_high", "palette_seed")},
    **{f"shift.{name}": _shifts("rotation") for name in ("low", "high", "test")},
    "attack.share": lambda settings: settings.attack.name != "none",
    "attack.scale": _attacks(*(name for name in ATTACKS if name != "zero")),
    "attack.target": _attacks("backdoor"),
    "attack.poisoned": _attacks("backdoor"),
    **clock_settings.USED,
    **local_training.USED,
    **task_settings.USED,
}
_PLACES = [(*dotted.rpartition(".")[::2], used) for dotted, used in USED.items()]  # section and name of each


# settings that are recorded only where they differ from this: keeps fingerprints from before they existed
LATER = {"augment": "none", "adapters": "apart", "server_average": 0.0, "weighting": "samples"}


def record(settings: Settings) -> dict[str, Any]:
    """Settings as they are recorded: nested, with every default, None for those that the run does not use.

    >>> record(complete(Settings(aggregator="mean")))["tau"] is None
    True
    """
    nested = settings.model_dump()
    for section, name, used in _PLACES:
        if not used(settings):
            (nested[section] if section else nested)[name] = None
    if not settings.inverse_sparsity_scale:  # recorded only when it is on
        nested["inverse_sparsity_scale"] = None
    for name, default in LATER.items():
        if nested[name] == default:
            del nested[name]
    if settings.attack.name == "none":
        nested["attack"] = dict.fromkeys(nested["attack"])
    if is_path(settings.dataset):  # the folder is private, and does not change the run
        nested["dataset"] = PurePath(settings.dataset).name
    named = ((nested, "model"), (nested, "task"), (nested, "aggregator"), (nested["partition"], "name"))
    for held, own in named:
        file, sign, name = str(held.get(own)).rpartition(":")
        if file.endswith(".py"):
            held[own] = f"{PurePath(file).name}{sign}{name}"
    return task_settings.trimmed(local_training.trimmed(clock_settings.trimmed(nested), settings))
