"""A federation on a device: whole splits as one tensor each, and the indices that say which client holds what.

A batch is an index. Pixels stay uint8 until they are used; a client's colours or angle are small tables that are looked
up when its batch is made, so 500 coloured clients cost no copy of an image.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedgma.datasets.sets import Dataset, Source, Split
from fedgma.partitions import Index, Partition

CHUNK = 2048  # images at a time where a whole split is passed over


class View(Protocol):
    """How an environment shows images: [..., channel, height, width] in [0, 1] to the same in that client's colours."""

    def __call__(self, x: Tensor, y: Tensor, index: Tensor, client: Tensor) -> Tensor:
        """Show images; tensor code only, so that it can be compiled and captured."""
        ...

    def to(self, device: torch.device | str) -> "View":
        """The same view with its tables on another device."""
        ...


@dataclass(frozen=True, eq=False)
class Pool:
    """One split of a data set on one device."""

    x: Tensor  # uint8 [sample, channel, height, width], or float32 features that are used as they are
    y: Tensor  # int64 [sample]
    classes: int
    home: Tensor  # int64 [sample], the client in whose environment a sample is normally seen
    mean: Tensor  # float32 [channel, 1, 1], of the training images as the clients see them
    std: Tensor
    view: View | None = None

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: Tensor, client: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of `index` (any shape), seen as `client` (broadcastable to it) sees them."""
        y = self.y[index]
        if self.x.dtype != torch.uint8:
            return self.x[index], y
        return (self.seen(index, client) - self.mean) / self.std, y

    def seen(self, index: Tensor, client: Tensor) -> Tensor:
        """Images in [0, 1], shifted but not normalised: what the eye would see."""
        x = self.x[index].to(torch.float32) / 255
        return x if self.view is None else self.view(x, self.y[index], index, client)

    def to(self, device: torch.device | str) -> "Pool":
        """The same pool on another device."""
        view = None if self.view is None else self.view.to(device)
        x, y, home, mean, std = (t.to(device) for t in (self.x, self.y, self.home, self.mean, self.std))
        return Pool(x, y, self.classes, home, mean, std, view)


@dataclass(frozen=True, eq=False)
class Federation:
    """Everything a run needs of its data."""

    name: str
    train: Pool
    test: Pool
    clients: tuple[Index, ...]  # training samples of each client, disjoint
    validation: tuple[Index, ...]  # held out of each client's own data; may be empty
    client_tests: tuple[Index, ...] | None = None  # into test, with the client's class mix
    more_tests: Mapping[str, Pool] = field(default_factory=dict)
    source: Source | None = None
    notes: tuple[str, ...] = ()


def make_pool(split: Split, classes: int, *, home: Index | None = None, view: View | None = None) -> Pool:
    """A pool on the CPU with statistics of its own images."""
    # np.array copies: a cached split is a read-only map of a file, which torch must not write into
    x, y = torch.from_numpy(np.array(split.x)), torch.from_numpy(np.array(split.y))
    owner = torch.from_numpy(np.zeros(len(y), np.int64) if home is None else home)
    blank = torch.zeros(1, 1, 1)
    pool = Pool(x, y, classes, owner, blank, blank + 1, view)
    mean, std = channel_statistics(pool)
    return Pool(x, y, classes, owner, mean, std, view)


def channel_statistics(pool: Pool) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel over a pool, as its home clients see it: two [channel, 1, 1]."""
    if pool.x.dtype != torch.uint8 or not len(pool):
        return torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
    total = square = torch.zeros((), dtype=torch.float64)
    pixels = 0
    for start in range(0, len(pool), CHUNK):
        index = torch.arange(start, min(start + CHUNK, len(pool)))
        x = pool.seen(index, pool.home[index])
        total = total + x.sum((0, 2, 3), dtype=torch.float64)
        square = square + (x * x).sum((0, 2, 3), dtype=torch.float64)
        pixels += x[:, 0].numel()
    mean = total / pixels
    std = (square / pixels - mean**2).clamp(min=0).sqrt()
    std = torch.where(std > 0, std, 1.0)  # a channel that never varies carries nothing; do not divide by zero
    return mean.float()[:, None, None], std.float()[:, None, None]


def owners(partition: Partition, samples: int) -> Index:
    """The client of each sample; client 0 for samples that nobody holds.

    >>> owners(Partition((np.array([2]), np.array([0, 1]))), 4).tolist()
    [1, 1, 0, 0]
    """
    owner = np.zeros(samples, np.int64)
    for client, index in enumerate(partition.clients):
        owner[index] = client
    return owner


def federate(dataset: Dataset, partition: Partition, *, device: torch.device | str = "cpu") -> Federation:
    """Put a data set and a partition of its training samples on a device."""
    classes = len(dataset.classes)
    train = make_pool(dataset.train, classes, home=owners(partition, len(dataset.train.y)))
    test = make_pool(dataset.test, classes)
    test = Pool(test.x, test.y, classes, test.home, train.mean, train.std)
    nothing = tuple(np.empty(0, np.int64) for _ in partition.clients)
    return Federation(
        dataset.name,
        train.to(device),
        test.to(device),
        partition.clients,
        nothing,
        source=dataset.source,
        notes=(*dataset.notes, *partition.notes),
    )
