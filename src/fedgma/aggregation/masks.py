"""Agreement, and the masks computed from it (SPEC 2.2, 2.4): functions of integer sign votes and client count.

    votes[j]     = sum over clients of sign(update[j]); a zero is no vote
    agreement[j] = |votes[j]| / clients, in [0, 1]
    soft mask    = 1 where agreement >= tau, else agreement      (gradient masked averaging)
    hard mask    = 1 where agreement >= tau, else 0              (AND-mask)

`agreement >= tau` is decided on integers: tau and the number of clients give the smallest |votes| that passes, in exact
arithmetic. So numpy, torch, every device, streamed and merged tallies agree to the bit. If a share p of the clients
moves an entry one way and 1 - p the other, agreement is 2p - 1; tau = 0.4 asks for 70 % of the clients.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from fedgma.arrays import Array, cast, is_torch, quotient
from fedgma.errors import ConfigError

Mask = Callable[[Array, int, str], Array]  # (votes, clients, dtype) -> mask


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

    Enough means an agreement of `tau` or, if tau is None, `threshold` votes.
    """

    tau: float | None
    below: float | None
    threshold: int = 0

    def needed(self, clients: int) -> int:
        """The smallest |votes| that passes."""
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
