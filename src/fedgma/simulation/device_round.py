"""A round of a fleet: its numbers stay on the device until they are read, so that host and device work in parallel."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgma.errors import Diverged
from fedgma.simulation.batched.tallies import Broken
from fedgma.simulation.batched.votes import VoteCounts, VoteStatistics
from fedgma.simulation.timeline import Attendance

REASONS = ("nonfinite", "", "norm")  # why a lane was refused, by its verdict


class RoundRecord(NamedTuple):
    """One run's round in plain numbers."""

    run: int  # its position in the fleet
    round: int
    sampled: tuple[int, ...]  # clients drawn for the round
    train: dict[str, float]  # loss and metrics on the training batches before each step, weighted by samples
    clients: int  # counted: sampled clients whose update was not refused
    weight: float
    mask_mean: float
    agreement: float  # mean of |votes| / clients
    scores: dict[str, dict[str, float]]  # test pool -> loss and metrics, where evaluated
    refused: tuple[tuple[int, str], ...] = ()  # clients whose update was refused, and why
    votes: VoteStatistics | None = None  # where measured
    client_scores: np.ndarray | None = None  # [client], where evaluated; NaN for a client without test samples
    attendance: Attendance | None = None  # of a run with a clock

    @property
    def train_loss(self) -> float:
        """The loss on the training batches."""
        return self.train["loss"]


@dataclass(frozen=True, eq=False)
class Round:
    """A round of a fleet; its numbers stay on the device until `records` is read."""

    rounds: np.ndarray  # [run], number of the round just completed
    sampled: dict[int, np.ndarray]  # clients of each run that took part
    table: Tensor  # [run, figure and four more]
    scores: dict[str, tuple[np.ndarray, Tensor]]
    counted: tuple[tuple[np.ndarray, np.ndarray, Tensor], ...] = ()  # lanes' runs, clients and `verdicts`
    votes: dict[int, VoteCounts] = field(default_factory=dict)  # of the runs that were measured
    client_scores: dict[int, Tensor] = field(default_factory=dict)  # [client], of the runs that were evaluated so
    attended: dict[int, Attendance] = field(default_factory=dict)  # of the runs with a clock
    names: tuple[str, ...] = ("loss", "accuracy")  # of the figures; the last ones may be of evaluations alone
    broken: Broken | None = None  # runs whose rule gave values that are not finite; None: no rule could
    state: Any = field(default=None, repr=False)  # the fleet's state after the round
    arrived: torch.cuda.Event | None = None  # set once the copy to the host is complete

    def sent(self) -> "Round":
        """The same round, being copied to the host in one transfer; reading it does not wait for later rounds."""
        parts: list[Tensor] = []

        def noted(tensor: Tensor) -> Tensor:
            parts.append(tensor)
            return tensor

        self._mapped(noted)
        numbers = torch.cat([part.flatten().double() for part in parts])  # float64 represents all of them exactly
        event = None
        if numbers.is_cuda:
            pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers, event = pinned.copy_(numbers, non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        pieces = iter(torch.split(numbers, [part.numel() for part in parts]))
        return replace(self._mapped(lambda tensor: next(pieces).view(tensor.shape)), arrived=event)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "Round":
        """The same round with every tensor changed, in a fixed order."""
        return replace(
            self,
            table=change(self.table),
            scores={name: (runs, change(values)) for name, (runs, values) in self.scores.items()},
            counted=tuple((runs, clients, change(verdict)) for runs, clients, verdict in self.counted),
            votes={run: votes.mapped(change) for run, votes in self.votes.items()},
            client_scores={run: change(values) for run, values in self.client_scores.items()},
            broken=None if self.broken is None else self.broken._replace(runs=change(self.broken.runs)),
        )

    @cached_property
    def records(self) -> list[RoundRecord]:
        """One record for each run that trained in this round; waits for the device.

        Raises `Diverged` if a rule gave values that are not finite.
        """
        if self.arrived is not None:
            self.arrived.synchronize()
        if self.broken is not None and bool(self.broken.runs.any()):
            run = int(self.broken.runs.nonzero()[0])
            name = self.broken.names[run]
            raise Diverged(f"rule {name!r} gave values that are not finite in round {self.rounds[run]}")
        rows = self.table.cpu().tolist()
        scores = {name: (runs.tolist(), values.cpu().tolist()) for name, (runs, values) in self.scores.items()}
        return [self._record(run, rows[run], scores) for run in self.sampled]

    def _record(
        self, run: int, row: list[float], scores: dict[str, tuple[list[int], list[list[float]]]]
    ) -> RoundRecord:
        by_pool = {}
        for name, (runs, values) in scores.items():
            if run in runs:
                by_pool[name] = dict(zip(self.names, values[runs.index(run)], strict=True))
        *train, clients, weight, mask, agreement = row
        sampled = tuple(self.sampled[run].tolist())
        numbers = (dict(zip(self.names, train, strict=False)), int(clients), weight, mask, agreement)
        votes, per_client = self.votes.get(run), self.client_scores.get(run)
        return RoundRecord(
            *(run, int(self.rounds[run]), sampled, *numbers, by_pool),
            refused=self._refused(run),
            votes=None if votes is None else votes.statistics(),
            client_scores=None if per_client is None else per_client.float().cpu().numpy(),
            attendance=self.attended.get(run),
        )

    def _refused(self, run: int) -> tuple[tuple[int, str], ...]:
        left = [(clients[runs == run], why[runs == run]) for runs, clients, why in self._left_out]
        return tuple((int(client), REASONS[int(why)]) for part in left for client, why in zip(*part, strict=True))

    @cached_property
    def _left_out(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Runs, clients and verdicts of the lanes that were not counted; waits for the device."""
        lanes = [(runs, clients, verdict.cpu().numpy()) for runs, clients, verdict in self.counted]
        return [(runs[w != 1], clients[w != 1], w[w != 1]) for runs, clients, w in lanes if (w != 1).any()]


def verdicts(counted: Tensor, longer: Tensor | None) -> Tensor:
    """What became of lanes, as a position in `REASONS`: 1 (or true) is counted.

    >>> verdicts(torch.tensor([True, False, False]), torch.tensor([False, False, True])).tolist()
    [1, 0, 2]
    """
    return counted if longer is None else counted.to(torch.uint8) + 2 * longer.to(torch.uint8)
