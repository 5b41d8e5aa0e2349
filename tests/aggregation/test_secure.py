"""Secure sums: votes come through exactly, the mean within its bound, and a total that is none is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedgma
from fedgma.aggregation.secure import Encoding, decode, encode, signed
from strategies import rows, same_bits, stacks

MODEL = {"w": np.zeros(2, np.float32), "bn.running_var": np.zeros(2, np.float32), "steps": np.array(3)}
encodings = st.builds(Encoding, clip=st.sampled_from([0.01, 1.0, 3.7, 200.0]), bits=st.sampled_from([11, 16, 22, 30]))


def first(updates):
    return rows(updates)[0]


@given(stacks(), encodings)
def test_the_mask_is_the_one_without_secure_aggregation_bit_for_bit(stack, encoding):
    updates, weights = stack
    total = sum(encode(update, weight, encoding) for update, weight in zip(rows(updates), weights, strict=True))
    tally, _, _ = decode(total, first(updates), encoding)
    expected = fedgma.masked_mean(0.4)(updates, weights)
    assert tally.clients == len(weights)
    assert tally.weight == sum(weights)
    assert same_bits(fedgma.finish(tally, 0.4).mask, expected.mask)


@given(stacks(), encodings)
def test_the_mean_is_within_its_bound(stack, encoding):
    updates, weights = stack
    cut = {name: np.clip(entry.astype(float), -encoding.clip, encoding.clip) for name, entry in updates.items()}
    total = sum(encode(update, weight, encoding) for update, weight in zip(rows(updates), weights, strict=True))
    decoded = decode(total, first(updates), encoding)
    for name, mean in fedgma.finish(decoded.tally).mean.items():
        exact = np.tensordot(np.array(weights, float), cut[name], 1) / sum(weights)
        rounding = np.spacing(np.abs(mean)).astype(float) + 1e-12 * encoding.clip  # the answer's own number type
        assert (np.abs(mean.astype(float) - exact) <= decoded.error + rounding).all()
    beyond = [
        any((row.astype(float) != cut[name][k]).any() for name, row in update.items())
        for k, update in enumerate(rows(updates))
    ]
    assert decoded.cut == sum(beyond)


@given(stacks(), st.integers(0, 2**32))
def test_masks_that_cancel_leave_the_sum_modulo_two_to_the_32(stack, seed):
    updates, weights = stack
    encoding, modulus = Encoding(), 2**32
    vectors = [encode(update, weight, encoding) for update, weight in zip(rows(updates), weights, strict=True)]
    masks = np.random.default_rng(seed).integers(0, modulus, (len(vectors), len(vectors[0])))
    masks[-1] = -masks[:-1].sum(0)
    hidden = [(vector + mask) % modulus for vector, mask in zip(vectors, masks, strict=True)]
    np.testing.assert_array_equal(signed(sum(hidden) % modulus), sum(vectors))


@given(stacks(), encodings)
def test_stochastic_rounding_changes_nothing(stack, encoding):
    updates, weights = stack
    sent = encode(first(updates), weights[0], encoding) / encoding.half
    levels = (np.clip(sent, -1.0, 1.0) + 1.0) * (2**encoding.bits / 2.0)  # as Flower's does it
    np.testing.assert_array_equal(levels, np.rint(levels))
    assert levels.min() >= 0
    assert levels.max() <= 2**encoding.bits


@given(st.integers(1, 1023), st.integers(-(2**21), 2**21))
def test_dividing_by_the_number_of_clients_and_rounding_finds_the_integer(clients, level):
    half = 2**21
    mean = (clients * level / half) * (2**22 / (clients * 2**22))  # what SecAgg+ hands to the strategy
    assert np.rint(mean * (float(clients) * half)) == clients * level


def test_buffers_are_summed_without_votes_and_counters_are_not_sent():
    update = {
        "w": np.array([0.5, -0.5], np.float32),
        "bn.running_var": np.ones(2, np.float32) / 4,
        "steps": np.array(1),
    }
    total = encode(update, 10, Encoding(), like=MODEL) + encode(update, 30, Encoding(), like=MODEL)
    assert len(total) == 3 + 2 + 2 + 2
    merged = fedgma.finish(decode(total, MODEL, Encoding()).tally)
    assert merged.mask["w"].tolist() == [1, 1]
    assert merged.update["bn.running_var"].tolist() == [0.25, 0.25]
    assert "steps" not in merged.update


def test_secure_tallies_of_two_groups_merge():
    first, second = ({"w": np.array([sign * 0.5], np.float32)} for sign in (1, -1))
    tallies = [decode(encode(update, 8, Encoding()), first, Encoding()).tally for update in (first, second)]
    tallies[0].merge(tallies[1])
    assert fedgma.finish(tallies[0]).mask["w"].tolist() == [0]
    tallies[0].add(first, 8)
    assert tallies[0].votes["w"].tolist() == [1]


@pytest.mark.parametrize(
    ("update", "weight", "reason"),
    [
        ({**MODEL, "w": np.array([np.nan, 0], np.float32)}, 10, "nonfinite"),
        ({**MODEL, "w": np.zeros(3, np.float32)}, 10, "shape"),
        ({"w": MODEL["w"]}, 10, "schema"),
        (MODEL, 0, "empty"),
        (MODEL, 5000, "weight"),
        (MODEL, 2.5, "whole numbers"),
    ],
)
def test_a_bad_update_is_refused_by_encode(update, weight, reason):
    with pytest.raises(fedgma.DataError, match=reason):
        encode(update, weight, Encoding(), like=MODEL)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda total: total[:-1],
        lambda total: total * 1.0,
        lambda total: total * 0,
        lambda total: np.where(np.arange(len(total)) == 2, 10**7, total),
        lambda total: np.where(np.arange(len(total)) == 3, 2**30, total),
        lambda total: np.where(np.arange(len(total)) == len(total) - 1, 3, total),
    ],
)
def test_a_total_that_no_clients_could_give_is_refused(spoil):
    total = sum(encode({"w": np.ones(2)}, 10, Encoding()) for _ in range(2))
    with pytest.raises(fedgma.DataError):
        decode(spoil(total), {"w": np.ones(2)}, Encoding())
    with pytest.raises(fedgma.DataError, match="like: an update must be a mapping"):
        decode(total, [], Encoding())


@pytest.mark.parametrize("wrong", [{"bits": 1}, {"bits": 31}, {"clip": 0.0}, {"max_weight": 0}, {"max_weight": 2**22}])
def test_an_invalid_encoding_is_refused(wrong):
    with pytest.raises(fedgma.ConfigError):
        Encoding(**wrong)
