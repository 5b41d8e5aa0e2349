import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedgma.errors import ConfigError
from fedgma.statistics.metrics import LARGEST, Metric
from fedgma.statistics.verdicts import (
    as_object,
    correct,
    from_interval,
    holm,
    p_value,
    p_within,
    paired,
)

points = st.floats(-50, 50).map(lambda value: round(value, 3))


def spread_out(values):
    return np.std(values) > 1e-3


several = st.lists(points, min_size=2, max_size=12).filter(spread_out)
enough = st.lists(points, min_size=4, max_size=12).filter(spread_out)
shares = st.lists(st.floats(0, 1), min_size=1, max_size=12)
AHEAD = [1.0, 1.2, 1.6, 1.0]  # p = 0.0034
BARELY = [0.1, 0.9, 0.3, 0.7]  # p = 0.068
SURE_ALONE = [0.5, 1.5, 0.7, 1.6]  # p = 0.031


@given(several)
def test_the_interval_and_p_are_those_of_scipys_paired_t_test(differences):
    test = stats.ttest_rel(differences, np.zeros(len(differences)))
    verdict = paired(differences)
    np.testing.assert_allclose(verdict.interval, test.confidence_interval(0.95), rtol=1e-9, atol=1e-9)
    assert verdict.interval == (verdict.low, verdict.high)
    np.testing.assert_allclose(p_value(differences), test.pvalue, rtol=1e-7, atol=1e-12)
    assert verdict.p == verdict.corrected == p_value(differences)
    assert verdict.deviation == pytest.approx(np.std(differences, ddof=1))


@given(enough)
def test_an_arm_is_called_ahead_exactly_where_p_is_below_five_percent(differences):
    verdict = paired(differences, ("one", "other"))
    assert verdict.significant == (p_value(differences) < 0.05)
    assert verdict.text.startswith(("one ahead", "other ahead")) == verdict.significant
    assert verdict.outcome in ("first ahead", "second ahead", "inconclusive")


@given(st.lists(points, min_size=1, max_size=3))
def test_fewer_than_four_seeds_are_preliminary_whatever_they_say(differences):
    for values in (differences, [5.0] * len(differences), [0.0] * len(differences)):
        verdict = paired(values)
        assert verdict.outcome == "preliminary"
        assert not verdict.significant
        assert verdict.text.startswith("preliminary: GMA ")
        assert "a verdict needs at least 4 seeds" in verdict.text
        assert correct([verdict, paired(AHEAD)])[0] == verdict


def test_four_seeds_are_enough_for_a_verdict():
    assert paired([5.0, 5.1, 5.2]).outcome == "preliminary"
    assert paired([5.0, 5.1, 5.2, 5.0]).outcome == "first ahead"


@given(several)
def test_swapping_the_arms_swaps_the_verdict(differences):
    verdict, swapped = paired(differences, ("a", "b")), paired([-d for d in differences], ("b", "a"))
    assert (swapped.mean, swapped.low, swapped.high) == (-verdict.mean, -verdict.high, -verdict.low)
    turned = {"first ahead": "second ahead", "second ahead": "first ahead"}
    assert swapped.outcome == turned.get(verdict.outcome, verdict.outcome)
    assert swapped.seeds_needed == verdict.seeds_needed
    assert (swapped.ahead, swapped.behind) == (verdict.behind, verdict.ahead)
    if verdict.significant:
        assert swapped.text == verdict.text


@given(st.lists(enough, min_size=1, max_size=6))
def test_an_inconclusive_verdict_asks_for_more_seeds_than_there_are(rows):
    for verdict in correct([paired(row) for row in rows]):
        if verdict.outcome == "inconclusive":
            assert (verdict.seeds_needed or 101) > verdict.of
            assert verdict.text.endswith(f"; {verdict.advice}")
        elif verdict.significant:
            assert verdict.advice == ""


@given(several)
def test_the_seeds_needed_are_the_least_whose_test_has_a_power_of_eighty_percent(differences):
    effect = abs(np.mean(differences)) / np.std(differences, ddof=1)
    needed = paired(differences).seeds_needed
    if len(differences) < 4:
        assert needed is None
    elif effect < 5:  # beyond, four are enough, and scipy's series does not converge everywhere
        assert needed is None or power(effect, needed) >= 0.8 - 1e-9
        assert needed == 4 or power(effect, (needed or 101) - 1) < 0.8


def power(effect, seeds):
    critical = stats.t.isf(0.025, seeds - 1)
    return stats.nct.sf(critical, seeds - 1, effect * np.sqrt(seeds))


@pytest.mark.parametrize(("effect", "seeds"), [(0.3, 90), (0.5, 34), (0.8, 15), (1.0, 10), (2.0, 5), (9.0, 4)])
def test_the_seeds_needed_are_those_of_printed_tables_of_power(effect, seeds):
    off = np.sqrt(3) / 2
    assert paired([effect - off, effect + off] * 2).seeds_needed == seeds


def test_more_than_a_hundred_seeds_are_not_counted():
    verdict = paired([0.1, -0.1, 0.001, 0.02])
    assert verdict.seeds_needed is None
    assert verdict.text.endswith("; more than 100 seeds would resolve a difference of this size")


