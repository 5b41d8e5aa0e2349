"""Random updates, good and bad, through every way into an aggregation, compared with exact fractions.

A case is a round: a model, a gate, and what each client sends, right or wrong in one of many ways. `expect` works out,
client by client and in plain Python, who is refused and for what; `WAYS` aggregates the round through the library;
`check` compares refusals, votes, masks and counters exactly, and means to the last digit of their number type. Nothing
but the library's own errors may be raised, and no input may change. `tests/faults` runs some thousands of cases,
`benchmarks/faults/updates.py` a million.
"""

import math
import sys
import warnings
from collections import namedtuple
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import fedgma
from fedgma.aggregation.server import MaskedServer

FLOATS = ("float64", "float32", "float16", "bfloat16")
COUNTERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
LARGEST = {"float64": 2.0**1023 * 1.9999, "float32": 3.4028235e38, "float16": 65504.0, "bfloat16": 3.3895314e38}
SMALLEST = {"float64": 5e-324, "float32": 2.0**-149, "float16": 2.0**-24, "bfloat16": 2.0**-133}
DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
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
Client = namedtuple("Client", "update weight name round fault values")  # fault: (reason of the update) or None
Case = namedtuple("Case", "entries library gate tau clients")
Expected = namedtuple("Expected", "refused counted")  # [(label, reason)], [(values, weight)]


# -- numbers ------------------------------------------------------------------------------------------------------------


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


# -- a case -------------------------------------------------------------------------------------------------------------


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
        gate["max_norm"] = float(10.0 ** rng.integers(-3, 6))
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


# -- what must come out ---------------------------------------------------------------------------------------------------


def expect(case, clients):
    """Refusals and counted clients of these clients in this order, worked out one by one."""
    seen, refused, counted = set(), [], []
    for position, client in enumerate(clients):
        reason, values, weight = judge(case, client, seen)
        label = position if client.name is None else client.name
        if reason is not None:
            refused.append((f"{label!r:.60}" if reason == "client" else label, reason))
            continue
        if client.name is not None:
            seen.add(client.name)
        counted.append((values, weight))
    return Expected(refused, counted)


def judge(case, client, seen):
    """The reason for which a client is refused, or None, its values and its weight."""
    if any(client.name is odd for odd in UNHASHABLE):
        return "client", None, None
    if client.name is not None and client.name in seen:
        return "duplicate", None, None
    if "selected" in case.gate and client.name not in case.gate["selected"]:
        return "unselected", None, None
    if "round" in case.gate and client.round != case.gate["round"]:
        return "round", None, None
    if any(client.weight is bad for bad in BAD_WEIGHTS):
        return "weight", None, None
    if not client.weight:
        return "empty", None, None
    if client.fault is not None:
        return client.fault, None, None
    values = {
        name: client.values[name] if entry.kind == "maximum" else rounded(client.values[name], entry.dtype)
        for name, entry in case.entries.items()
    }
    if not all(np.isfinite(array).all() for array in values.values()):
        return "nonfinite", None, None
    voters = [values[name] for name, entry in case.entries.items() if entry.kind == "masked"]
    if "max_norm" in case.gate and too_long(voters, case.gate["max_norm"]):
        return "norm", None, None
    return None, values, Fraction(float(client.weight))


def too_long(arrays, limit):
    squares = sum((Fraction(float(value)) ** 2 for array in arrays for value in array.reshape(-1)), Fraction(0))
    return squares > Fraction(limit) ** 2


def columns(expected, name):
    """The counted clients' values of each entry of one array."""
    return zip(*(values[name].reshape(-1).tolist() for values, _ in expected.counted), strict=True)


def sign(value):
    return (value > 0) - (value < 0)


def exact_mean(column, weights):
    return sum(weight * Fraction(value) for value, weight in zip(column, weights, strict=True)) / sum(weights)


def slack(column, weights, dtype, mean):
    """How far the mean may be from the exact one: its last digit, and the rounding of products in float64."""
    size = sum(weight * abs(Fraction(value)) for value, weight in zip(column, weights, strict=True)) / sum(weights)
    whole = dtype != "float64" and all(weight.denominator == 1 and weight < 2**29 for weight in weights)
    digits = 74 if whole else 52
    underflow = Fraction(2) ** -1074 * len(weights) / min(1, sum(weights))
    return last_digit(mean, dtype) + len(weights) * size / 2**digits + underflow


