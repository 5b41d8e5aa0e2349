"""The update gate: what a client sends is checked whole before any of it counts.

A refused client is left out of the mean and of the vote count; the others give what they would have given without it.

    reason      what was wrong
    schema      not a mapping of arrays, or entries missing or too many
    shape       an entry of another shape (never broadcast)
    dtype       an entry of another number type, or not numbers
    nonfinite   a NaN or an infinity
    norm        a norm above the limit that was set
    empty       a weight of zero: no data, no vote
    weight      a weight that is negative, not finite, not a number, or above the limit
    duplicate   a second update by one client
    unselected  a client that was not asked
    round       an update made for another round
"""

import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedgma.aggregation import kernels
from fedgma.arrays import FLOATS, INTEGERS, Array, Spec, cast, flat, native, spec
from fedgma.errors import ConfigError

Schema = Mapping[str, Spec]
PIECE = 2**15  # entries whose squares are summed at a time
SAFE = 1e-280  # a sum of squares above it has lost nothing to underflow that matters
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # how torch names the buffers of its normalisations


class Refusal(NamedTuple):
    """A client that was left out, the reason in a word, and in a sentence."""

    client: Hashable
    reason: str
    detail: str


@dataclass(frozen=True)
class Gate:
    """What an update must satisfy beyond its shape, type and finite values.

    `cast=True` lets another floating type in (it is converted); without it every client must send the model's own.
    """

    max_weight: float = 1e9
    max_norm: float = math.inf
    cast: bool = False
    selected: Collection[Hashable] | None = None  # clients that were asked; None: anyone
    round: int | None = None

    def __post_init__(self) -> None:
        if not self.max_weight > 0 or not self.max_norm > 0:
            raise ConfigError(f"a gate's limits are above 0, got {self.max_weight=} and {self.max_norm=}")
        if self.selected is not None and len(set(self.selected)) != len(self.selected):
            raise ConfigError("the selected clients must be different from each other, but one is named twice")


class Refused(Exception):
    """Inside the gate only: carries the reason to the door."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def read_weight(weight: object, max_weight: float) -> float:
    """A client's weight as a float; raises `Refused` for what is not a positive, finite number within the limit."""
    if isinstance(weight, bool | np.bool_ | str | bytes | complex) or not hasattr(weight, "__float__"):
        raise Refused("weight", f"the weight must be a number of samples, got {weight!r}")
    try:
        value = float(weight)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise Refused("weight", f"the weight must be one number, got {type(weight).__name__}") from None
    if value == 0:
        raise Refused("empty", "the client has no samples")
    if not 0 < value <= max_weight:  # also false for NaN
        raise Refused("weight", f"the weight must lie above 0 and not above {max_weight:g}, got {value!r}")
    return value


def read_schema(update: object) -> dict[str, Spec]:
    """Names, shapes and number types of an update; raises `Refused` where it is not a mapping of numeric arrays."""
    if not isinstance(update, Mapping) or not update:
        raise Refused("schema", f"an update is a mapping of names to arrays, got {type(update).__name__}")
    found = {}
    for name, array in update.items():
        if not isinstance(name, str):
            raise Refused("schema", f"entries are named by strings, got {name!r}")
        try:
            found[name] = spec(array)
        except (TypeError, ValueError):
            raise Refused("dtype", f"{name!r} is not an array") from None
        if found[name].dtype not in FLOATS | INTEGERS:
            raise Refused("dtype", f"{name!r} holds {found[name].dtype}, which cannot be averaged")
    return found


def compare(found: Schema, expected: Schema, cast: bool) -> None:
    """Raise `Refused` where an update's schema is not the expected one; order does not matter."""
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or extra:
        raise Refused("schema", f"entries missing: {missing[:3] or 'none'}, too many: {extra[:3] or 'none'}")
    for name, want in expected.items():
        have = found[name]
        if have.shape != want.shape:
            raise Refused("shape", f"{name!r} must have shape {list(want.shape)}, got {list(have.shape)}")
        if have.dtype != want.dtype and not (cast and {have.dtype, want.dtype} <= FLOATS):
            raise Refused("dtype", f"{name!r} must be {want.dtype}, got {have.dtype}")


def read_update(update: Mapping[str, Any], expected: Schema) -> dict[str, Array]:
    """The entries as flat native arrays in the expected order; raises `Refused` where one is not finite."""
    arrays = {name: flat(native(update[name])) for name in expected}
    floats = [name for name, entry in expected.items() if entry.dtype in FLOATS]
    bad = kernels.first_nonfinite([arrays[name] for name in floats])
    if bad is not None:
        raise Refused("nonfinite", f"{floats[bad]!r} holds a NaN or an infinity")
    return arrays


def why_not(update: Mapping[str, Any], gate: Gate) -> Refusal | None:
    """Why a gate refuses an update as it stands, whoever sent it; None where it does not."""
    try:
        arrays = read_update(update, read_schema(update))
        length = norm(arrays.values()) if gate.max_norm < math.inf else 0.0
        if length > gate.max_norm:
            raise Refused("norm", f"the norm must not be above {gate.max_norm:g}, got {length:g}")
    except Refused as refused:
        return Refusal(None, refused.reason, refused.detail)
    return None


def norm(arrays: Iterable[Array]) -> float:
    """Euclidean norm of all entries together, in float64; scaled where it must be, so that it cannot overflow."""
    lengths = []
    for array in arrays:
        squares = _squares(array) if isinstance(array, np.ndarray) else math.nan
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


def _squares(array: np.ndarray) -> float:
    """Sum of squares, piece by piece in the processor's cache; an infinity or next to nothing where it went wrong."""
    total, flat = 0.0, array.reshape(-1)
    for begin in range(0, flat.size, PIECE):
        piece = np.array(flat[begin : begin + PIECE], np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            total += float(np.multiply(piece, piece, out=piece).sum())
    return total


def treatment(name: str, entry: Spec, buffers: Collection[str] | None) -> str:
    """What becomes of an entry: a trainable one is "masked", a buffer "averaged", a counter takes the "maximum"."""
    if entry.dtype not in FLOATS:
        return "maximum"
    is_buffer = name.endswith(BUFFERS) if buffers is None else name in buffers
    return "averaged" if is_buffer else "masked"
