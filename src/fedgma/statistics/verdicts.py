"""Inference on paired differences: a 95 % CI, a test, its correction for other tests, and the verdict in words.

A difference is by how much one arm is better than the other on the same seed and settings: percentage points of an
accuracy, or another metric. The interval is Student's
95 % confidence interval of their mean. An arm is ahead only if there are at least four pairs and the p value of the
paired t test, corrected by Holm's method for the other tests of its page or table, is below 5 %. Fewer pairs are
preliminary, whatever their interval. Differences that are the same in every pair have no spread to test them by: the
seeds changed nothing, or scores are too coarse. They show no arm ahead.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from fedgma.errors import ConfigError
from fedgma.statistics.metrics import ACCURACY, Metric, is_lost
from fedgma.statistics.power import LEAST_SEEDS, LEVEL, MOST_SEEDS, seeds_for

LEAST = f"a verdict needs at least {LEAST_SEEDS} seeds"
LEAST_P = 0.0001  # smaller p values are not told apart
ROUNDING = 1e-9  # of a mean difference; a smaller deviation is none
Outcome = Literal["first ahead", "second ahead", "inconclusive", "equal", "preliminary"]


class Verdict(NamedTuple):
    """What paired differences say: their mean and deviation, p alone and corrected, the outcome, a sentence."""

    names: tuple[str, str]
    mean: float
    deviation: float  # of the differences; infinite for one pair
    ahead: int  # pairs in which the first arm is ahead
    behind: int
    of: int
    p: float
    corrected: float  # p after Holm's correction
    tests: int = 1  # tests in the correction
    score: Metric = ACCURACY  # what the differences are of

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % CI of the mean; None for one pair."""
        from scipy.special import stdtrit

        if self.of < 2:
            return None
        half = float(stdtrit(self.of - 1, 1 - LEVEL / 2)) * self.deviation / math.sqrt(self.of)
        return self.mean - half, self.mean + half

    @property
    def low(self) -> float:
        """Lower end of the 95 % CI; minus infinity for one pair."""
        return -math.inf if self.interval is None else self.interval[0]

    @property
    def high(self) -> float:
        """Upper end of the 95 % CI; infinity for one pair."""
        return math.inf if self.interval is None else self.interval[1]

    @property
    def outcome(self) -> Outcome:
        """Which arm is ahead after the correction."""
        if self.of < LEAST_SEEDS:
            return "preliminary"
        if self.mean == self.deviation == 0:
            return "equal"
        if self.corrected >= LEVEL:
            return "inconclusive"
        return "first ahead" if self.mean > 0 else "second ahead"

    @property
    def alike(self) -> bool:
        """Whether the difference is the same in every pair, up to rounding, and not zero."""
        return self.mean != 0 and _is_alike(self.mean, self.deviation)

    @property
    def lost(self) -> bool:
        """Whether a run without a finite score rules the difference, or its spread."""
        return not self.score.share and (is_lost(self.mean) or (self.of > 1 and is_lost(self.deviation)))

    @property
    def significant(self) -> bool:
        """Whether one arm is ahead."""
        return self.outcome in ("first ahead", "second ahead")

    @property
    def seeds_needed(self) -> int | None:
        """The seeds for a power of 80 % at the corrected level; None if more than 100, or if there is no estimate.

        True difference and deviation are taken to be those observed. Four seeds estimate both badly: read "about".
        Fewer do not estimate them at all: from two seeds, almost half of such numbers are below half of the true one.
        """
        if self.of < LEAST_SEEDS or self.alike:
            return None
        return seeds_for(self.mean, self.deviation, tests=self.tests)

    @property
    def advice(self) -> str:
        """How many seeds would be enough; empty if these are."""
        if self.of < LEAST_SEEDS:
            return LEAST
        if self.outcome != "inconclusive":
            return ""
        if self.alike:
            return "the same difference in every seed cannot be tested: look whether the seeds change anything"
        needed = self.seeds_needed
        enough = f"more than {MOST_SEEDS} seeds" if needed is None else f"about {needed} seeds"
        return f"{enough} would resolve a difference of this size"

    @property
    def correction(self) -> str:
        """The p value, and what is left of it after the correction; empty where nothing was tested."""
        if self.of < LEAST_SEEDS:
            return ""
        alone = f"p = {_spoken(self.p)}" if self.p >= LEAST_P else f"p {_spoken(self.p)}"
        return alone if self.tests == 1 else f"{alone}, {_spoken(self.corrected)} corrected for {self.tests} tests"

    @property
    def text(self) -> str:
        """The verdict as a sentence."""
        first, second = self.names
        if self.lost:
            return self._text_of_lost
        digits, unit = self.score.decimals(self.mean, self.low, self.high), self.score.apart
        between = f"95 % CI {self.low:.{digits}f} to {self.high:.{digits}f}"
        size = f"{abs(self.mean):.{digits}f}"
        size = size if float(size) else f"less than {10**-digits:.{digits}f}"
        apart = f"{first} {'behind' if self.mean < 0 else 'ahead'} by {size} {unit}"
        apart = apart if self.mean else f"{first} equal to {second} on average"
        alike = f"{first} and {second} are equal"
        tested = f", {self.correction}" if self.tests > 1 else ""
        match self.outcome:
            case "preliminary" if self.of == 1:
                return f"preliminary: {apart if self.mean else alike}, one seed, no interval; {self.advice}"
            case "preliminary" if self.mean == self.deviation == 0:
                return f"preliminary: {alike} in {self.of} of {self.of} seeds; {LEAST}"
            case "equal":
                return f"{alike} in {self.of} of {self.of} seeds"
            case "first ahead":
                return f"{apart}, {between}, in {self.ahead} of {self.of} seeds{tested}"
            case "second ahead":
                ahead = f"{second} ahead by {size} {unit}"
                between = f"95 % CI {-self.high:.{digits}f} to {-self.low:.{digits}f}"
                return f"{ahead}, {between}, in {self.behind} of {self.of} seeds{tested}"
            case "inconclusive" if self.alike:
                return f"inconclusive: {apart} in each of {self.of} seeds{tested}; {self.advice}"
            case outcome:
                return f"{outcome}: {apart}, {between}, {self.of} seeds{tested}; {self.advice}"

    @property
    def _text_of_lost(self) -> str:
        """The verdict where a run has no finite score: no size, no interval and no number of seeds that is enough."""
        worse = self.names[self.mean > 0] if is_lost(self.mean) else "each arm"
        if self.significant:
            return f"{worse} behind: it has runs without a finite score"
        further = f"; {LEAST}" if self.outcome == "preliminary" else ""
        seeds = f"{self.of} seed{'' if self.of == 1 else 's'}"
        return f"{self.outcome}: {worse} has runs without a finite score, {seeds}{further}"