def last_digit(value, dtype):
    """The distance of neighbouring numbers of a type around a value."""
    if not value:
        return Fraction(SMALLEST[dtype])
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    return max(Fraction(2) ** (exponent + 1 - DIGITS[dtype]), Fraction(SMALLEST[dtype]))


def may_overflow(case, expected):
    """Whether a weighted sum of float64 entries may be beyond float64."""
    for name, entry in case.entries.items():
        if entry.dtype == "float64" and any(
            sum(weight * abs(Fraction(value)) for value, (_, weight) in zip(column, expected.counted, strict=True))
            > Fraction(2.0**1023)
            for column in columns(expected, name)
        ):
            return True
    return False


# -- the ways in -----------------------------------------------------------------------------------------------------------


def model(case):
    """The model of zeros, in the case's library."""
    kinds = {name: (entry.shape, entry.dtype) for name, entry in case.entries.items()}
    if case.library == "torch":
        return {name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in kinds.items()}
    return {name: np.zeros(shape, dtype) for name, (shape, dtype) in kinds.items()}


def open_tally(case, **changes):
    return fedgma.Tally(model(case), gate=fedgma.Gate(**{**case.gate, **changes}))


def by_tally(case, clients, rule):
    tally = open_tally(case)
    for client in clients:
        tally.add(client.update, client.weight, client=client.name, round=client.round)
    return tally.votes, rule.conclude(tally)


def by_list(case, clients, rule):
    names = [client.name for client in clients]
    updates, weights = [client.update for client in clients], [client.weight for client in clients]
    gate = fedgma.Gate(**case.gate)
    return None, rule(updates, weights, clients=names, like=model(case), gate=gate)


def stacked(case, clients):
    arrays = {}
    for name, entry in case.entries.items():
        rows = [torch.as_tensor(plain(client.update[name])).detach() for client in clients]
        together = torch.stack([row.to(getattr(torch, entry.dtype)) for row in rows])
        arrays[name] = together if case.library == "torch" else together.numpy()
    return arrays


def plain(array):
    """An array that torch can take over."""
    return array if isinstance(array, torch.Tensor) else np.array(array, np.asarray(array).dtype.newbyteorder("="))


def by_stack(case, clients, rule):
    gate = fedgma.Gate(**case.gate)
    names, weights = [client.name for client in clients], [client.weight for client in clients]
    return None, rule(stacked(case, clients), weights, clients=names, like=model(case), gate=gate)


def by_add_many(case, clients, rule):
    tally, cut = open_tally(case), len(clients) // 2
    for part in (clients[:cut], clients[cut:]):
        if part:
            names = [client.name for client in part]
            tally.add_many(stacked(case, part), [client.weight for client in part], clients=names)
    return tally.votes, rule.conclude(tally)


def by_merge(case, clients, rule, through=lambda tally: tally):
    tallies, cut = [open_tally(case), open_tally(case)], len(clients) // 2
    for position, client in enumerate(clients):
        tallies[position >= cut].add(client.update, client.weight, client=client.name, round=client.round)
    merged = through(tallies[1])
    merged.merge(through(tallies[0]))
    return merged.votes, rule.conclude(merged)


def by_bytes(case, clients, rule):
    return by_merge(case, clients, rule, lambda tally: fedgma.from_bytes(fedgma.to_bytes(tally), gate=tally.gate))


def by_server_round(case, clients, rule):
    names, weights = [client.name for client in clients], [client.weight for client in clients]
    locals_ = [client.update for client in clients]
    gate = fedgma.Gate(**case.gate)
    result = fedgma.server_round(model(case), locals_, weights, aggregator=rule, clients=names, gate=gate)
    return None, result


def by_server(case, clients, rule):
    server = MaskedServer(rule, gate=fedgma.Gate(**case.gate), norm_factor=None)
    step = server.step(model(case), [(client.update, client.weight, client.name) for client in clients])
    if step.error is not None:
        raise step.error
    counted = {"clients": step.statistics["gma-clients"], "refused": step.refused}
    return None, fedgma.ServerRound(step.params, {}, counted)


