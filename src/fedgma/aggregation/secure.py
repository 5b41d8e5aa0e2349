"""Masked averaging under secure aggregation: encodes a client's update as integers for a secure sum.

Masked averaging needs two sums over clients, weighted updates and votes; a secure sum reveals the total and no
summand. `encode` turns a client's update into one vector of integers. The secure sum adds the vectors of all clients,
with or without a modulus that is a power of two. `decode` turns the total into a tally for `finish`.

    vector = [1, cut, weight | weighted updates, in levels | votes: -1, 0, +1 | further sums that a rule reads]

Votes, weights and the number of clients are integers and are not rounded: **the mask is bit for bit the one without
secure aggregation**, also where an update is smaller than a level. Only the mean is rounded: a weighted update is
clipped at `clip` and rounded to the nearest of 2**bits + 1 levels, so that

    |mean - exact mean| <= clients * clip * max_weight / (2**bits * total weight)       (entries within the clip)

which is clip / 2**bits if all clients have weight `max_weight`. A total can be decoded while clients * 2**bits is below
the modulus: up to 1,023 clients for 22 bits and a modulus of 2**32. Integer counters are not summed and not sent.

Of a rule's further sums, positive parts are sent in the same levels as updates, and clients and weights of each sign
as they are. Squares are not sent: in equal levels, those of small entries would all be zero.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedgma.aggregation.gate import (
    Refused,
    check_schema,
    entry_kind,
    read_further,
    read_mapping,
    read_schema,
    read_update,
    read_weight,
)
from fedgma.aggregation.kernels.plain import COUNTS, FURTHER, Sums
from fedgma.aggregation.masks import signs, vote_type
from fedgma.aggregation.tally import Tally
from fedgma.arrays import FLOATS, Array, Params, Spec, cast, move_to, working_type
from fedgma.errors import ConfigError, DataError

Vector = Array  # numpy, int64, flat
HEAD = 3  # client count, whether an entry was clipped, weight


@dataclass(frozen=True)
class Encoding:
    """Settings that clients and server share: entries are clipped at `clip`, weights are integers up to `max_weight`.

    A client's weighted entries take 2**bits + 1 levels.
    """

    clip: float = 1.0
    max_weight: int = 1024
    bits: int = 22

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 30:
            raise ConfigError(f"bits must be from 2 to 30, got {self.bits!r}")
        if not 0 < self.clip < math.inf:
            raise ConfigError(f"clip (the largest absolute value of an entry) must be above 0, got {self.clip!r}")
        if type(self.max_weight) is not int or not 1 <= self.max_weight <= self.half:
            raise ConfigError(f"max_weight must be a whole number from 1 to 2**(bits - 1), got {self.max_weight!r}")

    @property
    def half(self) -> int:
        """The highest level; the lowest is its negative."""
        return 1 << (self.bits - 1)

    @property
    def step(self) -> float:
        """Distance between levels, in units of weight times update."""
        return self.max_weight * self.clip / self.half

    def capacity(self, modulus: int = 2**32) -> int:
        """The largest number of clients in a sum modulo `modulus`.

        >>> Encoding(bits=22).capacity(), Encoding(bits=16).capacity()
        (1023, 65535)
        """
        return (modulus - 1) >> self.bits

    def error(self, clients: int, weight: float) -> float:
        """Upper bound on the rounding error of an entry of the mean."""
        return clients * self.step / 2 / weight


class Decoded(NamedTuple):
    """A decoded sum: the tally, the number of clients with clipped entries, the bound on the mean's rounding error."""

    tally: Tally
    cut: int
    error: float


