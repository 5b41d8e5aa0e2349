"""Successive halving: equal budgets, the plain mean stays, and no stage is planned that the time does not allow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgma.experiments.advise.halving import (
    Allowance,
    Stage,
    final_stage,
    first_stage,
    next_stage,
    pace,
    rates_around,
    survivors,
    units,
)

PAIRS = rates_around(0.05, 1.0)
ARMS = ["mean", "a", "b", "c", "d"]
ALL = [(arm, pair) for arm in ARMS for pair in PAIRS]
allowances = st.builds(Allowance, st.floats(0.0, 1e4), st.floats(1e-3, 1.0), st.integers(1, 300))


def takes(stage, allowed):
    return stage.runs * units(stage.rounds, allowed.every) * allowed.unit


@given(st.lists(st.tuples(st.floats(0.0, 9.0), st.integers(1, 9)), min_size=1, max_size=9), st.floats(0.0, 99.0))
def test_the_pace_of_a_stage_adds_up_to_what_it_took(steps, began):
    ticks, now, done = [], began, 0
    for seconds, more in steps:
        now, done = now + seconds, done + more
        ticks.append((now, done))
    found = pace(began, ticks)
    assert found.unit > 0
    assert found.start >= 0
    assert found.start + found.unit * done == pytest.approx(now - began, abs=1e-6)


@given(allowances)
def test_the_first_stage_fits_into_the_time_and_treats_all_arms_alike(allowed):
    stage = first_stage(ARMS, PAIRS, 7, allowed)
    if stage is None:
        assert 6 * units(allowed.least) * allowed.unit > allowed.seconds * (1 - 1e-9)
        return
    assert takes(stage, allowed) <= allowed.seconds * (1 + 1e-9)
    assert stage.arms[0] == "mean"
    pairs = {arm: [pair for name, pair in stage.candidates if name == arm] for arm in stage.arms}
    assert {tuple(own) for own in pairs.values()} == {tuple(PAIRS[: stage.pairs])}


@given(st.lists(st.floats(0, 100), min_size=len(ALL), max_size=len(ALL)), st.integers(2, 5), st.integers(1, 9))
def test_survivors_are_the_best_pairs_of_the_best_arms_and_always_the_mean(values, arms, pairs):
    scores = dict(zip(ALL, values, strict=True))
    kept = survivors(scores, "mean", arms, pairs, PAIRS[0])
    left = {arm: [pair for name, pair in kept if name == arm] for arm, _ in kept}
    assert len(left) == arms
    assert "mean" in left
    assert {len(own) for own in left.values()} == {pairs}
    best = {arm: max(scores[arm, pair] for pair in PAIRS) for arm in ARMS}
    assert min(best[arm] for arm in left if arm != "mean") >= max([0, *(best[arm] for arm in ARMS if arm not in left)])
    for arm, own in left.items():
        assert best[arm] in [scores[arm, pair] for pair in own]
        assert pairs == 1 or PAIRS[0] in own


@given(allowances)
def test_a_later_stage_is_longer_or_has_more_seeds_or_is_left_out(allowed):
    before = Stage(tuple(ALL), (7,), min(20, allowed.most))
    stage = next_stage(before, ALL[:6], (7, 8), allowed)
    if stage is not None:
        assert (stage.rounds, len(stage.seeds)) > (before.rounds, 1)
        assert takes(stage, allowed) <= allowed.seconds * (1 + 1e-9)


def test_a_short_time_leaves_finalists_out_before_rounds():
    ranked, own = [("mean", PAIRS[1]), ("a", PAIRS[0]), ("b", PAIRS[0])], ("mean", PAIRS[0])
    a_run = float(units(100, 10))
    stages = {arms: final_stage(ranked, own, range(4), Allowance(4 * arms * a_run, 1, 100, 10)) for arms in (4, 3, 2)}
    assert stages[4].candidates == (*ranked, own)
    assert stages[3].candidates == (*ranked[:2], own)
    assert stages[2].candidates == tuple(ranked[:2])
    assert {stage.rounds for stage in stages.values()} == {100}
    short = final_stage(ranked, own, range(4), Allowance(4 * a_run, 1, 100, 10))
    assert short.candidates == tuple(ranked[:2])
    assert 12 <= short.rounds < 100
    assert final_stage(ranked, own, range(4), Allowance(40.0, 1, 100, 10)) is None


def test_the_mean_at_its_given_rates_is_not_trained_twice():
    ranked = [("mean", PAIRS[0]), ("a", PAIRS[1])]
    assert final_stage(ranked, ranked[0], range(4), Allowance(1e6, 1, 100)).candidates == tuple(ranked)
