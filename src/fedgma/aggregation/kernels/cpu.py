"""The tally compiled for the CPU by numba: each update is read once, and the sums of a block stay in the cache.

The loops give the same bits as `plain`, so they do not use fast-math. Each thread takes a range of entries, so the
number of threads does not change the result.

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

from fedgma.aggregation.kernels.plain import Sums, select
from fedgma.arrays import Array

THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
SHARED = 1 << 16  # entries from which a second thread pays
BLOCK = 2048  # entries: their sums (13 bytes each) stay in the L1 cache while clients are added
SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
BITS: dict[Any, Any] = {SINGLE: np.uint32, DOUBLE: np.uint64}
EXPONENT: dict[Any, Any] = {SINGLE: np.uint32(0x7F800000), DOUBLE: np.uint64(0x7FF0000000000000)}  # all ones: nonfinite


Piece = tuple[int, slice]  # position of an array, and a part of it


def add(sums: Sequence[Sums], updates: Sequence[Array], weight: float) -> None:
    """Add one client's flat arrays to their sums, in place."""

    def work(pieces: list[Piece]) -> None:
        for position, part in pieces:
            total, rest, votes = (array[part] for array in sums[position][:3] if array is not None)
            update = updates[position][part]
            _add(total, rest, votes, update, weight)
            if any(array is not None for array in sums[position][3:]):
                _add_further(select(sums[position], part), update, weight)

    _run_in_threads(work, [update.size for update in updates])


def add_rows(sums: Sums, updates: Array, weights: Array) -> bool:
    """Add clients' updates [client, entry] in order, in place; returns whether all of them are finite."""

    def work(pieces: list[Piece]) -> bool:
        finite = all(_add_rows(*sums[:3], updates, weights, part.start, part.stop) for _, part in pieces)
        for _, part in pieces:
            _add_further_rows(sums, updates, weights, part.start, part.stop)
        return finite

    return all(_run_in_threads(work, [updates.shape[1]]))


def _add_further(sums: Sums, update: Array, weight: float) -> None:
    """Add one client's update to the sums that are kept on demand."""
    if sums.positive is not None:
        _add_positive(sums.positive, sums.positive_rest, update, weight)
    if sums.positives is not None:
        _count_positive(sums.positives, update)
    if sums.positive_weight is not None:
        _add_weights(sums.positive_weight, sums.negative_weight, update, weight)
    if sums.squares is not None:
        _add_squares(sums.squares, sums.squares_rest, update, weight)


def _add_further_rows(sums: Sums, updates: Array, weights: Array, first: int, last: int) -> None:
    """The same for all clients, at the entries from `first` to `last`."""
    if sums.positive is not None:
        _add_positive_rows(sums.positive, sums.positive_rest, updates, weights, first, last)
    if sums.positives is not None:
        _count_positive_rows(sums.positives, updates, first, last)
    if sums.positive_weight is not None:
        _add_weights_rows(sums.positive_weight, sums.negative_weight, updates, weights, first, last)
    if sums.squares is not None:
        _add_squares_rows(sums.squares, sums.squares_rest, updates, weights, first, last)


def first_nonfinite(arrays: Sequence[Array]) -> int | None:
    """Position of the first of these flat arrays that holds a NaN or an infinity; None if all are finite."""
    views = [(array.view(BITS[array.dtype]), EXPONENT[array.dtype]) for array in arrays]

    def work(pieces: list[Piece]) -> list[int]:
        return [position for position, part in pieces if _nonfinite(views[position][0][part], views[position][1])]

    nonfinite = _run_in_threads(work, [array.size for array in arrays])
    return min((position for positions in nonfinite for position in positions), default=None)


def _run_in_threads(work: Callable[[list[Piece]], Any], sizes: list[int]) -> list[Any]:
    """Run `work` on all entries of several arrays; many entries are divided equally among threads."""
    if THREADS == 1 or sum(sizes) < SHARED:
        return [work([(position, slice(0, size)) for position, size in enumerate(sizes)])]
    return list(_pool().map(work, split_work(sizes, THREADS)))


