"""The quadratic on which masks of a known density are tried."""

import numpy as np
import pytest

from fedgma.paper.analyses.quadratic import (
    Problem,
    bernoulli,
    expected_norms,
    exponent,
    make_problem,
    noisy,
    rounds_to,
    simulate,
    slowdown,
    voted,
)


def test_random_masks_do_on_average_what_the_closed_form_says():
    problem = make_problem(entries=20)
    norms, density = simulate(problem, bernoulli(0.3), 0.1, 25, seeds=400)
    np.testing.assert_allclose(norms.mean(0), expected_norms(problem, 0.3, 0.1, 25), rtol=0.05)
    assert density.mean() == pytest.approx(0.3, abs=0.01)


def test_a_full_mask_is_plain_averaging():
    problem = make_problem(entries=5)
    norms, density = simulate(problem, bernoulli(1.0), 0.1, 10)
    np.testing.assert_allclose(norms[0], expected_norms(problem, 1.0, 0.1, 10))
    assert (density == 1).all()


def test_local_steps_in_closed_form_are_the_steps_taken_one_by_one():
    problem = make_problem(entries=3, clients=2)
    local = np.tile(problem.start, (2, 1))
    for _ in range(5):
        local = local - 0.2 * problem.curvature * (local - problem.centres)
    gradient = problem.curvature * (local.mean(0) - problem.centres.mean(0))
    assert simulate(problem, bernoulli(1.0), 0.2, 1)[0][0, 1] == pytest.approx(np.square(gradient).sum())


def test_rounds_grow_with_the_square_of_one_over_alpha_at_the_papers_rate():
    alphas = (1.0, 0.5, 0.25)
    rows = slowdown(make_problem(entries=30), alphas, seeds=8)
    powers = {}
    for rule in {row["rate"] for row in rows}:
        own = [row for row in rows if row["rate"] == rule]
        powers[rule] = exponent(alphas, [row["rounds"] for row in own])
        for row in own:
            assert row["rounds"] == pytest.approx(row["closed_form"], rel=0.2)
    assert powers["alpha / (K L)"] == pytest.approx(2, abs=0.2)
    assert powers["1 / (K L)"] == pytest.approx(1, abs=0.2)


def test_with_noise_the_mean_norm_stays_under_a_constant_times_the_papers_rate():
    rows = noisy(make_problem(entries=30), (1.0, 0.5, 0.25), (64, 256), seeds=4)
    ratios = [row["ratio"] for row in rows]
    assert max(ratios) < 2 * min(ratios)


def test_an_entry_on_which_clients_are_evenly_split_stays_though_the_mean_lies_elsewhere():
    problem = Problem(np.ones(1), np.array([[-1.0], [5.0]]), np.zeros(1))  # the mean of the centres is 2
    norms, density = simulate(problem, voted(0.4), 0.1, 50)
    assert norms[0].tolist() == [4.0] * 51
    assert density[0, 0] == 0
    assert rounds_to(norms, 1.0)[0] == -1


def test_clients_that_agree_are_not_slowed_down():
    problem = make_problem(entries=10, spread=0.0)
    plain, masked = (simulate(problem, mask, 0.1, 20)[0] for mask in (bernoulli(1.0), voted(0.4)))
    np.testing.assert_array_equal(plain, masked)