def test_the_sentences_of_every_outcome():
    texts = {paired(values).outcome: paired(values).text for values in ([0.0] * 4, AHEAD, BARELY, [0.8], [1.0, 3.0])}
    assert texts == {
        "equal": "GMA and the mean are equal in 4 of 4 seeds",
        "first ahead": "GMA ahead by 1.20 points, 95 % CI 0.75 to 1.65, in 4 of 4 seeds",
        "inconclusive": "inconclusive: GMA ahead by 0.50 points, 95 % CI -0.08 to 1.08, 4 seeds; "
        "about 7 seeds would resolve a difference of this size",
        "preliminary": "preliminary: GMA ahead by 2.00 points, 95 % CI -10.71 to 14.71, 2 seeds; "
        "a verdict needs at least 4 seeds",
    }
    assert paired([-value for value in AHEAD]).text == (
        "the mean ahead by 1.20 points, 95 % CI 0.75 to 1.65, in 4 of 4 seeds"
    )
    assert paired([-0.1, -0.9, -0.3, -0.7]).text.startswith("inconclusive: GMA behind by 0.50 points, 95 % CI -1.08")
    assert paired([0.8]).text == (
        "preliminary: GMA ahead by 0.80 points, one seed, no interval; a verdict needs at least 4 seeds"
    )


def test_the_seeds_in_which_an_arm_is_ahead_are_counted():
    verdict = paired([3.0, 3.1, 3.2, 3.0, -0.1, 0.0])
    assert (verdict.ahead, verdict.behind, verdict.of) == (4, 1, 6)
    assert verdict.text.endswith("in 4 of 6 seeds")
    assert paired([-3.0, -3.1, -3.2, -3.0, 0.1]).text.endswith("in 4 of 5 seeds")


def test_words_follow_the_corrected_value():
    alone = paired(SURE_ALONE)
    assert (alone.outcome, alone.correction) == ("first ahead", "p = 0.031")
    corrected = correct([alone, paired(AHEAD), paired(BARELY)])
    assert [verdict.outcome for verdict in corrected] == ["inconclusive", "first ahead", "inconclusive"]
    assert corrected[0].p == alone.p
    assert corrected[0].corrected == pytest.approx(2 * alone.p)
    assert corrected[0].correction == "p = 0.031, 0.061 corrected for 3 tests"
    assert corrected[0].text == (
        "inconclusive: GMA ahead by 1.07 points, 95 % CI 0.19 to 1.96, 4 seeds, p = 0.031, "
        "0.061 corrected for 3 tests; "
        "about 6 seeds would resolve a difference of this size"
    )
    assert corrected[1].text.endswith("in 4 of 4 seeds, p = 0.0034, 0.01 corrected for 3 tests")
    turned = correct([paired([-value for value in values]) for values in (AHEAD, AHEAD)])
    assert turned[0].text.endswith("in 4 of 4 seeds, p = 0.0034, 0.0069 corrected for 2 tests")
    assert turned[0].outcome == "second ahead"
    assert correct([paired([5.0, 5.01, 5.02, 5.01])] * 2)[0].correction == "p < 0.0001, < 0.0001 corrected for 2 tests"


@given(st.lists(several, min_size=1, max_size=6))
def test_verdicts_are_corrected_by_holm_over_those_with_enough_seeds(rows):
    verdicts = [paired(row) for row in rows]
    corrected = correct(verdicts)
    tested = [verdict for verdict in corrected if verdict.of >= 4]
    assert [verdict.corrected for verdict in tested] == holm([v.p for v in verdicts if v.of >= 4])
    assert all(verdict.tests == len(tested) for verdict in tested)
    assert [v.of for v in corrected] == [v.of for v in verdicts]
    untested = [(before, after) for before, after in zip(verdicts, corrected, strict=True) if before.of < 4]
    assert all(before == after for before, after in untested)


def test_a_corrected_verdict_needs_more_seeds_for_its_stricter_level():
    alone = paired(BARELY)
    assert alone.seeds_needed == 7
    assert [correct([alone] * tests)[0].seeds_needed for tests in (2, 10, 49)] == [8, 12, 15]


def test_an_equal_verdict_needs_no_correction_and_no_advice():
    verdict = correct([paired([0.0] * 4), paired(AHEAD)])[0]
    assert (verdict.outcome, verdict.advice, verdict.corrected) == ("equal", "", 1.0)
    assert paired([1.0, -1.0, 1.0, -1.0]).text.startswith("inconclusive: GMA equal to the mean on average, 95 % CI")


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


@given(several)
def test_an_interval_gives_its_verdict_back(differences):
    verdict = paired(differences)
    again = from_interval(verdict.mean, verdict.interval, verdict.of)
    assert again.p == again.corrected == pytest.approx(verdict.p, rel=1e-6, abs=1e-12)
    assert again.deviation == pytest.approx(verdict.deviation)
    assert (again.outcome, again.of, again.mean) == (verdict.outcome, verdict.of, verdict.mean)
    for single in (from_interval(0.5, None, 4), from_interval(0.5, (0.1, 0.9), 1)):
        assert single[1:9] == (*paired([0.5])[1:3], 0, 0, 1, 1.0, 1.0, 1)


