"""The update gate: checks all of a client's update before any of it is counted.

A refused client is left out of the mean and of the vote count. The result is the same as if it had sent nothing.

    reason      why the client is refused
    schema      not a mapping of arrays, or entries are missing or unexpected
    shape       an entry has another shape (never broadcast)
    dtype       an entry has another number type, or is not a dense array of numbers; no entry is floating
    nonfinite   an entry holds a NaN or an infinity, or a value that the model's number type cannot hold
    norm        the norm, or that of the buffers' change, is above the limit
    empty       the weight is zero: no data, no vote
    weight      the weight is negative, not finite, not a number, or outside the limits
    client      the client's name cannot be compared with other names
    duplicate   the client has sent an update before
    unselected  the client was not selected for the round
    round       the update is for another round
"""

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedgma.aggregation import kernels
from fedgma.aggregation.kernels.plain import FURTHER
from fedgma.aggregation.norms import norm
from fedgma.arrays import (
    FLOATS,
    INTEGERS,
    NUMBERS,
    Array,
    NotDense,
    Spec,
    convert,
    flatten,
    is_torch,
    spec,
    to_int64,
    to_native,
)
from fedgma.errors import ConfigError, DataError, did_you_mean, nearest

Schema = Mapping[str, Spec]
NATIVE = {np.dtype(name).str: name for name in NUMBERS - {"bfloat16"}}  # of this machine's byte order
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # torch's names for buffers of normalisation layers
MIN_WEIGHT, MAX_WEIGHT = 1e-12, 1e15  # outside these, products with an update or sums of weights lose digits
LONGEST = 300  # characters of a detail: it quotes what a client sent


class Refusal(NamedTuple):
    """A client that was left out; `reason` is one word, `detail` a sentence."""

    client: Hashable
    reason: str
    detail: str


def in_words(refused: Sequence[Refusal]) -> str:
    """How many clients were refused and why, with the first one in full."""
    if not refused:
        return "none was added"
    reasons = ", ".join(sorted({refusal.reason for refusal in refused}))
    return f"{len(refused)} refused: {reasons}; the first: {refused[0].detail}"


@dataclass(frozen=True)
class Gate:
    """Conditions on an update beyond shape, number type and finite values.

    `cast=True` accepts other floating types and rounds them to the model's; otherwise every client must send the
    model's number types. The default `max_weight` refuses nonsense only: a client of that weight owns the mean. Set it
    to the samples of your largest client, or set `max_share`: a round in which one client has a larger share of the
    total weight is not averaged (`NotEnoughClients`).
    """

    max_weight: float = 1e9
    max_norm: float = math.inf
    cast: bool = False
    selected: Collection[Hashable] | None = None  # clients of the round; None: any client
    round: int | None = None
    max_share: float = 1.0
    max_buffer_norm: float = math.inf  # of floating buffers, such as running variances, all together

    def __post_init__(self) -> None:
        _check_limit("max_weight", self.max_weight, MAX_WEIGHT)
        _check_limit("max_share", self.max_share, 1.0)
        _check_limit("max_norm", self.max_norm, math.inf)
        _check_limit("max_buffer_norm", self.max_buffer_norm, math.inf)
        if not isinstance(self.cast, bool | np.bool_):
            raise ConfigError(f"a gate's cast must be True or False, got {self.cast!r}")
        if self.round is not None and (isinstance(self.round, bool) or not isinstance(self.round, int | np.integer)):
            raise ConfigError(f"a gate's round must be a whole number or None, got {self.round!r}")
        if self.selected is not None:
            object.__setattr__(self, "selected", _read_selected(self.selected))

    @property
    def limits_norms(self) -> bool:
        """Whether norms are measured."""
        return min(self.max_norm, self.max_buffer_norm) < math.inf


def _check_limit(name: str, limit: object, highest: float) -> None:
    number = isinstance(limit, int | float | np.integer | np.floating) and not isinstance(limit, bool)
    if not number or not 0 < limit <= highest:  # type: ignore[operator]
        at_most = "" if highest == math.inf else f" and at most {highest:g}"
        raise ConfigError(f"a gate's {name} must be a number above 0{at_most}, got {limit!r}")


