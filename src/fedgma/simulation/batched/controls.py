"""The controls of many runs at once: do masks find better directions, or only take smaller steps?

`damped_mean` keeps the direction of the plain mean and takes the masked mean's length, array by array;
`shuffled_mask` deals the mask's values to other entries of their array. The same as in `fedgma.aggregation.rules`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fedgma.aggregation.rules import shuffled_order
from fedgma.simulation.batched.tallies import Merged
from fedgma.training.task import Shapes

CONTROLS = ("damped_mean", "shuffled_mask")


class Controlled(Protocol):
    """What a run says about its aggregation."""

    @property
    def aggregator(self) -> str:
        """Name of the aggregator."""

    @property
    def seed(self) -> int:
        """The run's seed."""


class Controls(NamedTuple):
    """Which runs are controls, on the device."""

    damped: Tensor  # int64, rows
    shuffled: Tensor  # int64, rows
    order: Tensor  # int64 [row, entry], where each shuffled entry's mask comes from
    sizes: tuple[int, ...]  # entries of every array


def lay_out(specs: Sequence[Controlled], shapes: Shapes, device: torch.device) -> Controls | None:
    """The controls among some runs; None where there are none."""
    rows = {name: [row for row, s in enumerate(specs) if s.aggregator == name] for name in CONTROLS}
    if not any(rows.values()):
        return None
    sizes = tuple(shape.numel() for _, shape in shapes)
    orders = {seed: _order(shapes, seed) for seed in {specs[row].seed for row in rows["shuffled_mask"]}}
    order = [orders[specs[row].seed] for row in rows["shuffled_mask"]]
    table = np.stack(order) if order else np.zeros((0, sum(sizes)), np.int64)
    damped, shuffled = (torch.tensor(rows[name], dtype=torch.int64, device=device) for name in CONTROLS)
    return Controls(damped, shuffled, torch.from_numpy(table).to(device), sizes)


def _order(shapes: Shapes, seed: int) -> np.ndarray:
    sizes = [shape.numel() for _, shape in shapes]
    begins = np.cumsum([0, *sizes[:-1]])
    parts = [
        begin + shuffled_order(name, size, seed) for (name, _), begin, size in zip(shapes, begins, sizes, strict=True)
    ]
    return np.concatenate(parts)


def apply(controls: Controls | None, merged: Merged) -> Merged:
    """The same aggregates, with the masks of the controls in the place of those that they are made from."""
    if controls is None or merged.mask is None:
        return merged
    mask = merged.mask.clone()
    if len(controls.damped):
        mask[controls.damped] = _damped(merged.mean[controls.damped], mask[controls.damped], controls.sizes)
    if len(controls.shuffled):
        mask[controls.shuffled] = mask[controls.shuffled].gather(1, controls.order)
    return merged._replace(mask=mask)


def _damped(mean: Tensor, mask: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """One number an array: the masked mean's length over the plain mean's."""
    parts = []
    for whole, part in zip(torch.split(mean, list(sizes), 1), torch.split(mask, list(sizes), 1), strict=True):
        length = torch.linalg.vector_norm(whole, dim=1, dtype=torch.float64)
        masked = torch.linalg.vector_norm(whole * part, dim=1, dtype=torch.float64)
        share = torch.where(length > 0, masked / length, 1.0).float()
        parts.append(share[:, None].expand(part.shape))
    return torch.cat(parts, 1)
