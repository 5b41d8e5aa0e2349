"""The tally compiled for the CPU by numba: each update is read once, and the sums of a block stay in the cache.

No fast-math: rounding is part of the result, and these loops give the bits of `plain`. Threads take ranges of entries,
so their number does not change a bit.

Buys, over plain numpy on two cores: 5 to 6 (20 clients x 1 M parameters, `benchmarks/bench_parts.py --groups cpu`).
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numba
import numpy as np

from fedgma.arrays import Array

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SHARED = 1 << 16  # entries from which a second thread pays
BLOCK = 2048  # entries: their sums (13 bytes each) stay in the nearest cache while the clients pass
SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
BITS: dict[Any, Any] = {SINGLE: np.uint32, DOUBLE: np.uint64}
EXPONENT: dict[Any, Any] = {SINGLE: np.uint32(0x7F800000), DOUBLE: np.uint64(0x7FF0000000000000)}  # all ones: strange


Piece = tuple[int, slice]  # a part of one array of several


def add(sums: Sequence[tuple[Array, Array, Array]], updates: Sequence[Array], weight: float) -> None:
    """Add one client's flat arrays to their sums (total, rest, votes), in place."""

    def work(pieces: list[Piece]) -> None:
        for place, part in pieces:
            total, rest, votes = sums[place]
            _add(total[part], rest[part], votes[part], updates[place][part], weight)

    _spread(work, [update.size for update in updates])


def add_rows(total: Array, rest: Array, votes: Array, updates: Array, weights: Array) -> bool:
    """Add clients' updates [client, entry] in their order, in place; whether all of them were finite."""

    def work(pieces: list[Piece]) -> bool:
        return all(_add_rows(total, rest, votes, updates, weights, part.start, part.stop) for _, part in pieces)

    return all(_spread(work, [updates.shape[1]]))


def first_stranger(arrays: Sequence[Array]) -> int | None:
    """Which of these flat arrays is the first that holds a NaN or an infinity, if any."""
    views = [(array.view(BITS[array.dtype]), EXPONENT[array.dtype]) for array in arrays]

    def work(pieces: list[Piece]) -> list[int]:
        return [place for place, part in pieces if _strangers(views[place][0][part], views[place][1])]

    found = _spread(work, [array.size for array in arrays])
    return min((place for places in found for place in places), default=None)


def _spread(work: Callable[[list[Piece]], Any], sizes: list[int]) -> list[Any]:
    """Run `work` on all entries of several arrays or, where there are many, on equal shares of them, a thread each."""
    if THREADS == 1 or sum(sizes) < SHARED:
        return [work([(place, slice(0, size)) for place, size in enumerate(sizes)])]
    return list(_pool().map(work, shares(sizes, THREADS)))


def shares(sizes: list[int], parts: int) -> list[list[Piece]]:
    """Arrays of these sizes, one after the other, cut into equal shares.

    >>> shares([3, 5], 2)
    [[(0, slice(0, 3, None)), (1, slice(0, 1, None))], [(1, slice(1, 5, None))]]
    """
    starts = [0, *accumulate(sizes)]
    cuts = [
        (place, max(low, start) - start, min(high, stop) - start, part)
        for part, (low, high) in enumerate(pairwise(starts[-1] * k // parts for k in range(parts + 1)))
        for place, (start, stop) in enumerate(pairwise(starts))
    ]
    return [[(place, slice(a, b)) for place, a, b, owner in cuts if owner == part and a < b] for part in range(parts)]


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
