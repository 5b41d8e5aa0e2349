"""Attacks in a fleet: the rows of malicious clients are replaced between local training and the tally."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgma.aggregation.masks import VoteMask
from fedgma.seeds import generator
from fedgma.simulation.attacks import Known, malicious
from fedgma.simulation.spec import RunSpec
from fedgma.training.lane_batch import LaneBatch
from fedgma.training.stacked import ship

Draws = dict[tuple[int, int, int], np.ndarray]  # (seed, round, client) -> numbers; the arms of a seed share them


class Attackers(NamedTuple):
    """The attacked runs of a fleet, and which of their clients attack."""

    specs: tuple[RunSpec, ...]
    malicious: dict[int, np.ndarray]  # run -> bool [client]


def lay_out(specs: Sequence[RunSpec]) -> Attackers | None:
    """Draw the attackers of every run; None if no run has any."""
    drawn = {
        run: malicious(spec.seed, len(spec.federation.clients), spec.attack.share)
        for run, spec in enumerate(specs)
        if spec.attack is not None
    }
    drawn = {run: chosen for run, chosen in drawn.items() if chosen.any()}
    return Attackers(tuple(specs), drawn) if drawn else None


def send(attackers: Attackers, lane_batch: LaneBatch, rounds: np.ndarray, updates: Tensor) -> Tensor:
    """What the server receives [lane, entry]; `rounds` [run] is the round that each run plays.

    All lanes of a run must be in the lane batch, since attackers know all updates of their run.
    """
    sent, draws = updates.clone(), Draws()
    rows = lru_cache(partial(_rows, device=updates.device))
    for run, attacks in attackers.malicious.items():
        lanes = slice(*np.searchsorted(lane_batch.run, [run, run + 1]).tolist())
        clients = lane_batch.client[lanes]
        attacking = attacks[clients]
        if attacking.any():
            spec, trained = attackers.specs[run], updates[lanes]
            bad, good = rows(attacking.tobytes())
            noise = partial(_noise, draws, spec.seed, int(rounds[run]), clients[attacking], updates)
            assert spec.attack is not None
            known = Known(trained[bad], trained[good], _votes_needed(spec, len(clients)), noise)
            sent[lanes][bad] = spec.attack.send(known)
    return sent


def _rows(attacking: bytes, device: torch.device) -> tuple[Tensor, Tensor]:
    """The rows of attackers and of the others, which are all rows if everybody attacks; copied once for all arms."""
    chosen = np.frombuffer(attacking, bool)
    others = np.arange(len(chosen)) if chosen.all() else np.flatnonzero(~chosen)
    return ship(np.flatnonzero(chosen), device), ship(others, device)


def _votes_needed(spec: RunSpec, clients: int) -> int:
    """The smallest |votes| that a run's mask passes; 0 without a mask made of votes."""
    return spec.rule.mask.needed(clients) if isinstance(spec.rule.mask, VoteMask) else 0


def _noise(draws: Draws, seed: int, round: int, clients: np.ndarray, like: Tensor) -> Tensor:
    """Standard normal numbers, float32 [client, entry]."""
    for client in clients.tolist():
        if (seed, round, client) not in draws:
            source = generator(seed, "attack", round, client)
            draws[seed, round, client] = source.standard_normal(like.shape[1], np.float32)
    return ship(np.stack([draws[seed, round, client] for client in clients.tolist()]), like.device)
