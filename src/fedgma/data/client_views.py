"""Feature shift on the device: a client's colours or angle, applied when its batch is made."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fedgma.data.pools import Moments
from fedgma.data.shifts import Colouring


class Coloured(NamedTuple):
    """Shows grey images in the colours of an environment; the fields are those of `fedgma.data.shifts.Colouring`."""

    foreground: Tensor
    background: Tensor
    flip: Tensor
    uniform: Tensor
    other: Tensor
    pick: Tensor

    def __call__(self, x: Tensor, y: Tensor, index: Tensor, client: Tensor) -> Tensor:
        """Colour images: [..., 1, height, width] in [0, 1] to [..., 3, height, width]."""
        foreground, background = (colour[..., None, None] for colour in self.colours(y, index, client))
        return background + x * (foreground - background)

    def colours(self, y: Tensor, index: Tensor, client: Tensor) -> tuple[Tensor, Tensor]:
        """Foreground and background colours of samples: two [..., rgb]."""
        client = client.clamp(max=len(self.flip) - 1)  # the test environment is the same for all clients
        digit = torch.where(self.uniform[index] < self.flip[client], self.other[index], y)
        pick = self.pick[index]
        return self.foreground[client, digit, pick[..., 0]], self.background[client, digit, pick[..., 1]]

    def moments(self, grey: Moments, y: Tensor, client: Tensor) -> Moments:
        """Moments of all coloured images, computed from those of the grey images."""
        index = torch.arange(len(y), device=y.device)
        foreground, background = (colour.double() for colour in self.colours(y, index, client))
        span = foreground - background
        first = background + span * grey.first
        return Moments(first, background**2 + 2 * background * span * grey.first + span**2 * grey.second)

    def subset(self, index: Tensor) -> "Coloured":
        """The tables of some samples."""
        return self._replace(uniform=self.uniform[index], other=self.other[index], pick=self.pick[index])

    def to(self, device: torch.device | str) -> "Coloured":
        """The same tables on another device."""
        return Coloured(*(table.to(device) for table in self))


class Rotated(NamedTuple):
    """Rotates images anticlockwise by the angle of an environment: bilinear, black outside the image."""

    degrees: Tensor  # [environment]

    def __call__(self, x: Tensor, y: Tensor, index: Tensor, client: Tensor) -> Tensor:
        """Rotate every image about its centre."""
        client = client.clamp(max=len(self.degrees) - 1)
        angle = torch.deg2rad(self.degrees[client]).expand(index.shape).reshape(-1)
        cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
        rotation = torch.stack([cos, -sin, zero, sin, cos, zero], -1).reshape(-1, 2, 3)
        images = x.reshape(-1, *x.shape[-3:])
        grid = functional.affine_grid(rotation, list(images.shape), align_corners=False)
        return functional.grid_sample(images, grid, align_corners=False).reshape(x.shape)

    def subset(self, index: Tensor) -> "Rotated":
        """The same view: angles belong to environments, not to samples."""
        return self

    def to(self, device: torch.device | str) -> "Rotated":
        """The same angles on another device."""
        return Rotated(self.degrees.to(device))


def colour_view(colouring: Colouring) -> Coloured:
    """The view for the tables that `fedgma.data.shifts` draws."""
    return Coloured(*(torch.from_numpy(table.copy()) for table in colouring))
