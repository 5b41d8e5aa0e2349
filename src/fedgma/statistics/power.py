"""Power of the paired t test: seeds for a difference, and the difference that a number of seeds can show.

A test of `seeds` paired differences with mean `difference` and standard deviation `deviation` has a t statistic with a
noncentral t distribution: seeds - 1 degrees of freedom, noncentrality sqrt(seeds) * difference / deviation. The test is
two-sided; significance in the wrong direction is rare and neglected. With several tests the level is divided by their
number: the first and strictest step of Holm's correction.
"""

import math
from bisect import bisect_left

from fedgma.errors import ConfigError

LEVEL = 0.05  # of a test
POWER = 0.8
LEAST_SEEDS = 4  # fewer paired seeds give no verdict
MOST_SEEDS = 100  # the largest number of seeds that a verdict asks for
LARGEST = 1e6  # standard deviations; no difference is larger


def power(difference: float, deviation: float, seeds: int, *, tests: int = 1) -> float:
    """The probability that a test of `seeds` pairs shows a true difference of this size.

    >>> round(power(1.0, 1.0, 10), 3), round(power(1.0, 1.0, 4), 3)
    (0.803, 0.289)
    """
    from scipy.special import nctdtr, stdtrit

    _check(deviation, tests)
    if seeds < 2 or difference == 0:
        return 0.0
    if deviation == 0:
        return 1.0
    critical = stdtrit(seeds - 1, 1 - LEVEL / tests / 2)
    missed = nctdtr(seeds - 1, abs(difference) / deviation * math.sqrt(seeds), critical)
    return 1.0 if math.isnan(missed) else 1 - float(missed)  # NaN: the probability is too small to compute


def seeds_for(
    difference: float, deviation: float, *, least: float = POWER, tests: int = 1, most: int = MOST_SEEDS
) -> int | None:
    """The smallest number of seeds whose power is at least `least`; None if that is more than `most`.

    >>> seeds_for(1.0, 1.0), seeds_for(1.0, 1.0, least=0.9), seeds_for(1.0, 1.0, tests=49), seeds_for(0.1, 1.0)
    (10, 13, 23, None)
    """
    numbers = range(LEAST_SEEDS, most + 1)
    at = bisect_left(numbers, least, key=lambda seeds: power(difference, deviation, seeds, tests=tests))
    return numbers[at] if at < len(numbers) else None


def detectable(deviation: float, seeds: int, *, least: float = POWER, tests: int = 1) -> float:
    """The smallest difference that `seeds` pairs show with a power of `least`.

    >>> round(detectable(1.0, 4), 2), round(detectable(2.0, 10), 2)
    (2.13, 1.99)
    """
    from scipy.optimize import brentq

    _check(deviation, tests)
    if seeds < LEAST_SEEDS:
        raise ConfigError(f"a verdict needs at least {LEAST_SEEDS} seeds, got {seeds}; fewer show no difference")
    if deviation == 0:
        return 0.0
    effect = brentq(lambda size: power(size, 1.0, seeds, tests=tests) - least, 0.0, LARGEST)
    return float(effect) * deviation


def pooled_deviation(samples: list[tuple[float, ...]]) -> float:
    """The standard deviation of differences within settings, pooled by degrees of freedom.

    >>> round(pooled_deviation([(1.0, 3.0), (10.0, 12.0), (5.0,)]), 4)
    1.4142
    """
    freedom = sum(len(sample) - 1 for sample in samples)
    if freedom < 1:
        raise ConfigError("expected a setting with two seeds or more, which has a deviation; add seeds, or give --sd")
    means = [math.fsum(sample) / len(sample) for sample in samples]
    squares = math.fsum((v - mean) ** 2 for sample, mean in zip(samples, means, strict=True) for v in sample)
    return math.sqrt(squares / freedom)


def _check(deviation: float, tests: int) -> None:
    if not 0 <= deviation < math.inf:
        raise ConfigError(f"expected a standard deviation of 0 or more, got {deviation!r}")
    if tests < 1:
        raise ConfigError(f"expected one test or more, got {tests!r}")