def as_object(verdict: Verdict) -> dict[str, object]:
    """A verdict as a JSON object; a single pair has no interval and no deviation, a run without a score no mean either.

    >>> [as_object(paired([0.5]))[name] for name in ("mean", "low", "deviation", "outcome")]
    [0.5, None, None, 'preliminary']
    """
    low, high = verdict.interval or (None, None)
    deviation = verdict.deviation if verdict.of > 1 else None
    numbers = {**verdict._asdict(), **{"score": verdict.score.name, "better": verdict.score.better}}
    numbers |= {"deviation": deviation, "low": low, "high": high}
    numbers |= {name: None for name in ("mean", "deviation", "low", "high") if verdict.lost}
    return {**numbers, "outcome": verdict.outcome, "seeds_needed": verdict.seeds_needed, "text": verdict.text}


def paired(
    differences: Sequence[float], names: tuple[str, str] = ("GMA", "the mean"), score: Metric = ACCURACY
) -> Verdict:
    """The verdict on paired differences, by how much the first arm is better; `correct` corrects several together.

    >>> paired([1.0, 1.2, 1.6, 1.0]).text
    'GMA ahead by 1.20 points, 95 % CI 0.75 to 1.65, in 4 of 4 seeds'
    >>> paired([-3.75, -10.61, -10.88]).text
    'preliminary: GMA behind by 8.41 points, 95 % CI -18.45 to 1.62, 3 seeds; a verdict needs at least 4 seeds'
    >>> paired([0.0]).text
    'preliminary: GMA and the mean are equal, one seed, no interval; a verdict needs at least 4 seeds'
    >>> paired([0.0, 0.0]).text
    'preliminary: GMA and the mean are equal in 2 of 2 seeds; a verdict needs at least 4 seeds'
    """
    values = _checked(differences)
    mean, p = math.fsum(values) / len(values), p_value(values)
    ahead, behind = sum(value > 0 for value in values), sum(value < 0 for value in values)
    return Verdict(names, mean, _deviation(values), ahead, behind, len(values), p, p, score=score)


