"""Random rounds of updates, good and bad: a model, a gate, and what each client sends, right or wrong in some way.

`update_checks` aggregates them in every way and compares with exact fractions.
"""

import math
from collections import namedtuple
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch

FLOATS = ("float64", "float32", "float16", "bfloat16")
COUNTERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
LARGEST = {"float64": 2.0**1023 * 1.9999, "float32": 3.4028235e38, "float16": 65504.0, "bfloat16": 3.3895314e38}
SMALLEST = {"float64": 5e-324, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
SHAPES = [(), (1,), (3,), (5,), (2, 2), (0,), (0, 3)]
KINDS = {"w": "masked", "fc.bias": "masked", "bn.running_mean": "averaged", "steps": "maximum"}
NAMES = ["ann", "bob", "cid", 0, 1, 7, 2**40, -3, np.int64(11), np.str_("dan"), ("site", 4), 2.5]
UNHASHABLE = [["a"], {"b": 1}, np.array([1]), float("nan"), torch.tensor(3)]
BAD_WEIGHTS = [-1, -0.5, math.nan, math.inf, -math.inf, True, "10", b"1", None, 1j, [3], 1e18, 1e-300, 10**400]
BAD_WEIGHTS += [np.array([4]), torch.tensor([1, 2]), np.complex64(2), np.bool_(True), torch.tensor(True), object()]
GOOD_WEIGHTS = [
    1,
    3,
    10,
    999,
    1.0,
    2.5,
    np.int32(7),
    np.float32(0.5),
    np.float64(1e6),
    torch.tensor(12),
    Fraction(5, 4),
]
GOOD_WEIGHTS += [np.array(6), Decimal("3.25"), np.uint8(200), 10**8]
NOT_UPDATES = [None, 7, "weights", [1.0], {}, b"x", object()]

Entry = namedtuple("Entry", "shape dtype kind")
Client = namedtuple("Client", "update weight name round fault values")  # fault: why the update is refused, or None
Case = namedtuple("Case", "entries library gate tau clients")


# -- numbers -----------------------------------------------------------------------------------------------------------


def to_bfloat16(values):
    """The nearest bfloat16 of each float32, ties to even, as float32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).reshape(np.shape(values))


def rounded(values, dtype):
    """Numbers as a number type holds them, in float64."""
    with np.errstate(over="ignore"):
        if dtype == "bfloat16":
            return to_bfloat16(np.asarray(values, np.float32)).astype(np.float64)
        return np.asarray(values).astype(dtype).astype(np.float64)


def draw_values(rng, shape, dtype):
    """Finite numbers of a type: ordinary, tied, zeros of both signs, subnormal, near the limit, of any size."""
    kind = rng.integers(7)
    if kind == 0:
        values = rng.integers(-3, 4, shape).astype(float)
    elif kind == 1:
        values = rng.choice([0.0, -0.0, 1.0, -1.0], shape)
    elif kind == 2:
        values = SMALLEST[dtype] * rng.integers(-9, 10, shape)
    elif kind == 3:
        values = LARGEST[dtype] * rng.uniform(-1, 1, shape)
    elif kind == 4:
        values = rng.standard_normal(shape) * 10.0 ** rng.integers(-30, 30, shape)
    else:
        values = rng.standard_normal(shape)
    values = np.clip(values, -LARGEST[dtype], LARGEST[dtype])
    values = rounded(values, dtype)
    return np.where(np.isfinite(values), values, 1.0)


def draw_counters(rng, shape, dtype):
    limits = np.iinfo(dtype)
    low, high = (max(limits.min, -9), min(limits.max, 9)) if rng.integers(4) else (limits.min, limits.max)
    return rng.integers(low, min(high, 2**63 - 1), shape, dtype=np.int64, endpoint=True)


# -- a case ------------------------------------------------------------------------------------------------------------


def make_array(rng, values, dtype, library):
    """An array of these values as somebody may have it: of either library, strided, of the other byte order, a list."""
    if library == "torch" or dtype == "bfloat16":
        tensor = torch.tensor(values.tolist(), dtype=torch.float64 if dtype in FLOATS else torch.int64)
        tensor = tensor.reshape(values.shape).to(getattr(torch, dtype))
        if tensor.dim() == 2 and rng.integers(2):
            tensor = tensor.t().contiguous().t()
        return tensor.requires_grad_() if dtype in FLOATS and rng.integers(4) == 0 else tensor
    array = np.array(values).astype(dtype)
    form = rng.integers(6)
    if form == 0:
        array = array.astype(array.dtype.newbyteorder(">"))
    elif form == 1 and array.ndim:
        array = np.repeat(array, 2, axis=0)[::2]
    elif form == 2 and array.ndim == 2:
        array = np.asfortranarray(array)
    elif form == 3:
        array.flags.writeable = False
    elif form == 4 and dtype == "float64" and array.shape != (0, 3):
        return array.tolist()
    return array


def make_case(rng):
    """One round, drawn with a numpy generator."""
    names = ["w", *(name for name in ("fc.bias", "bn.running_mean", "steps") if rng.integers(2))]
    entries = {}
    for name in names:
        dtype = rng.choice(COUNTERS if name == "steps" else FLOATS)
        entries[name] = Entry(SHAPES[rng.integers(len(SHAPES))], str(dtype), KINDS[name])
    torch_only = any(entry.dtype == "bfloat16" for entry in entries.values())
    library = "torch" if torch_only else str(rng.choice(["numpy", "torch"]))
    gate = {"cast": bool(rng.integers(2))}
    if rng.integers(4) == 0:
        gate["selected"] = [*NAMES[:7]]
    if rng.integers(4) == 0:
        gate["round"] = 5
    if rng.integers(4) == 0:
        gate["max_norm"] = 1.2345678 * 10.0 ** int(rng.integers(-3, 6))  # no norm of a few whole numbers
    if rng.integers(4) == 0:
        gate["max_buffer_norm"] = 1.2345678 * 10.0 ** int(rng.integers(-3, 6))
    clients = [make_client(rng, entries, gate) for _ in range(rng.integers(1, 7))]
    return Case(entries, library, gate, int(rng.integers(21)), clients)


def make_client(rng, entries, gate):
    sent = {
        name: (entry.dtype if entry.kind == "maximum" else send_as(rng, entry.dtype)) for name, entry in entries.items()
    }
    values = {
        name: draw_counters(rng, entry.shape, entry.dtype)
        if entry.kind == "maximum"
        else draw_values(rng, entry.shape, sent[name])
        for name, entry in entries.items()
    }
    library = str(rng.choice(["numpy", "torch"]))
    update = {name: make_array(rng, values[name], sent[name], library) for name in rng.permutation(list(entries))}
    fault = None
    if any(sent[name] != entry.dtype for name, entry in entries.items()) and not gate["cast"]:
        fault = "dtype"
    elif rng.integers(3) == 0:
        update, fault = spoil(rng, update, values, sent, entries)
    weight = GOOD_WEIGHTS[rng.integers(len(GOOD_WEIGHTS))]
    if rng.integers(8) == 0:
        weight = [*BAD_WEIGHTS, 0, 0.0, np.int64(0)][rng.integers(len(BAD_WEIGHTS) + 3)]
    name = None if rng.integers(5) == 0 else NAMES[rng.integers(len(NAMES))]
    if rng.integers(15) == 0:
        name = UNHASHABLE[rng.integers(len(UNHASHABLE))]
    return Client(update, weight, name, 5 if rng.integers(9) else 4, fault, values)


def send_as(rng, dtype):
    """The number type that a client sends for an entry: now and then another one."""
    return dtype if rng.integers(12) else str(rng.choice(FLOATS))


def spoil(rng, update, values, sent, entries):
    """Make an update wrong in one way; returns it with the reason that the gate must give."""
    name = str(rng.choice(list(entries)))
    entry, others = entries[name], {key: array for key, array in update.items() if key != name}
    floats_left = any(entries[key].kind != "maximum" for key in others)
    way = rng.integers(10)
    if way == 0:
        return NOT_UPDATES[rng.integers(len(NOT_UPDATES))], "schema"
    if way == 1:
        return others, "schema" if not others or floats_left else "dtype"
    if way == 2:
        return {**update, "extra": np.ones(2)}, "schema"
    if way == 3:
        return {**others, name.upper(): update[name]}, "schema"
    if way == 4:
        return {**update, 3: np.ones(2)}, "schema"
    if way == 5:
        shape = (*entry.shape, 1) if rng.integers(2) else (7, *entry.shape)
        array = np.ones(shape, entry.dtype if entry.dtype != "bfloat16" else "float32")
        return {**update, name: array if entry.dtype != "bfloat16" else torch.from_numpy(array).bfloat16()}, "shape"
    if way == 6:
        odd = [
            np.ones(entry.shape, bool),
            np.ones(entry.shape, complex),
            np.full(entry.shape, "1"),
            np.full(entry.shape, None),
        ]
        return {**update, name: odd[rng.integers(len(odd))]}, "dtype"
    if way == 7:
        odd = [
            torch.ones(3, 3).to_sparse(),
            torch.ones(2, device="meta"),
            np.ma.array([1.0, 2.0], mask=[0, 1]),
            object(),
        ]
        return {**update, name: odd[rng.integers(len(odd))]}, "dtype"
    if way == 8:
        wrong = np.ones(entry.shape, "float32" if entry.kind == "maximum" else "int64")
        return {**update, name: wrong}, "dtype"
    size = math.prod(entry.shape)
    if entry.kind == "maximum" or not size:
        return update, None
    spoiled = values[name].copy().reshape(-1)
    spoiled[rng.integers(size)] = rng.choice([math.nan, math.inf, -math.inf])
    values[name] = spoiled.reshape(entry.shape)
    return {**update, name: make_array(rng, values[name], sent[name], "torch")}, None
