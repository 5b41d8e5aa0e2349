"""From settings to records and verdicts, in Python and on the command line."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch import nn

import fedgma
from commands import call
from fedgma.errors import ConfigError, Diverged, NotEnoughClients
from fedgma.experiments import play as experiments
from fedgma.experiments.grid import expand
from fedgma.experiments.lines import line_of
from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import pack
from fedgma.records.reader import read_head, read_lines
from fedgma.simulation.fleet import assemble, play
from fedgma.statistics.verdicts import Outcome


def command(*words, cwd=None):
    code = "from fedgma.cli import main; main()"
    where = {**os.environ, "PYTHONPATH": str(Path(fedgma.__file__).parents[1])}
    asked = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(asked, capture_output=True, text=True, cwd=cwd, env=where)


def records_of(settings, rounds=6):
    spec = Materials("cpu").spec(expand(settings).runs[-1])
    return spec, [played.records[0] for played in play([spec])]


def test_rounds_come_one_by_one_and_nothing_is_written(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = list(experiments.rounds({**small, "rounds": 2}))
    assert [(p.run.settings.aggregator, p.run.settings.seed, p.line["round"]) for p in seen[:4]] == [
        ("mean", 0, 1),
        ("mean", 1, 1),
        ("gma", 0, 1),
        ("gma", 1, 1),
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_run_says_what_came_out_and_its_folders_say_it_again(small, tmp_path):
    outcome = experiments.run(small, out=tmp_path)
    (comparison,) = outcome.comparisons
    means = {arm.name: arm.scores["last10"].mean for arm in outcome.arms}
    assert comparison.cells[0].verdict.mean == pytest.approx(means["GMA"] - means["mean"])
    again = experiments.run(small, out=tmp_path)
    assert again == outcome
    without = experiments.run(small)
    assert [(arm.name, arm.scores) for arm in without.arms] == [(arm.name, arm.scores) for arm in outcome.arms]
    assert without.comparisons == outcome.comparisons


def test_a_run_folder_is_complete(small, tmp_path):
    experiments.run({**small, "seed": 3, "aggregator": "gma"}, out=tmp_path)
    (folder,) = tmp_path.iterdir()
    head, lines = read_head(folder), read_lines(folder)
    assert head["fingerprint"] == folder.name
    assert head["parameters"] == 7850
    assert head["data"]["name"] == "fmnist-mini"
    assert (head["data"]["train"], len(head["data"]["sha256"])) == (10000, 64)
    assert {"fedgma", "python", "numpy", "torch"} <= set(head["versions"])
    counts = np.array(head["data"]["counts"])
    assert counts.shape == (20, len(head["data"]["classes"]))
    assert (counts.sum(), (counts > 0).sum(axis=1).tolist()) == (10000, [2] * 20)
    assert head["settings"]["partition"] | {"seed": 3, "clients": 20} == head["settings"]["partition"]
    assert [line["round"] for line in lines] == list(range(1, 7))
    assert ["mask" in line for line in lines] == [True, True, False, True, False, True]
    assert all({"train", "test", "clients", "counted", "refused", "seconds"} <= set(line) for line in lines)
    assert set(lines[-1]["clients"]) == {"worst_decile", "mean", "participating", "non_participating"}


def test_the_masks_figures_are_those_of_the_round(small):
    spec, records = records_of({**small, "seed": 0, "aggregator": "gma", "mask_every": 1})
    for record in records:
        figures = line_of(record, 0.0)["mask"]
        assert figures["mean"] == pytest.approx(record.mask_mean, rel=1e-5)
        assert figures["agreement"] == pytest.approx(record.agreement, rel=1e-5)
        assert sum(figures["histogram"]) == pytest.approx(1)
        assert len(figures["histogram"]) == spec.clients_per_round + 1
        assert figures["below"] == pytest.approx(sum(figures["histogram"][:2]))  # tau 0.4 of 4 clients needs 2 votes
        assert figures["layers"]["linear"]["below"] == pytest.approx(figures["below"])
        assert (figures["undecided"], figures["unanimous"]) == (figures["histogram"][0], figures["histogram"][-1])
        assert 0 < figures["ratio"] < 1
        assert figures["ratio"] <= figures["cosine"] + 1e-6  # the same for a mask of zeros and ones
        assert 0 <= figures["zeros"] < 0.5


def test_a_mask_is_set_beside_the_one_that_was_looked_at_before(small):
    _, records = records_of({**small, "seed": 0, "aggregator": "gma", "rounds": 5})
    masks = {record.round: line_of(record, 0.0).get("mask") for record in records}
    assert {round: mask.get("since") for round, mask in masks.items() if mask} == {1: None, 2: 1, 4: 2, 5: 4}
    for mask in (masks[2], masks[4], masks[5]):
        before = masks[mask["since"]]["below"]
        both = (
            mask["below"] + before - mask["flipped"]
        ) / 2  # of one share and another, what lies in one only is known
        assert 0 < mask["flipped"] < 1
        assert mask["overlap"] == pytest.approx(both / (both + mask["flipped"]))


def test_the_mean_votes_too_but_holds_nothing_back(small):
    _, records = records_of({**small, "seed": 0, "aggregator": "mean"})
    figures = line_of(records[-1], 0.0)["mask"]
    assert figures["mean"] == figures["ratio"] == figures["cosine"] == 1
    assert not {"below", "since", "flipped", "overlap"} & set(figures)
    assert 0 < figures["agreement"] < 1


def test_a_client_that_gives_no_finite_update_is_named(small, monkeypatch):
    spec = Materials("cpu").spec(expand({**small, "seed": 0, "aggregator": "gma", "rounds": 1}).runs[0])
    fleet = assemble([spec])
    bad = {}

    def spoilt(task):
        trained = fleet.train(task)
        next(iter(trained.updates.values()))[1] = float("nan")
        bad["client"] = int(task.lane_batch.client[1])
        return trained

    from dataclasses import replace

    from fedgma.simulation.fleet import play_round, start

    spoilt_fleet = replace(fleet, train=spoilt)
    _, played = play_round(spoilt_fleet, start(spoilt_fleet))
    line = line_of(played.records[0], 0.0)
    assert line["refused"] == [[bad["client"], "nonfinite"]]
    assert line["counted"] == 3


def test_kernels_and_modules_score_alike(small):
    spec = Materials("cpu").spec(expand({**small, "seed": 0, "aggregator": "gma"}).runs[0])
    *_, by_kernel = play([spec])
    *_, by_module = play([spec], form=False)
    first, second = by_kernel.records[0], by_module.records[0]
    assert first.scores["test"]["loss"] == pytest.approx(second.scores["test"]["loss"], rel=1e-4)
    assert first.scores["test"]["accuracy"] == pytest.approx(second.scores["test"]["accuracy"], abs=2e-3)
    np.testing.assert_allclose(first.client_scores, second.client_scores, atol=0.05)


def test_shifted_data_are_scored_where_colours_are_new_and_where_they_are_not(small):
    chosen = {**small, "shift": {"name": "colour"}, "rounds": 1, "seed": 0, "aggregator": "gma"}
    (played,) = experiments.rounds(chosen)
    assert {"test", "seen"} <= set(played.line)


def test_runs_of_other_models_are_played_in_fleets_of_their_own(small):
    grid = expand({**small, "model": ["logistic", "lenet"], "tau": [0.2, 0.4]})
    materials = Materials("cpu")
    packed = pack(experiments.plan(grid, materials, None), materials)
    assert [len(members) for members in packed] == [6, 6]


def test_federations_are_made_once_for_runs_that_share_them(small):
    grid = expand(small)
    materials = Materials("cpu")
    federations = {id(materials.federation(run)) for run in grid.runs}
    assert len(federations) == 2  # one a seed


@pytest.mark.filterwarnings("ignore:overflow")
def test_when_no_client_gives_anything_finite_to_the_end_there_are_too_few_clients(small):
    with pytest.raises(NotEnoughClients, match=r"\(8 were refused\); lower client_learning_rate"):
        experiments.run(
            {**small, "model": "lenet", "client_learning_rate": 1e30, "momentum": 0.0, "rounds": 3, "seed": 0}
        )


@pytest.mark.parametrize(("counted", "loss", "error"), [(0, 1.0, NotEnoughClients), (4, None, Diverged)])
def test_no_verdict_is_given_where_every_run_came_to_nothing(small, counted, loss, error):
    chosen = experiments.plan(expand({**small, "rounds": 1}), Materials("cpu"), None)
    line = {"round": 1, "train": {"loss": loss}, "counted": counted, "refused": [[0, "nonfinite"]], "test": {}}
    lines = {run.fingerprint: [line] for run in chosen}
    with pytest.raises(error, match="lower client_learning_rate"):
        experiments.conclude(chosen, lines)
    lines[chosen[0].fingerprint] = [{**line, "counted": 4, "train": {"loss": 1.0}}]
    assert experiments.conclude(chosen, lines).arms == ()  # one that lived is enough to go on


class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.layer = nn.Linear(int(np.prod(shape)), classes)

    def forward(self, x):
        return torch.relu(self.layer(x.flatten(1)))


def own_arrays(samples=240, classes=4):
    rng = np.random.default_rng(0)
    y = rng.integers(classes, size=samples)
    return rng.normal(size=(samples, 6)).astype(np.float32) + y[:, None], y


def test_own_arrays_and_own_module_in_python(tmp_path):
    chosen = {"partition": {"clients": 8}, "rounds": 4, "seed": [0, 1], "client_test_size": 0}
    outcome = experiments.run(chosen, data=own_arrays(), model=Net, out=tmp_path)
    assert {read_head(folder)["settings"]["model"] for folder in tmp_path.iterdir()} == {"own:Net"}
    assert len(outcome.comparisons) == 1
    other = own_arrays()
    other[0][0] += 1
    experiments.run(chosen, data=other, model=Net, out=tmp_path)
    assert len(list(tmp_path.iterdir())) == 8  # other data are other runs


def test_a_module_with_weights_starts_from_them():
    net = Net((6,), 4)
    chosen = {"partition": {"clients": 8}, "rounds": 1, "seed": 0, "aggregator": "gma", "client_test_size": 0}
    (played,) = experiments.rounds(chosen, data=own_arrays(), model=net)
    assert played.line["counted"] == 8


def test_a_new_user_asks_whether_masking_helps_on_their_own_file_and_module(tmp_path):
    x, y = own_arrays()
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    (tmp_path / "net.py").write_text(
        textwrap.dedent(
            """
            from torch import nn

            def Net(shape, classes):
                return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], 16), nn.ReLU(), nn.Linear(16, classes))
            """
        )
    )
    (tmp_path / "mine.toml").write_text(
        'dataset = "mine.npz"\nmodel = "net.py:Net"\nrounds = 5\npartition = { name = "dirichlet", clients = 6 }\n'
    )
    done = command("run", tmp_path / "mine.toml", "--out", tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout  # no colours in a pipe
    assert "last 5 rounds: " in done.stdout  # there are no ten
    assert "last 10 rounds" not in done.stdout
    assert f"fedgma report {tmp_path / 'runs'}" in done.stdout.replace("\n", "")
    assert len(list((tmp_path / "runs").iterdir())) == 10
    said = json.loads(call("run", tmp_path / "mine.toml", "--out", tmp_path / "runs", "--json")[1])
    assert len(said["runs"]) == 10
    assert said["verdicts"][0]["last10"]["of"] == 5
    assert said["verdicts"][0]["last10"]["outcome"] in get_args(Outcome)
    assert "5 done" in call("sweep", tmp_path / "mine.toml", "--out", tmp_path / "runs", "--status")[1]


NETS = """
from torch import nn

