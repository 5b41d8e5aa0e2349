"""The tally compiled for the CPU by numba: each update is read once, and the sums of a block stay in the cache.

No fast-math: rounding is part of the result, and these loops give the bits of `plain`. Threads take ranges of entries,
so their number does not change a bit.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numba
import numpy as np

from fedgma.arrays import Array

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SHARED = 1 << 16  # entries from which a second thread pays
BLOCK = 2048  # entries: their sums (13 bytes each) stay in the nearest cache while the clients pass
EXPONENT: dict[str, Any] = {
    "float32": np.uint32(0x7F800000),
    "float64": np.uint64(0x7FF0000000000000),
}  # all ones: NaN or infinite
BITS: dict[str, Any] = {"float32": np.uint32, "float64": np.uint64}


def add(total: Array, rest: Array, votes: Array, update: Array, weight: float) -> None:
    """Add one client's flat update, in place."""
    _spread(lambda part: _add(total[part], rest[part], votes[part], update[part], weight), update.size)


def add_rows(total: Array, rest: Array, votes: Array, updates: Array, weights: Array) -> bool:
    """Add clients' updates [client, entry] in their order, in place; whether all of them were finite."""

    def work(part: slice) -> bool:
        return bool(_add_rows(total, rest, votes, updates, weights, part.start, part.stop))

    return all(_spread(work, updates.shape[1]))


def all_finite(array: Array) -> bool:
    """Whether no entry of a flat array is NaN or infinite."""
    bits, exponent = array.view(BITS[array.dtype.name]), EXPONENT[array.dtype.name]
    return not any(_spread(lambda part: _strangers(bits[part], exponent), array.size))


def _spread(work: Callable[[slice], Any], size: int) -> list[Any]:
    """Run `work` on all entries, or, where there are many, on equal parts of them, a thread each."""
    threads = THREADS if size >= SHARED else 1
    if threads == 1:
        return [work(slice(0, size))]
    edges = [size * k // threads for k in range(threads + 1)]
    return list(_pool().map(work, [slice(start, stop) for start, stop in pairwise(edges)]))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS)


if hasattr(os, "register_at_fork"):  # a forked child has none of its parent's threads: it makes its own
    os.register_at_fork(after_in_child=_pool.cache_clear)


@numba.njit(nogil=True, cache=True)
def _add(total: Array, rest: Array, votes: Array, update: Array, weight: float) -> None:
    one = votes.dtype.type(1)
    for j in range(update.size):
        value = update[j]
        term = np.float64(value) * weight
        before = total[j]
        after = before + term
        back = after - before
        total[j] = after
        rest[j] = rest[j] + ((before - (after - back)) + (term - back))
        votes[j] += one * (value > 0) - one * (value < 0)


@numba.njit(nogil=True, cache=True)
def _strangers(bits: Array, exponent: Any) -> Any:
    found = bits.dtype.type(0)
    for j in range(bits.size):
        found |= bits.dtype.type((bits[j] & exponent) == exponent)
    return found > 0


@numba.njit(nogil=True, cache=True)
def _add_rows(total: Array, rest: Array, votes: Array, updates: Array, weights: Array, first: int, last: int) -> bool:
    finite = True
    for start in range(first, last, BLOCK):
        stop = min(last, start + BLOCK)
        for client in range(len(updates)):
            update = updates[client, start:stop]
            _add(total[start:stop], rest[start:stop], votes[start:stop], update, weights[client])
        for j in range(start, stop):
            finite &= abs(total[j]) < np.inf  # NaN and infinities end up in the total
    return finite
