"""Gradients at a perturbed point, for many lanes at once: sharpness-aware minimisation and its relatives.

A step takes two passes over its batch: one at the weights w, and one at w + e, where e has the direction of the first
gradient. Loss, hits and running statistics are those of the first pass.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedgma.training.lane_batch import Tilt
from fedgma.training.local_steps import wide
from fedgma.training.stacked import Stacked

TINY = 1e-12  # added to a norm that is divided by


class Ascent(NamedTuple):
    """How lanes perturb: [lane] each; see `LaneBatch`."""

    rho: Tensor
    unit: Tensor
    blend: Tensor
    tilted: Tensor


def second_gradients(
    find: Callable[[Stacked], Stacked], params: Stacked, grads: Stacked, ascent: Ascent, tilt: Tilt | None
) -> tuple[Stacked, Stacked]:
    """The blend of the first gradients and those that `find` gives at the perturbed weights, and the perturbations."""
    toward = grads if tilt is None else {n: g - tilt.own[n] - tilt.shared[n] for n, g in grads.items()}
    norm = torch.stack([value.flatten(1).square().sum(1) for value in toward.values()]).sum(0).sqrt()
    factor = ascent.rho * torch.where(ascent.unit > 0, 1 / (norm + TINY), 1.0)
    moves = {name: wide(factor, value) * value for name, value in toward.items()}
    second = find({name: value + moves[name] for name, value in params.items()})
    return {name: torch.lerp(g, second[name], wide(ascent.blend, g).to(g.dtype)) for name, g in grads.items()}, moves


def turn(tilt: Tilt, moves: Stacked, ascent: Ascent, busy: Tensor | None) -> None:
    """Add the perturbation minus the shared tilt to every tilted lane's own, and keep it as the last; in place."""
    changes = ascent.tilted > 0 if busy is None else (ascent.tilted > 0) & busy
    for name, move in moves.items():
        changing = wide(changes, move)
        tilt.own[name].add_(torch.where(changing, move - tilt.shared[name], 0.0))
        tilt.last[name].copy_(torch.where(changing, move, tilt.last[name]))
