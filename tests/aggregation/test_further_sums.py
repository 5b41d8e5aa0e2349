"""The sums that a tally keeps on demand: against exact fractions, in any order, streamed, merged and through bytes."""

import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedgma
from fedgma.aggregation.kernels.plain import FURTHER, PAIRS, Sums
from fedgma.aggregation.secure import Encoding, decode, encode
from strategies import rows, stacks

ALL = tuple(FURTHER)


def tallied(updates, weights, order=None, further=ALL):
    tally = fedgma.Tally(further=further)
    clients = rows(updates)
    for client in range(len(weights)) if order is None else order:
        assert tally.add(clients[client], weights[client]) is None
    return tally


def exact(column, weights):
    """Literal sums of one entry over clients, in fractions."""
    pairs = [(Fraction(float(value)), Fraction(weight)) for value, weight in zip(column, weights, strict=True)]
    return {
        "positive": sum(weight * value for value, weight in pairs if value > 0),
        "positives": sum(value > 0 for value, _ in pairs),
        "positive_weight": sum(weight for value, weight in pairs if value > 0),
        "negative_weight": sum(weight for value, weight in pairs if value < 0),
        "squares": sum(weight * value * value for value, weight in pairs),
    }


def values(sums):
    """The sums without how a pair divides its digits."""
    kept = [pair for pair in PAIRS if getattr(sums, pair[0]) is not None]
    pairs = {total: getattr(sums, total) + getattr(sums, rest) for total, rest in kept}
    others = ("votes", "positives", "positive_weight", "negative_weight")
    return pairs | {part: getattr(sums, part) for part in others if getattr(sums, part) is not None}


def same_sums(one, other):
    assert one.sums.keys() == other.sums.keys()
    for name in one.sums:
        mine, theirs = values(one.sums[name]), values(other.sums[name])
        assert mine.keys() == theirs.keys()
        for part in mine:
            np.testing.assert_array_equal(mine[part], theirs[part])


@settings(max_examples=40)
@given(stacks(dtypes=("float32", "float64")))
def test_they_are_those_of_the_literal_oracle(stack):
    updates, weights = stack
    sums = tallied(updates, weights).sums
    for name, entry in updates.items():
        flat, actual = entry.reshape(len(weights), -1), sums[name]
        for place in range(flat.shape[1]):
            expected = exact(flat[:, place], weights)
            for part in ("positives", "positive_weight", "negative_weight"):
                assert getattr(actual, part)[place] == expected[part]
            rounding = 0 if entry.dtype == np.float32 else 1e-15
            positive = Fraction(float(actual.positive[place])) + Fraction(float(actual.positive_rest[place]))
            assert abs(positive - expected["positive"]) <= rounding * expected["positive"]
            squares = Fraction(float(actual.squares[place])) + Fraction(float(actual.squares_rest[place]))
            assert abs(squares - expected["squares"]) <= 2.0**-51 * expected["squares"]


@settings(max_examples=40)
@given(stacks(dtypes=("float32",)), st.randoms(use_true_random=False))
def test_order_stacks_merges_bytes_and_torch_make_no_difference(stack, random):
    updates, weights = stack
    order = list(range(len(weights)))
    random.shuffle(order)
    whole = tallied(updates, weights)
    cut = random.randint(0, len(order))
    first, second = tallied(updates, weights, order[:cut]), tallied(updates, weights, order[cut:])
    first.merge(fedgma.from_bytes(fedgma.to_bytes(second)))
    stacked, tensors = fedgma.Tally(further=ALL), fedgma.Tally(further=ALL)
    stacked.add_many(updates, weights)
    tensors.add_many({name: torch.from_numpy(np.array(entry)) for name, entry in updates.items()}, weights)
    for other in (first, stacked, tensors):
        if other.clients == len(weights):
            same_sums(whole, other)


def test_a_tally_without_them_keeps_and_writes_what_it_did():
    tally = tallied({"w": np.ones((3, 2))}, [1, 2, 3], further=())
    assert tally.sums["w"][3:] == (None,) * len(Sums._fields[3:])
    assert fedgma.to_bytes(tally).startswith(b"fedgma tally 2\n")
    assert json.loads(fedgma.pack(tally)["header"].tobytes())["version"] == 2


def test_bytes_name_the_further_sums_and_buffers_have_none():
    tally = fedgma.Tally(further=["squares", "counts"], buffers=["s"])
    tally.add({"w": np.array([1.0, -2.0]), "s": np.ones(2)}, 3)
    packed = fedgma.pack(tally)
    assert fedgma.to_bytes(tally).startswith(b"fedgma tally 3\n")
    assert set(packed) == {
        *("header", "total.0", "rest.0", "votes.0", "positives.0", "squares.0", "squares_rest.0", "total.1", "rest.1")
    }
    again = fedgma.unpack(packed)
    assert again.further == ("counts", "squares")
    assert again.sums["w"].squares.tolist() == [3.0, 12.0]


DAMAGES = {
    "positives.0": (np.array([2], np.int8), "positive values of more clients than there are"),
    "positive_weight.0": (np.array([9.0]), "more weight than its clients have"),
    "positive.0": (np.array([-1.0]), "a negative sum of positive terms"),
    "squares.0": (np.array([0.01]), "squares that do not fit its sum"),
    "squares_rest.0": (np.array([np.nan]), "NaN or an infinity"),
}


@pytest.mark.parametrize("part", DAMAGES)
def test_sums_that_no_clients_can_have_are_refused(part):
    packed = fedgma.pack(tallied({"w": np.array([[2.0], [-1.0]])}, [1, 3]))
    damaged, sentence = DAMAGES[part]
    with pytest.raises(fedgma.DataError, match=sentence):
        fedgma.unpack({**packed, part: damaged})
    with pytest.raises(fedgma.DataError, match="positive parts that do not fit its sum"):
        fedgma.unpack({**packed, "total.0": np.array([2.5]), "votes.0": np.array([0], np.int8)})


def test_tallies_of_different_sums_are_not_merged():
    updates = {"w": np.ones((1, 1))}
    one, other = tallied(updates, [1]), tallied(updates, [1], further=("parts",))
    with pytest.raises(fedgma.DataError, match="the same further sums, got parts, counts, weights, squares and parts"):
        one.merge(other)
    fresh = fedgma.Tally()
    fresh.merge(other)
    assert fresh.further == ("parts",)
    with pytest.raises(fedgma.ConfigError, match="must be some of parts, counts, weights, squares, got 'parts'"):
        fedgma.Tally(further="parts")


def test_a_secure_sum_carries_all_but_squares():
    encoding, sent = Encoding(clip=1.0, max_weight=8, bits=20), ("parts", "counts", "weights")
    updates, weights = {"w": np.array([[0.5, -0.25, 0.0], [0.125, 0.5, -1.0]], np.float32)}, [2, 5]
    total = sum(encode(row, weight, encoding, further=sent) for row, weight in zip(rows(updates), weights, strict=True))
    tally = decode(total, rows(updates)[0], encoding, further=sent).tally
    wanted = tallied(updates, weights, further=sent)
    same_sums(tally, wanted)  # these updates are whole levels
    with pytest.raises(fedgma.DataError, match="must have 18 entries, got 21"):
        decode(total, rows(updates)[0], encoding, further=("parts", "weights"))
    with pytest.raises(fedgma.DataError, match="not a sum of encoded updates"):
        decode(np.where(np.arange(len(total)) == 9, -1, total), rows(updates)[0], encoding, further=sent)
    with pytest.raises(fedgma.ConfigError, match="does not carry squares"):
        encode(rows(updates)[0], 1, encoding, further=("squares",))
