"""Inference on paired differences: a 95 % CI, tests and their correction, the number of seeds needed, a sentence.

A difference is one arm minus the other on the same seed and settings, in percentage points. The interval is Student's
95 % confidence interval of their mean. An arm is ahead only if the interval excludes zero, that is, if the paired
t test is significant at 5 %.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, NamedTuple

from fedgma.errors import ConfigError

LEVEL = 0.95
POWER = 0.8
MOST_SEEDS = 100  # the largest number that `seeds_needed` considers

Outcome = Literal["first ahead", "second ahead", "inconclusive", "equal", "one seed"]


class Verdict(NamedTuple):
    """The mean difference, its 95 % CI, the outcome, and a sentence."""

    mean: float
    low: float  # -inf, and `high` is inf, for one pair, which has no interval
    high: float
    ahead: int  # pairs in which the first arm is ahead
    of: int
    outcome: Outcome
    seeds_needed: int | None  # if inconclusive: to resolve a difference of this size; None if more than 100
    text: str

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % CI of the mean; None for one pair."""
        return (self.low, self.high) if self.of > 1 else None

    @property
    def significant(self) -> bool:
        """Whether one arm is ahead."""
        return self.outcome in ("first ahead", "second ahead")

    @property
    def advice(self) -> str:
        """How many seeds would be enough; empty if these are."""
        if self.outcome == "one seed":
            return "at least two seeds are needed"
        if self.outcome != "inconclusive":
            return ""
        if self.seeds_needed is None:
            return f"more than {MOST_SEEDS} seeds would be needed to resolve a difference of this size"
        return f"about {self.seeds_needed} seeds would resolve a difference of this size"


def paired(differences: Sequence[float], names: tuple[str, str] = ("GMA", "the mean")) -> Verdict:
    """The verdict on paired differences, first arm minus second, in points.

    >>> paired([1.0, 1.2, 1.6, 1.0]).text
    'GMA ahead by 1.20 points, 95 % CI 0.75 to 1.65, in 4 of 4 seeds'
    >>> paired([-3.75, -10.61, -10.88]).text
    'inconclusive: GMA behind by 8.41 points, 95 % CI -18.45 to 1.62, 3 seeds; about 5 seeds would resolve a \
difference of this size'
    """
    values = _checked(differences)
    mean, half = math.fsum(values) / len(values), _half_width(values)
    outcome = _outcome(values, mean - half, mean + half)
    needed = seeds_needed(values) if outcome == "inconclusive" else None
    ahead = sum(value > 0 for value in values)
    verdict = Verdict(mean, mean - half, mean + half, ahead, len(values), outcome, needed, "")
    return verdict._replace(text=_sentence(verdict, sum(value < 0 for value in values), names))


def seeds_needed(differences: Sequence[float]) -> int | None:
    """The smallest number of seeds that would probably give a verdict; None if that is more than 100.

    It is the smallest n for which a two-sided paired t test at 5 % has a power of 80 %, if the true difference and
    deviation are those observed. Then the t statistic follows a noncentral t distribution with n - 1 degrees of freedom
    and noncentrality sqrt(n) |mean| / deviation. A few seeds estimate both badly: read it as "about".

    >>> seeds_needed([1.0, -0.2, 0.7]), seeds_needed([0.1, -1.0, 0.7])
    (15, None)
    """
    values = _checked(differences)
    if len(values) < 2:
        raise ConfigError("expected two differences or more, got one, which has no deviation; add seeds")
    mean, error = math.fsum(values) / len(values), _standard_error(values)
    if mean == 0:
        return None
    if error == 0:
        return 2
    effect = abs(mean) / (error * math.sqrt(len(values)))
    numbers = range(2, MOST_SEEDS + 1)
    at = bisect_left(numbers, True, key=lambda seeds: _is_enough(effect, seeds))
    return numbers[at] if at < len(numbers) else None


def _is_enough(effect: float, seeds: int) -> bool:
    """Whether the test has the required power; significance in the wrong direction is rare and neglected."""
    from scipy.special import nctdtr, stdtrit

    critical = stdtrit(seeds - 1, (1 + LEVEL) / 2)
    missed = nctdtr(seeds - 1, effect * math.sqrt(seeds), critical)
    return not missed > 1 - POWER  # NaN: the probability is too small to compute


def p_value(differences: Sequence[float]) -> float:
    """Two-sided p value of the paired t test; 1 for one pair or a mean of zero.

    >>> round(p_value([1.0, 1.2, 1.6, 1.0]), 4)
    0.0034
    """
    from scipy.special import stdtr

    values = _checked(differences)
    mean, error = math.fsum(values) / len(values), _standard_error(values)
    if len(values) < 2 or mean == 0:
        return 1.0
    return float(2 * stdtr(len(values) - 1, -abs(mean) / error)) if error else 0.0


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for multiple tests by Holm's step-down procedure, in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


def sign_test(ahead: int, behind: int) -> float:
    """Two-sided p value of the sign test; ties are left out.

    >>> sign_test(6, 0), sign_test(3, 3)
    (0.03125, 1.0)
    """
    of = ahead + behind
    tail = sum(math.comb(of, k) for k in range(min(ahead, behind) + 1))
    return float(min(1.0, 2 * tail / 2**of))


def _checked(differences: Sequence[float]) -> list[float]:
    values = [float(value) for value in differences]
    if not values or not all(map(math.isfinite, values)):
        raise ConfigError(
            f"expected one finite difference or more, got {values[:5]}; leave out runs without a finite score"
        )
    return values


def _standard_error(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return math.sqrt(squares / max(len(values) - 1, 1) / len(values))


def _half_width(values: list[float]) -> float:
    from scipy.special import stdtrit

    if len(values) < 2:
        return math.inf
    return float(stdtrit(len(values) - 1, (1 + LEVEL) / 2)) * _standard_error(values)


def _outcome(values: list[float], low: float, high: float) -> Outcome:
    if len(values) == 1:
        return "one seed"
    if not any(values):
        return "equal"
    return "first ahead" if low > 0 else "second ahead" if high < 0 else "inconclusive"


def _sentence(verdict: Verdict, behind: int, names: tuple[str, str]) -> str:
    mean, low, high, ahead, of, *_ = verdict
    first, second = names
    apart = f"{first} {'behind' if mean < 0 else 'ahead'} by {abs(mean):.2f} points"
    match verdict.outcome:
        case "one seed":
            return f"one seed: {apart}, no interval; {verdict.advice}"
        case "equal":
            return f"{first} and {second} are equal in {of} of {of} seeds"
        case "first ahead":
            return f"{apart}, 95 % CI {low:.2f} to {high:.2f}, in {ahead} of {of} seeds"
        case "second ahead":
            return f"{second} ahead by {-mean:.2f} points, 95 % CI {-high:.2f} to {-low:.2f}, in {behind} of {of} seeds"
        case "inconclusive":
            return f"inconclusive: {apart}, 95 % CI {low:.2f} to {high:.2f}, {of} seeds; {verdict.advice}"
