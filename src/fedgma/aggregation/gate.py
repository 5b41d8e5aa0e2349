"""The update gate: checks all of a client's update before any of it is counted.

A refused client is left out of the mean and of the vote count. The result is the same as if it had sent nothing.

    reason      why the client is refused
    schema      not a mapping of arrays, or entries are missing or unexpected
    shape       an entry has another shape (never broadcast)
    dtype       an entry has another number type, or does not hold numbers
    nonfinite   an entry holds a NaN or an infinity
    norm        the norm is above the limit
    empty       the weight is zero: no data, no vote
    weight      the weight is negative, not finite, not a number, or above the limit
    duplicate   the client has sent an update before
    unselected  the client was not selected for the round
    round       the update is for another round
"""

import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedgma.aggregation import kernels
from fedgma.arrays import FLOATS, INTEGERS, Array, Spec, cast, flatten, spec, to_native
from fedgma.errors import ConfigError

Schema = Mapping[str, Spec]
PIECE = 2**15  # entries whose squares are summed at a time
SAFE = 1e-280  # underflow does not matter in a sum of squares above this
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # torch's names for buffers of normalisation layers


class Refusal(NamedTuple):
    """A client that was left out; `reason` is one word, `detail` a sentence."""

    client: Hashable
    reason: str
    detail: str


@dataclass(frozen=True)
class Gate:
    """Conditions on an update beyond shape, number type and finite values.

    `cast=True` accepts and converts other floating types; otherwise every client must send the model's number types.
    """

    max_weight: float = 1e9
    max_norm: float = math.inf
    cast: bool = False
    selected: Collection[Hashable] | None = None  # clients of the round; None: any client
    round: int | None = None

    def __post_init__(self) -> None:
        if not self.max_weight > 0 or not self.max_norm > 0:
            raise ConfigError(f"a gate's limits must be above 0, got {self.max_weight=} and {self.max_norm=}")
        if self.selected is not None and len(set(self.selected)) != len(self.selected):
            raise ConfigError("the selected clients must be distinct, but one is named twice")


class Refused(Exception):
    """Raised and caught inside `aggregation` only: why the gate refuses an update."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def read_weight(weight: object, max_weight: float) -> float:
    """A client's weight as a float; raises `Refused` unless it is positive, finite and within the limit."""
    if isinstance(weight, bool | np.bool_ | str | bytes | complex) or not hasattr(weight, "__float__"):
        raise Refused("weight", f"the weight must be a number of samples, got {weight!r}")
    try:
        value = float(weight)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise Refused("weight", f"the weight must be one number, got {type(weight).__name__}") from None
    if value == 0:
        raise Refused("empty", "the client has no samples")
    if not 0 < value <= max_weight:  # also false for NaN
        raise Refused("weight", f"the weight must be above 0 and at most {max_weight:g}, got {value!r}")
    return value


def read_schema(update: object) -> dict[str, Spec]:
    """Names, shapes and number types of an update; raises `Refused` unless it is a mapping of numeric arrays."""
    if not isinstance(update, Mapping) or not update:
        raise Refused("schema", f"an update must be a mapping of names to arrays, got {type(update).__name__}")
    schema = {}
    for name, array in update.items():
        if not isinstance(name, str):
            raise Refused("schema", f"entry names must be strings, got {name!r}")
        try:
            schema[name] = spec(array)
        except (TypeError, ValueError):
            raise Refused("dtype", f"{name!r} must be an array of numbers, got {type(array).__name__}") from None
        if schema[name].dtype not in FLOATS | INTEGERS:
            raise Refused("dtype", f"{name!r} must hold numbers, got {schema[name].dtype}")
    return schema


def check_schema(schema: Schema, expected: Schema, cast: bool) -> None:
    """Raise `Refused` unless an update has the expected schema; the order of entries does not matter."""
    missing, extra = sorted(expected.keys() - schema.keys()), sorted(schema.keys() - expected.keys())
    if missing or extra:
        raise Refused("schema", f"entries missing: {missing[:3] or 'none'}, unexpected: {extra[:3] or 'none'}")
    for name, wanted in expected.items():
        actual = schema[name]
        if actual.shape != wanted.shape:
            raise Refused("shape", f"{name!r} must have shape {list(wanted.shape)}, got {list(actual.shape)}")
        if actual.dtype != wanted.dtype and not (cast and {actual.dtype, wanted.dtype} <= FLOATS):
            raise Refused("dtype", f"{name!r} must be {wanted.dtype}, got {actual.dtype}")


def read_update(update: Mapping[str, Any], expected: Schema) -> dict[str, Array]:
    """The entries as flat native arrays in the expected order; raises `Refused` if one is not finite."""
    arrays = {name: flatten(to_native(update[name])) for name in expected}
    floats = [name for name, entry in expected.items() if entry.dtype in FLOATS]
    bad = kernels.first_nonfinite([arrays[name] for name in floats])
    if bad is not None:
        raise Refused("nonfinite", f"{floats[bad]!r} holds a NaN or an infinity")
    return arrays


def find_refusal(update: Mapping[str, Any], gate: Gate) -> Refusal | None:
    """Check an update's arrays against a gate, without weight or client; None if they pass."""
    try:
        arrays = read_update(update, read_schema(update))
        length = norm(arrays.values()) if gate.max_norm < math.inf else 0.0
        if length > gate.max_norm:
            raise Refused("norm", f"the norm must be at most {gate.max_norm:g}, got {length:g}")
    except Refused as refused:
        return Refusal(None, refused.reason, refused.detail)
    return None


def norm(arrays: Iterable[Array]) -> float:
    """Euclidean norm of all entries together, in float64; scaled where squares would overflow or underflow."""
    lengths = []
    for array in arrays:
        squares = _sum_of_squares(array) if isinstance(array, np.ndarray) else math.nan
        if SAFE < squares < math.inf:
            lengths.append(math.sqrt(squares))
            continue
        largest = float(abs(array).max()) if math.prod(array.shape) else 0.0
        if not math.isfinite(largest):
            return largest
        if largest > 0:
            scaled = cast(array, "float64") / largest
            lengths.append(largest * math.sqrt(float((scaled * scaled).sum())))
    return math.hypot(*lengths)


def _sum_of_squares(array: np.ndarray) -> float:
    """Sum of squares in pieces that fit the cache; infinite after an overflow, about zero after an underflow."""
    total, flat = 0.0, array.reshape(-1)
    for begin in range(0, flat.size, PIECE):
        piece = np.array(flat[begin : begin + PIECE], np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            total += float(np.multiply(piece, piece, out=piece).sum())
    return total


def entry_kind(name: str, entry: Spec, buffers: Collection[str] | None) -> str:
    """How an entry is aggregated: trainable ones are "masked", buffers "averaged", counters take the "maximum"."""
    if entry.dtype not in FLOATS:
        return "maximum"
    is_buffer = name.endswith(BUFFERS) if buffers is None else name in buffers
    return "averaged" if is_buffer else "masked"
