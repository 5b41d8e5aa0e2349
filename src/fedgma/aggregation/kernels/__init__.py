"""Inner loops of the tally, chosen by device: `plain` (numpy, torch), `cpu` (numba), `gpu` (triton); the same bits.

Importing the compiled CPU loops takes longer than they save in a few rounds of a small model. So the first large array
imports them, or many small ones.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from fedgma.aggregation.kernels.plain import Sums
from fedgma.aggregation.kernels.plain import add as plain_add
from fedgma.aggregation.kernels.plain import add_rows as plain_add_rows
from fedgma.aggregation.kernels.plain import mean as plain_mean
from fedgma.aggregation.masks import VoteMask
from fedgma.arrays import Array, all_finite, blocks, is_torch, zeros

TRITON = importlib.util.find_spec("triton") is not None  # a constant, since torch.compile cannot trace find_spec
LARGE = 1 << 18  # entries from which importing the compiled CPU loops pays
ENOUGH = 1 << 28  # entries in plain loops, which took as long as the import: for all that follow it pays
MOST_VALUES = 1 << 14  # of a mask that is looked up in a table: it stays in the cache


@dataclass
class _Done:
    """What the plain loops have done in this process."""

    entries: int = 0


_done = _Done()


@cache
def load_cpu_kernels() -> ModuleType | None:
    """Import the compiled CPU loops; None if numba is missing or has no folder for its cache."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        from fedgma.aggregation.kernels import cpu
    except RuntimeError:  # numba has no folder for its cache
        return None
    return cpu


@cache
def load_gpu_kernels() -> ModuleType | None:
    """Import the GPU kernels of the tally; None if triton is missing."""
    return importlib.import_module("fedgma.aggregation.kernels.gpu") if TRITON else None


@cache
def load_layouts() -> ModuleType:
    """Import the layouts of stacks of tensors; they need torch."""
    return importlib.import_module("fedgma.aggregation.kernels.layout")


def add(sums: Sequence[Sums], updates: Sequence[Array], weight: float) -> None:
    """Add one client's flat arrays to their sums, in place."""
    cpu = _cpu_kernels_for(updates)
    compiled = [
        position
        for position, update in enumerate(updates)
        if cpu and sums[position].votes is not None and _is_supported(update)
    ]
    if cpu and compiled:
        cpu.add([sums[position] for position in compiled], [updates[position] for position in compiled], weight)
    for position in sorted(set(range(len(updates))) - set(compiled)):
        gpu = _gpu_kernels_of_votes(updates[position], sums[position])
        if gpu:
            gpu.add(sums[position], updates[position], weight)
        else:
            plain_add(sums[position], updates[position], weight)


def add_if_finite(sums: Sequence[Sums], updates: Sequence[Array], weight: float) -> bool:
    """The same for flat numpy arrays that were not checked; False if nothing was added.

    That is so if a value is not finite, and for arrays that are small, of several number types or without the compiled
    loops.
    """
    votes: Sequence[Any] = [entry.votes for entry in sums]
    kinds = {update.dtype.char + cast.dtype.char for update, cast in zip(updates, votes, strict=True)}
    suits = len(kinds) == 1 and _is_supported(updates[0]) and sum(update.size for update in updates) >= LARGE
    return suits and load_cpu_kernels() is not None and _load_attempt().add_if_finite(sums, updates, weight)


@cache
def _load_attempt() -> ModuleType:
    return importlib.import_module("fedgma.aggregation.kernels.attempt")


def add_rows(sums: Sums, updates: Array, weights: np.ndarray[Any, Any]) -> bool:
    """Add clients' updates [client, entry] in order, in place; returns whether all of them are finite."""
    cpu, gpu = _cpu_kernels_for([updates]), _gpu_kernels_of_votes(updates, sums)
    kernels = gpu or (cpu if _is_supported(updates) and sums.votes is not None else None)
    return bool(kernels.add_rows(sums, updates, weights)) if kernels else plain_add_rows(sums, updates, weights)


def first_nonfinite(arrays: Sequence[Array]) -> int | None:
    """Position of the first of these flat native arrays that holds a NaN or an infinity; None if all are finite."""
    cpu = _cpu_kernels_for(arrays)
    if cpu and all(_is_supported(array) for array in arrays):
        position: int | None = cpu.first_nonfinite(arrays)
        return position
    return next((position for position, array in enumerate(arrays) if not all_finite(array)), None)


def mean(sums: Sums, weight: float, dtype: str, *, reuse: bool = False) -> Array:
    """The weighted mean, rounded to `dtype`; `reuse` overwrites `rest` with it if the types match."""
    cpu = _cpu_kernels_for([sums.rest])
    if cpu is None or is_torch(sums.rest) or sums.rest.dtype != dtype:
        return plain_mean(sums, weight, dtype, reuse=reuse)
    result = sums.rest if reuse else sums.rest.copy()
    cpu.mean(sums.total, result, weight)
    return result


def mask(function: VoteMask, votes: Array, clients: int, dtype: str) -> Array:
    """The mask of these votes, in number type `dtype`; it has only clients + 1 values."""
    cpu = _cpu_kernels_for([votes])
    if cpu is not None and not is_torch(votes) and clients < min(len(votes), MOST_VALUES):
        return cpu.look_up(function(np.arange(clients + 1), clients, dtype), votes)
    result = zeros(len(votes), dtype, votes)
    for part in blocks(len(votes)):
        result[part] = function(votes[part], clients, dtype)
    return result


def _cpu_kernels_for(arrays: Sequence[Array]) -> ModuleType | None:
    """The compiled loops, if they are imported already or it pays to import them."""
    if load_cpu_kernels.cache_info().currsize > 0 or "numba" in sys.modules:
        return load_cpu_kernels()
    own = [array for array in arrays if not is_torch(array)]
    _done.entries += sum(array.size for array in own)
    worth_it = _done.entries >= ENOUGH or sum(array.shape[-1] for array in own) >= LARGE
    return load_cpu_kernels() if worth_it else None


def _is_supported(array: Array) -> bool:
    return not is_torch(array) and array.dtype.char in ("f", "d")  # float32 or float64


def _gpu_kernels_of_votes(array: Array, sums: Sums) -> ModuleType | None:
    return gpu_kernels_for(array) if sums.votes is not None and array.shape[-1] > 0 else None


def gpu_kernels_for(array: Any) -> ModuleType | None:
    """The fused passes where an array is on a GPU that has them; None elsewhere."""
    return load_gpu_kernels() if is_torch(array) and array.device.type == "cuda" else None
