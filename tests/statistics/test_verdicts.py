import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedgma.errors import ConfigError
from fedgma.statistics.verdicts import holm, p_value, paired, seeds_needed, sign_test

points = st.floats(-50, 50).map(lambda value: round(value, 3))
several = st.lists(points, min_size=2, max_size=12).filter(lambda values: np.std(values) > 1e-3)
shares = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@given(several)
def test_the_interval_and_p_are_those_of_scipys_paired_t_test(differences):
    test = stats.ttest_rel(differences, np.zeros(len(differences)))
    interval = test.confidence_interval(0.95)
    verdict = paired(differences)
    np.testing.assert_allclose([verdict.low, verdict.high], interval, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(p_value(differences), test.pvalue, rtol=1e-7, atol=1e-12)


@given(several)
def test_an_arm_is_called_ahead_exactly_where_p_is_below_five_percent(differences):
    verdict = paired(differences, ("one", "other"))
    assert verdict.significant == (p_value(differences) < 0.05)
    assert verdict.text.startswith(("one ahead", "other ahead")) == verdict.significant


@given(several)
def test_swapping_the_arms_swaps_the_verdict(differences):
    verdict, swapped = paired(differences, ("a", "b")), paired([-d for d in differences], ("b", "a"))
    assert (swapped.mean, swapped.low, swapped.high) == (-verdict.mean, -verdict.high, -verdict.low)
    turned = {"first ahead": "second ahead", "second ahead": "first ahead"}
    assert swapped.outcome == turned.get(verdict.outcome, verdict.outcome)
    assert swapped.seeds_needed == verdict.seeds_needed
    if verdict.significant:
        assert swapped.text == verdict.text


@given(several)
def test_an_inconclusive_verdict_asks_for_more_seeds_than_there_are(differences):
    verdict = paired(differences)
    if verdict.outcome == "inconclusive":
        assert (verdict.seeds_needed or 101) > verdict.of
        assert verdict.text.endswith(verdict.advice)


@given(several)
def test_the_seeds_needed_are_the_least_whose_test_has_a_power_of_eighty_percent(differences):
    effect = abs(np.mean(differences)) / np.std(differences, ddof=1)
    needed = seeds_needed(differences)
    if effect < 5:  # beyond, two or three are enough, and scipy's series does not converge everywhere
        assert power(effect, needed or 100) >= 0.8 - 1e-9 or needed is None
        assert needed == 2 or power(effect, (needed or 101) - 1) < 0.8


def power(effect, seeds):
    critical = stats.t.isf(0.025, seeds - 1)
    return stats.nct.sf(critical, seeds - 1, effect * np.sqrt(seeds))


@pytest.mark.parametrize(("effect", "seeds"), [(0.3, 90), (0.5, 34), (0.8, 15), (1.0, 10), (2.0, 5)])
def test_the_seeds_needed_are_those_of_printed_tables_of_power(effect, seeds):
    assert seeds_needed([effect - 1 / np.sqrt(2), effect + 1 / np.sqrt(2)]) == seeds


def test_more_than_a_hundred_seeds_are_not_counted():
    verdict = paired([0.1, -0.1, 0.001])
    assert verdict.seeds_needed is None
    assert verdict.text.endswith("more than 100 seeds would be needed to resolve a difference of this size")


@given(shares)
def test_holm_is_what_its_definition_says(p_values):
    expected = [
        max(min(1.0, (len(p_values) - rank) * q) for rank, q in enumerate(sorted(p_values)) if q <= p) for p in p_values
    ]
    assert holm(p_values) == pytest.approx(expected)


@given(shares)
def test_holm_never_lowers_a_p_value_and_keeps_their_order(p_values):
    corrected = holm(p_values)
    assert all(after >= before for before, after in zip(p_values, corrected, strict=True))
    order = np.argsort(p_values, kind="stable")
    assert np.all(np.diff(np.array(corrected)[order]) >= 0)


@given(st.integers(0, 40), st.integers(0, 40))
def test_the_sign_test_is_scipys_binomial_test(ahead, behind):
    expected = stats.binomtest(ahead, ahead + behind).pvalue if ahead + behind else 1.0
    assert sign_test(ahead, behind) == pytest.approx(expected)


def test_one_seed_has_a_difference_but_no_interval():
    verdict = paired([-0.5], ("GMA", "mean"))
    assert (verdict.low, verdict.high) == (-math.inf, math.inf)
    assert (verdict.outcome, verdict.interval) == ("one seed", None)
    assert verdict.text == "one seed: GMA behind by 0.50 points, no interval; at least two seeds are needed"
    with pytest.raises(ConfigError, match="two differences or more"):
        seeds_needed([-0.5])


def test_equal_runs_are_called_equal():
    assert paired([0.0, 0.0, 0.0]).outcome == "equal"
    assert paired([0.0, 0.0, 0.0]).text == "GMA and the mean are equal in 3 of 3 seeds"
    assert p_value([0.0, 0.0, 0.0]) == 1.0


@pytest.mark.parametrize("differences", [[], [math.nan], [1.0, math.inf]])
def test_what_is_no_number_is_refused(differences):
    with pytest.raises(ConfigError, match="finite difference"):
        paired(differences)
