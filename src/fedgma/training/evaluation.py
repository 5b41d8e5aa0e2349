"""Evaluation: loss and accuracy of all runs of a fleet at once, on a pool of samples and per client."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F

from fedgma.data.pools import Pool
from fedgma.training.hints import without_hints
from fedgma.training.stacked import Stacked

Forward = Callable[[Stacked, Stacked, Tensor], Tensor]  # parameters and buffers [run, ...], x [batch, ...] -> logits
Scorer = Callable[[Stacked, Stacked, Pool, Tensor], tuple[Tensor, Tensor]]  # ..., index -> loss and hit [run, sample]


class Metrics(NamedTuple):
    """Mean loss and accuracy of each run, on the device."""

    loss: Tensor  # [run]
    accuracy: Tensor  # [run]


def run_forward(model: nn.Module) -> Forward:
    """Logits [run, batch, class] of all runs on the same samples, for any module."""

    def one(params: Stacked, buffers: Stacked, x: Tensor) -> Tensor:
        return functional_call(model, {**params, **buffers}, (x,))  # type: ignore[no-any-return]

    together = without_hints()(vmap(one, in_dims=(0, 0, None), randomness="different"))

    def forward(params: Stacked, buffers: Stacked, x: Tensor) -> Tensor:
        runs = len(next(iter(params.values())))
        if x.device.type == "cuda" and runs > 1:
            return together(params, buffers, x)
        # one by one: as fast on the CPU, and a run's result does not depend on the other runs of the fleet
        rows = [({n: v[r] for n, v in params.items()}, {n: v[r] for n, v in buffers.items()}) for r in range(runs)]
        return torch.stack([one(p, b, x) for p, b in rows])

    return forward


def scorer(forward: Forward) -> Scorer:
    """A function for the loss and hit of every run on samples of a pool, from a forward pass in eval mode."""

    def score(params: Stacked, buffers: Stacked, pool: Pool, index: Tensor) -> tuple[Tensor, Tensor]:
        x, y = pool.batch(index, seen_by(pool, index))
        return losses_and_hits(forward(params, buffers, x).float(), y)

    return score


def losses_and_hits(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and hit [run, sample] of logits [run, sample, class]."""
    labels = y.expand(logits.shape[:2])
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    return losses, logits.argmax(-1) == labels


@torch.no_grad()
def sample_scores(
    score: Scorer, params: Stacked, buffers: Stacked, pool: Pool, index: Tensor | None = None, *, batch: int = 1000
) -> tuple[Tensor, Tensor]:
    """Loss and hit of every run on every sample of `index`, or of the whole pool: two [run, sample]."""
    chosen = torch.arange(len(pool.y), device=pool.y.device) if index is None else index
    size = even_batch(len(chosen), batch)
    pieces = list(torch.split(chosen, size))
    short = size - len(pieces[-1]) if len(pieces) > 1 else 0
    pieces[-1] = chosen[-size:] if short else pieces[-1]  # a shorter batch would be another shape to compile
    losses, hits = zip(*(score(params, buffers, pool, part) for part in pieces), strict=True)
    return _joined(losses, short), _joined(hits, short)


def _joined(parts: Sequence[Tensor], twice: int) -> Tensor:
    """Pieces joined to [run, sample]; the first `twice` samples of the last piece are also in the one before it."""
    return torch.cat([*parts[:-1], parts[-1][:, twice:]], 1)


def even_batch(samples: int, most: int) -> int:
    """The largest batch of at most `most` that divides the samples; else one with as few batches and even sizes.

    >>> even_batch(10_000, 3000), even_batch(10_007, 3000)
    (2500, 2502)
    """
    pieces = max(1, -(-samples // most))
    sizes = range(min(most, samples), most // 2, -1)
    return next((size for size in sizes if samples % size == 0), max(1, -(-samples // pieces)))


def seen_by(pool: Pool, index: Tensor) -> Tensor:
    """The client whose shift applies to each sample: from the pool's table `client_of` if it has one, else client 0."""
    client_of = getattr(pool, "client_of", None)
    return torch.zeros_like(index) if client_of is None else client_of[index]


def evaluate(
    score: Scorer, params: Stacked, buffers: Stacked, pool: Pool, index: Tensor | None = None, *, batch: int = 1000
) -> Metrics:
    """Mean loss and accuracy of every run on a pool, or on some samples of it."""
    loss, hit = sample_scores(score, params, buffers, pool, index, batch=batch)
    return Metrics(loss.mean(1), hit.float().mean(1))


def client_accuracies(hits: Tensor, clients: Sequence[np.ndarray]) -> np.ndarray:
    """Accuracy of every run on every client's samples, given hits [run, sample] on the whole pool: [run, client].

    A client without samples has NaN.

    >>> client_accuracies(torch.tensor([[True, False, True]]), [np.array([0, 2]), np.array([1]), np.array([], int)])
    array([[ 1.,  0., nan]])
    """
    table = hits.cpu().numpy()
    columns = [table[:, samples].mean(1) if len(samples) else np.full(len(table), np.nan) for samples in clients]
    return np.stack(columns, 1)


def client_means(hits: Tensor, table: Tensor) -> Tensor:
    """Accuracy of one run on every client's samples, on the device: hits [sample], table [client, sample] or -1.

    >>> client_means(torch.tensor([True, False, True]), torch.tensor([[0, 2], [1, -1], [-1, -1]]))
    tensor([1., 0., nan])
    """
    there = table >= 0
    right = hits[table.clamp(min=0)] & there
    return right.sum(1).float() / there.sum(1).float()
