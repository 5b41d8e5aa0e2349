"""The tally compiled for the CPU by numba: each update is read once, and the sums of a block stay in the cache.

The loops give the same bits as `plain`, so they do not use fast-math. Each thread takes a range of entries, so the
number of threads does not change the result.

Buys, over plain numpy on two cores: 5 to 6 (20 clients x 1 M parameters, `benchmarks/bench_parts.py --groups cpu`).
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from fedgma.aggregation.kernels.plain import Sums, select
from fedgma.arrays import Array
from fedgma.machine import available_cores

THREADS = available_cores()
SHARED = 1 << 16  # entries from which a second thread pays
CHECKED = 256  # entries whose rounding errors are added only if one of them is not zero
BLOCK = 2048  # entries: their sums (13 bytes each) stay in the L1 cache while clients are added
SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
BITS: dict[Any, Any] = {SINGLE: np.uint32, DOUBLE: np.uint64}
EXPONENT: dict[Any, Any] = {SINGLE: np.uint32(0x7F800000), DOUBLE: np.uint64(0x7FF0000000000000)}  # all ones: nonfinite


def add(sums: Sequence[Sums], updates: Sequence[Array], weight: float) -> None:
    """Add one client's flat arrays to their sums, in place."""
    votes: Sequence[Any] = [entry.votes for entry in sums]
    for alike in _groups([update.dtype.char + cast.dtype.char for update, cast in zip(updates, votes, strict=True)]):
        _add_alike([sums[position] for position in alike], [updates[position] for position in alike], weight)


def _add_alike(sums: list[Sums], updates: list[Array], weight: float) -> None:
    """`add` for arrays of the same number types: each thread makes one call for all its arrays."""
    table, kinds = table_of(sums, updates), kinds_of(sums[0], updates[0])
    further = any(array is not None for array in sums[0][3:])

    def work(pieces: Array) -> None:
        add_pieces(table, pieces, weight, *kinds)
        for position, first, last in pieces.tolist() if further else ():
            _add_further(select(sums[position], slice(first, last)), updates[position][first:last], weight)

    run_in_threads(work, [update.size for update in updates])


def table_of(sums: Sequence[Sums], updates: Sequence[Array]) -> Array:
    """The addresses of total, rest, votes and update of every array: int64 [array, 4]."""
    return np.array([[_address(array) for array in (*s[:3], u)] for s, u in zip(sums, updates, strict=True)])


def kinds_of(sums: Sums, update: Array) -> list[Array]:
    """Empty arrays of the number types of update, rest and votes."""
    return [np.empty_like(array, shape=0) for array in (update, *sums[1:3])]


def _groups(kinds: Sequence[str]) -> list[list[int]]:
    """Positions of equal kinds.

    >>> _groups(["a", "b", "a"])
    [[0, 2], [1]]
    """
    groups: dict[str, list[int]] = {}
    for position, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(position)
    return list(groups.values())


def add_rows(sums: Sums, updates: Array, weights: Array) -> bool:
    """Add clients' updates [client, entry] in order, in place; returns whether all of them are finite."""

    def work(pieces: Array) -> bool:
        finite = True
        for _, first, last in pieces.tolist():
            finite &= _add_rows(*sums[:3], updates, weights, first, last)
            _add_further_rows(sums, updates, weights, first, last)
        return finite

    return all(run_in_threads(work, [updates.shape[1]]))


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
    positions = [
        alike[position]
        for alike in _groups([array.dtype.char for array in arrays])
        for position in _nonfinite_alike([arrays[position] for position in alike])
    ]
    return min(positions, default=None)


def _nonfinite_alike(arrays: list[Array]) -> list[int]:
    """The first of these arrays of one number type that is not finite, in each thread's part."""
    table, dtype = np.array([_address(array) for array in arrays]), arrays[0].dtype
    bits = np.empty(0, BITS[dtype])

    def work(pieces: Array) -> int:
        return int(first_nonfinite_piece(table, pieces, bits, EXPONENT[dtype]))

    return [position for position in run_in_threads(work, [array.size for array in arrays]) if position >= 0]


def mean(total: Array, rest: Array, weight: float) -> None:
    """Replace `rest` by the weighted mean, rounded to its number type."""

    def work(pieces: Array) -> None:
        for _, first, last in pieces.tolist():
            _mean(total[first:last], rest[first:last], weight)

    run_in_threads(work, [rest.size])


def look_up(table: Array, votes: Array) -> Array:
    """The value in `table` of each entry's |votes|."""
    result = np.empty(votes.size, table.dtype)

    def work(pieces: Array) -> None:
        for _, first, last in pieces.tolist():
            _look_up(table, votes[first:last], result[first:last])

    run_in_threads(work, [result.size])
    return result


def run_in_threads(work: Callable[[Array], Any], sizes: list[int]) -> list[Any]:
    """Run `work` on all entries of several arrays; many entries are divided equally among threads."""
    parts = split_work(tuple(sizes), 1 if sum(sizes) < SHARED else THREADS)
    others = [_pool().submit(work, part) for part in parts[1:]]
    return [work(parts[0]), *(other.result() for other in others)]


