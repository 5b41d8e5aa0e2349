"""The CPU kernels as a local trainer and a scorer, for LeNet and logistic regression."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgma.data.pools import ImagePool, Pool
from fedgma.training.evaluation import Scorer
from fedgma.training.fast.cpu import clients as kernels
from fedgma.training.lane_batch import Assignment, LaneBatch, LocalTrainer, Trained
from fedgma.training.models import LeNet, Logistic
from fedgma.training.stacked import Stacked, flatten, shapes_of

KERNELS = {LeNet: "lenet", Logistic: "logistic"}


def kernel_of(model: nn.Module, pool: Pool) -> str | None:
    """The name of the kernel for this model on this pool, or None where there is none or numba is missing."""
    name = KERNELS.get(type(model))
    plain = isinstance(pool, ImagePool) and pool.view is None and pool.x.dim() == 4 and pool.y.device.type == "cpu"
    trainable = all(value.requires_grad for value in model.parameters())
    if name is None or not plain or not trainable or pool.x.dtype not in (torch.uint8, torch.float32):
        return None
    channels, height, width = pool.x.shape[1:]
    return None if kernels.why_not(name, (channels, height, width)) else str(name)


def kernel_trainer(name: str, pools: Sequence[Pool]) -> LocalTrainer:
    """A trainer by the kernel on these pools; called like `loop.train`."""
    images = {id(pool): _images(pool) for pool in pools}

    def train(task: Assignment) -> Trained:
        _, lane_batch, pools, start, _, correction, _ = task
        flat = flatten(start).numpy()
        fixes = flatten(correction).numpy() if correction else None
        used, updates = np.unique(lane_batch.pool), torch.empty(0)
        if len(used) > 1:  # else the kernel's own array is handed on
            updates = torch.empty(lane_batch.size, flat.shape[1])
        loss, accuracy = torch.empty(lane_batch.size), torch.empty(lane_batch.size)
        for which in used:
            rows = np.flatnonzero(lane_batch.pool == which)
            part = lane_batch.take(rows)
            results = kernels.train_clients(
                name,
                flat[part.run[0]] if (part.run == part.run[0]).all() else flat[part.run],
                images[id(pools[which])],
                _batches(part),
                classes=pools[which].classes,
                lr=part.lr,
                momentum=part.rate("momentum"),
                mu=part.rate("mu"),
                weight_decay=part.rate("weight_decay"),
                nesterov=part.rate("nesterov"),
                clip=part.rate("clip"),
                corrections=None if fixes is None else fixes[rows],
            )
            if len(used) > 1:
                updates[rows] = torch.from_numpy(results.updates)
            else:
                updates = torch.from_numpy(results.updates)
            loss[rows], accuracy[rows] = (_single(v) for v in (results.losses, results.accuracies))
        return Trained(updates, shapes_of(start), {}, loss, accuracy[:, None])

    return train


def kernel_scorer(model: nn.Module, otherwise: Scorer) -> Scorer:
    """Loss and hits of every run by the kernel on pools that it can read, by `otherwise` on the rest."""
    known: dict[int, tuple[Pool, str | None, kernels.Images | None]] = {}

    def score(params: Stacked, buffers: Stacked, pool: Pool, index: Tensor) -> tuple[Tensor, Tensor]:
        if id(pool) not in known:
            kernel = kernel_of(model, pool)
            known[id(pool)] = (pool, kernel, None if kernel is None else _images(pool))
        _, name, data = known[id(pool)]
        if name is None or data is None:
            return otherwise(params, buffers, pool, index)
        chosen, wanted = index.numpy(), pool.y[index]
        scores = [
            torch.from_numpy(kernels.logits(name, row, data, classes=pool.classes, index=chosen))
            for row in flatten(params).numpy()
        ]
        losses = [F.cross_entropy(logits, wanted, reduction="none") for logits in scores]
        return torch.stack(losses), torch.stack([logits.argmax(1) == wanted for logits in scores])[..., None]

    return score


def _single(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def _images(pool: Pool) -> kernels.Images:
    assert isinstance(pool, ImagePool)
    mean, std = (value.flatten().tolist() for value in (pool.mean, pool.std))
    return kernels.images(pool.x.numpy(), pool.y.numpy(), mean, std)


def _batches(lane_batch: LaneBatch) -> list[np.ndarray]:
    """Each lane's batches as the kernels take them: without empty steps, padded with -1."""
    real = np.arange(lane_batch.batch) < lane_batch.counts[..., None]
    marked = np.where(real, lane_batch.index, -1)
    return [batches[:steps] for batches, steps in zip(marked, lane_batch.steps.tolist(), strict=True)]
