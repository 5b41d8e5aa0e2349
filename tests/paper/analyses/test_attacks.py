"""Membership inference on cases whose answer is known."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr, ndtri

import fedgma
from fedgma.errors import ConfigError
from fedgma.paper.analyses.attacks import (
    ATTACKS,
    area,
    confidences,
    figures,
    halves,
    lira,
    logistic_attack,
    rate_at,
    rmia,
    trade_off,
)
from fedgma.paper.analyses.membership import Models, attack_runs, threshold_rows


def gaussian_models(shift, models=64, samples=4000, seed=0):
    """Confidences of unit variance around each sample's own level, `shift` higher for members."""
    rng = np.random.default_rng(seed)
    inside = halves(models, samples, seed=seed)
    level = 3 * rng.standard_normal(samples)
    return level + shift * inside + rng.standard_normal((models, samples)), inside


def mean_figures(name, confidence, inside, targets=8):
    found = [figures(ATTACKS[name](confidence, inside, target), inside[target]) for target in range(targets)]
    return {key: float(np.mean([one[key] for one in found])) for key in found[0]}


def test_lira_reaches_the_closed_form_of_two_gaussians():
    shift = 2.0
    actual = mean_figures("LiRA", *gaussian_models(shift))
    # the best test of N(0, 1) against N(shift, 1) thresholds the confidence: TPR = Phi(shift - z) at FPR = Phi(-z)
    expected = {"auc_%": ndtr(shift / np.sqrt(2)), "accuracy_%": ndtr(shift / 2)}
    expected |= {"tpr_at_1%": ndtr(shift + ndtri(0.01)), "tpr_at_0.1%": ndtr(shift + ndtri(0.001))}
    assert actual["auc_%"] == pytest.approx(100 * expected["auc_%"], abs=1.5)
    assert actual["accuracy_%"] == pytest.approx(100 * expected["accuracy_%"], abs=2)
    assert actual["tpr_at_1%"] == pytest.approx(100 * expected["tpr_at_1%"], abs=5)
    assert actual["tpr_at_0.1%"] == pytest.approx(100 * expected["tpr_at_0.1%"], abs=5)


def test_without_the_samples_own_level_a_threshold_finds_less():
    confidence, inside = gaussian_models(2.0)
    assert (
        mean_figures("threshold", confidence, inside)["auc_%"] < mean_figures("LiRA", confidence, inside)["auc_%"] - 10
    )


@pytest.mark.parametrize("models", [4, 16])
@pytest.mark.parametrize("name", list(ATTACKS))
def test_models_that_never_saw_a_sample_give_nothing_away(name, models):
    confidence, inside = gaussian_models(0.0, models=models, samples=64_000 // models)
    found = mean_figures(name, confidence, inside, targets=models)
    assert found["auc_%"] == pytest.approx(50, abs=1)  # 64,000 samples in all: one deviation is about 0.25
    assert found["tpr_at_1%"] == pytest.approx(1, abs=0.6)


@pytest.mark.parametrize("name", ["LiRA", "LiRA, offline", "RMIA"])
def test_models_that_memorise_give_everything_away(name):
    confidence, inside = gaussian_models(20.0, models=16, samples=1000)
    if name == "RMIA":  # it works on probabilities, which saturate: members sure, others not
        confidence = np.where(inside, 8.0, -3.0) + 0.1 * confidence / 20
    found = mean_figures(name, confidence, inside)
    assert found["auc_%"] > 99.9
    assert found["tpr_at_0.1%"] > 99


def test_a_variance_of_its_own_for_each_sample_helps_where_variances_differ():
    rng = np.random.default_rng(0)
    inside = halves(64, 3000)
    spread = np.where(np.arange(3000) % 2, 0.2, 5.0)
    confidence = inside + spread * rng.standard_normal(inside.shape)
    pooled, own = (
        np.mean([figures(lira(confidence, inside, t, pooled=p), inside[t])["tpr_at_1%"] for t in range(4)])
        for p in (True, False)
    )
    assert own > 2 * pooled


def test_too_few_shadows_are_refused():
    with pytest.raises(ConfigError, match="use more models"):
        lira(np.zeros((2, 4)), halves(2, 4), 0)
    with pytest.raises(ConfigError, match="even number"):
        halves(3, 4)


def test_the_order_of_the_relative_attack_does_not_depend_on_a_common_factor():
    confidence, inside = gaussian_models(1.0, models=8, samples=50)
    logs = -np.logaddexp(0, -confidence)
    half = np.log(0.5) + logs  # every probability halved
    halved = half - np.log1p(-np.exp(half))
    np.testing.assert_allclose(rmia(confidence, inside, 0), rmia(halved, inside, 0), atol=1e-9)


def test_confidences_of_very_sure_models_stay_finite():
    found = confidences(np.array([[1000.0, 0.0, 0.0], [0.0, 1000.0, 0.0]]), np.array([0, 0]))
    np.testing.assert_allclose(found, [1000 - np.log(2), -1000])


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=40))
def test_the_area_is_the_chance_that_a_member_scores_higher(pairs):
    scores, members = np.array([s for s, _ in pairs], float), np.array([m for _, m in pairs])
    if members.all() or not members.any():
        return
    apart = scores[members][:, None] - scores[~members][None]
    assert area(trade_off(scores, members)) == pytest.approx(np.mean((apart > 0) + 0.5 * (apart == 0)))


