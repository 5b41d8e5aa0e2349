"""`agreement >= tau` is decided on integers: for all N <= 100 exactly, and up to a million."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedgma
import oracle
from fedgma.aggregation.masks import hard_mask, soft_mask, vote_type, votes_needed


def test_votes_needed_is_exact_for_up_to_100_clients():
    for clients in range(1, 101):
        votes = np.arange(-clients, clients + 1)
        narrow = votes.astype(vote_type(clients))
        for step in range(21):
            tau, exact = step / 20, Fraction(step, 20)
            passed = np.array([Fraction(abs(int(vote)), clients) >= exact for vote in votes])
            expected = np.where(passed, 1.0, np.abs(votes) / clients)
            assert np.array_equal(soft_mask(tau)(narrow, clients, "float64"), expected), (clients, tau)
            assert np.array_equal(hard_mask(tau)(narrow, clients, "float64"), passed.astype(float)), (clients, tau)


@pytest.mark.parametrize("clients", [1, 2, 3, 7, 10, 20, 99, 100])
def test_updates_themselves_give_the_oracles_mask(clients):
    # entry k: k clients push up, the others down or (in the second half) abstain
    ups = np.arange(clients + 1)
    pushes = np.arange(clients)[:, None] < ups
    updates = np.concatenate([np.where(pushes, 1.0, -1.0), np.where(pushes, 1.0, 0.0)], axis=1)
    columns = [[int(value) for value in updates[:, j]] for j in range(updates.shape[1])]
    for step in range(21):
        exact = [float(oracle.soft_mask(column, Fraction(step, 20))) for column in columns]
        got = fedgma.masked_mean(step / 20)({"w": updates.astype(np.float32)}).mask["w"]
        assert np.array_equal(got, np.array(exact, np.float32)), (clients, step)


@given(st.integers(1, 1_000_000), st.integers(0, 1000))
def test_the_decision_is_exact_up_to_a_million_clients(clients, thousandths):
    exact = Fraction(thousandths, 1000) * clients
    assert votes_needed(thousandths / 1000, clients) == -(-exact.numerator // exact.denominator)


@pytest.mark.parametrize("clients", [999_999, 1_000_000])
@pytest.mark.parametrize("tau", [0.35, 0.4, 0.55, 2 / 3, 1.0])
def test_a_million_votes_are_decided_alike_by_numpy_and_torch(clients, tau):
    least = votes_needed(tau, clients)
    votes = np.array([least - 1, least, -least, -least + 1, 0, clients], np.int32)
    ours, theirs = (
        soft_mask(tau)(votes, clients, "float32"),
        soft_mask(tau)(torch.from_numpy(votes), clients, "float32"),
    )
    assert np.array_equal(ours, theirs.numpy())
    assert ours.tolist()[1:3] == [1.0, 1.0]
    assert ours[0] == np.float32(least - 1) / np.float32(clients)


@pytest.mark.parametrize("tau", [-0.1, 1.1, float("nan"), float("inf"), "0.4", None, True])
@pytest.mark.parametrize("make", [row.make for row in fedgma.RULES.values() if row.settings[:1] == ("tau",)])
def test_an_invalid_tau_is_refused(make, tau):
    with pytest.raises(fedgma.ConfigError, match="tau must be a number from 0 to 1"):
        make(tau)


@pytest.mark.parametrize(("clients", "kind"), [(126, "int8"), (127, "int16"), (32766, "int16"), (32767, "int32")])
def test_votes_take_the_smallest_type_that_cannot_overflow(clients, kind):
    assert vote_type(clients) == kind


def test_votes_widen_while_clients_stream_in():
    tally = fedgma.Tally()
    for _ in range(300):
        tally.add({"w": np.array([1.0, -1.0, 0.0])})
    assert tally.votes["w"].dtype == np.int16
    assert tally.votes["w"].tolist() == [300, -300, 0]
