"""How clients voted in a round: for the whole model and per layer, out of one count of |votes|.

|votes| is an integer from 0 to the number of clients, so mean agreement, mean mask and the share of entries below the
threshold all follow from how often each value occurs. The device counts, and returns a few numbers for each layer. The
stability of a mask compares the entries that pass now with those that passed when the votes were last measured.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class Layers(NamedTuple):
    """Which layer an entry belongs to: weight and bias of a module are one layer."""

    names: tuple[str, ...]
    owner: Tensor  # int64 [entry]
    parts: tuple[tuple[int, slice], ...]  # the same as ranges of entries: layer, range


class Share(NamedTuple):
    """Statistics of one layer, or of the whole model."""

    mean: float  # of the mask
    agreement: float  # mean of |votes| / clients
    below: float | None  # share of entries below the threshold; None without a mask
    unanimous: float  # share of entries with agreement 1
    undecided: float  # share of entries with agreement 0
    zeros: float  # share of zeros among the entries of all clients' updates; a zero is no vote


class Stability(NamedTuple):
    """A mask compared with that of an earlier round."""

    since: int  # the earlier round
    flipped: float  # share of entries that passed the threshold in one of the two rounds only
    overlap: float  # of the entries below it in either round, those below in both (Jaccard); 1 where there are none


class VoteStatistics(NamedTuple):
    """One run's round in plain numbers."""

    whole: Share
    ratio: float  # norm of the masked over that of the plain mean
    cosine: float  # between the two
    histogram: tuple[float, ...]  # share of entries at |votes| = 0 .. clients
    layers: dict[str, Share]
    stability: Stability | None  # None without a mask, and in the first round that was measured


class VoteCounts(NamedTuple):
    """One run's round, still on the device."""

    counts: Tensor  # int64 [layer, votes]
    zeros: Tensor  # int64 [layer], updates that are zero
    clients: Tensor  # int64, counted
    lengths: Tensor  # [2]: ratio and cosine
    needed: Tensor | None  # int32 [clients + 1], least |votes| that pass; None without a mask
    below: Tensor | None  # value of the mask below that; NaN for the agreement
    names: tuple[str, ...]
    changes: tuple[Tensor, Tensor] | None  # earlier round, 0 is none; [3]: flipped, below in both, below in either

    def statistics(self) -> VoteStatistics:
        """The statistics in plain numbers; waits for the device."""
        clients = max(int(self.clients), 1)
        counts = self.counts.cpu().numpy().astype(np.int64)[:, : clients + 1]
        agreement = np.arange(clients + 1) / clients
        passed = mask = None
        if self.needed is not None and self.below is not None:
            under = agreement if bool(self.below.isnan()) else np.full(clients + 1, float(self.below))
            passed = np.arange(clients + 1) >= int(self.needed[clients])
            mask = np.where(passed, 1.0, under)
        zeros = self.zeros.cpu().numpy() / clients
        by_part = zip((counts.sum(0), *counts), (zeros.sum(), *zeros), strict=True)
        shares = [_share(row, none, agreement, passed, mask) for row, none in by_part]
        histogram = counts.sum(0) / max(counts.sum(), 1)
        layers = dict(zip(self.names, shares[1:], strict=True))
        ratio, cosine = self.lengths.tolist()
        return VoteStatistics(shares[0], ratio, cosine, tuple(histogram.tolist()), layers, self._stability())

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "VoteCounts":
        """The same with every tensor changed, in their order."""
        tensors: dict[str, Any] = {
            name: change(value) for name, value in self._asdict().items() if isinstance(value, Tensor)
        }
        changes = None if self.changes is None else (change(self.changes[0]), change(self.changes[1]))
        return self._replace(**tensors, changes=changes)

    def _stability(self) -> Stability | None:
        if self.changes is None or int(self.clients) == 0 or int(self.changes[0]) == 0:
            return None
        since, (flipped, both, either) = int(self.changes[0]), self.changes[1].tolist()
        return Stability(since, flipped / max(int(self.counts.sum()), 1), both / either if either else 1.0)