@given(enough, st.sampled_from([0.5, 1.0, 10.0]))
def test_near_and_far_go_by_where_the_interval_lies(differences, margin):
    verdict = paired(differences)
    inside, outside = p_within(verdict, margin)
    assert (inside < 0.05) == (-margin < verdict.low and verdict.high < margin)
    assert (outside < 0.05) == (verdict.low > margin or verdict.high < -margin)
    assert max(inside, outside) == 1.0


def test_one_pair_is_neither_near_nor_far():
    assert p_within(paired([0.1]), 1.0) == (1.0, 1.0)
    assert p_within(paired([0.1, 0.1]), 1.0) == p_within(paired([3.0, 3.0]), 1.0) == (1.0, 1.0)


def test_one_seed_has_a_difference_but_no_interval():
    verdict = paired([-0.5], ("GMA", "mean"))
    assert (verdict.low, verdict.high) == (-math.inf, math.inf)
    assert (verdict.interval, verdict.seeds_needed, verdict.p, verdict.correction) == (None, None, 1.0, "")
    assert verdict.advice == "a verdict needs at least 4 seeds"
    assert verdict.text.startswith("preliminary: GMA behind by 0.50 points, one seed")


def test_equal_runs_have_no_p_value_below_one():
    assert p_value([0.0, 0.0, 0.0]) == p_value([1.0, -1.0]) == p_value([3.0]) == 1.0
    assert p_value([2.0, 2.0]) == 1.0


@pytest.mark.parametrize("size", [-1.0, 0.1 + 0.2, 7e3])
def test_the_same_difference_in_every_seed_shows_no_arm_ahead(size):
    verdict = paired([size, size, size * (1 + 1e-15), size])
    assert (verdict.outcome, verdict.p, verdict.seeds_needed) == ("inconclusive", 1.0, None)
    assert " in each of 4 seeds; the same difference in every seed cannot be tested: look whether" in verdict.text
    assert from_interval(size, (size, size), 4).outcome == "inconclusive"
    assert paired([size, size, size * 1.01, size]).p < 0.05


def test_fewer_seeds_than_a_verdict_needs_are_no_estimate_of_how_many_are_enough():
    for values in ([2.0, 2.1], [0.3, -0.2, 0.9]):
        assert paired(values).seeds_needed is None
        assert paired(values).text.endswith("seeds; a verdict needs at least 4 seeds")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([0.1, -LARGEST, 0.2, 0.1], "inconclusive: GMA has runs without a finite score, 4 seeds"),
        ([LARGEST, -LARGEST, 0.2, 0.1], "inconclusive: each arm has runs without a finite score, 4 seeds"),
        ([LARGEST], "preliminary: the mean has runs without a finite score, 1 seed; a verdict needs at least 4 seeds"),
        ([-LARGEST, -LARGEST, -LARGEST, -LARGEST / 2], "GMA behind: it has runs without a finite score"),
    ],
)
def test_a_run_without_a_finite_score_is_said_and_not_its_stand_in(values, said):
    verdict = paired(values, score=Metric("mse", "lower", ""))
    assert verdict.text == said
    made = as_object(verdict)
    assert [made[name] for name in ("mean", "deviation", "low", "high")] == [None] * 4


def test_a_verdict_as_an_object_is_plain_json():
    for values, tests in itertools.product(([0.5], AHEAD), (1, 2)):
        verdict = correct([paired(values)] * tests)[0]
        read = json.loads(json.dumps(as_object(verdict), allow_nan=False))
        assert (read["outcome"], read["text"], read["of"]) == (verdict.outcome, verdict.text, verdict.of)
        assert read["seeds_needed"] == verdict.seeds_needed
        between = [None, None, None] if len(values) == 1 else [verdict.low, verdict.high, verdict.deviation]
        assert [read["low"], read["high"], read["deviation"]] == between


@pytest.mark.parametrize("differences", [[], [math.nan], [1.0, math.inf]])
def test_what_is_no_number_is_refused(differences):
    for function in (paired, p_value):
        with pytest.raises(ConfigError, match="expected one finite difference or more"):
            function(differences)


def test_a_corrected_p_of_exactly_five_percent_is_not_enough():
    assert paired(AHEAD)._replace(corrected=0.05).outcome == "inconclusive"


def test_two_seeds_have_a_deviation_and_one_has_none():
    assert as_object(paired([1.0, 2.0]))["deviation"] == pytest.approx(np.sqrt(0.5))
    assert as_object(paired([1.0]))["deviation"] is None


def test_a_mean_that_rounds_to_zero_is_no_zero():
    assert paired([0.001, -0.002, -0.001, 0.0]).text.startswith(
        "inconclusive: GMA behind by less than 0.01 points, 95 %"
    )
    assert paired([0.001, 0.0011, 0.001, 0.0012]).text.startswith("GMA ahead by less than 0.01 points, 95 % CI 0.00 to")
    assert "equal to the mean on average" in paired([0.001, -0.001, 0.002, -0.002]).text
