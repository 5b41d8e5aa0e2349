"""Rules that scale the mean by what the squares of the updates say of signal and noise.

    wiener(smoothing)     each entry by its share of signal, from moments smoothed over past rounds
    james_stein()         each array by one number: positive-part James-Stein shrinkage
    fedexp(epsilon)       the whole step by one number of at least 1 (Jhunjhunwala et al. 2023)

The noise of an entry's mean is estimated from the spread of the clients: of C clients with second moment s (the mean of
their squares) and mean m, it is (s - m^2) / (C - 1), times 1 - C / N if they are drawn from a population of N. Weights
enter s and m; the count of clients stands for their number, which is exact for equal weights.
"""

from dataclasses import dataclass

import numpy as np

from fedgma.aggregation.aggregate import or_one
from fedgma.aggregation.rule import Rule
from fedgma.arrays import Array, cast, spec
from fedgma.errors import ConfigError

LARGEST = 1e38  # of a moment


def wiener(smoothing: float = 0.9, population: int | None = None) -> Rule:
    """Wiener shrinkage: each entry of the step times signal / (signal + noise), estimated from past rounds.

    The factor is 1 - noise / power, at least 0, of the noise of the mean and its power (its square), each averaged over
    past rounds with weights that fall by `smoothing` a round (Wiener, "Extrapolation, Interpolation and Smoothing of
    Stationary Time Series", 1949). This round does not enter its own factor; the first round is not scaled.
    `population` is the number of all clients: the noise of a sample of them is smaller by 1 - clients / population.

    >>> rule, updates = wiener(0.5), {"w": np.array([[2.0, 2.0], [2.0, -1.0]])}
    >>> first = rule(updates)
    >>> rule(updates, state=first.state).mask["w"].tolist()
    [1.0, 0.0]
    """
    if isinstance(smoothing, bool) or not isinstance(smoothing, int | float) or not 0 <= smoothing < 1:
        raise ConfigError(f"smoothing must be at least 0 and below 1, got {smoothing!r}")
    compute = Wiener(float(smoothing), _checked(population))
    return Rule("wiener", compute=compute, settings={"smoothing": smoothing}, state={"power": 0.0, "noise": 0.0})


def james_stein(population: int | None = None) -> Rule:
    """James-Stein shrinkage: each array of the step times 1 - (1 - 2 / size) noise / |mean|^2, at least 0.

    The positive-part estimator (James and Stein, "Estimation with Quadratic Loss", 1961; Baranchik 1964) with the noise
    of the array's mean estimated from the spread of the clients. Arrays of one or two entries are not scaled.

    >>> james_stein()({"w": np.array([[3.0, 3.0, 3.0, 1.0], [3.0, 3.0, 3.0, -1.0]])}).mask["w"].round(4).tolist()
    [0.9815, 0.9815, 0.9815, 0.9815]
    """
    return Rule("james_stein", compute=JamesStein(_checked(population)))


def fedexp(extrapolation: float = 1e-3) -> Rule:
    """FedExP (Jhunjhunwala et al., "FedExP: Speeding Up Federated Averaging via Extrapolation", 2023).

    The mean times max(1, mean of |update|^2 / (2 (|mean|^2 + extrapolation))), with norms over all trainable entries.
    Means over clients are weighted. The paper evaluates the mean of the last two models, which a rule does not do; a
    server's average of models (`fedgma.averaged`) is close to it.

    >>> fedexp(1e-9)({"w": np.array([[4.0, 1.0], [-4.0, 1.0]])}).update["w"].round(6).tolist()
    [0.0, 8.5]
    """
    if isinstance(extrapolation, bool) or not isinstance(extrapolation, int | float) or not extrapolation > 0:
        raise ConfigError(f"extrapolation (FedExP's epsilon) must be a number above 0, got {extrapolation!r}")
    settings = {"extrapolation": extrapolation}
    return Rule("fedexp", compute=Extrapolate(float(extrapolation)), measure=_norms, settings=settings)


def noise_of_mean(total: Array, squares: Array, clients: Array, weight: Array, population: int | None) -> Array:
    """Variance of the mean of each entry over draws of clients; 0 for a client alone."""
    mean = total / weight
    spread = squares / weight - mean * mean
    spread = spread * (spread > 0)  # rounding can make it negative
    unseen = 1.0 if population is None else 1 - clients / population
    return spread * (unseen / (clients - 1 + (clients == 1)))


def _storable(moment: Array) -> Array:
    """At most what the state, in float32, can hold: a run that diverges goes on as it would without the rule."""
    return moment - (moment - LARGEST) * (moment > LARGEST)


@dataclass(frozen=True)
class Wiener:
    """The factor from the moments of past rounds, and the moments with this round."""

    smoothing: float
    population: int | None

    def __call__(
        self, mean: Array, total: Array, squares: Array, clients: Array, weight: Array, power: Array, noise: Array
    ) -> tuple[Array, Array, dict[str, Array]]:
        """Mean, mask and moments."""
        factor = 1 - cast(noise, "float64") / or_one(cast(power, "float64"))
        known = cast(power > 0, "float64")
        keep, take = self.smoothing, 1 - self.smoothing
        average = total / weight
        fresh = noise_of_mean(total, squares, clients, weight, self.population)
        after = {
            "power": keep * power + take * _storable(average * average),
            "noise": keep * noise + take * _storable(fresh),
        }
        return mean, factor * (factor > 0) * known + (1 - known), after


@dataclass(frozen=True)
class JamesStein:
    """One factor for each array."""

    population: int | None

    def __call__(self, mean: Array, total: Array, squares: Array, clients: Array, weight: Array) -> tuple[Array, Array]:
        """Mean and mask."""
        average, size = total / weight, mean.shape[-1]
        noise = noise_of_mean(total, squares, clients, weight, self.population).sum(-1)
        factor = 1 - max(0.0, 1 - 2 / size) * noise / or_one((average * average).sum(-1))
        factor = factor * (factor > 0)
        return mean, mean * 0 + cast(factor, spec(mean).dtype)[..., None]


def _norms(total: Array, squares: Array, weight: Array) -> dict[str, Array]:
    average = total / weight
    return {"updates": (squares / weight).sum(-1), "mean": (average * average).sum(-1)}


@dataclass(frozen=True)
class Extrapolate:
    """The mean times FedExP's step size."""

    epsilon: float

    def __call__(self, total: Array, weight: Array, measured: dict[str, Array]) -> Array:
        """The longer mean."""
        size = measured["updates"] / (2 * (measured["mean"] + self.epsilon))
        return total / weight * (size * (size > 1) + (size <= 1))


def _checked(population: int | None) -> int | None:
    whole = isinstance(population, int | np.integer) and not isinstance(population, bool)
    if population is not None and (not whole or population < 1):
        raise ConfigError(f"population (the number of all clients) must be a whole number above 0, got {population!r}")
    return None if population is None else int(population)
