"""The tally's arithmetic, written once for numpy and torch; the other kernels must give the same bits.

A weighted sum is kept as two numbers: `total` in float64 and `rest`, what float64 rounded away (Knuth's two-sum). The
pair holds 77 binary digits for float32 updates (106 for float64), which is why a tally does not depend on the order in
which clients arrive, or on the tree in which tallies merge.
"""

from typing import NamedTuple

import numpy as np

from fedgma.aggregation.masks import signs, vote_type
from fedgma.arrays import Array, all_finite, blocks, cast, spec, zeros


class Sums(NamedTuple):
    """What a tally holds of one entry, flat; `votes` is None for a buffer, which has no say in the mask."""

    total: Array  # float64: weighted sum of updates
    rest: Array  # float32, or float64 where updates are: what `total` rounded away
    votes: Array | None  # smallest integer type: sum of signs


def empty(size: int, dtype: str, clients: int, voting: bool, like: Array) -> Sums:
    """Sums of no clients yet, wide enough for the votes of `clients`."""
    rest = "float64" if dtype == "float64" else "float32"
    votes = zeros(size, vote_type(clients), like) if voting else None
    return Sums(zeros(size, "float64", like), zeros(size, rest, like), votes)


def widened(sums: Sums, clients: int) -> Sums:
    """The same sums with votes wide enough for so many clients."""
    wide = vote_type(clients)
    right = sums.votes is None or spec(sums.votes).dtype == wide
    return sums if right else sums._replace(votes=cast(sums.votes, wide))


def two_sum(total: Array, term: Array) -> tuple[Array, Array]:
    """`total + term` rounded, and exactly what the rounding lost."""
    after = total + term
    back = after - total
    return after, (total - (after - back)) + (term - back)


def add(sums: Sums, update: Array, weight: float) -> None:
    """Add one client's flat update, in place, a block at a time."""
    with np.errstate(over="ignore", invalid="ignore"):  # a sum that overflows is found when it is finished
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
    """Add clients' updates [client, entry] in their order, in place; whether all of them were finite.

    Each block of entries is visited by all clients while its sums are in the cache. If a client was not finite the sums
    are spoiled: start again without it.
    """
    clients, size = updates.shape
    for part in blocks(size):
        block = Sums(*(None if array is None else array[part] for array in sums))
        for client in range(clients):
            add(block, updates[client, part], float(weights[client]))
    return all_finite(sums.total)  # NaN and infinities end up in the total


def merge(sums: Sums, other: Sums) -> None:
    """Add another tally's sums, in place."""
    for part in blocks(len(sums.total)):
        after, lost = two_sum(sums.total[part], other.total[part])
        sums.total[part] = after
        sums.rest[part] += lost + cast(other.rest[part], "float64")
        if sums.votes is not None and other.votes is not None:
            sums.votes[part] += cast(other.votes[part], spec(sums.votes).dtype)


def mean(sums: Sums, weight: float, dtype: str, *, reuse: bool = False) -> Array:
    """The weighted mean, rounded once from the pair to `dtype`; `reuse` writes it over `rest` where the types allow."""
    size = len(sums.total)
    result = sums.rest if reuse and spec(sums.rest).dtype == dtype else zeros(size, dtype, sums.total)
    with np.errstate(over="ignore", invalid="ignore"):
        for part in blocks(size):
            result[part] = (sums.total[part] + sums.rest[part]) / weight
    return result
