"""One run, said in full: its data, model, local training, aggregation and server; and what a round gives back."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedgma.aggregation.masks import VoteMask, hard_mask, soft_mask
from fedgma.data.augmentations import AUGMENTATIONS
from fedgma.errors import ConfigError
from fedgma.simulation.batched.votes import VoteCounts, VoteStatistics
from fedgma.training.models import Model
from fedgma.training.task import Pool


class Federation(Protocol):
    """What a run needs to know of its data."""

    @property
    def train(self) -> Pool:
        """The training split."""

    @property
    def test(self) -> Pool:
        """The test split."""

    @property
    def clients(self) -> tuple[np.ndarray, ...]:
        """Each client's samples, as indices into the training split."""


# how votes become a mask; None is no mask
AGGREGATORS: dict[str, Callable[[float], VoteMask] | None] = {
    "mean": None,
    "gma": soft_mask,
    "and_mask": hard_mask,
    "damped_mean": soft_mask,  # the controls change this mask; see `trainers.controls`
    "shuffled_mask": soft_mask,
}


@dataclass(frozen=True, eq=False)
class RunSpec:
    """A federated run. Only the federation has no default."""

    federation: Federation
    model: Model = "lenet"
    seed: int = 0
    rounds: int = 1
    cohort: int = 10  # clients sampled a round
    local_epochs: int = 1
    local_steps: int | None = None  # stop after so many steps, whatever the epochs
    batch_size: int = 32
    augment: str = "none"  # or "crop_flip": every training image moved and flipped at random
    lr: float = 0.05
    momentum: float = 0.9  # of the clients, from zero in every round
    mu: float = 0.0  # FedProx
    clip: float = math.inf  # largest norm of a local gradient
    scaffold: bool = False
    aggregator: str = "gma"
    tau: float = 0.4
    mask_position: str = "after"
    server: str = "sgd"
    server_lr: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-3
    evaluate_every: int = 1  # rounds; the last round is always evaluated; 0 is never
    evaluate_on: tuple[str, ...] = ("test",)
    evaluate_last: int = 0  # so many rounds at the end are all evaluated
    per_client: bool = False  # accuracy on every client's own test samples too, where the federation has them
    measure_every: int = 0  # rounds between statistics of the votes; the first and the last are measured too

    def __post_init__(self) -> None:
        if self.aggregator not in AGGREGATORS:
            raise ConfigError(f"unknown aggregator {self.aggregator!r}; known: {', '.join(sorted(AGGREGATORS))}")
        if self.augment not in AUGMENTATIONS:
            raise ConfigError(f"unknown augmentation {self.augment!r}; known: {', '.join(AUGMENTATIONS)}")
        known = len(self.federation.clients)
        if not 1 <= self.cohort <= known:
            raise ConfigError(f"cohort must be from 1 to the federation's {known} clients, got {self.cohort}")
        whole = {"rounds": self.rounds, "local_epochs": self.local_epochs, "batch_size": self.batch_size}
        for name, value in whole.items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.momentum < 1 or self.lr <= 0 or not 0 <= self.tau <= 1:
            raise ConfigError(
                f"expected 0 <= momentum < 1, lr > 0 and 0 <= tau <= 1, got {self.momentum}, {self.lr} and {self.tau}"
            )

    def is_due(self, round: int) -> bool:
        """Whether the run is evaluated after this round."""
        if self.evaluate_every <= 0:
            return False
        return round % self.evaluate_every == 0 or round > self.rounds - max(1, self.evaluate_last)

    def is_measured(self, round: int, *, extra: bool = True) -> bool:
        """Whether the votes of this round are looked at closely; the last round is an extra."""
        if self.measure_every <= 0:
            return False
        return round == 1 or round % self.measure_every == 0 or (extra and round == self.rounds)

    def test_pools(self) -> dict[str, Pool]:
        """The pools to evaluate on: "test", or the federation's further ones by their names."""
        more: Mapping[str, Pool] = getattr(self.federation, "more_tests", {})
        known = {"test": self.federation.test, "train": self.federation.train, **more}
        for name in self.evaluate_on:
            if name not in known:
                raise ConfigError(f"unknown test pool {name!r}; this federation has: {', '.join(sorted(known))}")
        return {name: known[name] for name in self.evaluate_on}


class RoundRecord(NamedTuple):
    """One run's round in plain numbers."""

    run: int  # its place in the fleet
    round: int
    cohort: tuple[int, ...]
    train_loss: float  # on the batches as they came, weighted by samples
    train_accuracy: float
    clients: int  # counted; fewer than sampled where an update was not finite
    weight: float
    mask_mean: float
    agreement: float  # mean of |votes| / clients
    scores: dict[str, dict[str, float]]  # test pool -> loss and accuracy, where evaluated
    refused: tuple[int, ...] = ()  # clients whose update was not finite
    votes: VoteStatistics | None = None  # where measured
    client_accuracies: np.ndarray | None = None  # [client], where evaluated; NaN for a client without test samples