def encode(
    update: Params | Refused,
    weight: object,
    encoding: Encoding,
    *,
    like: Params | None = None,
    buffers: Collection[str] | None = None,
    further: Collection[str] = (),
) -> Vector:
    """Encode one client's update: int64, every entry from -2**(bits - 1) to 2**(bits - 1).

    `like`, the model, sets the schema of the update; `further` are a rule's sums beside updates and votes
    (`rule.further`), the same on both sides. The server cannot check a client's update in a secure sum, so it
    is checked here: raises `DataError` if the gate would refuse it.

    >>> encode({"w": np.array([0.5, -0.25])}, 2, Encoding(clip=1.0, max_weight=4, bits=4)).tolist()
    [1, 0, 2, 2, -1, 1, -1]
    """
    parts = _sent_parts(further)
    try:
        value = read_weight(weight, encoding.max_weight)
        sent = read_mapping(update)
        schema = read_schema(sent)
        check_schema(schema, schema if like is None else read_schema(like), cast=False)
        entries = _summed_entries(schema)
        arrays = read_update(sent, schema, entries)
    except Refused as refused:
        raise DataError(f"the update cannot be encoded for a secure sum ({refused.reason}): {refused.detail}") from None
    if value != int(value):
        raise DataError(f"weights in a secure sum must be whole numbers, got {value!r}")
    on_host = {name: cast(move_to(array, np.empty(0)), "float64") for name, array in arrays.items()}
    cut = any(bool((abs(array) > encoding.clip).any()) for array in on_host.values())
    levels = {name: _quantise(array, value, encoding) for name, array in on_host.items()}
    voters = _voting_names(entries, buffers)
    per_sum = [PARTS[part](on_host[name], levels[name], int(value)) for part in parts for name in voters]
    return np.concatenate([np.array([1, cut, value], np.int64), *levels.values(), *per_sum], dtype=np.int64)


def decode(
    total: Array,
    like: Params,
    encoding: Encoding,
    *,
    buffers: Collection[str] | None = None,
    further: Collection[str] = (),
) -> Decoded:
    """Decode a total into the tally of its clients; raises `DataError` if it cannot be a sum of encoded updates.

    >>> encoding, model = Encoding(clip=1.0, max_weight=4, bits=4), {"w": np.zeros(2)}
    >>> vectors = [encode({"w": np.array([0.5, sign * 0.5])}, 4, encoding) for sign in (1, 1, -1)]
    >>> tally, cut, error = decode(sum(vectors), model, encoding)
    >>> tally.clients, tally.weight, tally.votes["w"].tolist(), error
    (3, 12.0, [3, 1], 0.0625)
    """
    try:
        entries = _summed_entries(read_schema(like))
    except Refused as refused:
        raise DataError(f"like: {refused.detail}") from None
    total, parts = _check_vector(total), _sent_parts(further)
    voters = _voting_names(entries, buffers)
    sizes = {name: math.prod(entry.shape) for name, entry in entries.items()}
    voting = sum(sizes[name] for name in voters)
    if len(total) != (expected := HEAD + sum(sizes.values()) + len(parts) * voting):
        raise DataError(f"a secure sum of this model must have {expected} entries, got {len(total)}")
    clients, cut, weight = (int(value) for value in total[:HEAD])
    first = HEAD + sum(sizes.values())
    cuts = [HEAD, *(first + voting * part for part in range(len(parts)))]
    sections = dict(zip(("total", *parts), np.split(total, cuts)[1:], strict=True))
    _check_total(sections, clients, cut, weight, encoding)
    tally = Tally({name: like[name] for name in entries}, buffers=buffers, further=further)
    tally.count([float(weight)], [])
    tally.clients, tally.heaviest = clients, float(min(encoding.max_weight, weight - clients + 1))  # at most
    sums = {"total": _split_by_name(sections.pop("total"), sizes)}
    sums |= {part: _split_by_name(held, {name: sizes[name] for name in voters}) for part, held in sections.items()}
    for name, entry in entries.items():
        held = {part: by_name[name] for part, by_name in sums.items() if name in by_name}
        tally.sums[name] = _to_sums(held, entry, clients, encoding)
    return Decoded(tally, cut, encoding.error(clients, weight))


