from pathlib import Path

import numpy as np
import pytest

from fedgma.records.format import Done
from fedgma.records.reader import Run
from fedgma.statistics.arms import Summary, summarise
from fedgma.statistics.baseline import against_baseline
from fedgma.statistics.convergence import Convergence, converge, diverged, is_dead, rise
from fedgma.statistics.metrics import LARGEST, Metric


def course(level, *, rising=0.0, rounds=100, every=5):
    """A curve that is flat at `level` percent, but for a straight rise of `rising` points in its second half."""
    evaluated = [r for r in range(1, rounds + 1) if r % every == 0 or r > rounds - 10]
    return {r: (level + rising * max(0.0, 2 * r / rounds - 1)) / 100 for r in evaluated}


def run(*arguments, **options):
    curve = course(*arguments, **options)
    return summarise(curve), curve


@pytest.mark.parametrize("every", [1, 5, 20])
def test_a_straight_line_rises_by_half_of_what_its_second_half_gains(every):
    assert rise(course(50, rising=8, every=every)) == pytest.approx(4.0, abs=0.2)
    assert rise(course(50, every=every)) == pytest.approx(0, abs=1e-9)
    assert rise(course(50, rising=-8, every=every)) == pytest.approx(-4.0, abs=0.2)


def test_too_few_evaluations_cannot_tell():
    assert rise({100: 0.5}) is None
    assert rise({10: 0.1, 100: 0.5}) is None
    assert rise({60: 0.4, 100: 0.5}) is None  # nothing between the two quarters' ends
    assert rise({90: 0.4, 100: 0.5}) is None
    assert rise({60: 0.4, 90: 0.4, 100: 0.4}) == pytest.approx(0)


def test_a_setting_converges_only_if_both_arms_do():
    flat, rising = [run(80), run(81)], [run(80, rising=4), run(81, rising=4)]
    assert converge([flat, flat], 100)[0].converged
    for arms in ([flat, rising], [rising, flat]):
        assert not converge(arms, 100)[0].converged


def test_the_rise_is_the_mean_over_seeds_without_diverged_runs():
    made, lost = converge([[run(80, rising=2), run(82)], [run(80), run(10, rising=9)]], 100)
    assert made.rises == (pytest.approx(0.5, abs=0.01), pytest.approx(0))
    assert (made.diverged, made.of, lost) == ((0, 1), 4, [[False, False], [False, True]])
    assert made.converged


def test_a_point_of_rise_is_the_limit():
    assert Convergence(100, (1.0, 0.0), (0, 0), 8).converged
    assert not Convergence(100, (1.01, 0.0), (0, 0), 8).converged


def test_fewer_rounds_than_forty_are_not_converged_because_the_last_ten_are_more_than_a_quarter():
    assert not Convergence(39, (0.0, 0.0), (0, 0), 8).converged
    assert Convergence(40, (0.0, 0.0), (0, 0), 8).converged


def test_what_is_said():
    assert Convergence(100, (0.2, 0.9), (0, 0), 8).text == ""
    assert Convergence(30, (0.2, 0.9), (0, 0), 8).text == "not converged: 30 rounds, fewer than 40"
    assert Convergence(100, (0.2, 2.94), (1, 2), 8).text == (
        "not converged: still rises by 2.9 points over the last quarter of 100 rounds; 3 of 8 runs diverged"
    )
    assert Convergence(100, (None, 0.1), (0, 0), 8).text.startswith("not known to have converged: too few evaluations")


def test_a_run_diverges_that_falls_below_half_of_its_best_or_of_the_others():
    good = Summary(80, 78, 77)
    assert diverged([good, good, Summary(70, 34.9, 30), Summary(70, 35.1, 30)]) == [False, False, True, False]
    assert diverged([good, good, good, Summary(39, 38.9, 38), Summary(40, 39.1, 38)]) == [False] * 3 + [True, False]
    assert diverged([Summary(10, 10, 10)] * 4) == [False] * 4  # a setting that never learned has nothing to fall from
    assert diverged([]) == []


