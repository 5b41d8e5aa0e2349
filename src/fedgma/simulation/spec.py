"""One run in full: its data, model, local training, rule and server optimiser."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import numpy as np

from fedgma.aggregation.optimizers import ServerOptimizer, sgd
from fedgma.aggregation.rule import Rule, Space
from fedgma.aggregation.rules import masked_mean
from fedgma.data.augmentations import AUGMENTATIONS
from fedgma.data.pools import Pool
from fedgma.errors import ConfigError
from fedgma.simulation.algorithms import Algorithm, fedavg
from fedgma.simulation.attacks import Attack
from fedgma.simulation.clock import Clock
from fedgma.training.local_steps import OPTIMIZERS
from fedgma.training.models import Model
from fedgma.training.schedules import CONSTANT, Schedule, check_last_rate
from fedgma.training.task import Task
from fedgma.training.tasks import CLASSIFICATION, smoothed


class Federation(Protocol):
    """The data of a run, divided among clients."""

    @property
    def train(self) -> Pool:
        """The training split."""

    @property
    def test(self) -> Pool:
        """The test split."""

    @property
    def clients(self) -> tuple[np.ndarray, ...]:
        """Each client's samples, as indices into the training split."""


WEIGHTINGS = ("samples", "uniform")
# settings that are equal in all runs of a fleet; so are input shape and device of their data
SHARED = ("task", "model", "batch_size", "augment", "client_optimizer", "label_smoothing", "adapters")


