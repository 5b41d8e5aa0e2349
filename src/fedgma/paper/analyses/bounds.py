"""The probability that a mask is 1 (E17, the paper's Appendix G): exact, simulated, and bounded.

Take one entry and independent client updates with means mu_n and deviation sigma. The paper states: the mask is 1 with
probability 1 - O(exp(-min mu^2 / sigma^2)) as soon as the share p of clients with a positive mean exceeds tau. But a
share p against 1 - p is an agreement of 2p - 1, so what is needed is p >= (1 + tau) / 2, and all of those clients must
keep their sign, which by the union bound fails with probability at most sum exp(-mu_n^2 / (2 sigma^2)) over them.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from fedgma.aggregation.masks import votes_needed
from fedgma.reports.plots.masks import coins
from fedgma.seeds import generator

Numbers = npt.NDArray[np.float64]


def pass_probability(means: Numbers, sigma: Numbers | float, tau: float) -> Numbers:
    """P(mask = 1) for Gaussian updates, exactly; means [client, ...], vectorised over trailing axes.

    >>> means = np.array([1.0] * 7 + [-1.0] * 3)
    >>> float(pass_probability(means, 1e-9, 0.4).round(6)), float(pass_probability(means, 1e-9, 0.6).round(6))
    (1.0, 0.0)
    >>> float(pass_probability(np.zeros(10), 1.0, 0.4).round(5))  # fair coins: 1 - 0.65625
    0.34375
    """
    up = ndtr(np.asarray(means, float) / sigma)  # probability of a positive update
    ahead = np.ones((1, *up.shape[1:]))  # P(number of positive updates), extended client by client
    for chance in up:
        grown = np.zeros((len(ahead) + 1, *ahead.shape[1:]))
        grown[:-1] += ahead * (1 - chance)
        grown[1:] += ahead * chance
        ahead = grown
    clients = len(up)
    passed = np.abs(2 * np.arange(clients + 1) - clients) >= votes_needed(tau, clients)
    return np.asarray(ahead[passed].sum(0))


def monte_carlo(means: Numbers, sigma: float, tau: float, *, draws: int = 20_000, seed: int = 0) -> float:
    """P(mask = 1) for Gaussian updates by simulation; means [client].

    >>> abs(monte_carlo(np.full(10, 0.5), 1.0, 0.4) - float(pass_probability(np.full(10, 0.5), 1.0, 0.4))) < 0.015
    True
    """
    rng = generator(seed, "mask stability")
    updates = means + sigma * rng.standard_normal((draws, len(means)))
    votes = np.sign(updates).sum(1)
    return float(np.mean(np.abs(votes) >= votes_needed(tau, len(means))))


def printed_condition(means: Numbers, tau: float) -> npt.NDArray[np.bool_]:
    """Whether the share of clients with a positive mean exceeds tau, the paper's condition.

    >>> printed_condition(np.array([1.0, 1.0, 1.0, -1.0, -1.0]), 0.4).item()
    True
    """
    return np.asarray((means > 0).mean(0) > tau)


def corrected_condition(means: Numbers, tau: float) -> npt.NDArray[np.bool_]:
    """Whether the clients whose means share the commoner sign outvote all others by tau: p >= (1 + tau) / 2.

    >>> corrected_condition(np.array([1.0, 1.0, 1.0, -1.0, -1.0]), 0.4).item()
    False
    """
    clients, most = len(means), np.maximum((means > 0).sum(0), (means < 0).sum(0))
    return np.asarray(2 * most - clients >= votes_needed(tau, clients))


def corrected_bound(means: Numbers, sigma: Numbers | float, tau: float) -> Numbers:
    """A lower bound of P(mask = 1) for sub-Gaussian updates: 1 - sum exp(-mu_n^2 / (2 sigma^2)) over the commoner sign.

    NaN if the condition fails and there is no bound; 0 if the sum is above 1.

    >>> corrected_bound(np.array([4.0] * 7 + [-4.0] * 3), 1.0, 0.4).round(5).item()
    0.99765
    """
    means = np.asarray(means, float)
    positive = (means > 0).sum(0) >= (means < 0).sum(0)
    commoner = np.where(positive, means > 0, means < 0)
    missed = np.where(commoner, np.exp(-np.square(means / sigma) / 2), 0.0).sum(0)
    return np.where(corrected_condition(means, tau), np.maximum(0.0, 1 - missed), np.nan)


def stability(votes: npt.NDArray[np.integer[Any]], clients: int, tau: float) -> Numbers:
    """The share of repeats in which each entry's mask has its commonest value; votes are [repeat, entry].

    >>> stability(np.array([[10, 2], [8, 0], [4, -2], [2, 2]]), 10, 0.4).tolist()  # masks 1 1 1 .2 and .2 0 .2 .2
    [0.75, 0.75]
    """
    needed = votes_needed(tau, clients)
    values = np.minimum(np.abs(votes), needed)  # all passing votes give the same mask
    return np.asarray(np.max([(values == value).mean(0) for value in range(needed + 1)], axis=0))


def chance_stability(clients: int, tau: float, repeats: int, *, entries: int = 20_000, seed: int = 0) -> float:
    """The mean of `stability` if every vote is a fair coin, as a reference.

    >>> chance_stability(10, 0.0, 5)  # a mask that is always 1
    1.0
    """
    needed, shares = votes_needed(tau, clients), coins(clients)
    values = np.append(shares[:needed], shares[needed:].sum())
    drawn = generator(seed, "chance stability").multinomial(repeats, values, size=entries)
    return float(drawn.max(1).mean() / repeats)
