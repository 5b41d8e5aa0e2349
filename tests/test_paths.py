"""A path may be a text wherever a user gives one."""

import numpy as np
import pytest

import fedgma
from fedgma.data.files import load, load_npz, load_own
from fedgma.data.files.own.text import load_text
from fedgma.experiments.grid import read_grid
from fedgma.records.reader import read_run, read_runs
from fedgma.records.trained import read_model, write_model
from fedgma.reports import trackers
from fedgma.reports.pages import write_report
from fedgma.reports.report import make_report, write_tables
from run_folders import write_duel


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_folders_and_reports_take_texts(folder, monkeypatch):
    first, *_ = write_duel(folder / "runs", seeds=1, rounds=2)
    assert read_runs("runs") == read_runs(["runs"]) == read_runs([folder / "runs"])
    assert read_run(str(first)).folder == first
    monkeypatch.setattr("fedgma.reports.pages.make_pictures", lambda *asked: [])
    made = make_report("runs")
    assert write_report(made, "page").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert (folder / "page" / "report.md") in [folder / path for path in write_tables(made, "page")]


def test_trackers_take_texts(folder, monkeypatch):
    pytest.importorskip("tensorboard")
    write_duel(folder / "runs", seeds=1, rounds=2)
    assert trackers.to_tensorboard(read_runs("runs"), "events")


def test_data_settings_and_models_take_texts(folder):
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    np.savez(folder / "mine.npz", x=x, y=(x[:, 0] > 0).astype(int))
    (folder / "mine.txt").write_text("a short text, long enough for a few windows of tokens " * 9)
    sums = {data.source.sha256 for data in (load_npz("mine.npz"), load_own("mine.npz"), load(folder / "mine.npz"))}
    assert sums == {load("mine.npz").source.sha256}
    assert len(load_text("mine.txt", length=8).train.y)
    lines = ['dataset = "mine.npz"', 'model = "logistic"', "rounds = 1", "seed = 0", "client_test_size = 0"]
    (folder / "mine.toml").write_text("\n".join([*lines, "partition = { clients = 4 }"]))
    assert read_grid("mine.toml") == read_grid(folder / "mine.toml")
    outcome = fedgma.run("mine.toml", out="runs")
    model = read_model(str(outcome.runs[0].folder))
    assert write_model(model, "net.safetensors").is_file()