@lru_cache(maxsize=64)
def split_work(sizes: tuple[int, ...], parts: int) -> list[Array]:
    """Divide the entries of arrays of these sizes into equal parts; a part may span several arrays.

    Each part is an array of pieces: position of an array, its first entry, and the entry after its last.

    >>> [part.tolist() for part in split_work((3, 5), 2)]
    [[[0, 0, 3], [1, 0, 1]], [[1, 1, 5]]]
    """
    starts = [0, *accumulate(sizes)]
    shares: list[Array] = []
    for low, high in pairwise(starts[-1] * k // parts for k in range(parts + 1)):
        cuts = [(k, max(low, a) - a, min(high, b) - a) for k, (a, b) in enumerate(pairwise(starts))]
        shares.append(np.array([cut for cut in cuts if cut[1] < cut[2]], np.int64).reshape(-1, 3))
    return shares


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS)


if hasattr(os, "register_at_fork"):  # a forked child does not inherit threads: it makes a new pool
    os.register_at_fork(after_in_child=_pool.cache_clear)


@numba.njit(cache=True)
def _address(array: Array) -> Any:
    return array.ctypes.data


def _to_pointer(typing: Any, address: Any) -> Any:
    """An address as a pointer, for `carray`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


pointer: Any = intrinsic(_to_pointer)


@numba.njit(nogil=True, cache=True)
def arrays_at(
    table: Array, row: int, first: int, size: int, of_update: Array, of_rest: Array, of_votes: Array
) -> tuple[Array, Array, Array, Array]:
    """Total, rest, votes and update of so many entries of one of a client's arrays, from their addresses in the table.

    The last three arguments are empty arrays of their number types.
    """
    return (
        carray(pointer(table[row, 0] + 8 * first), size, np.float64),
        carray(pointer(table[row, 1] + of_rest.itemsize * first), size, of_rest.dtype),
        carray(pointer(table[row, 2] + of_votes.itemsize * first), size, of_votes.dtype),
        carray(pointer(table[row, 3] + of_update.itemsize * first), size, of_update.dtype),
    )


@numba.njit(nogil=True, cache=True)
def add_pieces(table: Array, pieces: Array, weight: float, of_update: Array, of_rest: Array, of_votes: Array) -> None:
    """Add pieces of one client's arrays; a row of the table holds the addresses of total, rest, votes and update."""
    lost = np.empty(CHECKED)
    for k in range(len(pieces)):
        row, first, size = pieces[k, 0], pieces[k, 1], pieces[k, 2] - pieces[k, 1]
        total, rest, votes, update = arrays_at(table, row, first, size, of_update, of_rest, of_votes)
        _add(total, rest, votes, update, weight, lost)


@numba.njit(nogil=True, cache=True)
def _add(total: Array, rest: Array, votes: Array, update: Array, weight: float, lost: Array) -> None:
    """Knuth's two-sum and the votes; `lost` is scratch memory.

    Most additions are exact, and then `rest` is neither read nor written: a quarter less memory traffic.
    """
    unit, bits = votes.dtype.type(1), lost.view(np.uint64)
    for start in range(0, update.size, CHECKED):
        sums, values, count = total[start : start + CHECKED], update[start : start + CHECKED], votes[start:]
        for j in range(values.size):
            term = np.float64(values[j]) * weight
            before = sums[j]
            after = before + term
            back = after - before
            sums[j] = after
            lost[j] = (before - (after - back)) + (term - back)
        some = np.uint64(0)
        for j in range(values.size):
            some |= bits[j]
        for j in range(values.size):
            count[j] += unit * (values[j] > 0) - unit * (values[j] < 0)
        if some:
            kept = rest[start : start + CHECKED]
            for j in range(values.size):
                kept[j] = kept[j] + lost[j]


@numba.njit(nogil=True, cache=True)
def first_nonfinite_piece(table: Array, pieces: Array, of_bits: Array, exponent: Any) -> Any:
    """Row of the first of these pieces that holds a NaN or an infinity, or -1."""
    for k in range(len(pieces)):
        row, first, size = pieces[k, 0], pieces[k, 1], pieces[k, 2] - pieces[k, 1]
        if nonfinite(carray(pointer(table[row] + of_bits.itemsize * first), size, of_bits.dtype), exponent):
            return row
    return -1


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _mean(total: Array, rest: Array, weight: float) -> None:
    for j in range(rest.size):
        rest[j] = (total[j] + rest[j]) / weight


@numba.njit(nogil=True, cache=True)
def _look_up(table: Array, votes: Array, result: Array) -> None:
    for j in range(result.size):
        result[j] = table[min(abs(np.int64(votes[j])), table.size - 1)]  # a vote beyond the table would read elsewhere


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
def nonfinite(bits: Array, exponent: Any) -> Any:
    """Whether some of these values, seen as integers, are NaN or infinite."""
    some = bits.dtype.type(0)
    for j in range(bits.size):
        some |= bits.dtype.type((bits[j] & exponent) == exponent)
    return some > 0


@numba.njit(nogil=True, cache=True)
def _add_rows(total: Array, rest: Array, votes: Array, updates: Array, weights: Array, first: int, last: int) -> bool:
    finite, lost = True, np.empty(CHECKED)
    for start in range(first, last, BLOCK):
        stop = min(last, start + BLOCK)
        for client in range(len(updates)):
            update = updates[client, start:stop]
            _add(total[start:stop], rest[start:stop], votes[start:stop], update, weights[client], lost)
        for j in range(start, stop):
            finite &= abs(total[j]) < np.inf  # a NaN or infinity in an update makes the total NaN or infinite
    return finite


# one loop over rows for each sum: numba does not find a function again in its cache that takes, or closes over, another


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