def split_work(sizes: list[int], parts: int) -> list[list[Piece]]:
    """Divide the entries of arrays of these sizes into equal parts; a part may span several arrays.

    >>> split_work([3, 5], 2)
    [[(0, slice(0, 3, None)), (1, slice(0, 1, None))], [(1, slice(1, 5, None))]]
    """
    starts = [0, *accumulate(sizes)]
    cuts = [
        (position, max(low, start) - start, min(high, stop) - start, part)
        for part, (low, high) in enumerate(pairwise(starts[-1] * k // parts for k in range(parts + 1)))
        for position, (start, stop) in enumerate(pairwise(starts))
    ]
    return [[(position, slice(a, b)) for position, a, b, of in cuts if of == part and a < b] for part in range(parts)]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS)


if hasattr(os, "register_at_fork"):  # a forked child does not inherit threads: it makes a new pool
    os.register_at_fork(after_in_child=_pool.cache_clear)


@numba.njit(nogil=True, cache=True)
def _add(total: Array, rest: Array, votes: Array, update: Array, weight: float) -> None:
    unit = votes.dtype.type(1)
    for j in range(update.size):
        value = update[j]
        term = np.float64(value) * weight
        before = total[j]
        after = before + term
        back = after - before
        total[j] = after
        rest[j] = rest[j] + ((before - (after - back)) + (term - back))
        votes[j] += unit * (value > 0) - unit * (value < 0)


@numba.njit(nogil=True, cache=True)
def _add_positive(total: Array, rest: Array, update: Array, weight: float) -> None:
    for j in range(update.size):
        term = np.float64(update[j]) * weight if update[j] > 0 else 0.0
        before = total[j]
        after = before + term
        back = after - before
        total[j] = after
        rest[j] = rest[j] + ((before - (after - back)) + (term - back))


@numba.njit(nogil=True, cache=True)
def _add_squares(total: Array, rest: Array, update: Array, weight: float) -> None:
    for j in range(update.size):
        value = np.float64(update[j])
        term = value * weight * value
        before = total[j]
        after = before + term
        back = after - before
        total[j] = after
        rest[j] = rest[j] + ((before - (after - back)) + (term - back))


@numba.njit(nogil=True, cache=True)
def _count_positive(positives: Array, update: Array) -> None:
    unit = positives.dtype.type(1)
    for j in range(update.size):
        positives[j] += unit * (update[j] > 0)


@numba.njit(nogil=True, cache=True)
def _add_weights(positive: Array, negative: Array, update: Array, weight: float) -> None:
    for j in range(update.size):
        positive[j] += weight * (update[j] > 0)
        negative[j] += weight * (update[j] < 0)


@numba.njit(nogil=True, cache=True)
def _nonfinite(bits: Array, exponent: Any) -> Any:
    nonfinite = bits.dtype.type(0)
    for j in range(bits.size):
        nonfinite |= bits.dtype.type((bits[j] & exponent) == exponent)
    return nonfinite > 0


@numba.njit(nogil=True, cache=True)
def _add_rows(total: Array, rest: Array, votes: Array, updates: Array, weights: Array, first: int, last: int) -> bool:
    finite = True
    for start in range(first, last, BLOCK):
        stop = min(last, start + BLOCK)
        for client in range(len(updates)):
            update = updates[client, start:stop]
            _add(total[start:stop], rest[start:stop], votes[start:stop], update, weights[client])
        for j in range(start, stop):
            finite &= abs(total[j]) < np.inf  # a NaN or infinity in an update makes the total NaN or infinite
    return finite


@numba.njit(nogil=True, cache=True)
def _add_positive_rows(total: Array, rest: Array, updates: Array, weights: Array, first: int, last: int) -> None:
    for start in range(first, last, BLOCK):
        stop = min(last, start + BLOCK)
        for client in range(len(updates)):
            _add_positive(total[start:stop], rest[start:stop], updates[client, start:stop], weights[client])


@numba.njit(nogil=True, cache=True)
def _count_positive_rows(positives: Array, updates: Array, first: int, last: int) -> None:
    for start in range(first, last, BLOCK):
        stop = min(last, start + BLOCK)
        for client in range(len(updates)):
            _count_positive(positives[start:stop], updates[client, start:stop])


@numba.njit(nogil=True, cache=True)
def _add_weights_rows(positive: Array, negative: Array, updates: Array, weights: Array, first: int, last: int) -> None:
    for start in range(first, last, BLOCK):
        stop = min(last, start + BLOCK)
        for client in range(len(updates)):
            _add_weights(positive[start:stop], negative[start:stop], updates[client, start:stop], weights[client])


@numba.njit(nogil=True, cache=True)
def _add_squares_rows(total: Array, rest: Array, updates: Array, weights: Array, first: int, last: int) -> None:
    for start in range(first, last, BLOCK):
        stop = min(last, start + BLOCK)
        for client in range(len(updates)):
            _add_squares(total[start:stop], rest[start:stop], updates[client, start:stop], weights[client])
