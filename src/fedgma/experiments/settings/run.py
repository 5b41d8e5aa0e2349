"""The settings of one run: their names, types, ranges and defaults (the paper's).

A settings file holds only what differs from these defaults. A setting whose default is None is filled in by `complete`
with the paper's choice for the data set or the algorithm.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedgma.aggregation.rules import RULES, unknown_rule
from fedgma.data.files.locate import existing
from fedgma.data.files.locate import names as dataset_names
from fedgma.data.files.own.folders import SUFFIXES
from fedgma.errors import did_you_mean, nearest
from fedgma.experiments.settings.attack import AttackSettings
from fedgma.experiments.settings.clock import ClockSettings, check_clock
from fedgma.experiments.settings.local_training import AXES, ScheduleSettings
from fedgma.experiments.settings.partition import OWN, PartitionSettings
from fedgma.experiments.settings.section import BelowOne, Count, NotNegative, Positive, Section, Share, Whole
from fedgma.experiments.settings.shift import ShiftSettings
from fedgma.experiments.settings.task import TASKS, check_task
from fedgma.simulation.algorithms import ALGORITHMS, readers

MODELS = ("cnn", "lenet", "logistic", "mlp", "resnet18-bn", "resnet18-gn", "resnet18-gn-imagenet")


def _readers(name: str) -> str:
    """The names of the rules that read a setting."""
    return ", ".join(rule for rule, row in RULES.items() if name in row.settings)


class Settings(Section):
    """Everything that decides the outcome of one run."""

    dataset: str = Field(
        default="fmnist-mini",
        description="a known data set, or the path of your own: .npz, .csv, .parquet, text, a folder",
    )
    task: str = Field(
        default="classification",
        description=f"what the model learns: {', '.join(TASKS)}, or your own as `file.py:Name`",
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
        default=0.05, description="for `sign_test`: significance level at which votes are not chance"
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
        default=0.0,
        description="evaluate an exponential average of the server's models with this decay; 0: the last model",
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
                f"own file or folder, such as {'./' + self.dataset!r}{_near(self.dataset, dataset_names())}"
            )
        if self.model is not None and ":" not in self.model and self.model not in MODELS:
            raise ValueError(
                f"model: unknown model {self.model!r}; known: {', '.join(MODELS)}, or your own as 'file.py:Name'"
                f"{_near(self.model, MODELS)}"
            )
        if unknown := unknown_rule(self.aggregator):
            hint = f"; {self.aggregator} is an algorithm" if self.aggregator in ALGORITHMS else ""
            raise ValueError(f"aggregator: {unknown}{hint}")
        check_task(self.task)
        check_clock(self.clock)
        if self.shift.flip_low > self.shift.flip_high or self.shift.low > self.shift.high:
            raise ValueError("shift: the low end of a range must not be above its high end")
        return self


def _near(name: str, known: Iterable[str]) -> str:
    return did_you_mean(nearest(name, known))


SECTIONS = ("partition", "shift", "attack", "clock", *AXES)


def is_path(dataset: str) -> bool:
    """Whether a data set is a user's file or folder: neither known by name nor passed in Python."""
    return not dataset.startswith(OWN) and dataset not in dataset_names()


def looks_like_path(dataset: str) -> bool:
    """Whether a name can only be the path of a file or folder."""
    return dataset.lower().endswith((*SUFFIXES, ".txt")) or "/" in dataset or os.sep in dataset