def test_a_run_that_still_rises_has_not_diverged():
    steep = summarise({r: (10 + 30 * (r / 12) ** 4) / 100 for r in range(1, 13)})
    assert steep.last10 < steep.best / 2
    assert diverged([steep] * 4) == [False] * 4


def test_an_arm_whose_runs_all_diverged_is_not_called_converged():
    made, _ = converge([[run(80)] * 3, [run(10)] * 2], 100)
    assert (made.rises[1], made.diverged, made.converged) == (None, (0, 2), False)


BIAS = Metric("bias", "lower", "")


def noise(seed):
    """An error that falls to about 0.04 and then varies between zero and that, over 50 evaluations."""
    rng = np.random.default_rng(seed)
    return {r: abs(float(0.5 * 0.7**r + 0.04 * rng.normal())) for r in range(1, 51)}


def test_an_error_near_zero_has_not_diverged_though_its_best_is_nearer_by_chance():
    courses = [(summarise(curve, BIAS), curve) for curve in map(noise, range(8))]
    assert all(2 * summary.best < min(summary.last10, summary.final) for summary, _ in courses[1:4])
    assert converge([courses[:4], courses[4:]], 50, BIAS)[0].diverged == (0, 0)


def test_an_error_that_rises_back_by_half_of_what_it_fell_has_diverged():
    falls = {r: 1 / r for r in range(1, 21)}
    back = falls | {r: 0.1 + 0.09 * (r - 10) for r in range(11, 31)}
    calm = falls | dict.fromkeys(range(21, 31), 0.05)
    courses = [(summarise(curve, BIAS), curve) for curve in (back, back, back, back, calm)]
    assert converge([courses[:2], courses[2:]], 30, BIAS)[1] == [[True, True], [True, True, False]]


def test_a_run_that_ends_without_a_finite_score_has_diverged_whatever_the_others_do():
    lost = Summary(LARGEST, LARGEST, LARGEST)
    assert diverged([lost] * 4, BIAS) == [True] * 4
    assert diverged([Summary(-LARGEST, -LARGEST, -LARGEST)] * 4, Metric("r2", "higher", "")) == [True] * 4


@pytest.mark.parametrize(
    ("late", "dead"),
    [
        ({"test": {"accuracy": 0.5, "loss": None}}, True),
        ({"test": {"accuracy": 0.5, "loss": 0.7}, "counted": 0}, True),
        ({"test": {"accuracy": 0.5, "loss": 0.7}, "counted": 5}, False),
        ({"test": {"accuracy": 0.5}}, False),  # an exported run without a loss
    ],
)
def test_a_dead_run_has_diverged_though_its_accuracy_is_that_of_a_guess(late, dead):
    lines = [{"round": 1, "test": {"accuracy": 0.5, "loss": 0.7}, "counted": 5}]
    lines += [{"round": place, **late} for place in range(2, 61)]

    def runs(arm):
        settings = {"aggregator": arm, "algorithm": "fedavg", "rounds": 60}
        done = Done(rounds=60, sha256="")
        return [Run(Path(f"{arm}{s}"), {"settings": {}}, {**settings, "seed": s}, tuple(lines), done) for s in range(4)]

    (made,) = against_baseline([*runs("gma"), *runs("mean")])
    cell = made.cells[0]
    assert cell.convergence.diverged == ((4, 4) if dead else (0, 0))
    assert cell.convergence.converged is not dead
    assert ("all 8 runs of both arms diverged" in made.text) is dead


def test_one_of_the_last_ten_rounds_that_counted_a_client_is_enough():
    lines = tuple({"round": place, "counted": 0 if place > 20 else 4} for place in range(1, 31))
    assert is_dead(Run(Path(), {}, {}, lines, None))
    assert not is_dead(Run(Path(), {}, {}, lines[:29], None))
