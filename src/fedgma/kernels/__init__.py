"""Inner loops of the tally, chosen by device: `plain` (numpy, torch), `cpu` (numba), `gpu` (triton); the same bits.

Bringing in the compiled CPU loops takes longer than they save on a small model, so they wait for the first large array.
"""

import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from fedgma.arrays import Array, all_finite, is_torch
from fedgma.kernels.plain import Sums
from fedgma.kernels.plain import add as plain_add
from fedgma.kernels.plain import add_rows as plain_add_rows

LARGE = 1 << 18  # entries from which bringing in the compiled CPU loops pays


@cache
def compiled() -> ModuleType | None:
    """The compiled CPU loops, or None where numba is missing or cannot store what it compiles."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        from fedgma.kernels import cpu
    except RuntimeError:  # numba found no folder to keep its cache in
        return None
    return cpu


@cache
def fused() -> ModuleType | None:
    """The fused GPU passes, or None where triton is missing."""
    if importlib.util.find_spec("triton") is None:
        return None
    from fedgma.kernels import gpu

    return gpu


def add(sums: Sums, update: Array, weight: float) -> None:
    """Add one client's flat update, in place."""
    kernels = _kernels(update, sums.votes)
    if kernels is None:
        plain_add(sums, update, weight)
    else:
        kernels.add(*sums, update, weight)


def add_rows(sums: Sums, updates: Array, weights: np.ndarray[Any, Any]) -> bool:
    """Add clients' updates [client, entry] in their order, in place; whether all of them were finite."""
    kernels = _kernels(updates, sums.votes)
    if kernels is None:
        return plain_add_rows(sums, updates, weights)
    return bool(kernels.add_rows(*sums, updates, weights))


def finite(array: Array) -> bool:
    """Whether no entry of a flat native array is NaN or infinite."""
    kernels = None if is_torch(array) else _kernels(array, array)
    return bool(kernels.all_finite(array)) if kernels is not None else all_finite(array)


def _kernels(array: Array, votes: Array | None) -> ModuleType | None:
    if votes is None or not array.shape[-1]:
        return None
    if is_torch(array):
        return fused() if array.device.type == "cuda" else None
    if array.dtype not in (np.float32, np.float64):
        return None
    there = compiled.cache_info().currsize > 0
    return compiled() if there or array.shape[-1] >= LARGE else None
