"""The tally's arithmetic for numpy and torch; the other kernels give the same bits.

A weighted sum is a pair of numbers: `total` in float64, and `rest`, its rounding error (Knuth's two-sum). The pair
holds 77 binary digits for float32 updates (106 for float64). While it is exact, a tally does not depend on the order in
which clients arrive or tallies merge; docs/architecture.md says when.

Further sums are kept on demand (`FURTHER`); those of values are pairs too. A square is rounded to float64 once, before
it is added. Weights are plain float64: exact for whole numbers whose sum is below 2^53.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from fedgma.aggregation.masks import signs, vote_type
from fedgma.arrays import Array, all_finite, blocks, cast, quotient, spec, working_type, zeros


class Sums(NamedTuple):
    """The sums of one entry, flat; None for those that are not kept. A buffer does not vote and has only the first."""

    total: Array  # float64: weighted sum of updates
    rest: Array  # rounding error of `total`; float64 for float64 updates, else float32
    votes: Array | None  # sum of signs, in the smallest integer type
    positive: Array = None  # float64: weighted sum of positive values
    positive_rest: Array = None
    positives: Array = None  # clients with a positive value, in the type of the votes
    positive_weight: Array = None  # float64: their weight
    negative_weight: Array = None  # that of clients with a negative value
    squares: Array = None  # float64: weighted sum of squares
    squares_rest: Array = None


# sums that are kept on demand, by what they give: parts of the update by sign, clients and weight of each sign, squares
FURTHER = {
    "parts": ("positive", "positive_rest"),
    "counts": ("positives",),
    "weights": ("positive_weight", "negative_weight"),
    "squares": ("squares", "squares_rest"),
}
COUNTS = ("votes", "positives")
PAIRS = (("total", "rest"), ("positive", "positive_rest"), ("squares", "squares_rest"))


def empty_sums(size: int, dtype: str, clients: int, voting: bool, like: Array, further: Collection[str] = ()) -> Sums:
    """Sums over no clients yet, with a vote type that holds the votes of `clients`."""
    rest = working_type(dtype)
    kept = ["total", "rest", "votes", *(name for group in further for name in FURTHER[group])]
    kinds = {"rest": rest, "positive_rest": rest, "squares_rest": rest, **dict.fromkeys(COUNTS, vote_type(clients))}
    sums = {name: zeros(size, kinds.get(name, "float64"), like) for name in (kept if voting else kept[:2])}
    return Sums(**{"votes": None, **sums})


def widen_votes(sums: Sums, clients: int) -> Sums:
    """The same sums with a vote type that holds the votes of `clients`."""
    wide = {name: cast(getattr(sums, name), vote_type(clients)) for name in COUNTS if getattr(sums, name) is not None}
    return sums._replace(**wide)


def select(sums: Sums, part: Any) -> Sums:
    """The same sums at some of their entries, as views."""
    return Sums(*(None if array is None else array[part] for array in sums))


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
        term = cast(block, "float64") * weight
        _add_term(sums.total, sums.rest, part, term)
        if sums.votes is not None:
            sums.votes[part] += signs(block)
        if sums.positive is not None:
            _add_term(sums.positive, sums.positive_rest, part, term * (block > 0))
        if sums.positives is not None:
            sums.positives[part] += block > 0
        if sums.positive_weight is not None:
            sums.positive_weight[part] += cast(block > 0, "float64") * weight
            sums.negative_weight[part] += cast(block < 0, "float64") * weight
        if sums.squares is not None:
            _add_term(sums.squares, sums.squares_rest, part, term * cast(block, "float64"))


def _add_term(total: Array, rest: Array, part: slice, term: Array) -> None:
    after, lost = two_sum(total[part], term)
    total[part] = after
    rest[part] += lost


def add_rows(sums: Sums, updates: Array, weights: Array) -> bool:
    """Add clients' updates [client, entry] in order, in place; returns whether all of them are finite.

    All clients are added to a block of entries while its sums are in the cache. If an update is not finite, the sums
    are invalid: start again without that client.
    """
    clients, size = updates.shape
    for part in blocks(size):
        block = select(sums, part)
        for client in range(clients):
            add(block, updates[client, part], float(weights[client]))
    return all_finite(sums.total)  # a NaN or infinity in an update makes the total NaN or infinite


def merge(sums: Sums, other: Sums) -> None:
    """Add another tally's sums, in place."""
    with np.errstate(over="ignore", invalid="ignore"):  # `finish` raises if a sum overflowed
        _merge(sums, other)


def _merge(sums: Sums, other: Sums) -> None:
    for part in blocks(len(sums.total)):
        for total, rest in PAIRS:
            if getattr(sums, total) is not None:
                after, lost = two_sum(getattr(sums, total)[part], getattr(other, total)[part])
                getattr(sums, total)[part] = after
                getattr(sums, rest)[part] += lost + cast(getattr(other, rest)[part], "float64")
        for name in (*COUNTS, *FURTHER["weights"]):
            if (counts := getattr(sums, name)) is not None:
                counts[part] += cast(getattr(other, name)[part], spec(counts).dtype)


def mean(sums: Sums, weight: float, dtype: str, *, reuse: bool = False) -> Array:
    """The weighted mean, rounded to `dtype`; `reuse` overwrites `rest` with it if the types match."""
    size = len(sums.total)
    result = sums.rest if reuse and spec(sums.rest).dtype == dtype else zeros(size, dtype, sums.total)
    with np.errstate(over="ignore", invalid="ignore"):
        for part in blocks(size):
            result[part] = quotient(sums.total[part] + sums.rest[part], weight)
    return result
