"""The tally's arithmetic for numpy and torch; the other kernels give the same bits.

A weighted sum is a pair of numbers: `total` in float64, and `rest`, its rounding error (Knuth's two-sum). The pair
holds 77 binary digits for float32 updates (106 for float64). While it is exact, a tally does not depend on the order in
which clients arrive or tallies merge; docs/architecture.md says when.
"""

from typing import NamedTuple

import numpy as np

from fedgma.aggregation.masks import signs, vote_type
from fedgma.arrays import Array, all_finite, blocks, cast, spec, zeros


class Sums(NamedTuple):
    """The sums of one entry, flat; `votes` is None for a buffer, which does not vote."""

    total: Array  # float64: weighted sum of updates
    rest: Array  # rounding error of `total`; float64 for float64 updates, else float32
    votes: Array | None  # sum of signs, in the smallest integer type


def empty_sums(size: int, dtype: str, clients: int, voting: bool, like: Array) -> Sums:
    """Sums over no clients yet, with a vote type that holds the votes of `clients`."""
    rest = "float64" if dtype == "float64" else "float32"
    votes = zeros(size, vote_type(clients), like) if voting else None
    return Sums(zeros(size, "float64", like), zeros(size, rest, like), votes)


def widen_votes(sums: Sums, clients: int) -> Sums:
    """The same sums with a vote type that holds the votes of `clients`."""
    dtype = vote_type(clients)
    wide_enough = sums.votes is None or spec(sums.votes).dtype == dtype
    return sums if wide_enough else sums._replace(votes=cast(sums.votes, dtype))


def two_sum(total: Array, term: Array) -> tuple[Array, Array]:
    """`total + term` rounded, and the exact rounding error."""
    after = total + term
    back = after - total
    return after, (total - (after - back)) + (term - back)


def add(sums: Sums, update: Array, weight: float) -> None:
    """Add one client's flat update, in place, a block at a time."""
    with np.errstate(over="ignore", invalid="ignore"):  # `finish` raises if a sum overflowed
        _add(sums, update, weight)


def _add(sums: Sums, update: Array, weight: float) -> None:
    for part in blocks(len(update)):
        block = update[part]
        after, lost = two_sum(sums.total[part], cast(block, "float64") * weight)
        sums.total[part] = after
        sums.rest[part] += lost
        if sums.votes is not None:
            sums.votes[part] += signs(block)


def add_rows(sums: Sums, updates: Array, weights: Array) -> bool:
    """Add clients' updates [client, entry] in order, in place; returns whether all of them are finite.

    All clients are added to a block of entries while its sums are in the cache. If an update is not finite, the sums
    are invalid: start again without that client.
    """
    clients, size = updates.shape
    for part in blocks(size):
        block = Sums(*(None if array is None else array[part] for array in sums))
        for client in range(clients):
            add(block, updates[client, part], float(weights[client]))
    return all_finite(sums.total)  # a NaN or infinity in an update makes the total NaN or infinite


def merge(sums: Sums, other: Sums) -> None:
    """Add another tally's sums, in place."""
    with np.errstate(over="ignore", invalid="ignore"):  # `finish` raises if a sum overflowed
        _merge(sums, other)


def _merge(sums: Sums, other: Sums) -> None:
    for part in blocks(len(sums.total)):
        after, lost = two_sum(sums.total[part], other.total[part])
        sums.total[part] = after
        sums.rest[part] += lost + cast(other.rest[part], "float64")
        if sums.votes is not None and other.votes is not None:
            sums.votes[part] += cast(other.votes[part], spec(sums.votes).dtype)


def mean(sums: Sums, weight: float, dtype: str, *, reuse: bool = False) -> Array:
    """The weighted mean, rounded to `dtype`; `reuse` overwrites `rest` with it if the types match."""
    size = len(sums.total)
    result = sums.rest if reuse and spec(sums.rest).dtype == dtype else zeros(size, dtype, sums.total)
    with np.errstate(over="ignore", invalid="ignore"):
        for part in blocks(size):
            result[part] = (sums.total[part] + sums.rest[part]) / weight
    return result
