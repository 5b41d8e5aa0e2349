"""How long clients take, in simulated seconds, and which of them are there: values and seeded draws.

A client that starts in a round answers after `compute` seconds for every sample that it trains on and `network` seconds
more. Draws depend on seed, client and round (on seed, client and time for who is away), never on the rule, so both arms
of a comparison have the same delays. This module imports no torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedgma.errors import ConfigError
from fedgma.seeds import generator

DISTRIBUTIONS = ("constant", "uniform", "exponential", "lognormal")
VOTERS = ("all", "fresh")
SHORTEST = 0.001  # seconds of a stretch of time


@dataclass(frozen=True, eq=False)
class Delays:
    """Seconds by client: from a distribution with this mean, or from measurements."""

    name: str = "constant"
    mean: float = 0.0  # seconds
    spread: float = 0.0  # uniform: half of the range over the mean; lognormal: standard deviation of the logarithm
    measured: tuple[np.ndarray, ...] = ()  # seconds that devices took, one array each; replaces the distribution

    def __post_init__(self) -> None:
        if self.name not in DISTRIBUTIONS:
            raise ConfigError(f"unknown distribution of delays {self.name!r}; known: {', '.join(DISTRIBUTIONS)}")
        if not 0 <= self.mean < math.inf or not 0 <= self.spread < math.inf:
            raise ConfigError(f"delays need a mean and a spread of at least 0, got {self.mean} and {self.spread}")
        if self.name == "uniform" and self.spread > 1:
            raise ConfigError(
                f"uniform delays need a spread of at most 1, or some would be negative; got {self.spread}"
            )


@dataclass(frozen=True, eq=False)
class Clock:
    """The time of a run. Without `concurrency`, rounds are synchronous; with it, aggregation is buffered (FedBuff)."""

    compute: Delays = Delays()  # seconds a sample, drawn once for every client
    network: Delays = Delays()  # seconds a round, drawn for every client and round
    dropout: float = 0.0  # share of the clients that never answer in a round
    away: float = 0.0  # share of the clients that are away in a stretch of time, and neither asked nor heard
    away_seconds: float = 3600.0  # length of such a stretch
    deadline: float = math.inf  # seconds after which the server no longer waits for a client
    over_sample: float = 1.0  # clients asked over clients wanted; the first to answer are counted
    concurrency: int | None = None  # clients at work at a time
    staleness_power: float = 0.5  # an update that is n versions old is multiplied with (1 + n)^-power
    voters: str = "all"  # or "fresh": only updates of the present version vote

    def __post_init__(self) -> None:
        if not 0 <= self.dropout < 1 or not 0 <= self.away < 1:
            raise ConfigError(f"expected 0 <= dropout < 1 and 0 <= away < 1, got {self.dropout} and {self.away}")
        if not SHORTEST <= self.away_seconds < math.inf or not self.deadline > 0:
            raise ConfigError(
                f"expected away_seconds of at least {SHORTEST} and a deadline above 0, got {self.away_seconds} and "
                f"{self.deadline}"
            )
        if (self.dropout or self.away) and self.deadline == math.inf:
            raise ConfigError("a client that drops out or goes away never answers: set clock.deadline, in seconds")
        if not 1 <= self.over_sample < math.inf or (self.over_sample > 1 and self.concurrency is not None):
            raise ConfigError(
                f"over_sample is at least 1, and for synchronous rounds only, got {self.over_sample}"
                f"{' with concurrency' if self.concurrency is not None else ''}"
            )
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, got {self.concurrency}")
        if not 0 <= self.staleness_power < math.inf or self.voters not in VOTERS:
            raise ConfigError(
                f"expected staleness_power >= 0 and voters one of {', '.join(VOTERS)}, got {self.staleness_power} "
                f"and {self.voters!r}"
            )

    def asked(self, wanted: int) -> int:
        """How many clients are at work at a time if so many are wanted in a round.

        >>> Clock(over_sample=1.3).asked(10), Clock(concurrency=40).asked(10)
        (13, 40)
        """
        return math.ceil(wanted * self.over_sample - 1e-9) if self.concurrency is None else self.concurrency


def samples_trained(
    sizes: np.ndarray, *, epochs: int, batch: int, steps: int | None = None, least: int = 1
) -> np.ndarray:
    """How many samples clients of these sizes train on in a round, as `training.batches.batch_order` draws them.

    >>> samples_trained(np.array([5, 9]), epochs=2, batch=4, steps=3).tolist()
    [9, 9]
    """
    part = sizes % batch
    kept = np.where((part > 0) & (part < least), sizes - part, sizes)  # of an epoch
    if steps is None:
        return epochs * kept
    per_epoch = np.maximum(-(-kept // batch), 1)
    whole, rest = np.divmod(steps, per_epoch)
    return np.where(whole >= epochs, epochs * kept, whole * kept + np.minimum(rest * batch, kept))


def durations(clock: Clock, seed: int, work: np.ndarray, *when: int) -> np.ndarray:
    """Seconds until clients that start would answer, float64 [client]; infinite for those that drop out.

    `work` [client] is the number of samples that each trains on, `when` the round, and for a client that starts again
    in a round how many times it did before.
    """
    clients = len(work)
    seconds = _drawn(clock.compute, clients, seed, "compute", when, once=True) * work
    seconds = seconds + _drawn(clock.network, clients, seed, "network", when)
    if clock.dropout:
        seconds[generator(seed, "lost", *when).random(clients) < clock.dropout] = math.inf
    return np.asarray(seconds)


def _drawn(
    delays: Delays, clients: int, seed: int, what: str, when: Sequence[int], *, once: bool = False
) -> np.ndarray:
    """Seconds [client]; with `once`, those of a distribution are the same at any time."""
    if delays.measured:
        return _observed(delays.measured, clients, seed, what, when)
    if delays.name == "constant" or not delays.mean:
        return np.full(clients, delays.mean)
    source = generator(seed, what, *(() if once else when))
    if delays.name == "uniform":
        return np.asarray(delays.mean * (1 + delays.spread * (2 * source.random(clients) - 1)))
    if delays.name == "exponential":
        return source.exponential(delays.mean, clients)
    normal = source.standard_normal(clients)
    return np.asarray(delays.mean * np.exp(delays.spread * normal - delays.spread**2 / 2))


def _observed(measured: tuple[np.ndarray, ...], clients: int, seed: int, what: str, when: Sequence[int]) -> np.ndarray:
    """One measurement of each client's device, drawn anew for every start.

    If there are as many devices as clients, client i has device i; else each client is given one at random.
    """
    device = np.arange(clients)
    if len(measured) != clients:
        device = generator(seed, what, "device").integers(len(measured), size=clients)
    sizes = np.array([len(seconds) for seconds in measured])
    starts = np.cumsum(sizes) - sizes
    which = (generator(seed, what, *when).random(clients) * sizes[device]).astype(np.int64)
    return np.asarray(np.concatenate(measured)[starts[device] + which], np.float64)


def stretch_of(clock: Clock, time: float) -> int:
    """Which stretch of time a moment is in; the same clients are away in the whole of it."""
    return math.floor(time / clock.away_seconds) if clock.away else 0


def those_there(clock: Clock, seed: int, stretch: int, clients: int) -> np.ndarray:
    """Which of so many clients are there in a stretch, bool [client]."""
    if not clock.away:
        return np.ones(clients, bool)
    return np.asarray(generator(seed, "away", stretch).random(clients) >= clock.away)


def present(clock: Clock, seed: int, times: np.ndarray, clients: np.ndarray) -> np.ndarray:
    """Which of these clients are there at these times, bool [client]; infinite times are never."""
    there = np.isfinite(times)
    if clock.away:
        stretches = np.floor(np.where(there, times, 0) / clock.away_seconds)
        for stretch in np.unique(stretches[there]).tolist():
            known = those_there(clock, seed, int(stretch), int(clients.max()) + 1)
            there &= (stretches != stretch) | known[clients]
    return np.asarray(there)
