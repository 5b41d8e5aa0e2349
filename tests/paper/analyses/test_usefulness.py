"""Why a sign mask helps or costs: standard errors by enumeration, outvoted holders, class-balanced draws."""

import itertools

import numpy as np
import pytest

from fedgma.errors import DataError
from fedgma.paper.analyses.balanced import balanced_draw, find_balanced
from fedgma.paper.analyses.usefulness import Population, find, holder_rows, noise_row, steps_of, usefulness_rows
from fedgma.paper.findings import ClaimVerdict


def every_draw(population):
    return [np.array(draw) for draw in itertools.combinations(range(len(population.updates)), population.sampled)]


@pytest.fixture
def population():
    updates = np.random.default_rng(3).normal([[2.0, 0.1, 0.0] * 4], 1.0, (7, 12))
    updates[:, 2] = 0.0  # nobody moves it
    return Population(updates, sampled=3)


def test_the_standard_error_is_that_of_all_draws(population):
    means = np.array([population.updates[draw].mean(0) for draw in every_draw(population)])
    np.testing.assert_allclose(population.error, means.std(0), rtol=1e-12)
    assert population.signal_to_noise[2] == 0
    assert population.signal_to_noise[0] > population.signal_to_noise[1]


def test_over_all_draws_the_mean_keeps_all_and_its_error_is_the_noise(population):
    steps = steps_of(population, every_draw(population))
    np.testing.assert_allclose(steps.step["mean"], population.target, atol=1e-12)
    np.testing.assert_allclose(steps.squared["mean"], population.error**2, atol=1e-12)
    row = noise_row(population, steps)
    assert row["kept_mean"] == pytest.approx(1)
    assert row["kept_gma"] < 1
    assert row["error_best_factor"] < 1
    shares = [one["share_%"] for one in usefulness_rows(population, steps) if one["share_%"] > 1e-9]
    assert sum(shares) == pytest.approx(100)


def test_few_holders_are_outvoted_where_heads_count_and_not_where_sizes_count():
    """Two of five sampled clients want 9, the others -1: agreement by heads is 0.2, by size 0.71."""
    updates = np.array([[9.0], [9.0], [-1.0], [-1.0], [-1.0]])
    holds = np.array([[True], [True], [False], [False], [False]])
    (row,) = holder_rows(Population(updates, 5), [np.arange(5)], [np.array([0])], holds)
    assert row["holders"] == 2
    assert row["mean"] == row["magnitude"] == pytest.approx(3 / 9)
    assert row["gma"] == pytest.approx(0.2 * 3 / 9)


def test_a_balanced_draw_has_every_class_equally_often():
    holds = np.zeros((20, 10), bool)
    for client in range(20):
        holds[client, [client % 10, (client + 1 + client // 10) % 10]] = True
    for seed in range(5):
        drawn = balanced_draw(holds, 5, np.random.default_rng(seed))
        assert len(set(drawn.tolist())) == 5
        assert (holds[drawn].sum(0) == 1).all()
    with pytest.raises(DataError, match="equally often"):
        balanced_draw(np.array([[True, False]] * 3), 2, np.random.default_rng(0))


def test_findings_say_which_rule_is_further_from_the_full_update_and_what_balance_saves():
    errors = {"error_gma": 1.2, "error_magnitude": 1.01, "error_best_factor": 0.7}
    noise = [{"seed": seed, "after": 5, "layer": "all", **errors, "error_gma": 1.2 + seed / 100} for seed in range(4)]
    steps = {"mean": 0.1, "gma": 0.02, "magnitude": 0.1}
    rows = [
        {
            "seed": seed,
            "after": 5,
            "sampling": kind,
            "holders": 2,
            "cases": 3 + seed,
            **steps,
            "gma": 0.02 + seed / 1000,
        }
        for seed in range(4)
        for kind in ("uniform", "balanced")
    ]
    found = {one.id: one for one in find({"noise": noise, "holders": rows})}
    assert found["noise/gma"].estimate == pytest.approx(0.215)
    assert found["drift/uniform/gma"].estimate == pytest.approx(0.0785)
    assert found["drift/uniform/gma"].verdict is ClaimVerdict.HOLDS
    level = {("uniform", "mean"): 80, ("uniform", "gma"): 75, ("balanced", "mean"): 82, ("balanced", "gma"): 81}
    trained = [
        {"sampling": kind, "arm": arm, "seed": seed, "last10_%": value + (seed % 2) * (arm == "gma") / 10}
        for (kind, arm), value in level.items()
        for seed in range(4)
    ]
    saved = find_balanced(trained)[-1]
    assert (saved.id, saved.estimate) == ("trained/saved", pytest.approx(4))
