"""One split of a data set on one device; a batch is given by its sample indices.

Pixels stay uint8 until they are used. A client's colours or angle are small tables that are applied when its batch is
made, so 500 coloured clients need no copies of the images.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

CHUNK = 256  # images at a time in a pass over a split


class View(Protocol):
    """The feature shift of each client's environment: maps images [..., channel, height, width] in [0, 1]."""

    def __call__(self, x: Tensor, y: Tensor, index: Tensor, client: Tensor) -> Tensor:
        """Shift images; tensor operations only, so that it can be compiled and captured in a CUDA graph."""
        ...

    def subset(self, index: Tensor) -> "View":
        """The view of some of the samples."""
        ...

    def to(self, device: torch.device | str) -> "View":
        """The same view with its tables on another device."""
        ...


class Pool(Protocol):
    """One split of a data set on one device."""

    x: Tensor  # [n, ...]
    y: Tensor  # int64 [n] for classes; [n, ...] for other targets
    classes: int  # what a model puts out: classes, columns of a target, or tokens

    def batch(self, index: Tensor, client: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [...] as the given clients see them, normalised for the network, and their labels."""


@dataclass(frozen=True, eq=False)
class ImagePool:
    """One split of images, feature vectors or tokens, on one device."""

    x: Tensor  # uint8 [sample, channel, height, width], or float32 features or tokens, which are not normalised
    y: Tensor  # int64 [sample] for classes; [sample, ...] for other targets
    classes: int
    client_of: Tensor  # int64 [sample], the client whose environment applies to a sample by default
    mean: Tensor  # float32 [channel, 1, 1], of the training images as the clients see them
    std: Tensor
    view: View | None = None

    def __len__(self) -> int:
        return len(self.y)

    def batch(self, index: Tensor, client: Tensor) -> tuple[Tensor, Tensor]:
        """Images and labels of `index` (any shape), as `client` (broadcastable to it) sees them."""
        y = rows(self.y, index)
        if self.x.dtype != torch.uint8:
            return rows(self.x, index), y
        images = self.show(index, client)
        if self.view is None and images.device.type == "cpu":  # the memory is fresh: in place, no more is needed
            return images.sub_(self.mean).div_(self.std), y
        return self.normalise(images), y

    def show(self, index: Tensor, client: Tensor) -> Tensor:
        """Images in [0, 1] as `client` sees them, not normalised."""
        return self.apply_view(rows(self.x, index), index, client)

    def apply_view(self, pixels: Tensor, index: Tensor, client: Tensor) -> Tensor:
        """Pixels of the samples `index`, perhaps augmented, as `client` sees them: in [0, 1], not normalised."""
        x = pixels.to(torch.float32) / 255
        return x if self.view is None else self.view(x, self.y[index], index, client)

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise images for the network."""
        return (images - self.mean) / self.std

    def subset(self, index: Tensor) -> "ImagePool":
        """A pool of some of the samples."""
        view = None if self.view is None else self.view.subset(index)
        x, y, client_of = self.x[index], self.y[index], self.client_of[index]
        return ImagePool(x, y, self.classes, client_of, self.mean, self.std, view)

    def to(self, device: torch.device | str) -> "ImagePool":
        """The same pool on another device."""
        view = None if self.view is None else self.view.to(device)
        x, y, client_of, mean, std = (t.to(device) for t in (self.x, self.y, self.client_of, self.mean, self.std))
        return ImagePool(x, y, self.classes, client_of, mean, std, view)


def rows(values: Tensor, index: Tensor) -> Tensor:
    """The rows of a table at `index` (any shape): on a CPU whole rows are copied, which brackets do value by value.

    >>> rows(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1], [0]])).tolist()
    [[[3, 4]], [[1, 2]]]
    """
    if values.device.type != "cpu":
        return values[index]
    return values.index_select(0, index.reshape(-1)).view(index.shape + values.shape[1:])


class Moments(NamedTuple):
    """Mean and mean square of the pixels of every image, for pixels in [0, 1]: float64 [sample, channel] each."""

    first: Tensor
    second: Tensor


def image_moments(x: Tensor) -> Moments:
    """Moments of uint8 images; one pass, in pieces that fit the cache."""
    pieces = []
    for piece in torch.split(x, CHUNK):
        pixels = piece.flatten(2).to(torch.float32)
        pieces.append(torch.stack([pixels.sum(-1), pixels.square().sum(-1)]))
    sums = torch.cat(pieces, dim=1).double() if pieces else torch.zeros(2, 0, x.shape[1], dtype=torch.float64)
    count = x.shape[2] * x.shape[3]
    return Moments(sums[0] / (255 * count), sums[1] / (255**2 * count))


class Normalisation(NamedTuple):
    """How images become the input of a network: pixels / 255, minus `mean`, divided by `std`, channel by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def normalisation_of(pool: ImagePool) -> Normalisation | None:
    """The normalisation of a pool's images; None for features, which are used as they are."""
    if pool.x.dtype != torch.uint8:
        return None
    return Normalisation(*(tuple(part.flatten().double().tolist()) for part in (pool.mean, pool.std)))


def view_moments(pool: ImagePool) -> Moments:
    """Moments of all images as their clients see them; one pass over the images."""
    pieces = []
    for index in torch.split(torch.arange(len(pool), device=pool.y.device), CHUNK):
        x = pool.show(index, pool.client_of[index]).flatten(2)
        pieces.append(torch.stack([x.mean(-1), x.square().mean(-1)]))
    moments = torch.cat(pieces, dim=1).double()
    return Moments(moments[0], moments[1])


def channel_statistics(moments: Moments) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel over all images: two [channel, 1, 1]."""
    mean = moments.first.mean(0)
    std = (moments.second.mean(0) - mean**2).clamp(min=0).sqrt()
    std = torch.where(std > 0, std, 1.0)  # avoids a division by zero for a constant channel
    return mean.float()[:, None, None], std.float()[:, None, None]


def input_shape(pool: Pool) -> tuple[int, ...]:
    """The shape of one sample as a model sees it."""
    none = torch.zeros(1, dtype=torch.int64, device=pool.y.device)
    return tuple(pool.batch(none, none)[0].shape[1:])
