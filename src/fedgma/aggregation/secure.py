"""Masked averaging under secure aggregation: one client's update as integers that can be added up unseen.

Masked averaging needs two sums of the clients, weighted updates and votes, and a secure sum gives sums without showing
what went into them. `encode` makes one vector of integers of a client's update; whoever adds the vectors of all clients
up, modulo a power of two or not, hands the total to `decode`, which makes a tally of it; `finish` does the rest.

    vector = [1, cut, weight | weighted updates, in levels | votes: -1, 0, +1]

Votes, weights and the number of clients are integers, so no rounding touches them: **the mask is the one without secure
aggregation, bit for bit**, also where an update is too small for a level. Only the mean is rounded: a weighted update
is cut at `clip` and rounded to the nearest of 2**bits + 1 levels, so that

    |mean - mean without it| <= clients * clip * max_weight / (2**bits * total weight)       (entries within the clip)

which is clip / 2**bits where all clients have the greatest weight. A total stays readable while clients * 2**bits is
below the modulus: 1,023 clients for 22 bits and a modulus of 2**32. Integer counters are no sums and stay at home.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedgma.aggregation.gate import Refused, compare, read_schema, read_update, read_weight, treatment
from fedgma.aggregation.kernels.plain import Sums
from fedgma.aggregation.masks import signs, vote_type
from fedgma.aggregation.tally import Tally
from fedgma.arrays import FLOATS, Array, Params, Spec, beside, cast
from fedgma.errors import ConfigError, DataError

Vector = Array  # numpy, int64, flat
HEAD = 3  # client, cut, weight


@dataclass(frozen=True)
class Encoding:
    """What clients and server agree on: entries are cut at `clip`, weights are whole numbers up to `max_weight`.

    A client's entries take 2**bits + 1 levels.
    """

    clip: float = 1.0
    max_weight: int = 1024
    bits: int = 22

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 30:
            raise ConfigError(f"bits is from 2 to 30, got {self.bits!r}")
        if not 0 < self.clip < math.inf:
            raise ConfigError(f"clip is the greatest size of an entry, above 0, got {self.clip!r}")
        if type(self.max_weight) is not int or not 1 <= self.max_weight <= self.half:
            raise ConfigError(f"max_weight is a whole number from 1 to 2**(bits - 1), got {self.max_weight!r}")

    @property
    def half(self) -> int:
        """The highest level; the lowest is its opposite."""
        return 1 << (self.bits - 1)

    @property
    def step(self) -> float:
        """One level, in units of weight times update."""
        return self.max_weight * self.clip / self.half

    def capacity(self, modulus: int = 2**32) -> int:
        """How many clients a sum modulo so much can hold.

        >>> Encoding(bits=22).capacity(), Encoding(bits=16).capacity()
        (1023, 65535)
        """
        return (modulus - 1) >> self.bits

    def error(self, clients: int, weight: float) -> float:
        """The most by which rounding moves an entry of the mean."""
        return clients * self.step / 2 / weight


class Decoded(NamedTuple):
    """A secure sum read back: the tally, how many clients were cut at the clip, the bound on the mean's rounding."""

    tally: Tally
    cut: int
    error: float


def encode(
    update: Params,
    weight: object,
    encoding: Encoding,
    *,
    like: Params | None = None,
    buffers: Collection[str] | None = None,
) -> Vector:
    """One client's vector: int64, every entry from -2**(bits - 1) to 2**(bits - 1).

    `like`, the model, says what the update must look like. Nobody can check a client behind a secure sum, so it is
    checked here: `DataError` where the gate would refuse it.

    >>> encode({"w": np.array([0.5, -0.25])}, 2, Encoding(clip=1.0, max_weight=4, bits=4)).tolist()
    [1, 0, 2, 2, -1, 1, -1]
    """
    try:
        value = read_weight(weight, encoding.max_weight)
        found = read_schema(update)
        compare(found, found if like is None else read_schema(like), cast=False)
        carried = _carried(found)
        arrays = read_update(update, carried)
    except Refused as refused:
        raise DataError(f"the update cannot go into a secure sum ({refused.reason}): {refused.detail}") from None
    if value != int(value):
        raise DataError(f"a secure sum takes whole numbers of samples as weights, got {value!r}")
    hosted = {name: cast(beside(array, np.empty(0)), "float64") for name, array in arrays.items()}
    cut = any(bool((abs(array) > encoding.clip).any()) for array in hosted.values())
    levels = [_levels(array, value, encoding) for array in hosted.values()]
    votes = [signs(hosted[name]) for name in _voters(carried, buffers)]
    return np.concatenate([np.array([1, cut, value], np.int64), *levels, *votes], dtype=np.int64)