def signed(total: Array, modulus: int = 2**32) -> Vector:
    """Map a sum modulo a power of two to signed numbers.

    >>> signed(np.array([5, 2**32 - 5])).tolist()
    [5, -5]
    """
    total = np.asarray(total, np.int64) % modulus
    return np.where(total >= modulus // 2, total - modulus, total)


def _summed_entries(schema: Mapping[str, Spec]) -> dict[str, Spec]:
    """The entries that are summed, sorted by name, so that the order is the same for every client."""
    return {name: schema[name] for name in sorted(schema) if schema[name].dtype in FLOATS}


def _voting_names(entries: Mapping[str, Spec], buffers: Collection[str] | None) -> list[str]:
    return [name for name, entry in entries.items() if entry_kind(name, entry, buffers) == "masked"]


def _quantise(array: Array, weight: float, encoding: Encoding) -> Vector:
    return np.rint(np.clip(array, -encoding.clip, encoding.clip) * (weight / encoding.step)).astype(np.int64)


def _check_vector(total: Array) -> Vector:
    total = np.asarray(total)
    if total.ndim != 1 or total.dtype.kind not in "iu" or len(total) < HEAD:
        raise DataError(f"a secure sum must be a flat array of integers, got {total.dtype.name}{list(total.shape)}")
    return total.astype(np.int64)


def _check_total(sections: Mapping[str, Vector], clients: int, cut: int, weight: int, encoding: Encoding) -> None:
    """Raise `DataError` for a total that no sum of encoded updates can give, such as one that wrapped around."""
    valid = clients >= 1 and 0 <= cut <= clients and clients <= weight <= clients * encoding.max_weight
    largest = {"votes": clients, "positives": clients, "positive_weight": weight, "negative_weight": weight}
    for part, values in sections.items():
        limit = largest.get(part, clients * encoding.half)
        least = -limit if part in ("total", "votes") else 0
        valid = valid and (not values.size or (least <= int(values.min()) and int(values.max()) <= limit))
    if not valid:
        raise DataError(
            f"not a sum of encoded updates (clients {clients}, weight {weight}): check that all clients use the same "
            f"encoding and, for sums modulo 2**32, that there are at most {encoding.capacity():,} of them"
        )


# part of the sums -> what a client sends for an array, given its values, their levels and its weight
PARTS: dict[str, Callable[[Array, Vector, int], Vector]] = {
    "votes": lambda array, levels, weight: signs(array),
    "positive": lambda array, levels, weight: np.maximum(levels, 0),
    "positives": lambda array, levels, weight: array > 0,
    "positive_weight": lambda array, levels, weight: (array > 0) * weight,
    "negative_weight": lambda array, levels, weight: (array < 0) * weight,
}


def _sent_parts(further: Collection[str]) -> list[str]:
    """The parts that clients send for each array, in order; a rounding error is not one of them."""
    if "squares" in further:
        raise ConfigError(
            "a secure sum does not carry squares: in levels of equal distance those of small entries would be zero; "
            "use a rule that does not read them"
        )
    return ["votes", *(part for group in read_further(further) for part in FURTHER[group] if part in PARTS)]


def _split_by_name(values: Vector, sizes: Mapping[str, int]) -> dict[str, Vector]:
    cuts = np.cumsum(list(sizes.values()))[:-1]
    return dict(zip(sizes, np.split(values, cuts), strict=True)) if sizes else {}


def _to_sums(held: Mapping[str, Vector], entry: Spec, clients: int, encoding: Encoding) -> Sums:
    rest = np.zeros(len(held["total"]), working_type(entry.dtype))
    factors = {"total": encoding.step, "positive": encoding.step, "positive_weight": 1.0, "negative_weight": 1.0}
    sums = {part: held[part] * factor for part, factor in factors.items() if part in held}
    counts = {part: held[part].astype(vote_type(clients)) for part in COUNTS if part in held}
    rests = {"rest": rest, **({"positive_rest": rest.copy()} if "positive" in held else {})}
    return Sums(**{"votes": None, **sums, **rests, **counts})