def test_a_false_positive_rate_that_no_threshold_meets_finds_nobody():
    assert rate_at(trade_off(np.zeros(10), np.arange(10) < 5), 0.01) == 0


def test_the_papers_attacker_is_at_chance_where_members_look_like_others():
    logits = torch.randn(2, 8000, 10, generator=torch.Generator().manual_seed(0))
    found = logistic_attack(logits[:, :4000], logits[:, 4000:], epochs=200, rate=0.01)
    assert found.accuracy == pytest.approx([0.5, 0.5], abs=0.03)
    assert found.auc == pytest.approx([0.5, 0.5], abs=0.03)


def test_the_papers_attacker_finds_a_shift_as_well_as_the_best_linear_rule():
    logits = torch.randn(1, 8000, 10, generator=torch.Generator().manual_seed(0))
    logits[:, :4000, 3] += 1.0
    found = logistic_attack(logits[:, :4000], logits[:, 4000:], epochs=400, rate=0.02)
    assert found.accuracy[0] == pytest.approx(ndtr(0.5), abs=0.03)
    assert found.test_loss[0, 0] == pytest.approx(np.log(2))
    assert found.test_loss[0, -1] < found.test_loss[0, 0] - 0.05
    assert found.epochs[-1] == 400


def test_confidence_tells_members_from_test_samples_by_as_much_as_it_differs():
    rng = np.random.default_rng(0)
    labels, inside = np.zeros(4000, np.int64), np.arange(4000)[None] < 3000
    confident = lambda shift: np.stack([rng.normal(shift, 1, (1, 4000)), np.zeros((1, 4000))], -1)  # noqa: E731
    models = Models(confident(1.0), confident(0.0), labels, labels, inside)
    assert threshold_rows(models, 1) == []
    (row,) = threshold_rows(models, 0)
    assert (row["attack"], row["models"], row["target"]) == ("threshold", "all data", 0)
    assert row["auc_%"] == pytest.approx(100 * ndtr(1 / np.sqrt(2)), abs=1.5)
    assert row["tpr_at_1%"] == pytest.approx(100 * ndtr(1 + ndtri(0.01)), abs=2)


def test_finished_runs_that_kept_their_states_can_be_attacked(tmp_path):
    given = {"model": "logistic", "partition": {"clients": 20}, "rounds": 2, "client_test_size": 0}
    fedgma.run({**given, "aggregator": ["mean", "gma"], "seed": [0, 1]}, out=tmp_path)
    assert attack_runs(tmp_path, {"dataset": "cifar10"}) is None
    found = attack_runs(tmp_path, {"model": "logistic"}, "cpu", epochs=5)
    rows = [(row["arm"], row["attack"], row["targets"]) for row in found.tables["attacks"]]
    assert rows == [(arm, attack, 2) for arm in ("AVG", "GMA") for attack in ("logistic, as printed", "threshold")]
    tested = {row["arm"]: row["test_%"] for row in found.tables["gaps"]}
    lines = [json.loads(line) for file in tmp_path.glob("*/rounds.jsonl") for line in file.read_text().splitlines()]
    last = [100 * line["test"]["accuracy"] for line in lines if line["round"] == 2]
    assert sum(tested.values()) / 2 == pytest.approx(sum(last) / 4, abs=0.01)


def test_runs_that_differ_in_more_than_the_mask_are_no_pair(tmp_path):
    given = {"model": "logistic", "rounds": 1, "client_test_size": 0}
    for part, arms in (("iid", ["mean"]), ("label_skew", ["gma"])):
        fedgma.run({**given, "partition": {"clients": 20, "name": part}, "aggregator": arms, "seed": 0}, out=tmp_path)
    assert attack_runs(tmp_path, {"model": "logistic"}, "cpu", epochs=5) is None
    fedgma.run({**given, "partition": {"clients": 20, "name": "iid"}, "aggregator": "gma", "seed": 0}, out=tmp_path)
    assert attack_runs(tmp_path, {"partition.name": "iid"}, "cpu", epochs=5) is not None
    assert attack_runs(tmp_path, {"partition.name": "label_skew"}, "cpu", epochs=5) is None