def decode(total: Array, like: Params, encoding: Encoding, *, buffers: Collection[str] | None = None) -> Decoded:
    """The tally of all clients whose vectors are in the total; `DataError` where it cannot be such a sum.

    >>> encoding, model = Encoding(clip=1.0, max_weight=4, bits=4), {"w": np.zeros(2)}
    >>> vectors = [encode({"w": np.array([0.5, sign * 0.5])}, 4, encoding) for sign in (1, 1, -1)]
    >>> tally, cut, error = decode(sum(vectors), model, encoding)
    >>> tally.clients, tally.weight, tally.votes["w"].tolist(), error
    (3, 12.0, [3, 1], 0.0625)
    """
    try:
        carried = _carried(read_schema(like))
    except Refused as refused:
        raise DataError(f"like: {refused.detail}") from None
    total = _whole(total)
    voters = _voters(carried, buffers)
    sizes = {name: math.prod(entry.shape) for name, entry in carried.items()}
    if len(total) != (expected := HEAD + sum(sizes.values()) + sum(sizes[name] for name in voters)):
        raise DataError(f"a secure sum of this model has {expected} entries, got {len(total)}")
    clients, cut, weight = (int(value) for value in total[:HEAD])
    middle = HEAD + sum(sizes.values())
    _check(total, middle, clients, cut, weight, encoding)
    tally = Tally({name: like[name] for name in carried}, buffers=buffers)
    tally.count([float(weight)], [])
    tally.clients = clients
    sums = _parts(total[HEAD:middle], sizes)
    votes = _parts(total[middle:], {name: sizes[name] for name in voters})
    for name, entry in carried.items():
        tally.sums[name] = _sums(sums[name], votes.get(name), entry, clients, encoding)
    return Decoded(tally, cut, encoding.error(clients, weight))


def signed(total: Array, modulus: int = 2**32) -> Vector:
    """A sum that was taken modulo a power of two, as numbers on both sides of zero.

    >>> signed(np.array([5, 2**32 - 5])).tolist()
    [5, -5]
    """
    total = np.asarray(total, np.int64) % modulus
    return np.where(total >= modulus // 2, total - modulus, total)


def _carried(schema: Mapping[str, Spec]) -> dict[str, Spec]:
    """The entries that are sums, in an order that does not depend on the sender."""
    return {name: schema[name] for name in sorted(schema) if schema[name].dtype in FLOATS}


def _voters(carried: Mapping[str, Spec], buffers: Collection[str] | None) -> list[str]:
    return [name for name, entry in carried.items() if treatment(name, entry, buffers) == "masked"]


def _levels(array: Array, weight: float, encoding: Encoding) -> Vector:
    return np.rint(np.clip(array, -encoding.clip, encoding.clip) * (weight / encoding.step)).astype(np.int64)


def _whole(total: Array) -> Vector:
    total = np.asarray(total)
    if total.ndim != 1 or total.dtype.kind not in "iu" or len(total) < HEAD:
        raise DataError(f"a secure sum is a flat array of integers, got {total.dtype.name}{list(total.shape)}")
    return total.astype(np.int64)


def _check(total: Vector, middle: int, clients: int, cut: int, weight: int, encoding: Encoding) -> None:
    """A total that could not come from adding vectors up: wrapped around, or not ours."""
    right = clients >= 1 and 0 <= cut <= clients and clients <= weight <= clients * encoding.max_weight
    limits = ((total[HEAD:middle], clients * encoding.half), (total[middle:], clients))
    if not right or any(part.size and int(abs(part).max()) > limit for part, limit in limits):
        raise DataError(
            f"this is no sum of encoded updates (clients {clients}, weight {weight}): check that all use one encoding "
            f"and that there are not more than {encoding.capacity():,} clients where sums are taken modulo 2**32"
        )


def _parts(values: Vector, sizes: Mapping[str, int]) -> dict[str, Vector]:
    cuts = np.cumsum(list(sizes.values()))[:-1]
    return dict(zip(sizes, np.split(values, cuts), strict=True)) if sizes else {}


def _sums(levels: Vector, votes: Vector | None, entry: Spec, clients: int, encoding: Encoding) -> Sums:
    rest = np.zeros(len(levels), "float64" if entry.dtype == "float64" else "float32")
    narrow = None if votes is None else votes.astype(vote_type(clients))
    return Sums(levels * encoding.step, rest, narrow)
