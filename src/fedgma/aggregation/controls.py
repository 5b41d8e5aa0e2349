"""Rules that serve as controls: they tell why a mask helps or costs.

damped_mean(tau)            the server's unmasked step, as long per array as its masked step
shuffled_mask(tau, seed)    the mask's values at random entries of the array, as long as the masked step
stale_mask(tau)             the mask of the round before
cross_fitted(tau, seed)     half of the clients votes on the other half's mean
"""

import hashlib
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from fedgma.aggregation.masks import VoteMask, signs, soft_mask
from fedgma.aggregation.rule import Rule
from fedgma.arrays import Array, cast, is_torch, quotient
from fedgma.seeds import generator


def damped_mean(tau: float = 0.4) -> Rule:
    """Control: the step of a server without a mask, scaled per array to the length that its masked step would have."""
    mask = soft_mask(tau)
    return Rule("damped_mean", mask, compute=_no_mask, settings={"tau": mask.tau}, keep_length=True)


def shuffled_mask(tau: float = 0.4, seed: int = 0) -> Rule:
    """Control: each array's mask values moved to random entries of the array; the step is as long as the masked one."""
    mask, settings = soft_mask(tau), {"seed": seed}
    return Rule("shuffled_mask", mask, Shuffle(seed), settings={"tau": mask.tau, **settings}, keep_length=True)


def stale_mask(tau: float = 0.4) -> Rule:
    """Control: masked averaging with the mask of the round before, which knows nothing of this round's noise.

    The first round is not masked. The mask is the rule's state.
    """
    mask = soft_mask(tau)
    return Rule("stale_mask", mask, compute=_one_round_late, settings={"tau": mask.tau}, state={"before": 1.0})


def cross_fitted(tau: float = 0.4, seed: int = 0) -> Rule:
    """Control: the mask of one half of the clients applied to the other half's mean, and the other way round.

    The halves are drawn by the clients' names, so the order of arrival makes no difference. The result is a mean:
    moments of a server optimiser see it, as with `mask_position="before"`.

    >>> import numpy as np
    >>> cross_fitted(tau=1.0)({"w": np.array([[2.0], [4.0], [-1.0], [3.0]])}, [1, 1, 1, 1]).update["w"].shape
    (1,)
    """
    mask = soft_mask(tau)
    combine = partial(_cross_fit, mask=mask, seed=seed)
    return Rule(
        "cross_fitted", combine=combine, settings={"tau": mask.tau, "seed": seed}, weighted=True, entrywise=True
    )


def _cross_fit(
    stack: Array, weights: Sequence[float], clients: Sequence[Hashable], *, mask: VoteMask, seed: int
) -> Array:
    """The weighted mean of two halves, each masked by the votes of the other; a client alone is not masked."""
    drawn = sorted(range(len(clients)), key=lambda position: _draw(seed, clients[position]))
    flat = stack.reshape(len(stack), -1)
    total: Any = 0.0
    for half, other_half in ((drawn[0::2], drawn[1::2]), (drawn[1::2], drawn[0::2])):
        summed: Any = sum(weights[position] * cast(flat[position], "float64") for position in half)
        votes: Any = sum(cast(signs(flat[position]), "int64") for position in other_half)
        total = total + (summed * mask(votes, len(other_half), "float64") if other_half else summed)
    return quotient(total, math.fsum(weights)).reshape(stack.shape[1:])


def _draw(seed: int, client: Hashable) -> bytes:
    return hashlib.sha256(f"cross-fit {seed} {client}".encode()).digest()


def _no_mask(mean: Array, mask: Array) -> tuple[Array, Array]:
    return mean, mask * 0 + 1


def _one_round_late(mean: Array, mask: Array, before: Array) -> tuple[Array, Array, dict[str, Array]]:
    return mean, before, {"before": mask}


@dataclass(frozen=True)
class Shuffle:
    """Moves each array's mask values to random entries of the array."""

    seed: int

    def __call__(self, name: str, mean: Array, mask: Array) -> tuple[Array, Array]:
        """The mean, and the shuffled mask."""
        return mean, mask[..., _permutation(name, mask.shape[-1], self.seed, mask.device if is_torch(mask) else None)]


@lru_cache(maxsize=1024)  # drawn and copied to the device once, not every round
def _permutation(name: str, size: int, seed: int, device: Any) -> Any:
    order = generator(seed, "shuffled mask", name).permutation(size)
    if device is None:
        return order
    import torch

    return torch.as_tensor(order, device=device)
