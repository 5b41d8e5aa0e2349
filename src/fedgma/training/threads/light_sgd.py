"""SGD to the bits of torch's, in fewer calls: threads that train wait for each other's Python and share the memory.

An optimiser of torch spends some 150 microseconds of Python on a step. With momentum it also passes over the weights
three times. torch's fused step passes once; it is used if a trial gives the same bits, and only for arrays of whole
vectors, since the entries that are left over are rounded differently.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

VECTOR = 64  # entries: a multiple of every processor's vectors
FUSED_TYPES = (torch.float32, torch.float64)


class Rates(NamedTuple):
    """What stays the same during the steps of a lane."""

    momentum: float
    weight_decay: float
    nesterov: bool


class LightSGD:
    """Used like `torch.optim.SGD`, for dense gradients on a CPU: `zero_grad`, the rate in `param_groups`, `step`."""

    def __init__(self, trainable: Sequence[nn.Parameter], rates: Rates) -> None:
        self.param_groups: list[dict[str, Any]] = [{"lr": 0.0}]
        self.trainable, self.rates = trainable, rates
        fused = [_suits_fused(value) for value in trainable]
        self.groups: list[tuple[Step, list[Tensor], list[Tensor]]] = [
            (step, [value for value, suits in zip(trainable, fused, strict=True) if suits == wanted], [])
            for step, wanted in ((fused_step, True), (plain_step, False))
            if wanted in fused
        ]

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for value in self.trainable:
            value.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One step with the present gradients and rate."""
        rate = self.param_groups[0]["lr"]
        for step, values, velocities in self.groups:
            gradients: list[Any] = [value.grad for value in values]
            step(values, gradients, velocities, rate, self.rates)


Step = Callable[[list[Tensor], list[Tensor], list[Tensor], float, Rates], None]


def fused_step(
    values: list[Tensor], gradients: list[Tensor], velocities: list[Tensor], rate: float, rates: Rates
) -> None:
    """One pass over weights, gradients and velocities; these are empty before the first step."""
    first = bool(rates.momentum) and not velocities
    if first:
        velocities.extend(torch.empty_like(value) for value in values)
    dense = [gradient.contiguous() for gradient in gradients]  # the weights are; the fused step does not look
    fixed: dict[str, Any] = {"dampening": 0.0, "maximize": False, "is_first_step": first}
    torch._fused_sgd_(values, dense, velocities, lr=rate, **rates._asdict(), **fixed)


def plain_step(
    values: list[Tensor], gradients: list[Tensor], velocities: list[Tensor], rate: float, rates: Rates
) -> None:
    """The operations of `torch.optim.SGD(foreach=True)` in their order."""
    momentum, decay, nesterov = rates
    if decay:
        gradients = list(torch._foreach_add(gradients, values, alpha=decay))
    if momentum and not velocities:
        velocities.extend(gradient.clone() for gradient in gradients)
    elif momentum:
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_add_(velocities, gradients)
    if momentum:
        gradients = list(torch._foreach_add(gradients, velocities, alpha=momentum)) if nesterov else velocities
    torch._foreach_add_(values, gradients, alpha=-rate)


def _suits_fused(value: Tensor) -> bool:
    whole = value.numel() % VECTOR == 0 and value.dtype in FUSED_TYPES and value.is_contiguous()
    return whole and fused_has_the_same_bits()


@functools.cache
def fused_has_the_same_bits() -> bool:
    """Whether torch's fused step rounds as its plain one does on this processor, tried on random numbers."""
    draw = torch.Generator().manual_seed(0)
    cases = [Rates(0.9, 0.01, True), Rates(0.9, 0.0, False), Rates(0.0, 0.01, False)]
    return all(_same_ends(rates, kind, draw) for rates in cases for kind in FUSED_TYPES)


def _same_ends(rates: Rates, kind: torch.dtype, draw: torch.Generator) -> bool:
    """Whether three steps of both end at the same weights."""
    start, *gradients = torch.randn(4, 32 * VECTOR, generator=draw, dtype=kind)
    ends = []
    for step in (fused_step, plain_step):
        value, velocities = start.clone(), list[Tensor]()
        for number, gradient in enumerate(gradients):
            step([value], [gradient], velocities, 0.1 / (number + 3), rates)
        ends.append(value)
    return torch.equal(*ends)
