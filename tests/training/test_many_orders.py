"""Batches of many clients at once are those that numpy draws for one after the other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgma.seeds import seed, seeds
from fedgma.training import many_orders
from fedgma.training.batches import batch_order, stack_orders
from fedgma.training.many_orders import batch_orders, permutations


def test_this_numpy_draws_as_expected():
    assert many_orders.agrees_with_numpy()


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(1, 70)), min_size=1, max_size=5), st.integers(1, 3))
def test_permutations_are_those_of_numpy(clients, times):
    roots, sizes = zip(*clients, strict=True)
    shuffled = permutations(np.array(roots, np.uint64), np.array(sizes), times)
    for client, (root, size) in enumerate(clients):
        source = np.random.default_rng(root)
        for time in range(times):
            expected = source.permutation(np.arange(size))
            np.testing.assert_array_equal(shuffled[time][:size, client], expected)


@pytest.mark.parametrize("steps", [None, 1, 5])
@pytest.mark.parametrize(("epochs", "batch", "least"), [(1, 4, 1), (2, 4, 2), (3, 3, 1), (1, 20, 1)])
def test_batches_are_those_of_single_clients(epochs, batch, least, steps):
    rng = np.random.default_rng(0)
    samples = [rng.permutation(1000)[: 1 + number % 9] for number in range(600)]
    samples = [own for own in samples if len(own) >= least]
    lengths = {"epochs": epochs, "batch": batch, "least": least, "steps": steps}
    one = [batch_order(own, seed=3, round=7, client=c, **lengths) for c, own in enumerate(samples)]
    keys = seeds(3, "batches", 7, last=range(len(samples))).astype(np.uint64)
    orders, counts = batch_orders(samples, keys, **lengths)
    expected, expected_counts = stack_orders(one, batch)
    np.testing.assert_array_equal(counts, expected_counts)
    np.testing.assert_array_equal(orders, expected)
    assert orders.dtype == expected.dtype


@pytest.mark.parametrize("clients", [3, 40])
def test_few_clients_with_many_samples_draw_in_turn(clients):
    samples = [np.random.default_rng(number).permutation(900)[: 50 + number] for number in range(clients)]
    lengths = {"epochs": 2, "batch": 8}
    keys = seeds(1, "batches", 2, last=range(clients)).astype(np.uint64)
    one = [batch_order(own, seed=1, round=2, client=c, **lengths) for c, own in enumerate(samples)]
    for actual, expected in zip(batch_orders(samples, keys, **lengths), stack_orders(one, 8), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_another_numpy_is_not_imitated(monkeypatch):
    monkeypatch.setattr(many_orders, "agrees_with_numpy", lambda: False)
    assert batch_orders([np.arange(50)] * 10, np.arange(10, dtype=np.uint64), epochs=1, batch=5) is None


def test_many_seeds_are_the_single_ones():
    assert seeds(2**70, "a", 1, last=[0, 5, 12]).tolist() == [seed(2**70, "a", 1, client) for client in (0, 5, 12)]