@dataclass(frozen=True, eq=False)
class RunSpec:
    """A federated run. Only the federation has no default."""

    federation: Federation
    model: Model = "lenet"
    task: Task = CLASSIFICATION  # what the model learns: loss and metrics
    seed: int = 0
    rounds: int = 1
    clients_per_round: int = 10
    local_epochs: int = 1
    local_steps: int | None = None  # largest number of local steps; None: all of `local_epochs`
    batch_size: int = 32
    smallest_batch: int = 1  # a last batch of fewer samples is left out, and so is a client with fewer samples
    augment: str = "none"  # or one of `AUGMENTATIONS`: training images moved and flipped at random
    client_optimizer: str = "sgd"  # or "adamw"; its moments start at zero in every round
    client_learning_rate: float = 0.05
    round_schedule: Schedule = CONSTANT  # of the rate over the rounds
    step_schedule: Schedule = CONSTANT  # of the rate over the local steps of a round
    momentum: float = 0.9  # of SGD, as is the next
    nesterov: bool = False
    weight_decay: float = 0.0  # in the gradient for SGD, apart from it for AdamW
    client_beta1: float = 0.9  # of AdamW, as are the next two
    client_beta2: float = 0.999
    client_epsilon: float = 1e-8
    label_smoothing: float = 0.0  # share of each label that is spread over all classes, in the loss of training
    gradient_clip: float = math.inf  # largest norm of a local gradient
    algorithm: Algorithm = field(default_factory=fedavg)  # what it adds to federated averaging
    rule: Rule = field(default_factory=masked_mean)  # how updates become one step
    optimizer: ServerOptimizer = field(default_factory=sgd)  # how the server applies the step
    weighting: str = "samples"  # of clients in the mean: their numbers of samples, or "uniform"
    norm_factor: float | None = None  # an update of more than this many times the usual norm is refused
    attack: Attack | None = None  # what malicious clients send
    clock: Clock | None = None  # how long clients take; None: rounds have no duration
    evaluate_every: int = 1  # rounds; the last round is always evaluated; 0 is never
    evaluate_on: tuple[str, ...] = ("test",)
    evaluate_last: int = 0  # this many rounds at the end are all evaluated
    per_client: bool = False  # scores on every client's own test samples too, where the federation has them
    mask_every: int = 0  # rounds between statistics of the votes; the first and the last are measured too

    def __post_init__(self) -> None:
        if self.augment not in AUGMENTATIONS:
            raise ConfigError(f"unknown augmentation {self.augment!r}; known: {', '.join(AUGMENTATIONS)}")
        known = len(self.federation.clients)
        if not 1 <= self.clients_per_round <= known:
            raise ConfigError(
                f"clients_per_round must be from 1 to the federation's {known} clients, got {self.clients_per_round}"
            )
        whole = {"rounds": self.rounds, "local_epochs": self.local_epochs, "batch_size": self.batch_size}
        for name, value in whole.items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.momentum < 1 or self.client_learning_rate <= 0:
            raise ConfigError(
                f"expected 0 <= momentum < 1 and client_learning_rate > 0, got {self.momentum} and "
                f"{self.client_learning_rate}"
            )
        self._check_local_training()
        if self.weighting not in WEIGHTINGS:
            raise ConfigError(f"unknown weighting {self.weighting!r}; known: {', '.join(WEIGHTINGS)}")
        if self.algorithm.lookahead and self.optimizer.name != "momentum":
            raise ConfigError(
                f"a lookahead (FedACG) needs the server optimiser 'momentum', got {self.optimizer.name!r}"
            )
        if self.norm_factor is not None and not self.norm_factor > 0:
            raise ConfigError(f"norm_factor must be a number above 0, or None for no bound, got {self.norm_factor!r}")
        if self.clock is not None:
            self._check_clock(self.clock, known)

    def _check_clock(self, clock: Clock, known: int) -> None:
        asked = clock.asked(self.clients_per_round)
        if asked > known:
            raise ConfigError(
                f"the clock asks {asked} clients at a time (over_sample or concurrency), but there are {known}"
            )
        if clock.concurrency is not None and (self.algorithm.keeps != "nothing" or self.algorithm.lookahead):
            raise ConfigError(
                "asynchronous rounds have no form for algorithms that carry arrays from round to round or look ahead; "
                "use fedavg, fedprox, fedsam or an adaptive server, or a synchronous clock"
            )

    def _check_local_training(self) -> None:
        if self.client_optimizer not in OPTIMIZERS:
            raise ConfigError(f"unknown client_optimizer {self.client_optimizer!r}; known: {', '.join(OPTIMIZERS)}")
        if not 0 <= self.label_smoothing < 1:
            raise ConfigError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")
        smoothed(self.task, self.label_smoothing)
        if self.weight_decay < 0 or self.client_epsilon <= 0:
            raise ConfigError(
                f"expected weight_decay >= 0 and client_epsilon > 0, got {self.weight_decay} and {self.client_epsilon}"
            )
        if not (0 <= self.client_beta1 < 1 and 0 <= self.client_beta2 < 1):
            raise ConfigError(
                "expected client_beta1 and client_beta2 at least 0 and below 1, got "
                f"{self.client_beta1} and {self.client_beta2}"
            )
        if self.nesterov and not (self.client_optimizer == "sgd" and self.momentum > 0):
            raise ConfigError("nesterov needs client_optimizer 'sgd' with momentum above 0")
        check_last_rate(self.client_learning_rate, self.round_schedule, self.rounds)
        if self.algorithm.reads_gradients and self.client_optimizer != "sgd":
            raise ConfigError(
                "this algorithm reads the clients' mean gradient from how far SGD moved them, so it needs "
                f"client_optimizer 'sgd', got {self.client_optimizer!r}"
            )

    @cached_property
    def sizes(self) -> np.ndarray:
        """How many samples every client has, int64 [client]."""
        return np.array([len(samples) for samples in self.federation.clients], np.int64)

    @property
    def adapters(self) -> Space | None:
        """The space in which the rule works; None for the parameters themselves."""
        return self.rule.space

    def is_due(self, round: int) -> bool:
        """Whether the run is evaluated after this round."""
        if self.evaluate_every <= 0:
            return False
        return round % self.evaluate_every == 0 or round > self.rounds - max(1, self.evaluate_last)

    def is_measured(self, round: int, *, extra: bool = True) -> bool:
        """Whether statistics of the votes are recorded in this round; with `extra`, also in the last round."""
        if self.mask_every <= 0:
            return False
        return round == 1 or round % self.mask_every == 0 or (extra and round == self.rounds)

    def test_pools(self) -> dict[str, Pool]:
        """The pools to evaluate on, by name: "test", "train", or a further test pool of the federation."""
        more: Mapping[str, Pool] = getattr(self.federation, "more_tests", {})
        known = {"test": self.federation.test, "train": self.federation.train, **more}
        for name in self.evaluate_on:
            if name not in known:
                raise ConfigError(f"unknown test pool {name!r}; this federation has: {', '.join(sorted(known))}")
        return {name: known[name] for name in self.evaluate_on}


def fit_batches(specs: Sequence[RunSpec]) -> tuple[RunSpec, ...]:
    """The same runs with batches no larger than the largest client of all: a larger one would be padding."""
    federations = {id(spec.federation): spec.federation for spec in specs}.values()
    largest = max((len(samples) for federation in federations for samples in federation.clients), default=0)
    most = max(largest, *(spec.smallest_batch for spec in specs))  # else clients that are too small were trained
    fitted = {id(spec): spec if spec.batch_size <= most else replace(spec, batch_size=most) for spec in specs}
    return tuple(fitted[id(spec)] for spec in specs)


def check_together(specs: Sequence[RunSpec]) -> None:
    """Raise `ConfigError` unless these runs can be in one fleet."""
    if not specs:
        raise ConfigError("a fleet needs at least one run")
    for spec in specs:
        shape, first = spec.federation.train.x.shape[1:], specs[0].federation.train.x.shape[1:]
        same = all(getattr(spec, name) == getattr(specs[0], name) for name in SHARED)
        if not same or shape != first:
            raise ConfigError(
                f"the runs of a fleet must share {', '.join(SHARED)} and the shape of inputs; put runs that differ "
                "in another fleet"
            )
        if spec.federation.train.y.device != specs[0].federation.train.y.device:
            raise ConfigError("the data of a fleet's runs must be on one device; move them with `place`")
