"""What paired differences say: an interval, a count of signs, a corrected test, and one plain sentence.

A difference is one arm minus the other on the same seed and settings, in percentage points. The interval is Student's
95 % interval of their mean; the sentence claims an arm ahead only where that interval leaves zero out.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from fedgma.errors import ConfigError

LEVEL = 0.95


class Verdict(NamedTuple):
    """Mean difference, its interval, in how many of the pairs the first arm is ahead, and the sentence."""

    mean: float
    low: float  # -inf and inf where one pair alone gives no interval
    high: float
    ahead: int
    of: int
    text: str

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % CI of the mean; None for one pair."""
        return (self.low, self.high) if self.of > 1 else None


def paired(differences: Sequence[float], names: tuple[str, str] = ("GMA", "the mean")) -> Verdict:
    """The verdict on paired differences, first arm minus second, in points.

    >>> paired([1.0, 1.2, 1.6, 1.0]).text
    'GMA ahead by 1.20 points, interval 0.75 to 1.65, 4 of 4 seeds'
    >>> paired([0.4, -0.3, 0.1]).text
    'no difference to be seen: 0.07 points, interval -0.81 to 0.94, GMA ahead in 2 of 3 seeds'
    """
    values = _checked(differences)
    mean, half = math.fsum(values) / len(values), _half_width(values)
    low, high = mean - half, mean + half
    ahead = sum(value > 0 for value in values)
    return Verdict(mean, low, high, ahead, len(values), _sentence(values, mean, low, high, names))


def p_value(differences: Sequence[float]) -> float:
    """Two-sided p of the paired t test; 1 where one pair alone, or no difference at all, leaves nothing to test.

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
    """p values corrected for their number by Holm's step-down rule, in the order given.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = highest
    return corrected


def sign_test(ahead: int, behind: int) -> float:
    """Two-sided p of so uneven a count if either sign were as likely; ties are left out.

    >>> sign_test(6, 0), sign_test(3, 3)
    (0.03125, 1.0)
    """
    of = ahead + behind
    tail = sum(math.comb(of, k) for k in range(min(ahead, behind) + 1))
    return float(min(1.0, 2 * tail / 2**of))


def _checked(differences: Sequence[float]) -> list[float]:
    values = [float(value) for value in differences]
    if not values or not all(map(math.isfinite, values)):
        raise ConfigError(f"a verdict needs one finite difference or more, got {values[:5]}")
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


def _sentence(values: list[float], mean: float, low: float, high: float, names: tuple[str, str]) -> str:
    first, second = names
    of = len(values)
    count = f"{sum(value > 0 for value in values)} of {of} seeds"
    if not any(values):
        return f"no difference at all in {of} of {of} seeds"
    if of == 1:
        winner = first if mean > 0 else second
        return f"{winner} ahead by {abs(mean):.2f} points in the one seed there is; no interval without a second"
    if low > 0:
        return f"{first} ahead by {mean:.2f} points, interval {low:.2f} to {high:.2f}, {count}"
    if high < 0:
        behind = f"{sum(value < 0 for value in values)} of {of} seeds"
        return f"{second} ahead by {-mean:.2f} points, interval {-high:.2f} to {-low:.2f}, {behind}"
    return f"no difference to be seen: {mean:.2f} points, interval {low:.2f} to {high:.2f}, {first} ahead in {count}"