class Wide(nn.Linear):
    def __init__(self):
        super().__init__(7, 4)

class Pair(nn.Linear):
    def __init__(self):
        super().__init__(6, 4)

    def forward(self, x):
        return super().forward(x), x

class Empty(nn.Module):
    def forward(self, x):
        return x

def Three(shape, classes, depth):
    return Wide()
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["run", "nowhere.toml"], 2, "cannot read the settings file 'nowhere.toml'"),
        (["run", "a.toml", "b.toml"], 2, "expected one settings file"),
        (["run", "few.npz"], 2, "expected a settings file, got 'few.npz'; data are a setting: dataset=few.npz"),
        (["run", "net.py:Net"], 2, "a model is a setting: model=net.py:Net"),
        (["run", "rounds=1", "dataset=nowhere.npz"], 2, "no file or folder 'nowhere.npz'"),
        (["run", "rounds=1", "model=nowhere.py:Net"], 2, "no file 'nowhere.py'"),
        (["run", "rounds=1", "partition.clients=7"], 2, "7 clients of 2 classes"),
        (["run", "rounds=1", "--device", "quantum"], 2, "unknown device 'quantum'"),
        (["run", "rounds=1", "--device", "mps"], 2, "device 'mps' cannot be used; known: auto, cpu, cuda"),
        (["run", "rounds=1", "--device", "cpu", "--precision", "bf16"], 2, "precision 'bf16' is for a GPU"),
        (["sweep", "rounds=1", "--precision", "half"], 2, "fp32, tf32, bf16"),
        (["run", "--nonsense"], 2, "No such option"),
        (["run", "rounds=1", "dataset=bad.npz"], 3, "bad"),
        (["run", "rounds=1", "dataset=few.npz", "model=lenet"], 2, "at least 12 x 12 pixels, got samples of shape [6]"),
        (["run", "rounds=1", "dataset=few.npz", "model=net.py:Pair"], 2, "got a tuple of 2; return the logits alone"),
        (["run", "rounds=1", "dataset=few.npz", "model=net.py:Wide"], 2, "must take samples of shape [6]"),
        (["run", "rounds=1", "dataset=few.npz", "model=net.py:Empty"], 2, "has no trainable parameters"),
        (["run", "rounds=1", "dataset=few.npz", "model=net.py:Three"], 2, "Three(shape, classes) or as Three()"),
        (
            ["run", "rounds=1", "dataset=few.npz", "clients_per_round=10", "model=logistic"],
            4,
            "10 clients, but there are 3; set clients_per_round=3",
        ),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_the_documented_code(tmp_path, monkeypatch, words, code, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NETS)
    (tmp_path / "bad.npz").write_bytes(b"not an archive")
    x, y = own_arrays(60)
    np.savez(tmp_path / "few.npz", x=x, y=y, client=np.arange(60) % 3)
    found, _, told = call(*words)
    assert found == code
    assert said in told
    assert told.count("\n") == 1 or "No such option" in told  # which follows the usage
    assert not (tmp_path / "runs").exists()


def test_one_seed_is_printed_without_a_deviation(tmp_path):
    words = ["model=logistic", "rounds=1", "partition.clients=10", "seed=0", "--out", tmp_path]
    code, printed, _ = call("run", *words)
    assert code == 0
    assert "±" not in printed
    assert "last round" in printed
    assert "preliminary: GMA " in printed


def test_quiet_is_quiet(tmp_path):
    words = ["model=logistic", "rounds=1", "partition.clients=10", "seed=0", "--quiet", "--out", tmp_path]
    assert call("run", *words) == (0, "", "")


def test_a_model_file_that_fails_is_named(tmp_path):
    (tmp_path / "net.py").write_text("1 / 0\n")
    materials = Materials("cpu", folder=tmp_path)
    (run,) = expand({"model": "net.py:Net", "seed": 0, "aggregator": "gma"}).runs
    with pytest.raises(ConfigError, match=r"net\.py could not be executed \(ZeroDivisionError"):
        materials.spec(run)
