"""Scores of any metric: which way is better, in which unit, and what a run without a finite score is worth."""

from pathlib import Path

import pytest

from fedgma.errors import ConfigError
from fedgma.records.format import Done
from fedgma.records.reader import Run
from fedgma.statistics.arms import Summary, rows, summary_of
from fedgma.statistics.baseline import against_baseline
from fedgma.statistics.comparisons import compare
from fedgma.statistics.convergence import converge, diverged
from fedgma.statistics.metrics import ACCURACY, LARGEST, Metric, course, metric_of, metrics_of

MSE = {"name": "mse", "better": "lower", "unit": ""}
R2 = {"name": "r2", "better": "higher", "unit": ""}
LOWER = Metric("mse", "lower", "")
LITTLE = 1e-6


def run(aggregator, seed, values, metrics=(MSE, R2), **settings):
    """A finished run whose test mse are these values, one a round; its r2 is 1 - mse."""
    names = [fact["name"] for fact in metrics] or ["accuracy"]
    scores = [dict(zip(names, (value, None if value is None else 1 - value), strict=False)) for value in values]
    lines = tuple({"round": place, "test": score} for place, score in enumerate(scores, 1))
    settings = {"aggregator": aggregator, "algorithm": "fedavg", "seed": seed, "rounds": len(values), **settings}
    head = {"format": 3, "settings": {}, **({"metrics": list(metrics)} if metrics else {})}
    return Run(Path(f"{aggregator}{seed}"), head, settings, lines, Done(rounds=len(values), sha256=""))


def arms(gap):
    """Four seeds of GMA and of the mean; the mse of GMA is lower by `gap` and a little, from seed to seed more."""
    return [
        run(arm, seed, [0.5, 0.3 + 0.01 * seed - (gap + LITTLE * seed) * (arm == "gma")])
        for arm in ("gma", "mean")
        for seed in range(4)
    ]


def test_a_lower_score_is_ahead_where_lower_is_better():
    (made,) = against_baseline(arms(0.02), metric="final")
    assert made.cells[0].verdict.outcome == "first ahead"
    assert made.cells[0].differences == pytest.approx([0.02] * 4, abs=4 * LITTLE)
    assert made.text.startswith("GMA ahead by 0.0200 in mse, 95 % CI 0.0200 to 0.0200, in 4 of 4 seeds")
    (worse,) = against_baseline(arms(-0.02), metric="final")
    assert worse.text.startswith("the mean ahead by 0.0200 in mse")


def test_another_metric_of_the_same_runs_has_its_own_direction():
    (made,) = against_baseline(arms(0.02), metric="final", of="r2")
    assert made.score == Metric("r2", "higher", "")
    assert made.cells[0].differences == pytest.approx([0.02] * 4, abs=4 * LITTLE)
    with pytest.raises(ConfigError, match="not every run records the metric 'mae'; the runs have mse, r2, loss"):
        against_baseline(arms(0.02), of="mae")


def test_the_best_is_the_lowest():
    assert summary_of(run("gma", 0, [0.5, 0.2, 0.3])) == Summary(best=0.2, last10=pytest.approx(1 / 3), final=0.3)
    row = rows([run("gma", 0, [0.5, 0.2, 0.3])])[0]
    assert row.metric == LOWER
    assert row.scores["best"].mean == 0.2


def test_runs_without_recorded_metrics_have_the_accuracy():
    old = run("gma", 0, [0.5, 0.25], metrics=())
    assert metrics_of(old) == (ACCURACY,)
    assert summary_of(old) == Summary(best=50.0, last10=37.5, final=25.0)


def test_runs_of_different_metrics_are_not_compared():
    mixed = [*arms(0.02), *(run(arm, seed, [0.1, 0.2], (), task="x") for arm in ("gma", "mean") for seed in range(4))]
    with pytest.raises(ConfigError, match="scored by mse and accuracy; select those of one task"):
        metric_of(mixed)
    assert [made.score.name for made in against_baseline(mixed)] == ["mse", "accuracy"]


def test_a_score_that_is_not_finite_is_the_worst():
    lost, fine = run("gma", 0, [0.5, None]), run("mean", 0, [0.5, 0.4])
    assert course(lost, "test", LOWER) == {1: 0.5, 2: LARGEST}
    made = compare([lost], [fine], ("GMA", "the mean"), metric="final")
    assert made.cells[0].verdict.mean < -1e38
    assert sum(made.cells[0].convergence.diverged) == 1


def test_a_setting_in_which_every_pair_diverged_spoils_no_other_setting():
    bad = {arm: [[0.5, None]] * 3 + [[0.5, 0.4]] for arm in ("gma", "mean")}
    bad["mean"][3] = [0.5, None]
    lost = [run(arm, seed, bad[arm][seed], lr=0.3) for arm in bad for seed in range(4)]
    (alone,) = against_baseline(arms(0.02), metric="final")
    (made,) = against_baseline([*arms(0.02), *lost], metric="final")
    assert (made.overall.mean, made.overall.p) == (alone.overall.mean, alone.overall.p)
    assert "over the 1 of 2 in which not every pair diverged, none of which converged: GMA ahead by 0.0200" in made.text
    assert "7 of 16 runs diverged (GMA 3, the mean 4)" in made.text
    assert "without their pairs and without the 1 of the settings in which every pair has one" in made.text
    assert "e+" not in made.text
    assert "with them: inconclusive: " in made.text


def test_divergence_is_told_by_the_direction():
    higher = [Summary(80, 78, 77), Summary(81, 30, 30)]
    assert diverged(higher) == [False, True]
    falling = [Summary(0.1, 0.5, 0.1), Summary(0.1, 0.5, 0.1), Summary(0.1, 0.5, 0.3), Summary(0.4, 1.2, 0.4)]
    assert diverged(falling, LOWER) == [False, False, True, True]
    assert diverged([Summary(-1.0, -3.0, -2.0)], Metric("log_likelihood", "higher", "")) == [False]
    assert diverged([Summary(0.0, 0.0, 0.0)], LOWER) == [False]


def test_convergence_is_a_hundredth_of_the_range():
    flat = {r: 1 + 3 / r for r in range(1, 101)}  # falls from 4 to 1.03; by 0.02 over the last quarter
    steep = {r: 4 - 0.03 * r for r in range(1, 101)}
    for curve, converged in ((flat, True), (steep, False)):
        found, _ = converge([[(Summary(1, 1, 1), curve)]], 100, LOWER)
        assert found.converged is converged
    assert found.text == "not converged: still improves by 0.75 in mse over the last quarter of 100 rounds"
