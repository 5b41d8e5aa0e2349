"""A step of SGD that computes the gradients of all parameters as it applies them, in one kernel.

The gradients of a small model are sums that are cheap to form: products of two factors, or pieces of the batch.
`Together` keeps them so. A step with or without momentum, and nothing else in it, forms each sum where the weights are
changed; with any other term the gradients are computed first, as those of other models are.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedgma.training.fast import gpu
from fedgma.training.fast.layers import Pieces, Product
from fedgma.training.local_steps import sgd, wide
from fedgma.training.stacked import Stacked

LARGEST = 1 << 18  # entries of a lane; the blocks of large layers are better cut by a library

_library: Any = torch.library.Library("fedgma", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "sgd_step(Tensor(a!)[] weights, Tensor(b!)[] velocities, Tensor[] lefts, Tensor?[] rights, Tensor lr,"
    " Tensor momentum, Tensor count) -> ()",
    tags=(torch.Tag.flexible_layout,),  # else the compiler copies the counts
)


class Together(NamedTuple):
    """The gradients of all parameters, not summed yet."""

    sums: dict[str, Product | Pieces]
    samples: Tensor  # [lane]; a lane without any does not change

    def each(self) -> dict[str, Tensor | Product]:
        """Each gradient for itself."""
        return {name: value.tensor() if isinstance(value, Pieces) else value for name, value in self.sums.items()}

    def step(self, params: Stacked, velocities: Stacked, lr: Tensor, momentum: Tensor) -> None:
        """A step of SGD in place, with momentum if there are velocities; rates are [lane]."""
        names, sums = list(self.sums), list(self.sums.values())
        torch.ops.fedgma.sgd_step(
            [params[name] for name in names], [velocities[name] for name in names if velocities],
            [value.left if isinstance(value, Product) else value.parts for value in sums],
            [value.right if isinstance(value, Product) else None for value in sums], lr, momentum, self.samples,
        )  # fmt: skip


def by_kernel(params: Stacked) -> bool:
    """Whether the kernel takes a step of these parameters."""
    if "sgd_step" not in gpu.KERNELS:
        return False
    small = sum(value.numel() for value in params.values()) <= LARGEST * len(next(iter(params.values())))
    return small and all(v.device.type == "cuda" and v.dtype == torch.float32 for v in params.values())


def _plain(
    weights: list[Tensor], velocities: list[Tensor], lefts: list[Tensor], rights: list[Tensor | None],
    lr: Tensor, momentum: Tensor, count: Tensor,
) -> None:  # fmt: skip
    for place, (weight, left, right) in enumerate(zip(weights, lefts, rights, strict=True)):
        gradient = (Pieces(left) if right is None else Product(left, right)).tensor()
        velocity, busy = velocities[place] if velocities else None, wide(count > 0, weight)
        move, moved = sgd(gradient, weight, velocity, lr=lr, momentum=momentum, decay=None, nesterov=None)
        weight.sub_(torch.where(busy, move, 0.0))
        if velocity is not None and moved is not None:
            velocity.copy_(torch.where(busy, moved, velocity))


def _fused(
    weights: list[Tensor], velocities: list[Tensor], lefts: list[Tensor], rights: list[Tensor | None],
    lr: Tensor, momentum: Tensor, count: Tensor,
) -> None:  # fmt: skip
    kernels = gpu.kernels("sgd_step")
    if kernels is None or not all(value.is_contiguous() for value in (*weights, *velocities)):
        return _plain(weights, velocities, lefts, rights, lr, momentum, count)
    moving: list[Tensor | None] = [*velocities] if velocities else [None] * len(weights)
    factors = [
        (left.contiguous(), right if right is None else right.contiguous())
        for left, right in zip(lefts, rights, strict=True)
    ]
    parameters = [kernels.Parameter(*given, *pair) for *given, pair in zip(weights, moving, factors, strict=True)]
    kernels.step(parameters, lr.contiguous(), momentum.contiguous(), count.contiguous())


def _nothing(*given: Any) -> None:
    """For the compiler: no new tensor."""


for _device, _call in (("CPU", _plain), ("CUDA", _fused), ("Meta", _nothing)):
    _library.impl("sgd_step", _call, _device)
