"""Rounds of `update_cases` through every way into an aggregation, compared with exact fractions.

`expect` works out, client by client and in plain Python, who is refused and for what; `WAYS` aggregates the round
through the library; `compare` checks refusals, votes, masks and counters exactly, and means to the last digit of their
number type. Nothing but the library's own errors may be raised, and no input may change. `tests/faults` runs some
thousands of cases, `benchmarks/faults/updates.py` a million.
"""

import math
import sys
import warnings
from collections import namedtuple
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import fedgma
from fedgma.aggregation.server import MaskedServer
from oracle import sign, weighted_mean
from update_cases import BAD_WEIGHTS, SMALLEST, UNHASHABLE, make_case, rounded

DIGITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
Expected = namedtuple("Expected", "refused counted")  # [(label, reason)], [(values, weight)]


# -- what must come out ------------------------------------------------------------------------------------------------


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
    for limit, kind in (("max_norm", "masked"), ("max_buffer_norm", "averaged")):
        arrays = [values[name] for name, entry in case.entries.items() if entry.kind == kind]
        if limit in case.gate and too_long(arrays, case.gate[limit]):
            return "norm", None, None
    return None, values, Fraction(float(client.weight))


def too_long(arrays, limit):
    squares = sum((Fraction(float(value)) ** 2 for array in arrays for value in array.reshape(-1)), Fraction(0))
    return squares > Fraction(limit) ** 2


def columns(expected, name):
    """The counted clients' values of each entry of one array."""
    return zip(*(values[name].reshape(-1).tolist() for values, _ in expected.counted), strict=True)


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


# -- the ways in -------------------------------------------------------------------------------------------------------


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


# -- the check ---------------------------------------------------------------------------------------------------------


def rules(case):
    tau = case.tau / 20
    odd = np.float32(tau) if case.tau % 2 else tau
    soft = lambda votes, clients: 1 if abs(votes) * 20 >= case.tau * clients else Fraction(abs(votes), clients)  # noqa: E731
    hard = lambda votes, clients: int(abs(votes) * 20 >= case.tau * clients)  # noqa: E731
    reverse = lambda votes, clients: 1 if abs(votes) >= 2 else -1  # noqa: E731
    return [
        (fedgma.masked_mean(odd), weighted_mean, soft),
        (fedgma.mean(), weighted_mean, None),
        (fedgma.and_mask(tau), weighted_mean, hard),
        (fedgma.rlr(2), weighted_mean, reverse),
        (fedgma.median(), partial(exact_trimmed, share=0.5), None),
        (fedgma.trimmed_mean(0.2), partial(exact_trimmed, share=0.2), None),
    ]


def exact_trimmed(column, weights, share):
    kept = trimmed(column, share)
    return sum(kept) / len(kept)


def trimmed(column, share):
    cut = min(int(share * len(column)), (len(column) - 1) // 2)
    return sorted(map(Fraction, column))[cut : len(column) - cut]


def rounding(column, formula):
    """What a plain sum in float64 may lose; weighted means lose nothing."""
    if formula is weighted_mean:
        return 0
    kept = trimmed(column, formula.keywords["share"])
    return Fraction(len(kept), 2**52) * max(map(abs, kept))


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
        actual = merged.mean[name] if entry.kind == "masked" else merged.buffers[name]
        kind = str(actual.dtype).removeprefix("torch.")
        if kind != ("int64" if entry.kind == "maximum" else entry.dtype) or tuple(actual.shape) != entry.shape:
            return f"{name} is {kind}{tuple(actual.shape)}"
        if isinstance(actual, torch.Tensor) != (case.library == "torch"):
            return f"{name} is of the wrong library"
        for position, column in enumerate(columns(expected, name)):
            formula = mean if entry.kind == "masked" else weighted_mean
            if problem := check_number(numbers(actual)[position], column, weights, entry, formula):
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
    if abs(Fraction(found) - exact) > steps * slack(column, weights, entry.dtype, exact) + rounding(column, formula):
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
            formula = mean if entry.kind == "masked" else weighted_mean
            if problem := check_number(numbers(params[name])[position], column, weights, entry, formula, factor):
                return f"{name}[{position}]: {problem}"
    return None
