"""What is promised of a mask, and what really happens."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

from fedgma.aggregation.masks import votes_needed
from fedgma.paper.analyses.bounds import (
    chance_stability,
    corrected_bound,
    corrected_condition,
    monte_carlo,
    pass_probability,
    printed_condition,
    stability,
)
from fedgma.paper.analyses.repeats import describe, gather

MEANS = st.lists(st.floats(-4, 4).filter(lambda mean: abs(mean) > 0.01), min_size=1, max_size=12)


def test_the_exact_probability_is_that_of_all_outcomes_counted():
    means, tau = np.array([0.3, -0.2, 1.0, 0.5]), 0.5
    up = ndtr(means)
    total = 0.0
    for signs in itertools.product([1, -1], repeat=4):
        chance = np.prod([p if sign > 0 else 1 - p for p, sign in zip(up, signs, strict=True)])
        total += chance * (abs(sum(signs)) >= votes_needed(tau, 4))
    assert pass_probability(means, 1.0, tau) == pytest.approx(total)


def test_drawn_probabilities_are_the_exact_ones():
    means = np.array([0.5] * 7 + [-0.5] * 3)
    assert monte_carlo(means, 1.0, 0.4, draws=40_000) == pytest.approx(pass_probability(means, 1.0, 0.4), abs=0.01)


@given(MEANS, st.sampled_from([0.1, 0.5, 1.0, 3.0]), st.sampled_from([0.0, 0.2, 0.4, 0.6, 1.0]))
def test_the_corrected_bound_is_never_above_the_probability(means, sigma, tau):
    means = np.array(means)
    bound = float(corrected_bound(means, sigma, tau))
    assert np.isnan(bound) == (not corrected_condition(means, tau))
    if not np.isnan(bound):
        assert bound <= pass_probability(means, sigma, tau) + 1e-12


def test_the_printed_condition_holds_and_the_mask_is_almost_never_1():
    means = np.array([4.0] * 6 + [-4.0] * 4)  # 60 % positive exceeds tau = 0.4, but the agreement is 0.2
    assert printed_condition(means, 0.4)
    assert not corrected_condition(means, 0.4)
    assert pass_probability(means, 1.0, 0.4) < 1e-3


def test_many_entries_at_once_are_each_entry_alone():
    means = np.random.default_rng(0).standard_normal((10, 5))
    alone = [float(pass_probability(column, 1.0, 0.4)) for column in means.T]
    np.testing.assert_allclose(pass_probability(means, 1.0, 0.4), alone)


def test_a_mask_that_never_changes_is_wholly_stable():
    assert stability(np.tile([10, -4, 0, 2], (5, 1)), 10, 0.4).tolist() == [1, 1, 1, 1]


def test_fair_coins_are_as_stable_as_fair_coins():
    rng = np.random.default_rng(0)
    votes = 2 * rng.binomial(10, 0.5, (30, 20_000)) - 10
    assert stability(votes, 10, 0.4).mean() == pytest.approx(chance_stability(10, 0.4, 30), abs=0.005)


class Rows:
    """Updates as a trainer gives them, one repeat at a time."""

    def __init__(self, means, repeats):
        self.means, self.repeats = means, repeats

    def __iter__(self):
        import torch

        rng = np.random.default_rng(1)
        for _ in range(self.repeats):
            yield torch.from_numpy(self.means + rng.standard_normal(self.means.shape))


def test_repeats_of_gaussian_updates_say_what_theory_says():
    means = np.repeat([[3.0]] * 8 + [[-3.0]] * 2, 2000, axis=1)
    means[:, 1000:] = np.array([[3.0]] * 6 + [[-3.0]] * 4)  # the printed condition alone
    seen = gather(Rows(means, 40))
    found = describe(seen, 0.4)
    assert found["corrected_condition"] == pytest.approx(50)
    assert found["printed_condition"] == pytest.approx(100)
    assert found["mask_is_1_where_corrected"] == pytest.approx(
        100 * float(pass_probability(means[:, 0], 1.0, 0.4)), abs=1
    )
    assert found["mask_is_1_where_printed_alone"] < 2
    assert found["gaussian_model"] == pytest.approx(found["mask_is_1"], abs=1)
    np.testing.assert_allclose(seen.deviations.mean(), 1.0, atol=0.02)
