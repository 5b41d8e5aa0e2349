"""Models of earlier rounds that clients still work on, and what becomes of updates that began on them.

An update is relative to the model that its client started from. A version is kept while a client is at work on it, or
its update waits in the buffer, so there are never more versions than such clients.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgma.simulation.timeline import RunClock, Timeline
from fedgma.training.lane_batch import LaneBatch
from fedgma.training.stacked import Stacked, ship


class Version(NamedTuple):
    """The model of one run before a round."""

    params: Tensor  # [entry]
    buffers: Stacked


Versions = Mapping[tuple[int, int], Version]  # (run, round) -> the model before that round


class Begun(NamedTuple):
    """What lanes start from: the models of all runs, then older versions that some lane needs."""

    params: Tensor  # [row, entry]
    buffers: Stacked
    rows: np.ndarray  # int64 [lane]


class ReadyLanes(NamedTuple):
    """Lanes that are ready to train: their batches, their weights in the mean, and what they start from."""

    lanes: np.ndarray  # int64 [lane, 3]: run, client, round
    batch: LaneBatch
    weights: np.ndarray  # [lane]
    begun: Begun

    def take(self, rows: np.ndarray) -> "ReadyLanes":
        """Some of the lanes."""
        begun = self.begun._replace(rows=self.begun.rows[rows])
        return ReadyLanes(self.lanes[rows], self.batch.take(rows), self.weights[rows], begun)


def begin(versions: Versions, rounds: np.ndarray, lanes: np.ndarray, params: Tensor, buffers: Stacked) -> Begun:
    """The start of lanes [lane, 3] (run, client, round), given the present models [run, ...] before `rounds` [run]."""
    run, started = lanes[:, 0], lanes[:, 2]
    stale = started != rounds[run]
    if not stale.any():
        return Begun(params, buffers, run)
    keys = list(zip(run[stale].tolist(), started[stale].tolist(), strict=True))
    needed = {key: len(params) + position for position, key in enumerate(dict.fromkeys(keys))}
    rows = run.copy()
    rows[stale] = [needed[key] for key in keys]
    old = [versions[key] for key in needed]
    return Begun(
        torch.cat([params, torch.stack([version.params for version in old])]),
        {name: torch.cat([value, torch.stack([v.buffers[name] for v in old])]) for name, value in buffers.items()},
        rows,
    )


def keep(
    versions: Versions, timelines: Mapping[int, Timeline], rounds: np.ndarray, params: Tensor, buffers: Stacked
) -> dict[tuple[int, int], Version]:
    """The versions that clients of these timelines work on, out of the older ones and the models before `rounds`."""
    kept = {}
    for run, timeline in timelines.items():
        for started in np.unique(timeline.rounds[np.isfinite(timeline.arrivals)]).tolist():
            known = versions.get((run, started))
            if known is None and started == rounds[run]:
                known = Version(params[run].clone(), {name: value[run].clone() for name, value in buffers.items()})
            if known is not None:
                kept[run, started] = known
    return kept


def discount(clocks: Sequence[RunClock | None], rounds: np.ndarray, lanes: np.ndarray, updates: Tensor) -> Tensor:
    """The updates [lane, entry], those of older versions multiplied with (1 + age)^-staleness_power."""
    ages = rounds[lanes[:, 0]] - lanes[:, 2]
    if not ages.any():
        return updates
    powers = np.array([0.0 if clock is None else clock.clock.staleness_power for clock in clocks])
    factors = (1.0 + ages) ** -powers[lanes[:, 0]]
    return updates * ship(factors.astype(np.float32), updates.device)[:, None]


def silence(
    clocks: Sequence[RunClock | None],
    rounds: np.ndarray,
    lanes: np.ndarray,
    votes: Tensor,
    updates: Tensor,
    counted: Tensor,
) -> None:
    """Take back the votes [run, entry] of older versions, in runs where only the present one votes."""
    stale = lanes[:, 2] != rounds[lanes[:, 0]]
    if not stale.any():
        return
    fresh = np.array([clock is not None and clock.clock.voters == "fresh" for clock in clocks])
    rows = np.flatnonzero(stale & fresh[lanes[:, 0]])
    if len(rows):
        picked, owner = ship(rows, votes.device), ship(lanes[rows, 0], votes.device)
        signs = updates[picked].sign() * counted[picked, None]
        votes.index_add_(0, owner, -signs.to(votes.dtype))  # whole numbers: in any order the same


def exported(versions: Versions, run: int) -> dict[int, Version]:
    """The versions of one run by round."""
    return {round: version for (owner, round), version in versions.items() if owner == run}
