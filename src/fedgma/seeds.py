"""Keyed randomness: a draw depends on (root, purpose, round, client), never on what was drawn before.

So round 57 can be repeated alone, a resumed run draws the same numbers as an uninterrupted one, and a run draws the
same numbers alone and in a fleet. fedgma never draws from a global generator.
"""

import hashlib
from collections.abc import Iterable

import numpy as np


def seed(root: int, *path: str | int) -> int:
    """A 63-bit seed for one purpose, e.g. `seed(0, "batches", 57)`.

    >>> seed(0, "batches", 57) == seed(0, "batches", 57), seed(0, "batches", 57) == seed(0, "batches", 58)
    (True, False)
    """
    text = "/".join(part if isinstance(part, str) else str(int(part)) for part in (int(root), *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seeds(root: int, *path: str | int, last: Iterable[int]) -> np.ndarray:
    """The seeds of many paths that differ in their last part, int64; faster than one by one.

    >>> seeds(0, "batches", 57, last=[3]).tolist() == [seed(0, "batches", 57, 3)]
    True
    """
    text = "/".join(str(part) for part in (int(root), *path, ""))
    shared = hashlib.blake2b(text.encode(), digest_size=8)

    def digest(part: int) -> bytes:
        state = shared.copy()
        state.update(b"%d" % part)
        return state.digest()

    return (np.frombuffer(b"".join(map(digest, last)), ">u8") >> np.uint64(1)).astype(np.int64)


def generator(root: int, *path: str | int) -> np.random.Generator:
    """A numpy generator for one purpose.

    >>> generator(0, "batches", 57).integers(100, size=3).tolist()
    [9, 66, 8]
    """
    return np.random.default_rng(seed(root, *path))
