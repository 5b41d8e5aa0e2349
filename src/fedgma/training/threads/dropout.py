"""Dropout layers on a CPU that draw from a generator of their own, to the bits of torch's.

Clients in threads share torch's generator, so a client's draws would depend on the others. With a generator of its own,
started where the loop starts torch's, a client draws the same numbers as in the loop.
"""

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def draw_apart(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """The model itself, whose layers of type `nn.Dropout` draw from the generator; they keep type and settings."""
    for part in model.modules():
        if type(part) is nn.Dropout and "forward" not in vars(part):
            part.forward = functools.partial(_forward, part, generator)  # type: ignore[method-assign]
    return model


def _forward(layer: nn.Dropout, generator: torch.Generator, x: Tensor) -> Tensor:
    draws = layer.training and 0 < layer.p < 1 and x.numel() > 0
    if not draws or x.device.type != "cpu":
        return F.dropout(x, layer.p, layer.training, layer.inplace)
    kept = torch.empty_like(x).bernoulli_(1 - layer.p, generator=generator).div_(1 - layer.p)
    return x.mul_(kept) if layer.inplace else x * kept
