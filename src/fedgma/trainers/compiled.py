"""The CPU kernels as a local trainer: LeNet and logistic regression, every client of the cohort in one call."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedgma.evaluation import Scorer, losses_and_hits
from fedgma.kernels import cohorts as cohorts_cpu
from fedgma.models import LeNet, Logistic
from fedgma.pools import Pool as ImagePool
from fedgma.trainers.cohorts import Cohort, Pool, Stacked, Trained
from fedgma.trainers.tallies import flatten, unflatten

KERNELS = {LeNet: "lenet", Logistic: "logistic"}
Train = Callable[..., Trained]


def kernel_of(model: nn.Module, pool: Pool) -> str | None:
    """The name of the kernel that trains this model on such a pool, or None where there is none or numba is missing."""
    name = KERNELS.get(type(model))
    plain = isinstance(pool, ImagePool) and pool.view is None and pool.x.dim() == 4 and pool.y.device.type == "cpu"
    trainable = all(value.requires_grad for value in model.parameters())
    if name is None or not plain or not trainable or pool.x.dtype not in (torch.uint8, torch.float32):
        return None
    channels, height, width = pool.x.shape[1:]
    return None if cohorts_cpu.why_not(name, (channels, height, width)) else str(name)


def kernel_trainer(name: str, pools: Sequence[Pool]) -> Train:
    """A trainer that hands cohorts on these pools to the kernel; called like `loop.train`."""
    images = {id(pool): _images(pool) for pool in pools}

    def train(
        model: nn.Module,
        cohort: Cohort,
        pools: Sequence[Pool],
        start: Stacked,
        buffers: Stacked,
        correction: Stacked | None = None,
    ) -> Trained:
        flat = flatten(start).numpy()
        fixes = flatten(correction).numpy() if correction else None
        updates = torch.empty(cohort.lanes, flat.shape[1])
        loss, accuracy = torch.empty(cohort.lanes), torch.empty(cohort.lanes)
        for which in np.unique(cohort.pool):
            rows = np.flatnonzero(cohort.pool == which)
            part = cohort.take(rows)
            found = cohorts_cpu.train_cohort(
                name,
                flat[part.run],
                images[id(pools[which])],
                _batches(part),
                classes=pools[which].classes,
                lr=part.lr,
                momentum=part.momentum,
                mu=part.mu,
                clip=part.clip,
                corrections=None if fixes is None else fixes[rows],
            )
            place = torch.from_numpy(rows)
            updates[place] = torch.from_numpy(found.updates)
            loss[place], accuracy[place] = (_single(v) for v in (found.losses, found.accuracies))
        shapes = [(key, value.shape[1:]) for key, value in start.items()]
        return Trained(unflatten(updates, shapes), {}, loss, accuracy)

    return train


def kernel_scorer(model: nn.Module, otherwise: Scorer) -> Scorer:
    """A scorer that hands pools which a kernel can read to it, and the rest to `otherwise`."""
    known: dict[int, tuple[Pool, str, cohorts_cpu.Images] | None] = {}

    def score(params: Stacked, buffers: Stacked, pool: Pool, index: Tensor) -> tuple[Tensor, Tensor]:
        if id(pool) not in known:
            name = kernel_of(model, pool)
            known[id(pool)] = None if name is None else (pool, name, _images(pool))
        found = known[id(pool)]
        if found is None:
            return otherwise(params, buffers, pool, index)
        _, name, images = found
        flat = flatten(params).numpy()
        rows = cohorts_cpu.logits(name, flat, images, classes=pool.classes, index=index.numpy())
        return losses_and_hits(torch.from_numpy(rows), pool.y[index])

    return score


def _single(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def _images(pool: Pool) -> cohorts_cpu.Images:
    assert isinstance(pool, ImagePool)
    mean, std = (value.flatten().tolist() for value in (pool.mean, pool.std))
    return cohorts_cpu.images(pool.x.numpy(), pool.y.numpy(), mean, std)


def _batches(cohort: Cohort) -> list[np.ndarray]:
    """Each lane's batches as the kernels want them: without empty steps, padded with -1."""
    real = np.arange(cohort.index.shape[2]) < cohort.counts[..., None]
    marked = np.where(real, cohort.index, -1)
    return [one[:steps] for one, steps in zip(marked, cohort.steps.tolist(), strict=True)]
