"""Sums that no clients can have: how a tally from elsewhere is found to be none."""

import numpy as np

from fedgma.aggregation.kernels.plain import PAIRS, Sums
from fedgma.arrays import Array

SLACK = 1e-9  # share by which the rounding of sums may break an inequality


def lost(clients: int) -> float:
    """The largest share of a sum of positive terms that the rounding of additions and merges can lose."""
    return clients * 2.0**-51


def find_contradiction(sums: Sums, clients: int, weight: float, largest: float) -> str | None:
    """Why no clients of this number type can have these sums, or None; `largest` is the type's largest number."""
    with np.errstate(over="ignore", invalid="ignore"):
        if not all(np.isfinite(array).all() for array in sums if array is not None):
            return "holds a NaN or an infinity"
        reach = largest * weight * (1 + SLACK)  # infinite where float64 cannot hold it
        total, rest = sums.total, sums.rest
        if bool((abs(total + rest) > reach).any()) or bool((abs(rest) > lost(clients) * reach).any()):
            return "holds a mean outside its number type"
        if sums.votes is None:
            return None
        wrong = _find_in_votes(sums.total, sums.rest, sums.votes, clients)
        return wrong or _find_in_further(sums, clients, weight, reach, largest)


def _find_in_votes(total: Array, rest: Array, votes: Array, clients: int) -> str | None:
    if int(votes.max()) > clients or int(votes.min()) < -clients:
        return f"holds more than {clients} votes from {clients} clients"
    united = abs(votes) == clients
    if bool((united & ((total * votes < 0) | (abs(rest) > lost(clients) * abs(total)))).any()):
        return "holds votes of all clients for one sign and a sum of the other"
    if clients == 1 and bool(((votes == 0) & ((total != 0) | (rest != 0))).any()):
        return "holds a sum without a vote"
    return None


def _find_in_further(sums: Sums, clients: int, weight: float, reach: float, largest: float) -> str | None:
    if any(_is_not_a_positive_sum(getattr(sums, t), getattr(sums, r), clients) for t, r in PAIRS[1:]):
        return "holds a negative sum of positive terms"
    if sums.positive is not None:
        small = SLACK * abs(sums.positive)
        if bool(((sums.positive > reach) | (sums.positive + small < sums.total)).any()):
            return "holds positive parts that do not fit its sum"
    if sums.positives is not None:
        positives = sums.positives.astype(np.int64)
        if bool(((positives < sums.votes) | (positives < 0) | (2 * positives - sums.votes > clients)).any()):
            return "holds positive values of more clients than there are"
    if sums.positive_weight is not None:
        both = sums.positive_weight + sums.negative_weight
        if bool(((sums.positive_weight < 0) | (sums.negative_weight < 0) | (both > weight * (1 + SLACK))).any()):
            return "holds more weight than its clients have"
    if sums.squares is not None:
        mean = (sums.total + sums.rest) / weight
        if bool(
            ((sums.squares > reach * largest) | (mean * mean * weight > sums.squares * (1 + SLACK) + 1e-300)).any()
        ):
            return "holds squares that do not fit its sum"
    return None


def _is_not_a_positive_sum(total: Array, rest: Array, clients: int) -> bool:
    return total is not None and bool(((total < 0) | (abs(rest) > lost(clients) * total)).any())
