"""Random crops and flips of training images, drawn where batches are drawn and made where they are used.

An augmented pool holds every image in each of its variants, and none of them before it is asked for: image i in variant
v is number i * VARIANTS + v. So a draw is part of a batch's indices, and every trainer sees the same one.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedgma.data.pools import ImagePool, Pool
from fedgma.errors import ConfigError
from fedgma.seeds import generator

BORDER = 4  # pixels by which an image is moved at most, in each direction
PLACES = 2 * BORDER + 1
VARIANTS = 2 * PLACES**2
AUGMENTATIONS = ("none", "crop_flip")


@dataclass(frozen=True, eq=False)
class CropFlip:
    """A pool of images, each in all of its crops out of a black border of 4 pixels, as it is and flipped."""

    pool: ImagePool

    @property
    def x(self) -> Tensor:
        """The images as they are."""
        return self.pool.x

    @property
    def y(self) -> Tensor:
        """Their labels."""
        return self.pool.y

    @property
    def classes(self) -> int:
        """How many there are."""
        return self.pool.classes

    def batch(self, index: Tensor, client: Tensor) -> tuple[Tensor, Tensor]:
        """Images in the variants that `index` names, as `client` sees them, and their labels."""
        sample, variant = index // VARIANTS, index % VARIANTS
        pixels = moved(self.pool.x, sample, variant)
        return self.pool.ready(self.pool.shown(pixels, sample, client)), self.pool.y[sample]


def moved(x: Tensor, sample: Tensor, variant: Tensor) -> Tensor:
    """Images [..., channel, height, width] of a stack, cropped and flipped.

    >>> image = torch.arange(1, 5, dtype=torch.uint8).view(1, 1, 2, 2)
    >>> same, flipped = moved(image, torch.tensor([0, 0]), torch.tensor([80, 81])).tolist()
    >>> same, flipped
    ([[[1, 2], [3, 4]]], [[[2, 1], [4, 3]]])
    """
    channels, height, width = x.shape[1:]
    down, right, flip = variant // (2 * PLACES) - BORDER, variant // 2 % PLACES - BORDER, variant % 2
    place = torch.arange(width, device=x.device)
    place = torch.where(flip[..., None] > 0, width - 1 - place, place)
    row = (torch.arange(height, device=x.device) + down[..., None])[..., None, :, None]
    column = (place + right[..., None])[..., None, None, :]
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    channel = torch.arange(channels, device=x.device)[:, None, None]
    found = x[sample[..., None, None, None], channel, row.clamp(0, height - 1), column.clamp(0, width - 1)]
    return torch.where(inside, found, 0)


def augmented(pool: Pool, augment: str) -> Pool:
    """The pool that a run trains on."""
    if augment == "none":
        return pool
    if not isinstance(pool, ImagePool) or pool.x.dim() != 4 or pool.x.dtype != torch.uint8:
        shape, kind = tuple(pool.x.shape[1:]), str(pool.x.dtype).removeprefix("torch.")
        raise ConfigError(
            f"augment = {augment!r} expects images of uint8 pixels, got {kind} of shape {shape}; use augment = 'none'"
        )
    return cast(Pool, CropFlip(pool))  # frozen, where the protocol of a pool would let one assign


def vary(index: np.ndarray, augment: str, *, seed: int, round: int, client: int) -> np.ndarray:
    """A client's batches of a round as indices into the augmented pool; a new draw for every place in every batch.

    >>> vary(np.array([[0, 1]]), "crop_flip", seed=0, round=1, client=7) // VARIANTS
    array([[0, 1]])
    """
    if augment == "none":
        return index
    return index * VARIANTS + generator(seed, "augment", round, client).integers(VARIANTS, size=index.shape)
