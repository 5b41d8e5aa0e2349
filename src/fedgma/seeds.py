"""Keyed randomness: a draw depends on (root, purpose, round, client), never on what was drawn before.

So round 57 can be replayed alone, a resumed run draws what it would have drawn, and a run draws the same alone and in
company. Nothing in fedgma draws from a global generator.
"""

import hashlib

import numpy as np


def seed(root: int, *path: str | int) -> int:
    """A 63-bit seed for one purpose, e.g. `seed(0, "cohort", 57)`.

    >>> seed(0, "cohort", 57) == seed(0, "cohort", 57), seed(0, "cohort", 57) == seed(0, "cohort", 58)
    (True, False)
    """
    text = "/".join(part if isinstance(part, str) else str(int(part)) for part in (int(root), *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(root: int, *path: str | int) -> np.random.Generator:
    """A numpy generator for one purpose.

    >>> generator(0, "cohort", 57).integers(100, size=3).tolist()
    [20, 99, 53]
    """
    return np.random.default_rng(seed(root, *path))
