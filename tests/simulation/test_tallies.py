"""The batched tally against one client after the other, counted by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedgma
from fedgma.aggregation import kernels
from fedgma.aggregation.masks import votes_needed
from fedgma.aggregation.optimizers import server_optimizer
from fedgma.simulation.batched import optimizers, rules, tallies
from fedgma.simulation.server_part import numbers
from fedgma.training.lane_batch import Trained
from fedgma.training.tasks import CLASSIFICATION

CPU = torch.device("cpu")


def merged(updates, weights, run, runs, *, rule=None, chunk=None):
    sums, kept = tallies.empty(updates.new_zeros(runs, updates.shape[1]), {}), {}
    shapes = [("w", torch.Size([updates.shape[1]]))]
    laid = rules.lay_out([rule or fedgma.masked_mean(0.4)] * runs, len(run), shapes, CPU)
    for part in np.array_split(np.arange(len(run)), chunk or 1):
        rows = torch.from_numpy(part)
        trained = Trained(updates[rows], shapes, {}, torch.zeros(len(part)), torch.zeros(len(part), 1))
        rules.add(laid, sums, kept, run[part], weights[part], trained)
    return rules.merge(laid, sums, kept, {}), sums


def test_lanes_are_counted_where_only_the_device_knows_their_runs():
    weights, nowhere = np.ones(3), np.empty(0, np.int64)
    owners = tallies.owners_of(np.zeros(3, int), weights, 1, CPU)
    sums = tallies.empty(torch.zeros(1, 2), {})
    counted = tallies.add(sums, nowhere, weights, torch.ones(3, 2), {}, torch.ones(3, 2), owners=owners)
    assert counted.tolist() == [True] * 3
    assert sums.clients.item() == 3


def test_a_split_vote_scales_the_entry_down():
    updates = torch.tensor([[3.0, 3.0], [3.0, 3.0], [3.0, -3.0]])
    found, _ = merged(updates, np.ones(3), np.zeros(3, int), 1, rule=fedgma.masked_mean(0.5))
    np.testing.assert_allclose(found.mean * found.mask, [[3.0, 1 / 3]])  # mean 1, agreement 1/3


def test_weights_change_the_mean_and_not_the_votes():
    updates = torch.tensor([[1.0], [-1.0]])
    found, sums = merged(updates, np.array([3, 1]), np.zeros(2, int), 1)
    assert found.mean.item() == 0.5
    assert sums.votes.item() == 0


def test_a_zero_is_no_vote_but_stays_in_the_count():
    found, sums = merged(torch.tensor([[1.0], [0.0], [-0.0]]), np.ones(3), np.zeros(3, int), 1)
    assert sums.clients.item() == 3
    assert found.mask.item() == pytest.approx(1 / 3)


def test_a_lane_that_is_not_finite_is_left_out_of_mean_and_count():
    updates = torch.tensor([[1.0, 1.0], [float("nan"), 1.0], [3.0, float("inf")], [3.0, 3.0]])
    found, sums = merged(updates, np.array([1, 5, 5, 1]), np.zeros(4, int), 1)
    assert found.mean.tolist() == [[2.0, 2.0]]
    assert sums.clients.item() == 2


def test_the_hard_mask_is_zero_where_too_few_agree():
    found, _ = merged(
        torch.tensor([[3.0, 3.0], [3.0, -3.0]]), np.ones(2), np.zeros(2, int), 1, rule=fedgma.and_mask(0.4)
    )
    assert found.mask.tolist() == [[1.0, 0.0]]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12).map(sorted), st.integers(1, 5), st.integers(0, 2**31))
def test_batched_chunked_sums_are_those_of_one_client_after_the_other(run, pieces, seed):
    rng = np.random.default_rng(seed)
    run, weights = np.array(run), rng.integers(1, 50, len(run))
    updates = rng.choice([-1.5, -0.1, 0.0, 0.3, 7.0], (len(run), 3)).astype(np.float32)
    found, sums = merged(torch.from_numpy(updates), weights, run, 6, chunk=pieces)
    for row in range(6):
        total, votes = np.zeros(3), np.zeros(3, int)
        for lane in np.flatnonzero(run == row):
            total += updates[lane].astype(np.float64) * weights[lane]
            votes += np.sign(updates[lane]).astype(int)
        np.testing.assert_array_equal(sums.total[row] + sums.rest[row], total)
        np.testing.assert_array_equal(sums.votes[row], votes)
        assert bool(found.alive[row]) == bool((run == row).any())


@pytest.mark.parametrize(("clients", "tau", "needed"), [(10, 0.2, 2), (100, 0.4, 40), (20, 0.7, 14), (10, 0.3, 3)])
def test_a_tie_with_the_threshold_passes(clients, tau, needed):
    assert votes_needed(tau, clients) == needed


@pytest.mark.parametrize("large", [kernels.LARGE, 1])  # plain and, where numba is there, compiled loops
def test_a_fleet_tallies_to_the_bits_of_a_tally(monkeypatch, large):
    monkeypatch.setattr(kernels, "LARGE", large)
    rng = np.random.default_rng(0)
    updates = torch.from_numpy(rng.standard_normal((12, 50)).astype(np.float32))
    updates[5, 2] = float("nan")
    weights = rng.integers(1, 900, 12)
    found, _ = merged(updates, weights, np.repeat(np.arange(3), 4), 3, chunk=2)
    for run in range(3):
        lanes = slice(4 * run, 4 * run + 4)
        alone = fedgma.masked_mean(0.4)({"w": updates[lanes]}, weights[lanes])
        assert torch.equal(found.mean[run], alone.mean["w"])
        assert torch.equal(found.mask[run], alone.mask["w"])


def test_servers_follow_the_formulas_and_the_mask_comes_after_the_moments():
    kinds = ["sgd", "momentum", "adagrad", "adam", "yogi", "adam"]
    laid = [server_optimizer(kind, 0.1, "after") for kind in kinds[:5]] + [server_optimizer("adam", 0.1, "before")]
    table = optimizers.lay_out(laid, [("w", torch.Size([1]))], CPU)
    params = torch.zeros(6, 1)
    moments = optimizers.init_moments(table, params)
    delta, mask, v0 = 0.5, 0.4, 1e-6
    actual = tallies.Merged(torch.full((6, 1), delta), torch.full((6, 1), mask), {}, torch.ones(6, dtype=torch.bool))
    new, after = optimizers.step(table, actual, moments, params)
    square = delta**2
    second = {"adagrad": v0 + square, "adam": 0.99 * v0 + 0.01 * square, "yogi": v0 + 0.01 * square}
    for row, kind in enumerate(kinds[:5]):
        if kind in second:
            assert after.v[row].item() == pytest.approx(second[kind], rel=1e-5)
            first = delta if kind == "adagrad" else 0.1 * delta
            expected = first / (second[kind] ** 0.5 + 1e-3)
        else:
            expected = delta
        assert new[row].item() == pytest.approx(0.1 * mask * expected, rel=1e-5)
    assert after.z[5].item() == pytest.approx(0.1 * mask * delta)


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_a_lane_that_is_not_finite_leaves_no_trace_in_any_sum(chunk):
    updates = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    run, weights = np.repeat([0, 1], 4), np.arange(1, 9)
    updates[[1, 6]] = torch.tensor([[float("nan")], [float("inf")]])
    fine = np.array([0, 2, 3, 4, 5, 7])
    found, sums = merged(updates, weights, run, 2, chunk=chunk)
    wanted, counted = merged(updates[torch.from_numpy(fine)], weights[fine], run[fine], 2)
    assert torch.equal(found.mean, wanted.mean)
    for part in ("total", "rest", "votes", "weight", "clients"):
        assert torch.equal(getattr(sums, part), getattr(counted, part))


@pytest.mark.parametrize("clients", [10, 2**30])
def test_agreement_is_the_mean_share_of_votes_for_any_number_of_clients(clients):
    sums = tallies.empty(torch.zeros(2, 3), {})
    sums.votes[:] = torch.tensor([[clients, -clients, clients], [0, clients, -clients // 2]])
    sums.clients[:], sums.weight[:] = clients, clients
    table = numbers(CLASSIFICATION, CLASSIFICATION.columns, sums, tallies.merge(sums, {}))
    assert table[:, -1].tolist() == [1.0, 0.5]
