"""How clients voted in a round: for the whole model and per layer, out of one count of |votes| (SPEC 9.1).

Votes are whole numbers from 0 to the number of clients, so mean agreement, mean mask and the share of entries below the
threshold all follow from how often each number occurs; the count is made on the device and is a few numbers a layer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Layers(NamedTuple):
    """Which layer an entry belongs to: weight and bias of a module are one layer."""

    names: tuple[str, ...]
    owner: Tensor  # int64 [entry]


class Share(NamedTuple):
    """One layer, or the whole model."""

    mean: float  # of the mask
    agreement: float  # mean of |votes| / clients
    below: float | None  # share of entries that the mask holds back; None without a mask


class VoteStatistics(NamedTuple):
    """One run's round in plain numbers."""

    whole: Share
    ratio: float  # norm of the masked over that of the plain mean
    histogram: tuple[float, ...]  # share of entries at |votes| = 0 .. clients
    layers: dict[str, Share]


class VoteCounts(NamedTuple):
    """One run's round, still on the device."""

    counts: Tensor  # int64 [layer, votes]
    clients: Tensor  # int64, counted
    ratio: Tensor
    needed: Tensor | None  # int32 [clients + 1], least |votes| that pass; None without a mask
    below: Tensor | None  # what the mask is under them; NaN for the agreement
    names: tuple[str, ...]

    def statistics(self) -> VoteStatistics:
        """Waits for the device."""
        clients = max(int(self.clients), 1)
        counts = self.counts.cpu().numpy()[:, : clients + 1]
        agreement = np.arange(clients + 1) / clients
        passed = mask = None
        if self.needed is not None and self.below is not None:
            under = agreement if bool(self.below.isnan()) else np.full(clients + 1, float(self.below))
            passed = np.arange(clients + 1) >= int(self.needed[clients])
            mask = np.where(passed, 1.0, under)
        shares = [_share(row, agreement, passed, mask) for row in (counts.sum(0), *counts)]
        histogram = counts.sum(0) / max(counts.sum(), 1)
        layers = dict(zip(self.names, shares[1:], strict=True))
        return VoteStatistics(shares[0], float(self.ratio), tuple(histogram.tolist()), layers)


def lay_out(shapes: Sequence[tuple[str, torch.Size]], device: torch.device) -> Layers:
    """The layers of a model by the names of its parameters.

    >>> lay_out([("a.weight", torch.Size([2])), ("a.bias", torch.Size([1])), ("b", torch.Size([1]))], "cpu").owner
    tensor([0, 0, 0, 1])
    """
    owners = [name.rpartition(".")[0] or name for name, _ in shapes]
    names = tuple(dict.fromkeys(owners))
    rows = np.repeat([names.index(owner) for owner in owners], [shape.numel() for _, shape in shapes])
    return Layers(names, torch.from_numpy(rows.astype(np.int64)).to(device))


def count(
    votes: Tensor,
    clients: Tensor,
    layers: Layers,
    mean: Tensor,
    mask: Tensor | None,
    *,
    rule: tuple[Tensor, Tensor] | None,
) -> VoteCounts:
    """Count one run's |votes| [entry] by layer; `rule` is its row of the mask tables, None where it does not mask."""
    most = max(int(clients), 1)
    size = votes.abs().to(torch.int64)
    found = torch.bincount(layers.owner * (most + 1) + size, minlength=len(layers.names) * (most + 1))
    plain = mean.norm()
    moved = plain if mask is None else (mask * mean).norm()
    ratio = torch.where(plain > 0, moved / plain, 1.0)
    needed, below = rule if rule is not None else (None, None)
    return VoteCounts(found.view(len(layers.names), most + 1), clients, ratio, needed, below, layers.names)


def _share(counts: np.ndarray, agreement: np.ndarray, passed: np.ndarray | None, mask: np.ndarray | None) -> Share:
    total = max(int(counts.sum()), 1)
    held = None if passed is None else float(counts[~passed].sum() / total)
    return Share(
        mean=1.0 if mask is None else float(counts @ mask / total),
        agreement=float(counts @ agreement / total),
        below=held,
    )
