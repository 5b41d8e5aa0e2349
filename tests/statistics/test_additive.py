"""The additive model of differences over choices: exact effects, honest intervals, and what it refuses."""

import itertools

import numpy as np
import pytest

from fedgma.errors import DataError
from fedgma.statistics.additive import fit_additive

ROWS = [{"data": data, "tau": tau, "one": "same"} for data in ("a", "b", "c") for tau in ("0.2", "0.4")] * 4
SHIFTS = {"a": -1.0, "b": 0.0, "c": 1.0, "0.2": 0.25, "0.4": -0.25}


def values(rng=None, scale=0.0):
    noise = np.zeros(len(ROWS)) if rng is None else scale * rng.standard_normal(len(ROWS))
    return [3.0 + SHIFTS[row["data"]] + SHIFTS[row["tau"]] + extra for row, extra in zip(ROWS, noise, strict=True)]


def test_effects_without_noise_are_exact_and_relative_to_the_mean_of_their_choice():
    model = fit_additive(ROWS, values())
    found = {one.level: one for one in model.effects}
    assert {level: round(one.effect, 9) for level, one in found.items()} == SHIFTS
    assert found["a"].settings == 8
    assert found["a"].mean == pytest.approx(2.0)
    assert model.explained == pytest.approx(1.0)
    assert model.freedom == len(ROWS) - 4  # a choice with one level has no effect
    assert [one.choice for one in model.decided] == ["data", "tau"]
    assert [round(one.spread, 9) for one in model.decided] == [2.0, 0.5]


def test_effects_are_those_of_least_squares_also_where_choices_are_not_balanced():
    rng = np.random.default_rng(3)
    rows = [dict(zip("xyz", one, strict=True)) for one in rng.choice(list("abc"), (40, 3))]
    actual = rng.standard_normal(40)
    model = fit_additive(rows, actual)
    columns = [[row[name] == level for row in rows] for name in "xyz" for level in "abc"]
    fitted = np.column_stack(columns).astype(float)
    expected = fitted @ np.linalg.lstsq(fitted, actual, rcond=None)[0]
    shifts = {(one.choice, one.level): one.effect for one in model.effects}
    ours = np.array([sum(shifts[name, row[name]] for name in "xyz") for row in rows])
    np.testing.assert_allclose(ours - ours.mean(), expected - expected.mean(), atol=1e-9)


def test_intervals_hold_the_truth_in_about_95_percent_of_draws_with_unequal_variances():
    rng = np.random.default_rng(0)
    held = []
    for _ in range(150):
        scale = np.array([3.0 if row["data"] == "a" else 0.3 for row in ROWS])
        drawn = np.array(values()) + scale * rng.standard_normal(len(ROWS))
        held += [one.low <= SHIFTS[one.level] <= one.high for one in fit_additive(ROWS, drawn).effects]
    assert 0.92 < np.mean(held) <= 1.0


def test_a_choice_that_decides_nothing_is_rarely_significant():
    rng = np.random.default_rng(1)
    small = [
        min(one.corrected for one in fit_additive(ROWS, rng.standard_normal(len(ROWS))).decided) for _ in range(150)
    ]
    assert np.mean(np.array(small) < 0.05) < 0.1


def test_too_few_settings_and_choices_always_made_together_are_refused():
    with pytest.raises(DataError, match="3 settings cannot tell 4 effects apart"):
        fit_additive([ROWS[0], ROWS[3], ROWS[4]], [1.0, 2.0, 3.0])
    rows = [{"x": level, "y": level} for level, _ in itertools.product("ab", range(5))]
    with pytest.raises(DataError, match="not always made together"):
        fit_additive(rows, list(range(10)))
