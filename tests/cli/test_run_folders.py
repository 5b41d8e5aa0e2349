"""`fedgma ls`, `show`, `export`, `rm`: run folders on the command line."""

import json
import shutil

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors import safe_open
from safetensors.torch import load_file

import fedgma
from commands import call
from fedgma.cli import rm
from fedgma.data.files import load
from fedgma.records.format import with_checksum
from fedgma.records.label import Label, read_label, write_label
from fedgma.records.reader import read_runs
from fedgma.reports.report import make_report
from fedgma.training.models import build


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    x = np.random.default_rng(0).normal(size=(80, 5)).astype(np.float32)
    out = tmp_path_factory.mktemp("trained") / "runs"
    settings = {"model": "logistic", "partition": {"clients": 4}, "rounds": 2, "seed": 0, "client_test_size": 0}
    outcome = fedgma.run(settings, data=(x, (x[:, 0] > 0).astype(int)), out=out)
    return outcome, out


@pytest.fixture
def runs(trained, tmp_path, monkeypatch):
    """A copy of the folder `runs` in the current folder."""
    shutil.copytree(trained[1], tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return {run.settings["aggregator"]: tmp_path / "runs" / run.folder.name for run in trained[0].runs}


def test_the_version():
    assert call("--version")[:2] == (0, f"fedgma {fedgma.__version__}\n")


def test_runs_are_listed_with_their_state_name_and_score(runs):
    write_label(runs["gma"], Label("wide nets", "first try"))
    (runs["mean"] / "done").unlink()
    code, printed, _ = call("ls", "--json")
    listed = {row["run"]: row for row in json.loads(printed)}
    assert code == 0
    assert [(listed[runs[arm].name]["arm"], listed[runs[arm].name]["state"]) for arm in ("gma", "mean")] == [
        ("GMA", "done"),
        ("mean", "stopped"),
    ]
    assert listed[runs["gma"].name]["name"] == "wide nets"
    assert 0 <= listed[runs["gma"].name]["last10"] <= 100
    assert "wide nets" in call("ls")[1].splitlines()[-1]
    assert call("ls", "--runs", "runs")[1] == call("ls", "runs")[1] == call("ls")[1]


def test_a_damaged_run_does_not_hide_the_others(runs):
    (runs["mean"] / "run.json").write_text("{")
    code, printed, said = call("ls", "--json")
    assert (code, len(json.loads(printed))) == (0, 1)
    assert said.startswith("left out: ")


def test_a_run_is_shown_by_the_first_digits_of_its_id_or_by_its_name(runs):
    write_label(runs["gma"], Label("wide nets", "first try"))
    by_id = json.loads(call("show", runs["gma"].name[:6], "--json")[1])
    by_name = json.loads(call("show", "wide nets", "--json")[1])
    assert by_id == by_name
    assert (by_id["name"], by_id["note"], by_id["rounds"]) == ("wide nets", "first try", "2 of 2")
    assert by_id["settings"]["aggregator"] == "gma"
    assert "aggregator               gma" in call("show", runs["gma"])[1].splitlines()


def test_what_a_terminal_would_obey_is_not_printed(runs):
    head = (runs["gma"] / "run.json").read_text()
    content = {**json.loads(head), "device": "\x1b[2J"}
    (runs["gma"] / "run.json").write_text(
        json.dumps(with_checksum({k: v for k, v in content.items() if k != "checksum"}))
    )
    (runs["gma"] / "done").unlink()
    shutil.rmtree(runs["gma"] / "checkpoints")
    code, printed, _ = call("show", runs["gma"])
    assert code == 0
    assert "\x1b" not in printed
    assert "?[2J" in printed


def test_an_unknown_run_is_one_sentence(runs):
    code, _, said = call("show", "beef0000")
    assert (code, said.count("\n")) == (3, 1)
    assert "no run 'beef0000' in runs" in said


def test_a_word_that_is_too_short_for_an_id_is_said_to_be(runs):
    code, _, said = call("show", runs["gma"].name[:2])
    assert (code, said) == (2, f"fedgma: {runs['gma'].name[:2]!r} is too short for an id; give at least 4 digits\n")


def test_a_model_is_not_exported_into_a_folder_nowhere_or_as_another_format(runs, tmp_path):
    code, _, said = call("export", runs["gma"].name, "--out", tmp_path)
    assert (code, "is a folder; give a file, such as" in said) == (2, True)
    code, _, said = call("export", runs["gma"].name, "--out", "net.pt")
    assert code == 2
    assert "models are written as safetensors; give a file such as 'net.safetensors', got 'net.pt'" in said
    code, _, said = call("export", runs["gma"].name, "--out", "/proc/none/net.safetensors")
    assert (code, said.endswith("give another folder\n")) == (3, True)


def test_a_model_is_exported_for_plain_torch(trained, runs):
    code, _, _ = call("export", runs["gma"].name[:8], "--out", "models/gma.safetensors")
    state = load_file("models/gma.safetensors")
    build("logistic", (5,), 2, seed=1).load_state_dict(state)
    assert code == 0
    assert torch.equal(state["linear.bias"], trained[0].state_dict("gma")["linear.bias"])
    with safe_open("models/gma.safetensors", "pt") as file:
        facts = file.metadata()
    assert (facts["model"], facts["round"], json.loads(facts["classes"])) == ("logistic", "2", ["0", "1"])
    assert json.loads(facts["settings"])["aggregator"] == "gma"


def test_an_exported_model_gives_the_recorded_accuracy_in_plain_torch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("model=logistic", "rounds=1", "seed=0", "aggregator=mean", "client_test_size=0", "evaluate_every=1")
    assert call("run", *words, "--device", "cpu")[0] == 0
    (run,) = read_runs("runs")
    assert call("export", run.folder, "--out", "net.safetensors")[0] == 0
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(28 * 28, 10))
    net.load_state_dict({name.replace("linear", "1"): value for name, value in load_file("net.safetensors").items()})
    with safe_open("net.safetensors", "pt") as file:
        pixels = json.loads(file.metadata()["normalisation"])
    test = load("fmnist-mini").test
    mean, std = (torch.tensor(pixels[name]).reshape(-1, 1, 1) for name in ("mean", "std"))
    guessed = net((torch.from_numpy(test.x) / 255 - mean) / std).argmax(1).numpy()
    assert (guessed == test.y).mean() == pytest.approx(run.rounds[-1]["test"]["accuracy"], abs=1e-3)


