"""The server's part of a round as one function of tensors: tally, rule, server step, and the round's numbers.

Most fleets need nothing else between training and the next round: their rules are means with or without a mask of
votes, their optimisers are built in, and nothing is carried, bounded or attacked. On a GPU that function is captured
(`training.replay`), because the launches of a small model take longer than its round.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgma.aggregation import kernels
from fedgma.aggregation.masks import VoteMask
from fedgma.simulation.batched import optimizers, rules, tallies
from fedgma.training.lane_batch import Trained
from fedgma.training.replay import LARGEST, Replayed
from fedgma.training.stacked import Stacked
from fedgma.training.task import Columns, Task, figures


class Concluded(NamedTuple):
    """The server's state after a round, and the round's numbers."""

    params: Tensor  # [run, entry]
    moments: optimizers.Moments
    table: Tensor  # [run, figure and four more]
    counted: Tensor  # bool [lane]
    buffers: Stacked  # [run, ...]


class ServerPart:
    """What becomes of trained lanes, in fleets that `is_plain` holds for; `buffers` are names in the model's state."""

    def __init__(
        self,
        rules: rules.Rules,
        optimizers: optimizers.Optimizers,
        task: Task,
        columns: Columns,
        buffers: Sequence[str] = (),
        *,
        replay: bool,
    ) -> None:
        self.rules, self.optimizers, self.task, self.columns = rules, optimizers, task, columns
        self.buffers = tuple(buffers)
        self._replayed = Replayed(self._of_equal_runs) if replay else None

    def __call__(
        self,
        run: np.ndarray,
        weights: np.ndarray,
        trained: Trained,
        params: Tensor,
        moments: optimizers.Moments,
        buffers: Stacked | None = None,
    ) -> Concluded:
        """Tally, rule and server step of lanes; `run` [lane], rising, is the run of each; `buffers` are the runs'."""
        owners = tallies.owners_of(run, weights, len(params), params.device)
        average = _of_averages(moments)
        held = [part[name] for part in (trained.buffers, buffers or {}) for name in self.buffers]
        given = (*owners, trained.flat, trained.loss, trained.measures, params, moments.z, moments.v, *held, *average)
        captured = self._replayed is not None and trained.flat.numel() <= LARGEST
        if captured and (not self.buffers or (len(run) > 1 and np.array_equal(run, _equal_runs(owners.owner)))):
            after, z, v, table, counted, *rest = self._replayed(*given)  # type: ignore[misc]
        else:
            after, z, v, table, counted, *rest = self._tensors(run, weights, *given)
        held_after = dict(zip(self.buffers, rest, strict=False))
        averages = dict(zip(("average", "models"), rest[len(held_after) :], strict=False))
        return Concluded(after, moments._replace(z=z, v=v, **averages), table, counted, held_after)

    def _of_equal_runs(self, *given: Tensor) -> Sequence[Tensor]:
        """The same on a GPU, which reads runs and weights of lanes from `Owners`; buffers need runs of equal size."""
        run = _equal_runs(given[2]) if self.buffers else np.empty(0, np.int64)
        return self._tensors(run, np.empty(0), *given)

    def _tensors(self, run: np.ndarray, weights: np.ndarray, *given: Tensor) -> Sequence[Tensor]:
        """The same with tensors alone, in the order of `__call__`."""
        weight, edges, owner, flat, loss, measures, params, z, v, *rest = given
        names, number = self.buffers, len(self.buffers)
        of_lanes, of_runs = (dict(zip(names, part, strict=True)) for part in (rest[:number], rest[number : 2 * number]))
        sums = tallies.empty(params, of_runs, self.columns.number)
        trained = Trained(flat, self.rules.shapes, of_lanes, loss, measures)
        owners = tallies.Owners(weight, edges, owner)
        added = rules.add(self.rules, sums, {}, run, weights, trained, owners=owners)
        merged = rules.merge(self.rules, sums, {}, of_runs)
        moments = optimizers.Moments(z, v, (None,) * len(params), *rest[2 * number :])
        after, moments = optimizers.step(self.optimizers, merged, moments, params)
        average = _of_averages(moments)
        table = numbers(self.task, self.columns, sums, merged)
        return after, moments.z, moments.v, table, added.counted, *(merged.buffers[name] for name in names), *average


def _of_averages(moments: optimizers.Moments) -> tuple[Tensor, ...]:
    return () if moments.average is None or moments.models is None else (moments.average, moments.models)


def _equal_runs(owner: Tensor) -> np.ndarray:
    """The run of each lane, if all runs have the same number of lanes; `owner` is [run, lane].

    >>> _equal_runs(torch.zeros(2, 6)).tolist()
    [0, 0, 0, 1, 1, 1]
    """
    runs, lanes = owner.shape
    return np.repeat(np.arange(runs), lanes // runs)


def is_plain(rules: rules.Rules, optimizers: optimizers.Optimizers) -> bool:
    """Whether all rules are means with or without a mask of votes, and all optimisers are built in."""
    for rule in rules.rules:
        masked = rule.mask is None or isinstance(rule.mask, VoteMask)
        if not masked or not rule.streams or rule.prepare is not None:
            return False
    return not (rules.computed or rules.scaled is not None or rules.further or optimizers.own)


def can_replay(task: Task, device: torch.device) -> bool:
    """Whether the function can be captured: a user's summary of a task may do anything, and triton may be missing."""
    return device.type == "cuda" and task.summary is None and kernels.load_gpu_kernels() is not None


def numbers(task: Task, columns: Columns, sums: tallies.Sums, merged: tallies.Merged) -> Tensor:
    """The numbers of a round [run, figure and four more]: figures of training, clients, weight, mask, agreement.

    The figures of training are NaN where no client counted.
    """
    trained = sums.metrics / sums.weight.clamp(min=1)[:, None]
    scored = figures(task, columns, trained[:, 0], trained[:, 1:])
    scored = scored.masked_fill(sums.clients[:, None] == 0, torch.nan)
    mask = torch.ones_like(sums.weight) if merged.mask is None else merged.mask.mean(1)
    agreement = _vote_sizes(sums) / (sums.votes.shape[1] * sums.clients.clamp(min=1))
    parts = (sums.clients[:, None].double(), sums.weight[:, None], mask[:, None].double(), agreement[:, None].double())
    return torch.cat([scored, *parts], 1)


def _vote_sizes(sums: tallies.Sums) -> Tensor:
    """The sum of |votes| of each run [run]; where int32 holds it, a CPU adds three times as fast as in int64."""
    on_cpu = sums.votes.device.type == "cpu"  # a GPU is not asked for the number of clients
    small = on_cpu and sums.votes.shape[1] * int(sums.clients.max()) < 2**31
    return sums.votes.abs().sum(1, dtype=torch.int32 if small else torch.int64)
