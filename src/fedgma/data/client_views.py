"""Feature shift on the device: a client's colours or angle, looked up and applied when its batch is made."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fedgma.data.pools import Moments
from fedgma.data.shifts import Colouring


class Coloured(NamedTuple):
    """Grey images in the colours of an environment; the fields are those of `fedgma.data.shifts.Colouring`."""

    ink: Tensor
    ground: Tensor
    flip: Tensor
    luck: Tensor
    other: Tensor
    pick: Tensor

    def __call__(self, x: Tensor, y: Tensor, index: Tensor, client: Tensor) -> Tensor:
        """[..., 1, height, width] in [0, 1] to [..., 3, height, width]."""
        ink, ground = (colour[..., None, None] for colour in self.colours(y, index, client))
        return ground + x * (ink - ground)

    def colours(self, y: Tensor, index: Tensor, client: Tensor) -> tuple[Tensor, Tensor]:
        """Ink and ground colour of samples: two [..., rgb]."""
        client = client.clamp(max=len(self.flip) - 1)  # a test environment is the same whoever asks
        digit = torch.where(self.luck[index] < self.flip[client], self.other[index], y)
        pick = self.pick[index]
        return self.ink[client, digit, pick[..., 0]], self.ground[client, digit, pick[..., 1]]

    def moments(self, grey: Moments, y: Tensor, client: Tensor) -> Moments:
        """Moments of all images in colour from those in grey, without looking at a pixel."""
        index = torch.arange(len(y), device=y.device)
        ink, ground = (colour.double() for colour in self.colours(y, index, client))
        span = ink - ground
        first = ground + span * grey.first
        return Moments(first, ground**2 + 2 * ground * span * grey.first + span**2 * grey.second)

    def part(self, index: Tensor) -> "Coloured":
        """The tables of some samples."""
        return self._replace(luck=self.luck[index], other=self.other[index], pick=self.pick[index])

    def to(self, device: torch.device | str) -> "Coloured":
        """The same tables on another device."""
        return Coloured(*(table.to(device) for table in self))


class Rotated(NamedTuple):
    """Images turned anticlockwise by the angle of an environment: bilinear, black where nothing was."""

    degrees: Tensor  # [environment]

    def __call__(self, x: Tensor, y: Tensor, index: Tensor, client: Tensor) -> Tensor:
        """Turn every image about its centre."""
        client = client.clamp(max=len(self.degrees) - 1)
        angle = torch.deg2rad(self.degrees[client]).expand(index.shape).reshape(-1)
        cos, sin, none = angle.cos(), angle.sin(), torch.zeros_like(angle)
        turn = torch.stack([cos, -sin, none, sin, cos, none], -1).reshape(-1, 2, 3)
        images = x.reshape(-1, *x.shape[-3:])
        grid = functional.affine_grid(turn, list(images.shape), align_corners=False)
        return functional.grid_sample(images, grid, align_corners=False).reshape(x.shape)

    def part(self, index: Tensor) -> "Rotated":
        """The same: angles belong to environments, not to samples."""
        return self

    def to(self, device: torch.device | str) -> "Rotated":
        """The same angles on another device."""
        return Rotated(self.degrees.to(device))


def coloured(colouring: Colouring) -> Coloured:
    """A view from the tables that `fedgma.data.shifts` draws."""
    return Coloured(*(torch.from_numpy(table.copy()) for table in colouring))
