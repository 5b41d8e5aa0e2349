"""Finds equal pools: federations of one data set that differ only in their partition share its samples."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedgma.data.pools import Pool


def distinct(pools: Sequence[Pool], apart: tuple[str, ...] = ()) -> tuple[tuple[Pool, ...], np.ndarray]:
    """The pools that differ, and the position of each pool among them; fields in `apart` are not compared."""
    different: list[Pool] = []
    known: dict[int, int] = {}
    for pool in pools:
        if id(pool) not in known:
            position = next((i for i, other in enumerate(different) if same(pool, other, apart)), len(different))
            if position == len(different):
                different.append(pool)
            known[id(pool)] = position
    return tuple(different), np.array([known[id(pool)] for pool in pools], np.int64)


def same(first: Pool, second: Pool, apart: tuple[str, ...] = ()) -> bool:
    """Whether two pools are equal; tensors are compared by content."""
    if type(first) is not type(second) or not hasattr(first, "__dict__"):
        return first is second
    mine, theirs = vars(first), vars(second)
    return mine.keys() == theirs.keys() and all(_equal(mine[k], theirs[k]) for k in mine if k not in apart)


def _equal(first: object, second: object) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first is second or (first.device == second.device and torch.equal(first, second))
    if isinstance(first, tuple) and isinstance(second, tuple):  # a view is a tuple of tables
        alike = type(first) is type(second) and len(first) == len(second)
        return alike and all(_equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))
    return first is second or bool(type(first) is type(second) and first == second)
