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


def same(one: Pool, other: Pool, apart: tuple[str, ...] = ()) -> bool:
    """Whether two pools are equal; tensors are compared by content."""
    if type(one) is not type(other) or not hasattr(one, "__dict__"):
        return one is other
    mine, theirs = vars(one), vars(other)
    return mine.keys() == theirs.keys() and all(_equal(mine[k], theirs[k]) for k in mine if k not in apart)


def _equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.device == other.device and torch.equal(one, other))
    if isinstance(one, tuple) and isinstance(other, tuple):  # a view is a tuple of tables
        alike = type(one) is type(other) and len(one) == len(other)
        return alike and all(_equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))
    return one is other or bool(type(one) is type(other) and one == other)