@dataclass(frozen=True, eq=False)
class Round:
    """A round of a fleet; its numbers stay on the device until `records` is read."""

    rounds: np.ndarray  # [run], number of the round just played
    cohorts: dict[int, np.ndarray]  # of the runs that played
    table: Tensor  # [run, 6]
    scores: dict[str, tuple[np.ndarray, Tensor]]
    counted: tuple[tuple[np.ndarray, np.ndarray, Tensor], ...] = ()  # lanes' runs and clients, and which were finite
    votes: dict[int, VoteCounts] = field(default_factory=dict)  # of the runs that were measured
    client_scores: dict[int, Tensor] = field(default_factory=dict)  # [client], of the runs that were evaluated so
    state: Any = field(default=None, repr=False)  # the fleet's state after the round
    arrived: torch.cuda.Event | None = None  # when what was sent is there

    def sent(self) -> "Round":
        """The same round on its way to the host, as one copy; reading it waits for no round that was begun later."""
        parts: list[Tensor] = []

        def noted(tensor: Tensor) -> Tensor:
            parts.append(tensor)
            return tensor

        self._mapped(noted)
        numbers = torch.cat([part.flatten().double() for part in parts])  # float64 holds all of them as they are
        event = None
        if numbers.is_cuda:
            there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers, event = there.copy_(numbers, non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        pieces = iter(torch.split(numbers, [part.numel() for part in parts]))
        return replace(self._mapped(lambda tensor: next(pieces).view(tensor.shape)), arrived=event)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Round":
        """The same round with every tensor changed, in a fixed order."""
        return replace(
            self,
            table=change(self.table),
            scores={name: (runs, change(values)) for name, (runs, values) in self.scores.items()},
            counted=tuple((runs, clients, change(fine)) for runs, clients, fine in self.counted),
            votes={run: votes.mapped(change) for run, votes in self.votes.items()},
            client_scores={run: change(values) for run, values in self.client_scores.items()},
        )

    @cached_property
    def records(self) -> list[RoundRecord]:
        """One record for each run that played; waits for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()
        rows = self.table.cpu().tolist()
        scores = {name: (runs.tolist(), values.cpu().tolist()) for name, (runs, values) in self.scores.items()}
        return [self._record(run, rows[run], scores) for run in self.cohorts]

    def _record(
        self, run: int, row: list[float], scores: dict[str, tuple[list[int], list[list[float]]]]
    ) -> RoundRecord:
        own = {}
        for name, (runs, values) in scores.items():
            if run in runs:
                own[name] = dict(zip(("loss", "accuracy"), values[runs.index(run)], strict=True))
        loss, accuracy, clients, weight, mask, agreement = row
        cohort = tuple(self.cohorts[run].tolist())
        numbers = (loss, accuracy, int(clients), weight, mask, agreement)
        votes, per_client = self.votes.get(run), self.client_scores.get(run)
        return RoundRecord(
            *(run, int(self.rounds[run]), cohort, *numbers, own),
            refused=self._refused(run),
            votes=None if votes is None else votes.statistics(),
            client_accuracies=None if per_client is None else per_client.float().cpu().numpy(),
        )

    def _refused(self, run: int) -> tuple[int, ...]:
        left = [clients[runs == run] for runs, clients in self._left_out]
        return tuple(int(client) for part in left for client in part)

    @cached_property
    def _left_out(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Runs and clients of the lanes that were not counted; waits for the device."""
        lanes = [(runs, clients, ~fine.bool().cpu().numpy()) for runs, clients, fine in self.counted]
        return [(runs[lost], clients[lost]) for runs, clients, lost in lanes if lost.any()]


def mask_tables(specs: Sequence[RunSpec], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """How each run masks: votes needed [run, clients + 1] and the mask below them [run]; None where nobody masks."""
    if all(AGGREGATORS[spec.aggregator] is None for spec in specs):
        return None
    most = max(spec.cohort for spec in specs)
    needed = np.zeros((len(specs), most + 1), np.int32)  # no vote needed: a plain mean
    below = np.zeros(len(specs), np.float32)
    for row, spec in enumerate(specs):
        rule = AGGREGATORS[spec.aggregator]
        if rule is not None:
            mask = rule(spec.tau)
            needed[row] = [mask.needed(clients) for clients in range(most + 1)]
            below[row] = math.nan if mask.below is None else mask.below
    return torch.from_numpy(needed).to(device), torch.from_numpy(below).to(device)