def lay_out(shapes: Sequence[tuple[str, torch.Size]], device: torch.device) -> Layers:
    """The layers of a model by the names of its parameters.

    >>> lay_out([("a.weight", torch.Size([2])), ("a.bias", torch.Size([1])), ("b", torch.Size([1]))], "cpu").owner
    tensor([0, 0, 0, 1])
    """
    owners = [name.rpartition(".")[0] or name for name, _ in shapes]
    names = tuple(dict.fromkeys(owners))
    sizes = [shape.numel() for _, shape in shapes]
    rows = np.repeat([names.index(owner) for owner in owners], sizes)
    ends = np.cumsum(sizes).tolist()
    parts = [(names.index(o), slice(end - size, end)) for o, size, end in zip(owners, sizes, ends, strict=True)]
    return Layers(names, torch.from_numpy(rows.astype(np.int64)).to(device), tuple(parts))


def count(
    votes: Tensor,
    clients: Tensor,
    layers: Layers,
    mean: Tensor,
    mask: Tensor | None,
    *,
    most: int,
    zeros: Tensor,
    rule: tuple[Tensor, Tensor] | None,
    before: tuple[Tensor, Tensor] | None = None,
) -> VoteCounts:
    """Count one run's |votes| [entry] by layer, without waiting for the device; `most` is its `clients_per_round`.

    `rule` is its row of the mask tables, None where it does not mask; `zeros` [layer] are its clients' zero updates;
    `before` is an earlier round and the entries that passed then.
    """
    bins = layers.owner * (most + 1) + votes.abs()
    counts = torch.zeros(len(layers.names) * (most + 1), dtype=torch.int64, device=votes.device)
    counts.scatter_add_(0, bins, torch.ones_like(bins))
    needed, below = rule if rule is not None else (None, None)
    changes = None
    if needed is not None and before is not None:
        changes = before[0], _changes(before[1], passing(votes, clients, needed))
    counts = counts.view(len(layers.names), most + 1)
    return VoteCounts(counts, zeros, clients, _lengths(mean, mask), needed, below, layers.names, changes)


def passing(votes: Tensor, clients: Tensor, needed: Tensor) -> Tensor:
    """Which entries [entry] have enough votes to pass the threshold.

    >>> passing(torch.tensor([3, -2, 1]), torch.tensor(3), torch.tensor([0, 1, 1, 2])).tolist()
    [True, True, False]
    """
    return votes.abs() >= needed.gather(0, clients.view(1))  # needed[clients] would wait for the device


def look(
    votes: Tensor, clients: Tensor, needed: Tensor, round: int, before: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """The round and the entries that passed in it; if no client was counted, those of the measurement `before`."""
    now = passing(votes, clients, needed)
    since, passed = before if before is not None else (torch.zeros_like(clients), now)
    return torch.where(clients > 0, round, since), torch.where(clients > 0, now, passed)


def count_zeros(zeros: Tensor, run: Tensor, layers: Layers, updates: Tensor, counted: Tensor) -> None:
    """Add the number of zeros in the counted lanes' updates [lane, entry] to `zeros` [run, layer]."""
    counts = torch.zeros(len(run), len(layers.names), dtype=torch.int64, device=zeros.device)
    for layer, part in layers.parts:
        counts[:, layer] += (updates[:, part] == 0).sum(1)
    zeros.index_add_(0, run, counts * counted[:, None])


def _changes(before: Tensor, now: Tensor) -> Tensor:
    return torch.stack([(before != now).sum(), (~before & ~now).sum(), (~before | ~now).sum()])


def _lengths(mean: Tensor, mask: Tensor | None) -> Tensor:
    """Norm of the masked over that of the plain mean, and the cosine between them; 1 where there is nothing to mask."""
    if mask is None:
        return torch.ones(2, device=mean.device)
    masked = mask * mean
    plain, moved = mean.norm(), masked.norm()
    along = (masked * mean).sum()  # the result of torch.dot depends on the alignment of the row in memory
    figures = torch.stack([moved / plain, (along / (moved * plain)).clamp(max=1)])
    return torch.where((plain > 0) & (moved > 0), figures, torch.stack([(plain == 0).float(), torch.ones_like(plain)]))


def _share(
    counts: np.ndarray, zeros: float, agreement: np.ndarray, passed: np.ndarray | None, mask: np.ndarray | None
) -> Share:
    total = max(int(counts.sum()), 1)
    return Share(
        mean=1.0 if mask is None else float(counts @ mask / total),
        agreement=float(counts @ agreement / total),
        below=None if passed is None else float(counts[~passed].sum() / total),
        unanimous=float(counts[-1] / total),
        undecided=float(counts[0] / total),
        zeros=float(zeros / total),
    )