def read_further(names: Collection[str]) -> tuple[str, ...]:
    """The names of further sums, each once, in their order; raises `ConfigError` for one that is not known."""
    if isinstance(names, str) or not set(names) <= set(FURTHER):
        raise ConfigError(f"a tally's further sums must be some of {', '.join(FURTHER)}, got {names!r}")
    return tuple(name for name in FURTHER if name in names)


def _read_selected(selected: object) -> frozenset[Hashable]:
    if isinstance(selected, str | bytes) or not isinstance(selected, Collection):
        raise ConfigError(f"the selected clients must be a collection of names, got {type(selected).__name__}")
    names = list(selected)
    try:
        distinct = frozenset(names)
    except TypeError:
        raise ConfigError("the selected clients' names must be hashable, such as strings or integers") from None
    if len(distinct) != len(names):
        raise ConfigError("the selected clients must be distinct, but one is named twice")
    return distinct


class Refused(Exception):
    """Why the gate refuses an update; in place of an update, it stands for one that could not be read."""

    def __init__(self, reason: str, detail: str) -> None:
        detail = detail if len(detail) <= LONGEST else detail[: LONGEST - 3] + "..."
        super().__init__(detail)
        self.reason, self.detail = reason, detail


def check_client(client: Hashable) -> None:
    """Raise `Refused` unless a client's name can be compared with others: hashable, and equal to itself."""
    if client is None or type(client) in (str, int):
        return
    try:
        comparable = not is_torch(client) and hash(client) == hash(client) and bool(client == client)
    except Exception:
        comparable = False
    if not comparable:
        raise Refused("client", f"a client's name must be hashable, such as a string or an integer, got {client!r:.60}")


def check_identity(client: Hashable, round: int | None, seen: Collection[Hashable], gate: Gate) -> None:
    """Raise `Refused` unless an update is the first one of a client of this round; `seen` were counted before."""
    check_client(client)
    if client is not None and client in seen:
        raise Refused("duplicate", f"client {client!r} has sent an update before; only the first one counts")
    if gate.selected is not None and client not in gate.selected:
        raise Refused("unselected", f"client {client!r} was not selected for this round")
    if gate.round is not None and round != gate.round:
        raise Refused("round", f"the update must be for round {gate.round}, got round {round}")


def check_members(seen: Collection[Hashable], clients: int, gate: Gate) -> None:
    """Raise `DataError` unless all clients of a whole tally are among those that the gate selects."""
    if gate.selected is None:
        return
    if len(seen) < clients:
        raise DataError(f"the gate has selected clients, but {clients - len(seen)} clients of the tally have no name")
    if unselected := set(seen) - set(gate.selected):
        raise DataError(f"the tally holds clients that were not selected, such as {min(map(repr, unselected))}")


def read_weight(weight: object, max_weight: float) -> float:
    """A client's weight as a float; raises `Refused` unless it is positive, finite and within the limits."""
    if not _is_number(weight):
        raise Refused("weight", f"the weight must be a number of samples, got {weight!r:.60}")
    try:
        value = float(weight)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise Refused("weight", f"the weight must be one number, got {type(weight).__name__}") from None
    if value == 0:
        raise Refused("empty", "the client has no samples")
    if not MIN_WEIGHT <= value <= min(max_weight, MAX_WEIGHT):  # also false for NaN
        raise Refused("weight", f"the weight must be at least {MIN_WEIGHT:g} and at most {max_weight:g}, got {value!r}")
    return value


def _is_number(weight: object) -> bool:
    """Whether this may be a weight: a real number, or an array of one without axes."""
    if type(weight) in (int, float):
        return True
    if isinstance(weight, bool | str | bytes | complex | np.ma.MaskedArray) or not hasattr(weight, "__float__"):
        return False
    if getattr(weight, "dtype", None) is None:  # a Fraction, a Decimal
        return True
    try:
        return spec(weight).shape == () and spec(weight).dtype in NUMBERS
    except Exception:
        return False


