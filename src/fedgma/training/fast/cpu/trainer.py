"""The CPU kernels as a local trainer and a scorer, for LeNet and logistic regression."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedgma.data.client_views import Coloured
from fedgma.data.pools import CHUNK, ImagePool, Pool
from fedgma.machine import available_cores
from fedgma.training.evaluation import Scorer, scored, seen_by
from fedgma.training.fast.cpu import clients as kernels
from fedgma.training.lane_batch import Assignment, LaneBatch, LocalTrainer, Trained
from fedgma.training.models import LeNet, Logistic
from fedgma.training.stacked import Stacked, flatten, shapes_of
from fedgma.training.task import Task
from fedgma.training.tasks import CLASSIFICATION

KERNELS = {LeNet: "lenet", Logistic: "logistic"}
SHOWN = 2**26  # bytes of images that are shown in a view at a time, if that is enough for all cores
LARGER = 3 * 4  # bytes that a byte of a grey image becomes: three colours, in float32


def kernel_of(model: nn.Module, pool: Pool) -> str | None:
    """The name of the kernel for this model on this pool, or None where there is none or numba is missing."""
    name = KERNELS.get(type(model))
    readable = isinstance(pool, ImagePool) and pool.x.dim() == 4 and pool.y.device.type == "cpu"
    trainable = all(value.requires_grad for value in model.parameters())
    if name is None or not readable or not trainable or pool.x.dtype not in (torch.uint8, torch.float32):
        return None
    first = torch.zeros(1, dtype=torch.int64)
    channels, height, width = pool.x.shape[1:] if _view_of(pool) is None else pool.batch(first, first)[0].shape[1:]
    return None if kernels.why_not(name, (channels, height, width)) else str(name)


def kernel_trainer(name: str, pools: Sequence[Pool]) -> LocalTrainer:
    """A trainer by the kernel on these pools; called like `loop.train`."""
    images = {id(pool): _images(pool) for pool in pools if _view_of(pool) is None}

    def train(assignment: Assignment) -> Trained:
        _, lane_batch, pools, start, _, correction, _ = assignment
        flat = flatten(start).numpy()
        fixes = flatten(correction).numpy() if correction else None
        groups = list(_groups(lane_batch, pools))
        updates = torch.empty(0)
        if len(groups) > 1:  # else the kernel's own array is handed on
            updates = torch.empty(lane_batch.size, flat.shape[1])
        loss, accuracy = torch.empty(lane_batch.size), torch.empty(lane_batch.size)
        for pool, rows in groups:
            part = lane_batch.take(rows)
            known = images.get(id(pool))
            data, batches = _seen_by_lanes(pool, part) if known is None else (known, _batches(part))
            results = kernels.train_clients(
                name,
                flat[part.run[0]] if (part.run == part.run[0]).all() else flat[part.run],
                data,
                batches,
                classes=pool.classes,
                lr=part.lr,
                momentum=part.rate("momentum"),
                mu=part.rate("mu"),
                weight_decay=part.rate("weight_decay"),
                nesterov=part.rate("nesterov"),
                clip=part.rate("clip"),
                corrections=None if fixes is None else fixes[rows],
            )
            if len(groups) > 1:
                updates[rows] = torch.from_numpy(results.updates)
            else:
                updates = torch.from_numpy(results.updates)
            loss[rows], accuracy[rows] = (_single(v) for v in (results.losses, results.accuracies))
        return Trained(updates, shapes_of(start), {}, loss, accuracy[:, None])

    return train


def _groups(lane_batch: LaneBatch, pools: Sequence[Pool]) -> Iterator[tuple[Pool, np.ndarray]]:
    """Lanes that train together: all of a pool, or with a view as many as may be shown at a time."""
    for number in np.unique(lane_batch.pool):
        rows, pool = np.flatnonzero(lane_batch.pool == number), pools[number]
        if _view_of(pool) is None:
            yield pool, rows
            continue
        each = pool.x[0].numel() * (LARGER if _tint_of(pool) is None else 1)
        largest = int(lane_batch.counts[rows].sum(1).max()) * each
        size = max(available_cores(), SHOWN // max(1, largest))
        for begin in range(0, len(rows), size):
            yield pool, rows[begin : begin + size]


def _seen_by_lanes(pool: Pool, lane_batch: LaneBatch) -> tuple[kernels.Images, list[np.ndarray]]:
    """The samples as the lanes' clients see them, each once for all runs, and the lanes' batches of them."""
    padding, size = -1, len(pool.y)
    lanes = zip(lane_batch.client.tolist(), _batches(lane_batch), strict=True)
    pairs = [np.where(steps < 0, padding, client * size + steps) for client, steps in lanes]
    one = np.zeros(1, np.int64)  # where no client has any
    shown = np.unique(np.concatenate([one, *(pair[pair != padding] for pair in pairs)]))
    clients, index = map(torch.from_numpy, np.divmod(shown, size))
    return _seen(pool, index, clients), [np.where(pair < 0, padding, np.searchsorted(shown, pair)) for pair in pairs]


def _seen(pool: Pool, index: Tensor, client: Tensor) -> kernels.Images:
    """Samples as their clients see them: bytes and two colours for each, or floats of a few at a time, in the cache."""
    if (tint := _tint_of(pool)) is not None:
        grey, y = pool.x.index_select(0, index), pool.y[index]
        white, black = (colour.numpy() for colour in tint.colours(y, index, client))
        return kernels.tinted(grey.numpy(), y.numpy(), black, white, *_normalisation(pool))
    pieces = [pool.batch(*piece) for piece in zip(torch.split(index, CHUNK), torch.split(client, CHUNK), strict=True)]
    shown, labels = (torch.cat(parts).numpy() for parts in zip(*pieces, strict=True))
    return kernels.images(shown, labels)


def _tint_of(pool: Pool) -> Coloured | None:
    """The colours of a pool that shows grey images of bytes in two colours each: the kernels mix them themselves."""
    view = _view_of(pool)
    grey = pool.x.dtype == torch.uint8 and pool.x.shape[1] == 1
    return view if isinstance(view, Coloured) and grey else None


def _view_of(pool: Pool) -> object:
    return pool.view if isinstance(pool, ImagePool) else None


def kernel_scorer(model: nn.Module, otherwise: Scorer, task: Task = CLASSIFICATION) -> Scorer:
    """Loss and hits of every run by the kernel on pools that it can read, by `otherwise` on the rest."""
    known: dict[int, tuple[Pool, str | None, kernels.Images | None]] = {}

    def score(params: Stacked, buffers: Stacked, pool: Pool, index: Tensor) -> tuple[Tensor, Tensor]:
        if id(pool) not in known:
            kernel = kernel_of(model, pool)
            plain = kernel is not None and _view_of(pool) is None
            known[id(pool)] = (pool, kernel, _images(pool) if plain else None)
        _, name, images = known[id(pool)]
        if name is None:
            return otherwise(params, buffers, pool, index)
        data = _seen(pool, index, seen_by(pool, index)) if images is None else images
        chosen, wanted = None if images is None else index.numpy(), pool.y[index]
        rows = (kernels.logits(name, row, data, classes=pool.classes, index=chosen) for row in flatten(params).numpy())
        losses, measured = zip(*(scored(task, torch.from_numpy(logits), wanted) for logits in rows), strict=True)
        return torch.stack(losses), torch.stack(measured)

    return score


def _single(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.float32))


def _images(pool: Pool) -> kernels.Images:
    mean, std = _normalisation(pool)
    return kernels.images(pool.x.numpy(), pool.y.numpy(), mean.tolist(), std.tolist())


def _normalisation(pool: Pool) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel."""
    assert isinstance(pool, ImagePool)
    return pool.mean.flatten().numpy(), pool.std.flatten().numpy()


def _batches(lane_batch: LaneBatch) -> list[np.ndarray]:
    """Each lane's batches as the kernels take them: without empty steps, padded with -1."""
    real = np.arange(lane_batch.batch) < lane_batch.counts[..., None]
    marked = np.where(real, lane_batch.index, -1)
    return [batches[:steps] for batches, steps in zip(marked, lane_batch.steps.tolist(), strict=True)]
