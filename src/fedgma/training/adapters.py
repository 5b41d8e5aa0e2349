"""Low-rank adapters on the linear layers of any module; all other parameters are frozen.

(Hu and others, LoRA: Low-Rank Adaptation of Large Language Models, 2022.) Frozen parameters are neither trained nor
sent: only `lora_A` and `lora_B` of each layer travel, vote and count. A module that peft made is used as it is.
"""

import copy
import fnmatch
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgma.errors import ConfigError


class Adapted(nn.Module):
    """A frozen linear layer, and scale * B A added to its weight; B starts at zero, so nothing changes at first."""

    def __init__(self, base: nn.Linear, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        inside, outside = base.in_features, base.out_features
        drawn = (2 * torch.rand(rank, inside, generator=generator) - 1) / math.sqrt(inside)
        self.lora_A = nn.Parameter(drawn.to(base.weight))
        self.lora_B = nn.Parameter(base.weight.new_zeros(outside, rank))

    @property
    def weight(self) -> Tensor:
        """The weight of the plain layer that does the same, for modules that read it."""
        return self.base.weight + self.scale * (self.lora_B @ self.lora_A)

    @property
    def bias(self) -> Tensor | None:
        """The bias of the frozen layer."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output, and that of the adapter."""
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)  # type: ignore[no-any-return]


def with_adapters(
    model: nn.Module, *patterns: str, rank: int = 8, alpha: float | None = None, seed: int = 0
) -> nn.Module:
    """A copy of a module with an adapter on each linear layer whose name fits a pattern, and all else frozen.

    Without patterns, all linear layers have one. An adapter adds alpha / rank times B A; by default alpha is the rank.
    The result is a `model` for `fedgma.run`. To train another parameter too, set its `requires_grad` afterwards.

    >>> net = with_adapters(nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)), "0", rank=2)
    >>> {name: tuple(value.shape) for name, value in net.named_parameters() if value.requires_grad}
    {'0.lora_A': (2, 6), '0.lora_B': (4, 2)}
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"rank (of adapters) must be a whole number from 1, got {rank!r}")
    network = copy.deepcopy(model).requires_grad_(False)
    # subclasses have forward passes of their own
    linear = {name: layer for name, layer in network.named_modules() if type(layer) is nn.Linear}
    chosen = [
        name for name in linear if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if not chosen or "" in chosen:
        known = ", ".join(name or "the module itself" for name in linear) or "none"
        raise ConfigError(f"adapters: expected names of linear layers inside of the module; there are: {known}")
    generator = torch.Generator().manual_seed(seed)
    scale = 1.0 if alpha is None else alpha / rank
    for name in chosen:
        parent, _, short = name.rpartition(".")
        setattr(network.get_submodule(parent), short, Adapted(linear[name], rank, scale, generator))
    return network