def read_mapping(update: object) -> dict[str, Any]:
    """The entries of an update, read once; raises `Refused` unless it is a mapping with entries."""
    if isinstance(update, Refused):
        raise update
    try:
        entries = dict(update) if isinstance(update, Mapping) else {}
    except Exception as error:  # a mapping that reads its entries from elsewhere
        raise Refused("schema", f"the update's entries cannot be read ({type(error).__name__})") from None
    if not entries:
        got = "an empty one" if isinstance(update, Mapping) else type(update).__name__
        hint = "; give each array a name, such as dict(zip(names, arrays))" if isinstance(update, list) else ""
        raise Refused("schema", f"an update must be a mapping of names to arrays, got {got}{hint}")
    return entries


def read_schema(update: object) -> dict[str, Spec]:
    """Names, shapes and number types of an update; raises `Refused` unless it is a mapping of numeric arrays.

    Integers are counters, which take the maximum in int64 whatever their type. An update of counters alone is refused:
    it was meant to be averaged.
    """
    schema = {}
    entries = update if type(update) is dict and update else read_mapping(update)
    for name, array in entries.items():
        if not isinstance(name, str):
            raise Refused("schema", f"entry names must be strings, got {name!r:.60}")
        schema[name] = _read_spec(name, array)
    if not any(entry.dtype in FLOATS for entry in schema.values()):
        raise Refused("dtype", "integers are counters and are not averaged: convert the updates to a floating type")
    return schema


def _read_spec(name: str, array: object) -> Spec:
    try:
        entry = spec(array)
    except NotDense as odd:
        raise Refused("dtype", f"{name!r:.60} must be a dense array of numbers, got {odd}") from None
    except Exception:  # an unknown object may raise anything when it is read
        raise Refused("dtype", f"{name!r:.60} must be an array of numbers, got {type(array).__name__}") from None
    if entry.dtype not in NUMBERS:
        hint = "; leave out masks that never change" if entry.dtype == "bool" else ""
        raise Refused("dtype", f"{name!r:.60} must hold real numbers of 16 to 64 bits, got {entry.dtype}{hint}")
    return Spec(entry.shape, "int64") if entry.dtype in INTEGERS else entry


def check_schema(schema: Schema, expected: Schema, cast: bool) -> None:
    """Raise `Refused` unless an update has the expected schema; the order of entries does not matter."""
    missing, extra = sorted(expected.keys() - schema.keys()), sorted(schema.keys() - expected.keys())
    if missing or extra:
        raise Refused("schema", f"entries missing: {missing[:3] or 'none'}, unexpected: {extra[:3] or 'none'}")
    for name, wanted in expected.items():
        actual = schema[name]
        if actual.shape != wanted.shape:
            raise Refused("shape", f"{name!r} must have shape {list(wanted.shape)}, got {list(actual.shape)}")
        floats = {actual.dtype, wanted.dtype} <= FLOATS
        if actual.dtype != wanted.dtype and not (cast and floats):
            accept = "; Gate(cast=True) accepts it" if floats else ""
            raise Refused("dtype", f"{name!r} must be {wanted.dtype}, got {actual.dtype}{accept}")


def read_update(update: Mapping[str, Any], schema: Schema, expected: Schema) -> dict[str, Array]:
    """The entries as flat native arrays in the expected order and types; raises `Refused` if one is not finite."""
    arrays = {name: flatten(read_array(name, update[name], schema[name], expected[name])) for name in expected}
    return check_finite(arrays, schema, expected)


def plain_arrays(update: Mapping[str, Any], expected: Schema) -> dict[str, Array] | None:
    """The entries, flat, of an update of numpy arrays in one piece that are just as expected; None for any other."""
    if update.keys() != expected.keys():
        return None
    arrays = {}
    for name, (shape, dtype) in expected.items():
        array = update[name]
        if type(array) is not np.ndarray or array.shape != shape or NATIVE.get(array.dtype.str) != dtype:
            return None
        if not array.flags.c_contiguous:
            return None
        arrays[name] = array.reshape(-1)
    return arrays


