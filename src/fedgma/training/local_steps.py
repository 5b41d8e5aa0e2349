"""A step of local training once the gradient is known, for one parameter of many lanes.

`sgd` is that of torch.optim.SGD and `adamw` that of torch.optim.AdamW. The lane axis comes first, and a rate is [lane].
Both return the step to subtract, and the new moments. Moments start at zero in every round.
"""

import torch
from torch import Tensor

OPTIMIZERS = ("sgd", "adamw")


def sgd(
    gradient: Tensor,
    weight: Tensor,
    velocity: Tensor | None,
    *,
    lr: Tensor,
    momentum: Tensor,
    decay: Tensor | None,
    nesterov: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """SGD with momentum, weight decay and Nesterov's step; a term that is None is left out."""
    if decay is not None:
        gradient = torch.addcmul(gradient, weight, wide(decay, weight))
    step = gradient
    if velocity is not None:
        velocity = step = torch.addcmul(gradient, velocity, wide(momentum, gradient))
        if nesterov is not None:
            ahead = torch.addcmul(gradient, velocity, wide(momentum, gradient))
            step = torch.where(wide(nesterov, step) > 0, ahead, step)
    return wide(lr, step) * step, velocity


def adamw(
    gradient: Tensor,
    weight: Tensor,
    moments: tuple[Tensor, Tensor],
    step: Tensor,
    *,
    lr: Tensor,
    betas: tuple[Tensor, Tensor],
    epsilon: Tensor,
    decay: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Adam with decoupled weight decay (Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019).

    `step` [1] counts from 0. What remains of a beta is computed in float64: in float32, 1 - 0.999 is off by 1e-5.
    """
    dtype, exact = gradient.dtype, [beta.double() for beta in betas]
    rest1, rest2 = (wide((1 - beta).to(dtype), gradient) for beta in exact)
    bias1, bias2 = (wide((1 - beta.pow(step + 1)).to(dtype), gradient) for beta in exact)
    first = torch.lerp(moments[0], gradient, rest1)
    second = torch.addcmul(moments[1] * wide(betas[1], gradient), gradient * gradient, rest2)
    move = first / bias1 / ((second / bias2).sqrt() + wide(epsilon, gradient))
    if decay is not None:
        move = torch.addcmul(move, weight, wide(decay, weight))
    return wide(lr, move) * move, (first, second)


def wide(per_lane: Tensor, like: Tensor) -> Tensor:
    """[lane] as [lane, 1, 1, ...] to multiply with."""
    return per_lane.view(-1, *(1,) * (like.dim() - 1))
