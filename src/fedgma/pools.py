"""One split of a data set on one device, in which a batch is an index.

Pixels stay uint8 until they are used; a client's colours or angle are small tables that are looked up when its batch is
made, so 500 coloured clients cost no copy of an image.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedgma.datasets.sets import Split
from fedgma.errors import DataError
from fedgma.partitions import Index

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


def make_pool(split: Split, classes: int, *, home: Index | None = None, view: View | None = None) -> Pool:
    """A pool on the CPU, not normalised yet: mean 0, deviation 1."""
    if view is not None and split.x.dtype != np.uint8:
        raise DataError(f"colour and rotation need uint8 images, not {split.x.dtype} features")
    # np.array copies: a cached split is a read-only map of a file, which torch must not write into
    x, y = torch.from_numpy(np.array(split.x)), torch.from_numpy(np.array(split.y))
    owner = torch.zeros(len(y), dtype=torch.int64) if home is None else torch.from_numpy(home)
    return Pool(x, y, classes, owner, torch.zeros(1, 1, 1), torch.ones(1, 1, 1), view)


def normalised(pool: Pool, mean: Tensor, std: Tensor) -> Pool:
    """The same pool with these channel statistics."""
    return replace(pool, mean=mean, std=std)


def channel_statistics(pool: Pool) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel over a pool, as its home clients see it: two [channel, 1, 1]."""
    if pool.x.dtype != torch.uint8 or not len(pool):
        return pool.mean, pool.std
    total = square = torch.zeros((), dtype=torch.float64, device=pool.x.device)
    pixels = 0
    for start in range(0, len(pool), CHUNK):
        index = torch.arange(start, min(start + CHUNK, len(pool)), device=pool.x.device)
        x = pool.seen(index, pool.home[index])
        total = total + x.sum((0, 2, 3), dtype=torch.float64)
        square = square + (x * x).sum((0, 2, 3), dtype=torch.float64)
        pixels += x[:, 0].numel()
    mean = total / pixels
    std = (square / pixels - mean**2).clamp(min=0).sqrt()
    std = torch.where(std > 0, std, 1.0)  # a channel that never varies carries nothing; do not divide by zero
    return mean.float()[:, None, None], std.float()[:, None, None]