WAYS = {
    "tally": by_tally, "list": by_list, "stack": by_stack, "add_many": by_add_many, "merge": by_merge,
    "bytes": by_bytes, "server_round": by_server_round, "server": by_server,
}  # fmt: skip
ROUNDLESS = ("list", "stack", "add_many", "server_round", "server")  # their updates have no round of their own


def suitable(case, way):
    """The clients of a case that can take a way: a stack has one schema; merged tallies share no client."""
    clients = [client._replace(round=5) for client in case.clients] if way in ROUNDLESS else list(case.clients)
    if way in ("stack", "add_many"):
        return [client for client in clients if client.fault is None and has_types(case, client)]
    if way in ("merge", "bytes"):
        counted, seen = [], set()
        for client in clients:
            reason, _, _ = judge(case, client, seen)
            wire = way == "merge" or client.name is None or isinstance(client.name, int | np.integer | str)
            if reason is None and wire:
                counted.append(client)
                seen |= set() if client.name is None else {client.name}
        return [client for client in counted if "selected" not in case.gate or client.name is not None]
    return clients


def has_types(case, client):
    """Whether a client sent the model's number types."""

    def kind(array):
        return str(array.dtype).removeprefix("torch.") if hasattr(array, "dtype") else "float64"

    return all(kind(client.update[name]).lstrip(">") == entry.dtype for name, entry in case.entries.items())


# -- the check -------------------------------------------------------------------------------------------------------------


def rules(case):
    tau = case.tau / 20
    odd = np.float32(tau) if case.tau % 2 else tau
    soft = lambda votes, clients: 1 if abs(votes) * 20 >= case.tau * clients else Fraction(abs(votes), clients)  # noqa: E731
    hard = lambda votes, clients: int(abs(votes) * 20 >= case.tau * clients)  # noqa: E731
    reverse = lambda votes, clients: 1 if abs(votes) >= 2 else -1  # noqa: E731
    return [
        (fedgma.masked_mean(odd), exact_mean, soft),
        (fedgma.mean(), exact_mean, None),
        (fedgma.and_mask(tau), exact_mean, hard),
        (fedgma.rlr(2), exact_mean, reverse),
        (fedgma.median(), partial(exact_trimmed, share=0.5), None),
        (fedgma.trimmed_mean(0.2), partial(exact_trimmed, share=0.2), None),
    ]


