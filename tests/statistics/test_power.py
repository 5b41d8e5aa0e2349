import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedgma.errors import ConfigError
from fedgma.statistics.power import detectable, pooled_deviation, power, seeds_for


def simulated(difference, deviation, seeds, tests=1, repeats=40_000):
    rng = np.random.default_rng(7)
    values = rng.normal(difference, deviation, (repeats, seeds))
    t = values.mean(1) / (values.std(1, ddof=1) / math.sqrt(seeds))
    return float((t > stats.t.isf(0.025 / tests, seeds - 1)).mean())


@pytest.mark.parametrize(("difference", "seeds", "tests"), [(1.0, 4, 1), (0.6, 8, 1), (2.0, 6, 10), (0.2, 12, 1)])
def test_power_is_the_share_of_simulated_tests_that_show_the_difference(difference, seeds, tests):
    assert power(difference, 1.0, seeds, tests=tests) == pytest.approx(
        simulated(difference, 1.0, seeds, tests), abs=0.01
    )
    assert power(-3 * difference, 3.0, seeds, tests=tests) == pytest.approx(power(difference, 1.0, seeds, tests=tests))


@settings(max_examples=30)
@given(st.floats(0.2, 3), st.sampled_from([0.8, 0.9]), st.sampled_from([1, 5, 49]))
def test_the_seeds_for_a_difference_are_the_least_that_reach_the_power(difference, least, tests):
    seeds = seeds_for(difference, 1.0, least=least, tests=tests, most=1000)
    assert power(difference, 1.0, seeds, tests=tests) >= least
    assert seeds == 4 or power(difference, 1.0, seeds - 1, tests=tests) < least


@settings(max_examples=30)
@given(st.integers(4, 40), st.floats(0.1, 5), st.sampled_from([0.8, 0.9]), st.sampled_from([1, 49]))
def test_the_difference_that_seeds_can_show_is_the_inverse(seeds, deviation, least, tests):
    difference = detectable(deviation, seeds, least=least, tests=tests)
    assert power(difference, deviation, seeds, tests=tests) == pytest.approx(least, abs=1e-6)
    assert seeds_for(1.001 * difference, deviation, least=least, tests=tests) <= seeds


def test_limits():
    assert power(0.0, 1.0, 10) == power(1.0, 1.0, 1) == 0.0
    assert power(1.0, 0.0, 4) == 1.0
    assert power(1e6, 1.0, 4) == 1.0  # beyond what scipy's series reaches
    assert detectable(0.0, 4) == 0.0
    assert seeds_for(0.0, 1.0) is None
    assert seeds_for(0.28, 1.0) is None  # 103
    assert seeds_for(0.28, 1.0, most=200) == 103
    assert seeds_for(1.0, 0.0) == 4  # fewer give no verdict


def test_deviations_are_pooled_within_settings():
    assert pooled_deviation([(0.0, 2.0, 4.0), (100.0, 102.0)]) == pytest.approx(math.sqrt((8 + 2) / 3))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: power(1.0, -1.0, 4), "standard deviation of 0 or more, got -1.0"),
        (lambda: power(1.0, math.inf, 4), "standard deviation of 0 or more, got inf"),
        (lambda: detectable(1.0, 4, tests=0), "one test or more, got 0"),
        (lambda: detectable(1.0, 3), "at least 4 seeds, got 3"),
        (lambda: pooled_deviation([(1.0,)]), "a setting with two seeds or more"),
    ],
)
def test_what_makes_no_sense_is_refused(call, sentence):
    with pytest.raises(ConfigError, match=sentence):
        call()
