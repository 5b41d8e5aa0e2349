"""The smallest pool and federation that the engine accepts, for tests."""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class PlainPool:
    x: Tensor
    y: Tensor
    classes: int

    def batch(self, index: Tensor, client: Tensor) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        if x.dtype != torch.float32:
            return x, self.y[index]
        # a shift of the client's own, so that a test sees whether lanes get their own environment
        shift = (client % 7).to(torch.float32).expand(index.shape) * 0.01
        return x + shift.reshape(*index.shape, *(1,) * (x.dim() - index.dim())), self.y[index]

    def to(self, device: str) -> "PlainPool":
        return replace(self, x=self.x.to(device), y=self.y.to(device))


class DoublePool(PlainPool):
    """In double precision, where equality can be told from rounding."""

    def batch(self, index: Tensor, client: Tensor) -> tuple[Tensor, Tensor]:
        x, y = super().batch(index, client)
        return x.double(), y


@dataclass(frozen=True)
class PlainFederation:
    train: PlainPool
    test: PlainPool
    clients: tuple[np.ndarray, ...]
    validation: tuple[np.ndarray, ...] = ()
    client_tests: tuple[np.ndarray, ...] | None = None
    others: dict[str, PlainPool] = field(default_factory=dict)

    def to(self, device: str) -> "PlainFederation":
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def make_pool(samples: int, shape: tuple[int, ...], classes: int = 10, seed: int = 0) -> PlainPool:
    rng = np.random.default_rng(seed)
    y = rng.integers(classes, size=samples)
    centres = np.random.default_rng(99).standard_normal((classes, *shape))
    x = 0.5 * centres[y] + rng.standard_normal((samples, *shape))
    return PlainPool(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y), classes)


def make_federation(sizes: list[int], shape: tuple[int, ...], classes: int = 10, seed: int = 0) -> PlainFederation:
    pool = make_pool(sum(sizes), shape, classes, seed)
    parts = np.split(np.random.default_rng(seed).permutation(sum(sizes)), np.cumsum(sizes)[:-1])
    return PlainFederation(pool, make_pool(60, shape, classes, seed + 1), tuple(parts))