def test_a_run_without_a_model_says_how_to_get_one(runs):
    shutil.rmtree(runs["gma"] / "checkpoints")
    code, _, said = call("export", runs["gma"])
    assert code == 3
    assert "kept no model" in said
    assert "--no-state" in said


def test_a_model_that_is_not_the_one_that_the_run_ended_with_is_refused(runs):
    from fedgma.records.checkpoints import read_checkpoint, write_checkpoint

    point = read_checkpoint(runs["gma"] / "checkpoints")
    changed = {**point.state, "params/linear.bias": point.state["params/linear.bias"] + 1}
    write_checkpoint(runs["gma"] / "checkpoints", 2, changed, records=point.records)
    assert call("export", runs["gma"])[0] == 3


def test_a_run_is_deleted_only_where_somebody_agrees(runs, monkeypatch):
    assert call("rm", runs["gma"].name)[0] == 2  # no terminal and no --yes
    monkeypatch.setattr(rm, "at_terminal", lambda: True)
    monkeypatch.setattr(rm.typer, "confirm", lambda question: False)
    assert call("rm", runs["gma"].name)[1] == "nothing was deleted\n"
    assert runs["gma"].exists()
    assert call("rm", runs["gma"].name, "--yes")[1] == f"deleted run {runs['gma'].name}\n"
    assert [path.name for path in runs["mean"].parent.iterdir()] == [runs["mean"].name]


def test_nothing_but_a_run_that_is_not_running_is_deleted(runs):
    (runs["mean"] / "thesis.tex").write_text("mine")
    for folder in ("runs", runs["mean"]):
        code, _, said = call("rm", folder, runs["gma"], "--yes")
        assert (code, said.count("\n")) == (2, 1)
    with FileLock(runs["gma"] / "lock"):
        assert "is running" in call("rm", runs["gma"], "--yes")[2]
    assert (runs["mean"] / "thesis.tex").exists()
    assert runs["gma"].exists()


def test_a_label_changes_nothing_that_is_checked(runs):
    write_label(runs["gma"], Label("a"))
    write_label(runs["gma"], Label(note="b"))
    assert read_label(runs["gma"]) == ("a", "b")
    assert len(make_report("runs").runs) == 2
