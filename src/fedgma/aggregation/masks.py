"""Agreement, and the masks computed from it: functions of integer sign votes and client count.

    votes[j]     = sum over clients of sign(update[j]); a zero is no vote
    agreement[j] = |votes[j]| / clients, in [0, 1]
    soft mask    = 1 where agreement >= tau, else agreement      (gradient masked averaging)
    hard mask    = 1 where agreement >= tau, else 0              (AND-mask)
    sign test    = 1 where the votes are no accident at a level, else agreement

`agreement >= tau` is decided on integers: tau and the number of clients give the smallest |votes| that passes, in exact
arithmetic. So numpy, torch, every device, streamed and merged tallies agree to the bit. If a share p of the clients
moves an entry one way and 1 - p the other, agreement is 2p - 1; tau = 0.4 asks for 70 % of the clients.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from fedgma.arrays import Array, cast, is_torch, quotient
from fedgma.errors import ConfigError

Mask = Callable[[Array, int, str], Array]  # (votes, clients, dtype) -> mask
EXACT = 1000  # clients; up to so many the probability of votes is summed exactly


def check_tau(tau: float) -> float:
    """Return tau as a float; raises `ConfigError` unless it is a number in [0, 1].

    A number of a smaller type is taken as the shortest decimal that it stands for, since 4 of 10 votes reach 0.4 but
    not the nearest float32, 0.400000006.

    >>> check_tau(np.float32(0.4)), check_tau(float(np.float32(0.4)))
    (0.4, 0.4)
    """
    if isinstance(tau, bool) or not isinstance(tau, int | float | np.floating | np.integer) or not 0 <= tau <= 1:
        raise ConfigError(f"tau must be a number from 0 to 1, got {tau!r}; the paper uses 0.4")
    single = np.float32(tau)
    return float(str(tau if isinstance(tau, np.float16) or float(single) != float(tau) else single))


def votes_needed(tau: float, clients: int) -> int:
    """The smallest |votes| whose agreement reaches tau, in exact arithmetic.

    A tolerance of 1e-9 times the number of clients absorbs the rounding of decimals: 0.1 + 0.2 counts as 0.3.

    >>> votes_needed(0.4, 10), votes_needed(0.3, 10), votes_needed(0.1 + 0.2, 10), votes_needed(0, 10)
    (4, 3, 3, 0)
    """
    return max(0, math.ceil(Fraction(tau) * clients - Fraction(clients, 10**9)))


def agreement(votes: Array, clients: int, dtype: str = "float64") -> Array:
    """Share by which one sign outvotes the other, per entry, in [0, 1].

    >>> agreement(np.array([4, -2, 0], np.int8), 4).tolist()
    [1.0, 0.5, 0.0]
    """
    return quotient(cast(abs(votes), dtype), clients)


@dataclass(frozen=True)
class VoteMask:
    """A mask: 1 where enough clients agree; elsewhere `below`, or the agreement if `below` is None.

    Enough means an agreement of `tau` or, if tau is None, votes that a sign test at `level` takes for no accident or,
    if that is None too, `threshold` votes.
    """

    tau: float | None
    below: float | None
    threshold: int = 0
    level: float | None = None

    def needed(self, clients: int) -> int:
        """The smallest |votes| that passes."""
        if self.level is not None:
            return significant_votes(self.level, clients)
        # above clients + 1 a threshold makes no difference, and clients + 1 still fits the type of the votes
        return min(self.threshold, clients + 1) if self.tau is None else votes_needed(self.tau, clients)

    def __call__(self, votes: Array, clients: int, dtype: str) -> Array:
        """The mask of these votes, in number type `dtype`."""
        passed = abs(votes) >= self.needed(clients)
        mask = agreement(votes, clients, dtype) if self.below is None else cast(votes, dtype) * 0 + self.below
        mask[passed] = 1
        return mask


def soft_mask(tau: float) -> VoteMask:
    """The paper's mask: 1 where agreement reaches tau, else the agreement.

    >>> soft_mask(0.5)(np.array([10, 8, -6, 4, 2, 0], np.int8), 10, "float64").tolist()
    [1.0, 1.0, 1.0, 0.4, 0.2, 0.0]
    """
    return VoteMask(check_tau(tau), below=None)


def hard_mask(tau: float) -> VoteMask:
    """The AND-mask: 1 where agreement reaches tau, else 0.

    >>> hard_mask(0.5)(np.array([10, 8, -6, 4, 2, 0], np.int8), 10, "float64").tolist()
    [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    """
    return VoteMask(check_tau(tau), below=0.0)


def reversing_mask(threshold: int) -> VoteMask:
    """Robust learning rate (Ozdayi et al. 2021): 1 where |votes| reaches the threshold, else -1.

    >>> reversing_mask(4)(np.array([10, -4, 2], np.int8), 10, "float64").tolist()
    [1.0, 1.0, -1.0]
    """
    if isinstance(threshold, bool) or not isinstance(threshold, int | np.integer) or threshold < 0:
        raise ConfigError(f"threshold must be a whole number of votes, 0 or more, got {threshold!r}")
    return VoteMask(None, below=-1.0, threshold=int(threshold))


def sign_test_mask(level: float) -> VoteMask:
    """1 where a two-sided sign test rejects fair coins at this level, else the agreement.

    >>> sign_test_mask(0.05)(np.array([10, 8, -6, 4, 0], np.int8), 10, "float64").tolist()
    [1.0, 1.0, 0.6, 0.4, 0.0]
    """
    if isinstance(level, bool) or not isinstance(level, int | float | np.floating) or not 0 < level < 1:
        raise ConfigError(f"level (of significance) must be a number between 0 and 1, got {level!r}")
    return VoteMask(None, below=None, level=float(level))


@lru_cache(maxsize=4096)
def significant_votes(level: float, clients: int) -> int:
    """The smallest |votes| that fair coins of all clients reach with a probability of at most `level`.

    It is clients + 1, which no votes reach, where even unanimity is no evidence. The sum over the binomial
    distribution is exact; above a thousand clients the normal distribution takes its place.

    >>> [significant_votes(0.05, clients) for clients in (5, 6, 10, 100, 10**6)]
    [6, 6, 8, 22, 1960]
    """
    if clients > EXACT:
        return math.ceil(NormalDist().inv_cdf(1 - level / 2) * math.sqrt(clients))
    allowed, tail, ways = Fraction(level) * 2**clients, 0, 1
    for opponents in range(clients // 2 + 1):  # two-sided: either sign may be the one outvoted
        tail += ways if 2 * opponents == clients else 2 * ways
        if tail > allowed:
            return clients - 2 * opponents + (1 if opponents == 0 else 2)
        ways = ways * (clients - opponents) // (opponents + 1)
    return 0


VOTE_LIMITS = {"int8": 2**7 - 1, "int16": 2**15 - 1, "int32": 2**31 - 1, "int64": 2**63 - 1}
MASKS: dict[str, Callable[[float], VoteMask]] = {"soft": soft_mask, "hard": hard_mask}


def signs(array: Array) -> Array:
    """-1, 0 or +1 per entry as int8; 0.0 and -0.0 give 0, subnormal numbers keep their sign."""
    if is_torch(array):
        import torch

        return (array > 0).to(torch.int8) - (array < 0).to(torch.int8)
    return (array > 0).view(np.int8) - (array < 0).view(np.int8)


def vote_type(clients: int) -> str:
    """The smallest integer type that holds the votes of `clients` clients, and `clients + 1`.

    >>> [vote_type(clients) for clients in (10, 126, 127, 32767, 10**6)]
    ['int8', 'int8', 'int16', 'int32', 'int32']
    """
    return next(name for name, limit in VOTE_LIMITS.items() if clients < limit)
