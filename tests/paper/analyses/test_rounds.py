"""Analyses that play rounds: an opened round is the played one, arms share what they must share."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedgma.experiments.materials import Materials
from fedgma.paper.analyses import ANALYSES, AnalysisRequest
from fedgma.paper.analyses.agreement import along_runs, fair_share_below, share_below
from fedgma.paper.analyses.attacks import halves
from fedgma.paper.analyses.density import mean_masks
from fedgma.paper.analyses.membership import attack, train_models
from fedgma.paper.analyses.participation import (
    paired_trials,
    printed,
    printed_changes,
    relative_change,
    separate_trials,
)
from fedgma.paper.analyses.rounds import open_round, retrain, specs_of
from fedgma.paper.analyses.saving import save
from fedgma.paper.catalogue import experiment
from fedgma.paper.claims import ANALYSIS
from fedgma.paper.findings import read_findings
from fedgma.simulation import fleet as fleets
from plain_pools import make_federation
from run_specs import make_spec

ROOT = Path(__file__).resolve().parents[3]
SHAPE = (1, 8, 8)
SIZES = [30, 20, 40, 25, 35]


def federation(seed=0, samples=12):
    made = make_federation(SIZES, SHAPE, seed=seed)
    tests = tuple(np.arange(n * samples, (n + 1) * samples) for n in range(len(SIZES)))
    return replace(made, client_tests=tests)


def spec(**settings):
    plain = {"model": "logistic", "rounds": 4, "clients_per_round": 3, "batch_size": 8, "lr": 0.05}
    return make_spec(federation(), **{**plain, **settings})


@pytest.mark.parametrize("server", ["sgd", "adam"])
def test_an_opened_round_is_the_round_that_is_played(server):
    fleet = fleets.assemble([spec(seed=0, server=server), spec(seed=1, aggregator="mean", server=server)])
    opened = played = fleets.start(fleet)
    for _ in range(3):
        opened, sums, merged = open_round(fleet, opened)
        played, _ = fleets.play_round(fleet, played)
        torch.testing.assert_close(opened.params, played.params, rtol=0, atol=0)
    assert sums.clients.tolist() == [3, 3]
    assert ((merged.mask[0] == 1) | (merged.mask[0] < 0.4)).all()
    assert (merged.mask[1] == 1).all()


def test_repeats_start_from_the_same_weights_and_differ_in_their_batches():
    fleet = fleets.assemble([spec()])
    state = fleets.start(fleet)
    first, second = retrain(fleet, state, 0, [0, 2], 2)
    again = next(iter(retrain(fleet, state, 0, [0, 2], 1)))
    assert first.shape == (2, fleets.start(fleet).params.shape[1])
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_mean_masks_of_one_round_are_that_rounds_mask():
    fleet = fleets.assemble([spec(seed=3)])
    _, _, merged = open_round(fleet, fleets.start(fleet))
    dense, still = mean_masks(fleet, 1)
    np.testing.assert_array_equal(dense[0], merged.mask[0].numpy())
    assert still.max() <= 1


def test_both_arms_of_a_paired_trial_share_clients_and_updates():
    rows = list(paired_trials([spec(seed=0, tau=0.0), spec(seed=1, tau=0.0)], [1, 2]))  # no mask: the arms are one
    values = {arm: [row["accuracy_%"] for row in rows if row["arm"] == arm] for arm in ("AVG", "GMA")}
    assert len(values["AVG"]) == 2 * 2 * 2  # points, seeds, groups
    assert values["AVG"] == values["GMA"]


def test_a_mask_changes_a_paired_trial():
    rows = list(paired_trials([spec(seed=seed, tau=1.0) for seed in range(6)], [1]))
    plain, masked = ([row["accuracy_%"] for row in rows if row["arm"] == arm] for arm in ("AVG", "GMA"))
    assert plain != masked


def test_separate_arms_look_at_the_rounds_asked_for():
    rows = list(separate_trials([spec()], [1, 3]))
    assert {row["after"] for row in rows} == {1, 3}
    assert {row["group"] for row in rows} == {"participating", "non_participating"}


def test_the_printed_changes_follow_from_the_printed_means():
    means = {(row["cohort"], row["group"], row["arm"]): row["value"] for row in printed() if row["trial"] == "mean"}
    for (sampled, group), change in printed_changes().items():
        own = relative_change(means[sampled, group, "GMA"], means[sampled, group, "AVG"])
        assert own == pytest.approx(change, abs=0.1)


def test_shares_below_are_those_of_the_runs_own_statistics():
    one = spec(clients_per_round=5, mask_every=1, tau=0.4)
    wanted = [record.votes.whole.below for played in fleets.play([one]) for record in played.records]
    rows = [row for row in along_runs([one], 0.4) if row["layer"] == "all"]
    assert [row["below_%"] for row in rows] == pytest.approx([100 * share for share in wanted])


@pytest.mark.full_data
def test_on_mnist_unlike_clients_agree_less_in_the_first_round(monkeypatch, tmp_path):
    folder = Path(os.environ.get("FEDGMA_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "mnist.npz").is_file():
        pytest.skip("the packed data sets are not here (set FEDGMA_TEST_DATA to their folder)")
    monkeypatch.setenv("FEDGMA_CACHE", str(tmp_path))
    monkeypatch.setenv("FEDGMA_DATA", str(folder))
    specs = []
    for alpha in (0.1, 100.0):
        partition = {"name": "dirichlet", "clients": 10, "alpha": alpha}
        settings = {"dataset": "mnist", "model": "logistic", "rounds": 1, "client_learning_rate": 0.01}
        specs += specs_of(Materials("cpu"), [0], partition=partition, aggregator="mean", client_test_size=0, **settings)
    unlike, alike = (row["below_%"] for row in along_runs(specs, 0.4) if row["layer"] == "all")
    assert alike + 10 < unlike < 100 * fair_share_below(10, 0.4) + 5


def test_counts_are_shared_out_along_the_last_axis():
    assert share_below(np.array([[1, 0, 1], [0, 0, 4]]), 0.5).tolist() == [0.5, 0.0]


def test_an_overfit_federation_gives_its_members_away():
    # 64 numbers a picture, 75 pictures, a linear model: it learns them by heart
    inside = np.concatenate([halves(8, sum(SIZES)), np.ones((1, sum(SIZES)), bool)])
    base = spec(rounds=12, clients_per_round=5, local_epochs=5, lr=0.2)
    result = attack(train_models(base, inside), 8, epochs=50)
    rows = {(row["attack"], row["arm"], row["models"]): row for row in result.tables["attacks"]}
    assert rows["LiRA", "AVG", "half of the data"]["auc_%"] > 70
    assert rows["LiRA", "GMA", "half of the data"]["targets"] == 8
    assert rows["logistic, as printed", "AVG", "all data"]["targets"] == 1
    gaps = {(row["arm"], row["models"]): row["gap"] for row in result.tables["gaps"]}
    assert gaps["AVG", "half of the data"] > 10
    assert set(result.figures) == {"trade_off", "attacker_loss"}


def test_a_federation_trained_on_noise_of_its_own_knows_nothing_of_the_others():
    inside = halves(8, sum(SIZES))
    wrong = np.roll(inside, 1, axis=1)[:, ::-1]  # halves that have nothing to do with the training
    models = train_models(spec(rounds=4, clients_per_round=5), inside)
    told = {arm: own._replace(inside=wrong) for arm, own in models.items()}
    rows = attack(told, 8, epochs=50).tables["attacks"]
    own = next(row for row in rows if row["attack"] == "LiRA" and row["arm"] == "AVG")
    assert own["auc_%"] == pytest.approx(50, abs=12)  # 8 targets of 150 samples


def test_an_analysis_of_new_seeds_takes_these_alone(tmp_path):
    result = ANALYSES["C35"](AnalysisRequest("cpu", tmp_path, seeds=2, first_seed=60, quick=True))
    assert {row["seed"] for row in result.tables["trials"]} == {60, 61}
    result = ANALYSES["C36"](AnalysisRequest("cpu", tmp_path, seeds=1, first_seed=60, quick=True))
    assert {row["seed"] for row in result.tables["rounds"]} == {60}


@pytest.mark.parametrize("name", ["E7", "E11", "E16", "E17", "E18", "C25"])
def test_a_quick_look_ends_in_tables_findings_and_pictures(name, tmp_path):
    loops = []

    def follow(steps, total, what):
        loops.append((what, total, seen := []))
        for step in steps:
            seen.append(step)
            yield step

    result = ANALYSES[name](AnalysisRequest("cpu", tmp_path, seeds=1, quick=True, follow=follow))
    assert loops
    assert all(len(seen) == total for _, total, seen in loops), loops
    files = save(result, tmp_path / name, name)
    named = [claim.finding for claim in experiment(name).claims if claim.kind == ANALYSIS]
    assert all(any(finding.is_below(path) for finding in result.findings) for path in named)
    assert len({finding.id for finding in result.findings}) == len(result.findings)
    assert read_findings(tmp_path / name) == result.findings
    assert all(len(rows) for rows in result.tables.values())
    assert {file.suffix for file in files} == {".csv", ".png", ".md", ".json"}
    assert all(0 < file.stat().st_size < 100_000 for file in files)
