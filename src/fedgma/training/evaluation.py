"""Evaluation: loss and measures of all runs of a fleet at once, on a pool of samples and per client."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedgma.data.pools import Pool
from fedgma.training.hints import without_hints
from fedgma.training.recurrent import written_out
from fedgma.training.stacked import Stacked
from fedgma.training.task import Columns, Task, figures, losses, measures, sample_means, whole_number
from fedgma.training.tasks import CLASSIFICATION

Forward = Callable[[Stacked, Stacked, Tensor], Tensor]  # parameters and buffers [run, ...], x [batch, ...] -> output
# ..., index -> loss [run, sample] and `scored` measures [run, sample, column]
Scorer = Callable[[Stacked, Stacked, Pool, Tensor], tuple[Tensor, Tensor]]


class Metrics(NamedTuple):
    """Mean loss and accuracy of each run of a classification, on the device."""

    loss: Tensor  # [run]
    accuracy: Tensor  # [run]


def run_forward(model: nn.Module) -> Forward:
    """Outputs [run, batch, ...] of all runs on the same samples, for any module."""

    def outputs_of(module: nn.Module) -> Forward:
        def outputs(params: Stacked, buffers: Stacked, x: Tensor) -> Tensor:
            return functional_call(module, {**params, **buffers}, (x,))  # type: ignore[no-any-return]

        return outputs

    alone, vectorised = outputs_of(model), outputs_of(written_out(model))
    together = without_hints()(vmap(vectorised, in_dims=(0, 0, None), randomness="different"))

    def forward(params: Stacked, buffers: Stacked, x: Tensor) -> Tensor:
        runs = len(next(iter(params.values())))
        if x.device.type == "cuda" and runs > 1:
            return together(params, buffers, x)
        # one by one: as fast on the CPU, and a run's result does not depend on the other runs of the fleet
        rows = [({n: v[r] for n, v in params.items()}, {n: v[r] for n, v in buffers.items()}) for r in range(runs)]
        return torch.stack([alone(p, b, x) for p, b in rows])

    return forward


def scorer(forward: Forward, task: Task = CLASSIFICATION) -> Scorer:
    """A function for loss and measures of every run on samples of a pool, from a forward pass in eval mode."""

    def score(params: Stacked, buffers: Stacked, pool: Pool, index: Tensor) -> tuple[Tensor, Tensor]:
        x, y = pool.batch(index, seen_by(pool, index))
        output = forward(params, buffers, x).float()
        runs, samples = output.shape[:2]
        rows, targets = output.flatten(0, 1), y.expand(runs, *y.shape).flatten(0, 1)
        loss, measured = scored(task, rows, targets)
        return loss.view(runs, samples), measured.view(runs, samples, measured.shape[1])

    return score


def scored(task: Task, output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Loss [sample] and measures [sample, column]; for metrics of a whole split followed by the output itself."""
    measured = measures(task, output, y)
    return losses(task, output, y), torch.cat([measured, output.flatten(1)], 1) if task.whole else measured


def sample_scores(
    score: Scorer,
    params: Stacked,
    buffers: Stacked,
    pool: Pool,
    index: Tensor | None = None,
    *,
    batch: int = 1000,
    over: Callable[..., Iterable[tuple[Tensor, ...]]] = map,
) -> tuple[Tensor, Tensor]:
    """Loss [run, sample] and measures [run, sample, column] on every sample of `index`, or of the whole pool.

    `over` is a `map` that scores the pieces, which are of equal size.
    """
    chosen = torch.arange(len(pool.y), device=pool.y.device) if index is None else index
    size = even_batch(len(chosen), batch)
    pieces = list(torch.split(chosen, size))
    short = size - len(pieces[-1]) if len(pieces) > 1 else 0
    pieces[-1] = chosen[-size:] if short else pieces[-1]  # a shorter batch would be another shape to compile
    losses, measured = zip(*over(partial(score, params, buffers, pool), pieces), strict=True)
    return _joined(losses, short), _joined(measured, short)


def _joined(parts: Sequence[Tensor], twice: int) -> Tensor:
    """Pieces joined along samples; the first `twice` samples of the last piece are also in the one before it."""
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
    """Mean loss and accuracy of every run of a classification on a pool, or on some samples of it."""
    loss, hits = sample_scores(score, params, buffers, pool, index, batch=batch)
    return Metrics(loss.mean(1), hits[..., 0].float().mean(1))


def split_figures(task: Task, columns: Columns, loss: Tensor, measured: Tensor, y: Tensor) -> Tensor:
    """What is recorded of each run on a split, [run, name] in the order of `task.names`.

    From loss [run, sample] and measures [run, sample, column] of the samples with targets `y`.
    """
    means, outputs = measured[..., : columns.number], measured[..., columns.number :]
    averaged = figures(task, columns, *sample_means(task, loss, means, y))
    if not task.whole:
        return averaged
    whole = [torch.stack([whole_number(task, name, row, y) for name in task.whole]) for row in outputs]
    return torch.cat([averaged, torch.stack(whole).to(averaged.dtype)], 1)


def client_figure(task: Task, columns: Columns, loss: Tensor, measured: Tensor, y: Tensor, table: Tensor) -> Tensor:
    """What verdicts are about, of one run on every client's samples: [client]; NaN for a client without samples.

    From loss [sample] and measures [sample, column]; `table` [client, sample] is that of `client_means`.
    """
    means, outputs, name = measured[:, : columns.number], measured[:, columns.number :], task.names[task.first]
    if name not in task.whole:
        weight = None if task.weight is None else task.weight(y)
        return figures(task, columns, *client_means(loss, means, table, weight))[:, task.first]
    held = [samples[samples >= 0] for samples in table]
    nothing = loss.new_full((), torch.nan, dtype=torch.float64)
    return torch.stack([whole_number(task, name, outputs[own], y[own]) if len(own) else nothing for own in held])


def client_means(loss: Tensor, measured: Tensor, table: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Means of one run on every client's samples, on the device: of loss [sample] and measures [sample, column].

    `table` [client, sample] holds each client's samples, padded with -1. A client without samples has NaN.

    >>> hits, table = torch.tensor([[True], [False], [True]]), torch.tensor([[0, 2], [1, -1], [-1, -1]])
    >>> client_means(torch.zeros(3), hits, table)[1].flatten().tolist()
    [1.0, 0.0, nan]
    """
    there, samples = table >= 0, table.clamp(min=0)
    share = there.float() if weight is None else torch.where(there, weight[samples], 0.0)
    total = share.sum(1)
    return (loss[samples] * share).sum(1) / total, (measured[samples] * share[..., None]).sum(1) / total[:, None]