def exact_trimmed(column, weights, share):
    cut = min(int(share * len(column)), (len(column) - 1) // 2)
    kept = sorted(map(Fraction, column))[cut : len(column) - cut]
    return sum(kept) / len(kept)


def snapshot(update):
    """The bits of an update, to see that it did not change."""
    if not isinstance(update, dict):
        return repr(update)
    return {name: frozen(array) for name, array in update.items()}


def frozen(array):
    if isinstance(array, torch.Tensor):
        if array.layout != torch.strided or array.is_meta:
            return repr(array.shape)
        return (
            array.dtype,
            array.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if array.numel() else b"",
        )
    return (array.dtype, array.tobytes()) if isinstance(array, np.ndarray) else repr(array)


def run_case(seed):
    """Draw and check one case through one way; returns what went wrong, or None."""
    rng = np.random.default_rng(seed)
    case = make_case(rng)
    way = list(WAYS)[rng.integers(len(WAYS))]
    clients = suitable(case, way)
    if not clients:  # a stack needs one
        way, clients = "tally", case.clients
    choices = [
        choice for choice in rules(case) if choice[0].streams or way in ("list", "stack", "server_round", "server")
    ]
    rule, mean, mask = choices[rng.integers(len(choices))]
    expected = expect(case, clients)
    before = [snapshot(client.update) for client in clients]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        problem = compare(case, clients, way, rule, mean, mask, expected)
    if problem is None and before != [snapshot(client.update) for client in clients]:
        problem = "an input changed"
    return None if problem is None else f"seed {seed}, {way}, {rule.name}: {problem}"


def compare(case, clients, way, rule, mean, mask, expected):
    try:
        votes, result = WAYS[way](case, clients, rule)
    except fedgma.NotEnoughClients:
        return "no clients" if expected.counted else None
    except fedgma.Diverged:
        return None if may_overflow(case, expected) else "diverged"
    except fedgma.DataError as error:
        return None if way == "bytes" and may_overflow(case, expected) else f"DataError: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not expected.counted:
        return "nobody should have been counted"
    refused = [(refusal.client, refusal.reason) for refusal in result.notes["refused"]]
    if [str(one) for one in refused] != [str(one) for one in expected.refused]:
        return f"refused {refused}, expected {expected.refused}"
    if result.notes["clients"] != len(expected.counted):
        return f"{result.notes['clients']} clients, expected {len(expected.counted)}"
    if isinstance(result, fedgma.ServerRound):
        return check_model(case, result.params, mean, mask, expected)
    return check_votes(case, votes, expected) or check_aggregate(case, result, mean, mask, expected)


def numbers(array):
    array = array.detach().double().numpy() if isinstance(array, torch.Tensor) and array.is_floating_point() else array
    return np.asarray(array).reshape(-1).tolist()


def check_votes(case, votes, expected):
    for name, entry in case.entries.items() if votes is not None else ():
        if entry.kind == "masked":
            wanted = [sum(map(sign, column)) for column in columns(expected, name)]
            if numbers(votes[name]) != wanted:
                return f"votes of {name}: {numbers(votes[name])}, expected {wanted}"
    return None


def check_aggregate(case, merged, mean, mask, expected):
    weights, clients = [weight for _, weight in expected.counted], len(expected.counted)
    for name, entry in case.entries.items():
        found = merged.mean[name] if entry.kind == "masked" else merged.buffers[name]
        kind = str(found.dtype).removeprefix("torch.")
        if kind != ("int64" if entry.kind == "maximum" else entry.dtype) or tuple(found.shape) != entry.shape:
            return f"{name} is {kind}{tuple(found.shape)}"
        if isinstance(found, torch.Tensor) != (case.library == "torch"):
            return f"{name} is of the wrong library"
        for position, column in enumerate(columns(expected, name)):
            formula = mean if entry.kind == "masked" else exact_mean
            if problem := check_number(numbers(found)[position], column, weights, entry, formula):
                return f"{name}[{position}]: {problem}"
        if entry.kind == "masked" and (merged.mask is None) != (mask is None):
            return "mask"
        if entry.kind == "masked" and mask is not None:
            single = np.float64 if entry.dtype == "float64" else np.float32
            wanted = [mask(sum(map(sign, column)), clients) for column in columns(expected, name)]
            exact = [float(single(value.numerator) / single(value.denominator)) for value in map(Fraction, wanted)]
            if numbers(merged.mask[name]) != exact:
                return f"mask of {name}: {numbers(merged.mask[name])}, expected {exact}"
    return None


def check_number(found, column, weights, entry, formula, factor=1):
    if entry.kind == "maximum":
        return None if found == max(column) else f"{found}, expected {max(column)}"
    exact = formula(column, weights) * factor
    if not math.isfinite(found):
        return f"{found} is not finite"
    steps = 1 if factor == 1 else 2  # the product with the mask is rounded once more
    if abs(Fraction(found) - exact) > steps * slack(column, weights, entry.dtype, exact):
        return f"{found!r}, expected {float(exact)!r}"
    return None


def check_model(case, params, mean, mask, expected):
    weights, clients = [weight for _, weight in expected.counted], len(expected.counted)
    for name, entry in case.entries.items():
        kind = str(params[name].dtype).removeprefix("torch.")
        if kind != entry.dtype or tuple(params[name].shape) != entry.shape:
            return f"{name} became {kind}{tuple(params[name].shape)}"
        for position, column in enumerate(columns(expected, name)):
            factor = mask(sum(map(sign, column)), clients) if mask is not None and entry.kind == "masked" else 1
            formula = mean if entry.kind == "masked" else exact_mean
            if problem := check_number(numbers(params[name])[position], column, weights, entry, formula, factor):
                return f"{name}[{position}]: {problem}"
    return None
