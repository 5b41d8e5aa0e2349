"""Errors that are out in the world under the name of GMA; each has a test that ours does not make it."""

import numpy as np
import pytest
import torch

import fedgma

AGREEMENT = [1.0, 0.8, 0.6, 0.4, 0.2, 0.0]
PAPER = [1.0, 1.0, 1.0, 0.4, 0.2, 0.0]


def updates_with(agreement, clients=10):
    """Ten clients whose signs agree by the given share, per entry."""
    ones = [round(clients * (1 + score) / 2) for score in agreement]
    return {"w": np.array([[1.0 if client < count else -1.0 for count in ones] for client in range(clients)])}


def test_the_mask_is_not_amplified_and_not_hard_as_in_the_feddg_benchmark():
    # there A = [1, .8, .6, .4, .2, 0] and tau = .5 give [2, 1.8, 1.6, 0, 0, 0]
    merged = fedgma.masked_mean(0.5)(updates_with(AGREEMENT))
    np.testing.assert_array_equal(merged.mask["w"], PAPER)


def test_the_threshold_is_reached_at_equality():
    # a strict comparison scales an entry whose agreement is exactly tau
    merged = fedgma.masked_mean(0.6)(updates_with([0.6]))
    np.testing.assert_array_equal(merged.mask["w"], [1.0])


def test_the_sample_counts_do_not_weigh_the_votes():
    heavy = fedgma.masked_mean(1.0)(updates_with([0.2]), [1000] + [1] * 9)
    np.testing.assert_array_equal(heavy.mask["w"], [0.2])


def test_a_zero_is_no_vote_but_stays_in_the_count():
    merged = fedgma.masked_mean(1.0)({"w": np.array([[1.0], [1.0], [0.0], [-0.0]])})
    np.testing.assert_array_equal(merged.mask["w"], [0.5])


def test_sums_of_shares_in_float32_do_not_decide_the_threshold():
    # eight of ten agree: A = 0.6 exactly, which ten times 1/10 in float32 misses
    for clients, tau in ((10, 0.2), (10, 0.6), (20, 0.7), (100, 0.4)):
        merged = fedgma.masked_mean(tau)({k: v.astype(np.float32) for k, v in updates_with([tau], clients).items()})
        assert merged.mask["w"][0] == 1, (clients, tau)


def test_buffers_and_counters_are_not_masked():
    model = torch.nn.BatchNorm1d(2)
    clients = []
    for mean, batches in ((1.0, 3), (-1.0, 8)):
        state = {name: value.clone() for name, value in model.state_dict().items()}
        state["running_mean"] += mean * torch.tensor([1.0, 3.0])
        state["num_batches_tracked"] += batches
        clients.append(state)
    after = fedgma.server_round(model.state_dict(), clients, [30, 10]).params
    assert after["running_mean"].tolist() == [0.5, 1.5]  # the weighted mean, though the signs are opposed
    assert after["num_batches_tracked"].item() == 8
    assert after["num_batches_tracked"].dtype == torch.int64


def test_the_mask_comes_after_the_preconditioner():
    merged = fedgma.masked_mean(1.0)(updates_with([0.4]))
    params = {"w": np.zeros(1)}
    steps = {}
    for position in ("after", "before"):
        server = fedgma.adam(1.0, mask_position=position)
        steps[position] = server.step(merged, server.init(params), params)[0]["w"][0]
    mean, mask = merged.mean["w"][0], 0.4
    after = mask * (0.1 * mean) / (np.sqrt(0.99e-6 + 0.01 * mean**2) + 1e-3)
    before = 0.1 * mask * mean / (np.sqrt(0.99e-6 + 0.01 * (mask * mean) ** 2) + 1e-3)
    assert steps["after"] == pytest.approx(after, rel=1e-12)
    assert steps["before"] == pytest.approx(before, rel=1e-12)
    assert abs(after - before) > 0.1 * abs(after)
