"""Random crops and flips of training images: drawn together with the batches, computed when a batch is used.

An augmented pool indexes every image in each of its variants: image i in variant v has index i * VARIANTS + v. So the
draw is part of a batch's indices, and every trainer gets the same variants. No variant is stored.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fedgma.data.pools import ImagePool, Pool
from fedgma.errors import ConfigError
from fedgma.seeds import generator

BORDER = 4  # largest shift in pixels, in each direction
OFFSETS = 2 * BORDER + 1
VARIANTS = 2 * OFFSETS**2
MIDDLE = VARIANTS // 2 - 1  # the image itself; one more is the image flipped
AUGMENTATIONS = ("none", "crop_flip", "half_crop_flip")


@dataclass(frozen=True, eq=False)
class CropFlip:
    """A pool of images in all variants: every crop of the image with a border of 4 pixels, flipped or not.

    The border is black, or with `mean_border` of the mean colour of the images, which the network sees as zero.
    """

    pool: ImagePool
    mean_border: bool = False

    @property
    def x(self) -> Tensor:
        """The original images."""
        return self.pool.x

    @property
    def y(self) -> Tensor:
        """Their labels."""
        return self.pool.y

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.pool.classes

    def batch(self, index: Tensor, client: Tensor) -> tuple[Tensor, Tensor]:
        """The variants with these indices as `client` sees them, and their labels."""
        sample, variant = index // VARIANTS, index % VARIANTS
        pixels, inside = crop_and_flip(self.pool.x, sample, variant)
        images = self.pool.normalise(self.pool.apply_view(pixels, sample, client))
        return torch.where(inside, images, 0.0) if self.mean_border else images, self.pool.y[sample]


def crop_and_flip(x: Tensor, sample: Tensor, variant: Tensor) -> tuple[Tensor, Tensor]:
    """Crop and flip images of a stack: [..., channel, height, width], and which pixels are not in the border.

    >>> image = torch.arange(1, 5, dtype=torch.uint8).view(1, 1, 2, 2)
    >>> same, flipped = crop_and_flip(image, torch.tensor([0, 0]), torch.tensor([80, 81]))[0].tolist()
    >>> same, flipped
    ([[[1, 2], [3, 4]]], [[[2, 1], [4, 3]]])
    """
    channels, height, width = x.shape[1:]
    down, right, flip = variant // (2 * OFFSETS) - BORDER, variant // 2 % OFFSETS - BORDER, variant % 2
    columns = torch.arange(width, device=x.device)
    columns = torch.where(flip[..., None] > 0, width - 1 - columns, columns)
    row = (torch.arange(height, device=x.device) + down[..., None])[..., None, :, None]
    column = (columns + right[..., None])[..., None, None, :]
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    channel = torch.arange(channels, device=x.device)[:, None, None]
    pixels = x[sample[..., None, None, None], channel, row.clamp(0, height - 1), column.clamp(0, width - 1)]
    return torch.where(inside, pixels, 0), inside


def augment_pool(pool: Pool, augment: str) -> Pool:
    """The pool with the augmentation of that name; "none" returns the pool."""
    if augment == "none":
        return pool
    if not isinstance(pool, ImagePool) or pool.x.dim() != 4 or pool.x.dtype != torch.uint8:
        shape, dtype = tuple(pool.x.shape[1:]), str(pool.x.dtype).removeprefix("torch.")
        raise ConfigError(
            f"augment = {augment!r} expects images of uint8 pixels, got {dtype} of shape {shape}; use augment = 'none'"
        )
    return cast(
        Pool, CropFlip(pool, mean_border=augment == "half_crop_flip")
    )  # CropFlip's fields are read-only, unlike those of the protocol


def draw_variants(index: np.ndarray, augment: str, *, seed: int, round: int, client: int) -> np.ndarray:
    """A client's batches of a round as indices into the augmented pool; each sample of each batch is a new draw.

    >>> draw_variants(np.array([[0, 1]]), "crop_flip", seed=0, round=1, client=7) // VARIANTS
    array([[0, 1]])
    """
    if augment == "none":
        return index
    rng = generator(seed, "augment", round, client)
    variant = rng.integers(VARIANTS, size=index.shape)
    if augment == "half_crop_flip":
        variant = np.where(rng.integers(2, size=index.shape), variant, MIDDLE + variant % 2)
    return index * VARIANTS + variant