def correct(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Verdicts corrected together by Holm's method, in the order given; those of fewer than four pairs are no tests.

    >>> one, two = correct([paired([1.0, 1.2, 1.6, 1.0]), paired([0.1, 0.9, 0.3, 0.7])])
    >>> one.text
    'GMA ahead by 1.20 points, 95 % CI 0.75 to 1.65, in 4 of 4 seeds, p = 0.0034, 0.0069 corrected for 2 tests'
    """
    tests = sum(verdict.of >= LEAST_SEEDS for verdict in verdicts)
    p_values = iter(holm([verdict.p for verdict in verdicts if verdict.of >= LEAST_SEEDS]))
    return [
        verdict._replace(corrected=next(p_values), tests=tests) if verdict.of >= LEAST_SEEDS else verdict
        for verdict in verdicts
    ]


def p_value(differences: Sequence[float]) -> float:
    """Two-sided p value of the paired t test; 1 for one pair, a mean of zero or differences without any spread.

    >>> round(p_value([1.0, 1.2, 1.6, 1.0]), 4)
    0.0034
    """
    values = _checked(differences)
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return 1.0
    return _two_sided(mean, _deviation(values) / math.sqrt(len(values)), len(values))


def from_interval(
    mean: float, interval: tuple[float, float] | None, of: int, names: tuple[str, str] = ("GMA", "the mean")
) -> Verdict:
    """The verdict on `of` differences of which only the mean and Student's 95 % CI are known; None: one difference.

    >>> round(from_interval(1.2, (0.7463, 1.6537), 4).p, 4)
    0.0035
    """
    from scipy.special import stdtrit

    if interval is None or of < 2:
        return Verdict(names, mean, math.inf, 0, 0, 1, 1.0, 1.0)
    error = (interval[1] - interval[0]) / 2 / float(stdtrit(of - 1, 1 - LEVEL / 2))
    p = _two_sided(mean, error, of)
    return Verdict(names, mean, error * math.sqrt(of), 0, 0, of, p, p)


def p_within(verdict: Verdict, margin: float) -> tuple[float, float]:
    """p values of two claims: the mean lies within `margin` of zero, and it lies further away.

    Each is twice a one-sided p value, so that it is below 5 % where the 95 % CI lies inside the margin, or outside.

    >>> inside, outside = p_within(paired([0.1, -0.1, 0.2, 0.0]), 1.0)
    >>> inside < 0.01, outside
    (True, 1.0)
    """
    if verdict.of < 2:
        return 1.0, 1.0
    error = verdict.deviation / math.sqrt(verdict.of)
    gap = margin - abs(verdict.mean)
    p = _two_sided(gap, error, verdict.of)
    return (p, 1.0) if gap > 0 else (1.0, p)


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


def _two_sided(mean: float, error: float, of: int) -> float:
    """Two-sided p value of a mean of `of` values with this standard error; 1 where there is none to test it by."""
    from scipy.special import stdtr

    if mean == 0 or _is_alike(mean, error):
        return 1.0
    return float(2 * stdtr(of - 1, -abs(mean) / error))


def _is_alike(mean: float, deviation: float) -> bool:
    return deviation <= ROUNDING * abs(mean)


def _spoken(p: float) -> str:
    return f"{p:.2g}" if p >= LEAST_P else f"< {LEAST_P}"


def _checked(differences: Sequence[float]) -> list[float]:
    values = [float(value) for value in differences]
    if not values or not all(map(math.isfinite, values)):
        raise ConfigError(
            f"expected one finite difference or more, got {values[:5]}; leave out runs without a finite score"
        )
    return values


def _deviation(values: list[float]) -> float:
    """Sample standard deviation; infinite for one value."""
    if len(values) < 2:
        return math.inf
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