def check_finite(arrays: dict[str, Array], schema: Schema, expected: Schema) -> dict[str, Array]:
    """The flat arrays themselves; raises `Refused` if one is not finite."""
    floats = [name for name, entry in expected.items() if entry.dtype in FLOATS]
    bad = kernels.first_nonfinite([arrays[name] for name in floats])
    if bad is not None:
        raise Refused("nonfinite", nonfinite(floats[bad], schema, expected))
    return arrays


def read_array(name: str, array: Array, entry: Spec, expected: Spec) -> Array:
    """One entry as a native array of the expected number type."""
    try:
        native = to_native(array)
        if expected.dtype == "int64":
            return to_int64(native)
    except OverflowError:
        raise Refused("dtype", f"{name!r} holds a counter of 2**63 or more") from None
    return native if entry.dtype == expected.dtype else convert(native, expected.dtype)


def nonfinite(name: str, schema: Schema, expected: Schema) -> str:
    """What is wrong with an entry that is not finite in the expected number type."""
    outside = "" if schema[name].dtype == expected[name].dtype else f", or a value outside {expected[name].dtype}"
    return f"{name!r} holds a NaN or an infinity{outside}"


def find_refusal(update: Mapping[str, Any], gate: Gate) -> Refusal | None:
    """Check an update's arrays against a gate, without weight or client; None if they pass."""
    try:
        schema = read_schema(update)
        arrays = read_update(update, schema, schema)
        if gate.limits_norms:
            check_norms(([*arrays.values()], []), gate, ([], []))
    except Refused as refused:
        return Refusal(None, refused.reason, refused.detail)
    return None


def check_norms(parts: Sequence[Sequence[Array]], gate: Gate, norms: Sequence[list[float]]) -> None:
    """Refuse finite arrays, voters and buffers, with a norm above its limit; both norms are added to `norms`."""
    lengths = [norm(arrays) for arrays in parts]
    for length, arrays, noted in zip(lengths, parts, norms, strict=True):
        if arrays and math.isfinite(length):
            noted.append(length)
    limits, what = (gate.max_norm, gate.max_buffer_norm), ("the norm", "the norm of the buffers' change")
    for length, limit, words in zip(lengths, limits, what, strict=True):
        if length > limit:
            raise Refused("norm", f"{words} must be at most {limit:g}, got {length:g}")


def check_gate(gate: object) -> Gate:
    """The gate; raises `ConfigError` if it is something else."""
    if not isinstance(gate, Gate):
        raise ConfigError(f"gate: expected fedgma.Gate(...), got {gate!r:.60}")
    return gate


def check_buffers(buffers: Collection[str] | None, names: Collection[str]) -> None:
    """Raise `ConfigError` unless the names of buffers are those of entries: a wrong name would mask the buffer.

    >>> check_buffers(["bn.meen"], ["bn.mean", "w"])
    Traceback (most recent call last):
    ...
    fedgma.errors.ConfigError: buffers: the model has no entry 'bn.meen'; did you mean 'bn.mean'?
    """
    if isinstance(buffers, str):
        raise ConfigError(f"buffers: expected a list of names, got the text {buffers!r:.60}; write [{buffers!r:.60}]")
    if unknown := [name for name in buffers or () if name not in names]:
        hint = did_you_mean(nearest(unknown[0], names))
        raise ConfigError(f"buffers: the model has no entry {unknown[0]!r:.60}{hint}")


def check_first(schema: Schema, expected: Schema | None, buffers: Collection[str] | None) -> None:
    """Refuse a first update (`expected` is None) without the named buffers: all others would be held to its entries."""
    if expected is not None:
        return
    try:
        check_buffers(buffers, schema)
    except ConfigError as error:
        raise Refused("schema", str(error)) from None


def entry_kind(name: str, entry: Spec, buffers: Collection[str] | None) -> str:
    """How an entry is aggregated: trainable ones are "masked", buffers "averaged", counters take the "maximum".

    torch's running statistics are buffers, and so are those that `buffers` names.
    """
    if entry.dtype not in FLOATS:
        return "maximum"
    return "averaged" if name.endswith(BUFFERS) or (buffers is not None and name in buffers) else "masked"
