"""Adds a client's update while looking whether it is finite, and takes it back if it is not: it is read only once.

An exact addition can be taken back exactly: `after - term` is what was there before. An addition that is rounded,
infinite or NaN has a rounding error that is not zero. Only then is the block of entries looked at, and its sums are
kept in a journal. If the journal is full, what is left of the update is checked before it is added.

Buys, over checking first, on two cores: 1.2 (100 clients x ResNet18, `benchmarks/bench_aggregation.py cpu`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
from numba.np.numpy_support import carray

from fedgma.aggregation.kernels import cpu
from fedgma.aggregation.kernels.cpu import BITS, CHECKED, EXPONENT, arrays_at, nonfinite, pointer
from fedgma.aggregation.kernels.plain import Sums
from fedgma.arrays import Array

KEPT = 32  # one of so many blocks can be kept in the journal


class Journal(NamedTuple):
    """Blocks with rounded additions, as they were before."""

    places: Array  # int64 [block, 2]: position of the piece, and the first entry in it
    totals: Array  # float64 [block, CHECKED]
    rests: Array  # [block, CHECKED]


class Attempt(NamedTuple):
    """How far a thread got with its pieces."""

    pieces: Array
    journal: Journal
    reached: Array  # int64: the piece and the entry in it that come next, and the number of blocks in the journal
    finite: bool


def add_if_finite(sums: Sequence[Sums], updates: Sequence[Array], weight: float) -> bool:
    """Add one client's flat arrays to their sums, in place; False if one is not finite: then the sums are as before.

    The arrays have one number type, and so have their votes; no further sums are kept.
    """
    table, dtype = cpu.table_of(sums, updates), updates[0].dtype
    kinds: Any = cpu.kinds_of(sums[0], updates[0])
    bits, exponent = np.empty(0, BITS[dtype]), EXPONENT[dtype]

    def attempt(pieces: Array) -> Attempt:
        journal, reached = _empty_journal(pieces, kinds[1]), np.zeros(3, np.int64)
        rest: Any = (bits, exponent, *journal, reached)
        finite = _attempt(table, pieces, weight, *kinds, *rest)
        left = _left(pieces, reached)
        if finite and len(left):
            finite = cpu.first_nonfinite_piece(np.ascontiguousarray(table[:, 3]), left, bits, exponent) < 0
        return Attempt(pieces, journal, reached, bool(finite))

    attempts = cpu.run_in_threads(attempt, [update.size for update in updates])
    finite = all(tried.finite for tried in attempts)
    for tried in attempts:
        if not finite:
            rest: Any = (*tried.journal, tried.reached)
            _take_back(table, tried.pieces, weight, *kinds, *rest)
        elif len(left := _left(tried.pieces, tried.reached)):
            cpu.add_pieces(table, left, weight, *kinds)
    return finite


def _empty_journal(pieces: Array, like: Array) -> Journal:
    blocks = 1 + int((pieces[:, 2] - pieces[:, 1]).sum()) // CHECKED // KEPT
    return Journal(
        np.empty((blocks, 2), np.int64), np.empty((blocks, CHECKED)), np.empty_like(like, shape=(blocks, CHECKED))
    )


def _left(pieces: Array, reached: Array) -> Array:
    """The pieces that are not added yet."""
    left = pieces[reached[0] :].copy()
    left[:1, 1] += reached[1]
    return left


@numba.njit(nogil=True, cache=True)
def _attempt(
    table: Array,
    pieces: Array,
    weight: float,
    of_update: Array,
    of_rest: Array,
    of_votes: Array,
    of_bits: Array,
    exponent: Any,
    places: Array,
    totals: Array,
    rests: Array,
    reached: Array,
) -> bool:
    """Add pieces of one client's arrays until a value is not finite (returns False) or the journal is full."""
    kept, old, lost = 0, np.empty(CHECKED), np.empty(CHECKED)
    for k in range(len(pieces)):
        row, first, size = pieces[k, 0], pieces[k, 1], pieces[k, 2] - pieces[k, 1]
        total, rest, votes, update = arrays_at(table, row, first, size, of_update, of_rest, of_votes)
        raw = carray(pointer(table[row, 3] + of_update.itemsize * first), size, of_bits.dtype)
        for start in range(0, size, CHECKED):
            stop = min(size, start + CHECKED)
            if _add_block(total[start:stop], update[start:stop], weight, old, lost):
                bad = nonfinite(raw[start:stop], exponent)
                if bad or kept == len(places):
                    total[start:stop] = old[: stop - start]
                    reached[0], reached[1], reached[2] = k, start, kept
                    return not bad
                places[kept, 0], places[kept, 1] = k, start
                totals[kept], rests[kept, : stop - start] = old, rest[start:stop]
                kept += 1
                for j in range(start, stop):
                    rest[j] = rest[j] + lost[j - start]
            _vote(votes[start:stop], update[start:stop], of_votes.dtype.type(1))
    reached[0], reached[1], reached[2] = len(pieces), 0, kept
    return True


@numba.njit(nogil=True, cache=True)
def _add_block(total: Array, update: Array, weight: float, old: Array, lost: Array) -> bool:
    """Add at most CHECKED entries; returns whether an addition was not exact. `old` and `lost` are written."""
    for j in range(update.size):
        term = np.float64(update[j]) * weight
        before = total[j]
        after = before + term
        back = after - before
        old[j] = before
        total[j] = after
        lost[j] = (before - (after - back)) + (term - back)
    some, bits = np.uint64(0), lost.view(np.uint64)
    for j in range(update.size):
        some |= bits[j]
    return bool(some)


@numba.njit(nogil=True, cache=True)
def _vote(votes: Array, update: Array, unit: Any) -> None:
    for j in range(update.size):
        votes[j] += unit * (update[j] > 0) - unit * (update[j] < 0)


@numba.njit(nogil=True, cache=True)
def _take_back(
    table: Array,
    pieces: Array,
    weight: float,
    of_update: Array,
    of_rest: Array,
    of_votes: Array,
    places: Array,
    totals: Array,
    rests: Array,
    reached: Array,
) -> None:
    """Undo what `_attempt` added: exact blocks by subtraction, the others from the journal."""
    next_kept = 0
    for k in range(min(len(pieces), reached[0] + 1)):
        row, first = pieces[k, 0], pieces[k, 1]
        size = pieces[k, 2] - first if k < reached[0] else reached[1]
        total, rest, votes, update = arrays_at(table, row, first, size, of_update, of_rest, of_votes)
        for start in range(0, size, CHECKED):
            stop = min(size, start + CHECKED)
            if next_kept < reached[2] and places[next_kept, 0] == k and places[next_kept, 1] == start:
                total[start:stop] = totals[next_kept, : stop - start]
                rest[start:stop] = rests[next_kept, : stop - start]
                next_kept += 1
            else:
                for j in range(start, stop):
                    total[j] -= np.float64(update[j]) * weight
            _vote(votes[start:stop], update[start:stop], of_votes.dtype.type(-1))
