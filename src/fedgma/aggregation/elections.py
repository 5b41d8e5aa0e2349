"""Rules that elect a sign for each entry from the sums of its positive and its negative values.

ties(density)               trim, elect by the weighted sum, average those who agree (Yadav et al. 2023)
majority_sign()             elect by the number of clients, average those who agree
magnitude_agreement(tau)    the mean, scaled down where sizes cancel: |sum of updates| over the sum of their sizes
voters_only(tau)            gradient masked averaging in which clients with a zero are not counted
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from fedgma.aggregation.aggregate import or_one
from fedgma.aggregation.gate import Refused, entry_kind, read_schema
from fedgma.aggregation.masks import check_tau
from fedgma.aggregation.rule import Prepare, Rule
from fedgma.arrays import Array, Params, cast, flatten, is_torch, placement, spec, to_native, to_user
from fedgma.errors import ConfigError


def ties(density: float = 0.2) -> Rule:
    """TIES-Merging (Yadav et al., "TIES-Merging: Resolving Interference When Merging Models", 2023).

    Trim: of each array of an update only the share `density` of largest size counts, on the client's side of the sum.
    Elect: the sign of the weighted sum, entry by entry; plus where it is zero. Merge: the weighted mean of the values
    of that sign. The last two are exact functions of sums, so the rule streams. Entries of the same size at the edge of
    the trim all stay.

    >>> ties(density=1.0)({"w": np.array([[3.0, 1.0], [1.0, -4.0], [-2.0, 1.0]])}).update
    {'w': array([ 2., -4.])}
    """
    if isinstance(density, bool) or not isinstance(density, int | float) or not 0 < density <= 1:
        raise ConfigError(f"density (the share of entries that count) must be above 0 and at most 1, got {density!r}")
    prepare = None if density == 1 else Trim(float(density))
    return Rule("ties", compute=_elect_by_sum, prepare=prepare, settings={"density": density})


def majority_sign() -> Rule:
    """The weighted mean of the clients on the side of the majority, entry by entry; one client, one vote.

    The election is that of signSGD with majority vote (Bernstein et al., "signSGD with Majority Vote is Communication
    Efficient and Fault Tolerant", 2019), the mean that of TIES. Where votes are even, the weighted sum decides.

    >>> majority_sign()({"w": np.array([[3.0, 1.0], [1.0, -4.0], [-2.0, 1.0]])}).update
    {'w': array([2., 1.])}
    """
    return Rule("majority_sign", compute=_elect_by_votes)


def magnitude_agreement(tau: float = 0.4) -> Rule:
    """The mean, masked by its agreement weighted by size: |sum of updates| / sum of |updates|, and 1 from `tau` on.

    Votes count heads; this agreement counts sizes too, so a strong minority is not outvoted by many small values.
    After gradient masked averaging (Tenison et al. 2023), with another measure of agreement.

    >>> magnitude_agreement(0.5)({"w": np.array([[9.0, 1.0], [-1.0, -4.0], [-1.0, 2.0]])}).mask["w"].round(3).tolist()
    [1.0, 0.143]
    """
    tau = check_tau(tau)
    return Rule("magnitude_agreement", compute=MagnitudeMask(tau), settings={"tau": tau})


def voters_only(tau: float = 0.4) -> Rule:
    """Gradient masked averaging (Tenison et al. 2023) where a zero is an abstention: agreement is among those who vote.

    The paper does not say what a client counts that leaves an entry as it is. `masked_mean` counts it as one that does
    not agree.

    >>> updates = {"w": np.array([[3.0, 2.0], [0.0, 2.0], [0.0, -1.0]])}
    >>> voters_only(0.5)(updates).mask["w"].round(3).tolist()
    [1.0, 0.333]
    """
    tau = check_tau(tau)
    return Rule("voters_only", compute=VotersMask(tau), settings={"tau": tau})


def _elect_by_sum(
    total: Array, positive: Array, negative: Array, positive_weight: Array, negative_weight: Array
) -> Array:
    up = positive / or_one(positive_weight)
    down = negative / or_one(negative_weight)
    return (total >= 0) * up - (total < 0) * down


def _elect_by_votes(
    total: Array, votes: Array, positive: Array, negative: Array, positive_weight: Array, negative_weight: Array
) -> Array:
    plus = (votes > 0) | ((votes == 0) & (total >= 0))
    return plus * (positive / or_one(positive_weight)) - (plus == 0) * (negative / or_one(negative_weight))


@dataclass(frozen=True)
class MagnitudeMask:
    """The agreement weighted by size, and 1 where it reaches `tau`."""

    tau: float

    def __call__(self, mean: Array, total: Array, magnitude: Array) -> tuple[Array, Array]:
        """The mean and its mask."""
        agreement = abs(total) / or_one(magnitude)
        return mean, agreement * (agreement < self.tau) + (agreement >= self.tau)


@dataclass(frozen=True)
class VotersMask:
    """The agreement among the clients that vote, and 1 where it reaches `tau`."""

    tau: float

    def __call__(self, mean: Array, votes: Array, positives: Array, negatives: Array) -> tuple[Array, Array]:
        """The mean and its mask."""
        voters = or_one(positives + negatives)
        passed = abs(votes) >= (self.tau - 1e-9) * voters  # tolerance for decimals, as in `masks.votes_needed`
        return mean, abs(votes) / voters * (passed == 0) + passed


@dataclass(frozen=True)
class Trim:
    """The `prepare` of TIES: keeps the share `density` of largest entries of each array that votes, at least one."""

    density: float
    inner: Prepare | None = None

    def __call__(self, update: Params, buffers: Collection[str] | None) -> Params:
        """The update with small entries set to zero; one that the gate refuses stays as it is."""
        try:
            schema = read_schema(update)
        except Refused:
            return update
        trimmed = dict(update if self.inner is None else self.inner(update, buffers))
        for name, entry in schema.items():
            if entry_kind(name, entry, buffers) == "masked" and 0 not in entry.shape:
                array = trimmed[name]
                flat = self.rows(flatten(to_native(array))[None])[0]
                trimmed[name] = to_user(flat, spec(array), placement(array))
        return trimmed

    def rows(self, rows: Array) -> Array:
        """Arrays [client, entry] with small entries set to zero."""
        size = rows.shape[-1]
        kept = max(1, int(self.density * size))
        lengths = abs(rows)
        ordered = lengths.sort(-1).values if is_torch(rows) else np.sort(lengths, -1)  # NaNs are sorted last
        if not size:
            return rows
        with np.errstate(invalid="ignore"):  # zero times infinity, in updates that are not counted
            return rows * cast(lengths >= ordered[..., size - kept, None], spec(rows).dtype)
