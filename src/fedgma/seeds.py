"""Keyed randomness: a draw depends on (root, purpose, round, client), never on what was drawn before.

So round 57 can be repeated alone, a resumed run draws the same numbers as an uninterrupted one, and a run draws the
same numbers alone and in a fleet. fedgma never draws from a global generator.
"""

import hashlib

import numpy as np


def seed(root: int, *path: str | int) -> int:
    """A 63-bit seed for one purpose, e.g. `seed(0, "batches", 57)`.

    >>> seed(0, "batches", 57) == seed(0, "batches", 57), seed(0, "batches", 57) == seed(0, "batches", 58)
    (True, False)
    """
    text = "/".join(part if isinstance(part, str) else str(int(part)) for part in (int(root), *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(root: int, *path: str | int) -> np.random.Generator:
    """A numpy generator for one purpose.

    >>> generator(0, "batches", 57).integers(100, size=3).tolist()
    [9, 66, 8]
    """
    return np.random.default_rng(seed(root, *path))
