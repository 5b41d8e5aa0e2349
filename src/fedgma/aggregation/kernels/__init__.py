"""Inner loops of the tally, chosen by device: `plain` (numpy, torch), `cpu` (numba), `gpu` (triton); the same bits.

Bringing in the compiled CPU loops takes longer than they save on a small model, so they wait for the first large one.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from fedgma.aggregation.kernels.plain import Sums
from fedgma.aggregation.kernels.plain import add as plain_add
from fedgma.aggregation.kernels.plain import add_rows as plain_add_rows
from fedgma.arrays import Array, all_finite, is_torch

TRITON = importlib.util.find_spec("triton") is not None  # asked once: a compiler cannot look through the question
LARGE = 1 << 18  # entries from which bringing in the compiled CPU loops pays


@cache
def compiled() -> ModuleType | None:
    """The compiled CPU loops, or None where numba is missing or cannot store what it compiles."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        from fedgma.aggregation.kernels import cpu
    except RuntimeError:  # numba found no folder to keep its cache in
        return None
    return cpu


@cache
def fused() -> ModuleType | None:
    """The fused GPU passes of the tally, or None where triton is missing."""
    return importlib.import_module("fedgma.aggregation.kernels.gpu") if TRITON else None


def add(sums: Sequence[Sums], updates: Sequence[Array], weight: float) -> None:
    """Add one client's flat arrays to their sums, in place."""
    cpu = _compiled_for(updates)
    quick = [place for place, update in enumerate(updates) if cpu and sums[place].votes is not None and _fits(update)]
    if cpu and quick:
        cpu.add([sums[place] for place in quick], [updates[place] for place in quick], weight)
    for place in sorted(set(range(len(updates))) - set(quick)):
        gpu = _gpu_for(updates[place], sums[place])
        if gpu:
            gpu.add(*sums[place], updates[place], weight)
        else:
            plain_add(sums[place], updates[place], weight)


def add_rows(sums: Sums, updates: Array, weights: np.ndarray[Any, Any]) -> bool:
    """Add clients' updates [client, entry] in their order, in place; whether all of them were finite."""
    cpu, gpu = _compiled_for([updates]), _gpu_for(updates, sums)
    kernels = gpu or (cpu if _fits(updates) and sums.votes is not None else None)
    return bool(kernels.add_rows(*sums, updates, weights)) if kernels else plain_add_rows(sums, updates, weights)


def first_nonfinite(arrays: Sequence[Array]) -> int | None:
    """Which of these flat native arrays is the first that holds a NaN or an infinity, if any."""
    cpu = _compiled_for(arrays)
    if cpu and all(_fits(array) for array in arrays):
        place: int | None = cpu.first_nonfinite(arrays)
        return place
    return next((place for place, array in enumerate(arrays) if not all_finite(array)), None)


def _compiled_for(arrays: Sequence[Array]) -> ModuleType | None:
    """The compiled loops, if they are there already or the arrays are large enough to bring them in for."""
    there = compiled.cache_info().currsize > 0 or "numba" in sys.modules
    large = there or sum(array.shape[-1] for array in arrays if not is_torch(array)) >= LARGE
    return compiled() if large else None


def _fits(array: Array) -> bool:
    return not is_torch(array) and array.dtype in (np.float32, np.float64)


def _gpu_for(array: Array, sums: Sums) -> ModuleType | None:
    on_gpu = is_torch(array) and array.device.type == "cuda" and array.shape[-1] > 0
    return fused() if on_gpu and sums.votes is not None else None
