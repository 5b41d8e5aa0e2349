"""Attacks as settings: on the command line, in records and labels, and never in a pair with another attack."""

import json

import numpy as np
import pytest
from small_runs import SMALL

import fedgma
from commands import call
from fedgma.cli.show_settings import show_settings
from fedgma.errors import ConfigError
from fedgma.experiments.grid import expand, read_grid
from fedgma.experiments.materials import Materials
from fedgma.experiments.outcome import read_outcome
from fedgma.experiments.settings import Settings, complete, record
from fedgma.records.format import fingerprint
from fedgma.records.reader import read_runs
from fedgma.simulation.attacks import Attack
from fedgma.statistics.arms import rows
from fedgma.statistics.baseline import against_baseline
from run_folders import write_run

WORDS = ["attack.name=sign_flip", "attack.share=0.3", "attack.scale=10.0"]


def test_words_make_an_attack():
    (settings,) = read_grid(None, [*WORDS, "aggregator=mean", "seed=0", "model=logistic"]).runs
    assert Materials("cpu").spec(settings).attack == Attack("sign_flip", 0.3, 10.0)
    assert record(settings)["attack"] == {
        "name": "sign_flip",
        "share": 0.3,
        "scale": 10.0,
        "target": None,
        "poisoned": None,
    }


def test_a_scale_that_is_not_given_is_the_attacks_own():
    assert complete(Settings(attack={"name": "alie"})).attack.scale == 1.5


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"attack": "sign_flipp"}, "did you mean 'sign_flip'?"),
        ({"attack": {"share": 0.3}}, "attack.share is given but no run uses it"),
        ({"attack": {"name": "zero", "scale": 2.0}}, "attack.scale is given but no run uses it"),
        ({"attack": {"name": "noise", "target": 2}}, "attack.target is given but no run uses it"),
        ({"attack": {"name": "noise", "share": 1.5}}, "attack.share: input should be less than or equal to 1"),
        ({"norm_factor": 0.0}, "norm_factor: input should be greater than 0"),
    ],
)
def test_what_an_attack_cannot_be_is_refused_by_name(given, said):
    with pytest.raises(ConfigError) as error:
        expand(given)
    assert said in str(error.value)


def test_a_run_without_attack_or_bound_keeps_the_name_that_it_had_before_there_were_any():
    recorded = record(complete(Settings()))
    before = {name: value for name, value in recorded.items() if name not in ("attack", "norm_factor")}
    assert fingerprint(recorded) == fingerprint(before)
    for change in ({"attack": {"name": "zero"}}, {"norm_factor": 10.0}):
        assert fingerprint(record(complete(Settings(**change)))) != fingerprint(before)


def test_what_is_shown_of_an_attack_is_a_settings_file_of_the_same_runs(tmp_path):
    for words in (WORDS, []):
        grid = read_grid(None, words)
        (tmp_path / "shown.toml").write_text(show_settings(grid))
        assert read_grid(tmp_path / "shown.toml").runs == grid.runs


def test_arms_under_different_attacks_are_never_paired(tmp_path):
    none = {"name": None, "share": None, "scale": None}
    flip, strong = ({"name": "sign_flip", "share": 0.3, "scale": scale} for scale in (1.0, 10.0))
    for seed in range(3):
        write_run(tmp_path / f"plain{seed}", aggregator="mean", attack=none, seed=seed)
        write_run(tmp_path / f"flipped{seed}", aggregator="gma", attack=flip, seed=seed)
        write_run(tmp_path / f"strong{seed}", aggregator="mean", attack=strong, seed=seed)
    runs = read_runs([tmp_path])
    assert [row.name for row in rows(runs)] == [
        "no attack, mean",
        "sign_flip, scale 1, GMA",
        "sign_flip, scale 10, mean",
    ]
    assert sum(len(cell.seeds) for made in against_baseline(runs) for cell in made.cells) == 0


def test_an_attacked_run_is_played_recorded_and_found_again(tmp_path):
    words = [f"{name}={json.dumps(value)}" for name, value in SMALL.items() if not isinstance(value, dict)]
    given = [*words, "partition.clients=20", "rounds=2", "aggregator=mean", "seed=0", "norm_factor=10.0"]
    backdoor = ["attack.name=backdoor", "attack.share=0.2", "attack.scale=5.0"]
    code, _, said = call("run", "--out", tmp_path, *given, *backdoor)
    assert code == 0, said
    (run,) = read_runs([tmp_path])
    assert run.settings["attack.name"] == "backdoor"
    assert run.settings["norm_factor"] == 10.0
    assert {"test", "backdoor"} <= set(run.rounds[-1])  # accuracy, and the success of the attack beside it
    assert sum(map(sum, run.head["data"]["counts"])) == 10_000  # the clients' own samples, not the poisoned copies


def test_both_arms_of_a_seed_have_the_same_attackers():
    attack = {"name": "noise", "share": 0.3, "scale": 3.0}
    outcome = fedgma.run({**SMALL, "aggregator": ["mean", "gma"], "attack": attack, "seed": [0, 1], "rounds": 1})
    first = {(run.settings["aggregator"], run.seed): run.rounds[0]["train"] for run in outcome.runs}
    assert first["mean", 0] == first["gma", 0]
    assert len(outcome.comparisons[0].cells[0].seeds) == 2
    assert np.isfinite(outcome.arms[0].scores["final"].mean)


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_rounds_in_which_no_client_counted_have_no_training_score(task, tmp_path):
    x = np.random.default_rng(0).normal(size=(120, 4)).astype(np.float32)
    np.savez(tmp_path / "mine.npz", x=x, y=x.sum(1) if task == "regression" else (x.sum(1) > 0).astype(np.int64))
    runs, report = tmp_path / "runs", tmp_path / "report"
    words = ["model=mlp", "partition.clients=4", "rounds=2", "aggregator=mean", "seed=0", "norm_factor=1e-9"]
    code, _, said = call("run", f"dataset={tmp_path / 'mine.npz'}", f"task={task}", *words, "--out", runs, "--quiet")
    assert (code, "no client's update could be averaged" in said) == (4, True)
    outcome = read_outcome(runs)
    for line in outcome.runs[0].rounds:
        assert (line["counted"], set(line["train"].values())) == (0, {None})
    assert all(np.isfinite(value) for value in outcome.runs[0].rounds[-1]["test"].values())
    assert not any(name.startswith("train/") for row in outcome.curves() for name in row)
    assert call("report", runs, "--out", report)[0] == 0
    assert "| train " not in (report / "report.md").read_text()
    code, shown, _ = call("watch", runs, "--once")
    assert (code, "not finite" in shown) == (0, False)
