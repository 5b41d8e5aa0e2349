"""Runs of other tasks: from a file or in Python, recorded with their metrics, known by their code, compared by them."""

import json
import textwrap

import numpy as np
import pytest

import fedgma
from commands import call
from fedgma.data.files import from_arrays
from fedgma.errors import ConfigError
from fedgma.experiments.grid import expand
from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import plan
from fedgma.records.reader import read_runs
from fedgma.reports.pages import write_report
from fedgma.reports.report import make_report
from scripts import load_script
from task_cases import Reader

SHORT = {"rounds": 2, "evaluate_every": 1, "seed": [0, 1, 2, 3], "client_learning_rate": 0.01}
TASK = """
import torch

class Task:
    better = {"far": "lower", "near": "higher"}
    units = {"far": "EUR", "near": "%"}
    target = "float"

    def loss(self, output, target):
        return (output - target).square().mean(1)

    def metrics(self, output, target):
        apart = (output - target).abs().mean(1)
        return {"far": apart, "near": (apart < 1).float()}
"""


@pytest.fixture
def prices(tmp_path):
    """A folder with data, and with a task in a file."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3)).astype(np.float32)
    np.savez(tmp_path / "prices.npz", x=x, y=x @ [1.0, 2.0, 3.0], client=np.arange(80) % 5)
    (tmp_path / "mine.py").write_text(textwrap.dedent(TASK))
    return tmp_path


def words(folder, *more):
    given = [f"task={folder}/mine.py:Task", f"dataset={folder}/prices.npz", "partition=natural", "clients_per_round=3"]
    return [*given, "model=logistic", "rounds=2", "evaluate_every=1", "seed=0,1,2,3", *more]


def test_a_task_in_a_file_is_run_reported_and_compared(prices):
    code, out, _ = call("run", *words(prices), "--out", str(prices / "runs"))
    assert code == 0
    assert "test far, EUR" in out
    assert "EUR in far" in out
    runs = read_runs(prices / "runs")
    assert [fact["name"] for fact in runs[0].head["metrics"]] == ["far", "near"]
    assert runs[0].settings["task"] == "mine.py:Task"
    assert set(runs[0].rounds[-1]["test"]) == {"loss", "far", "near"}
    page = write_report(make_report(prices / "runs"), prices / "report").read_text()
    assert "Far by round" in page
    assert "Near by round" in page
    assert "lower is better" in page
    assert "accuracy" not in page.lower()
    code, out, _ = call("compare", "gma", "mean", "--runs", str(prices / "runs"), "--of", "near", "--json")
    assert json.loads(out)["score"] == {"name": "near", "better": "higher", "unit": "%"}


def test_a_run_is_known_by_the_code_of_its_task(prices):
    def names(text):
        (prices / "mine.py").write_text(textwrap.dedent(text))
        grid = expand(
            {"task": f"{prices}/mine.py:Task", "dataset": f"{prices}/prices.npz", "model": "logistic", **SHORT}
        )
        return [run.fingerprint for run in plan(grid, Materials("cpu"), None)]

    first = names(TASK)
    assert names(TASK + "# a comment\n") == first
    assert not set(names(TASK.replace("apart < 1", "apart < 2"))) & set(first)
    assert not set(names(TASK.replace('"far": "lower"', '"far": "higher"'))) & set(first)


def test_a_task_of_the_library_has_no_checksum_and_a_classification_leaves_no_trace():
    data = from_arrays(np.zeros((20, 2), np.float32), np.arange(20.0), target="float")
    (run,) = plan(
        expand({"task": "regression", "seed": 0, "aggregator": "gma", "partition": {"clients": 2}}, own=True),
        Materials("cpu", data=data),
        None,
    )
    assert run.recorded["task"] == "regression"
    assert "task" not in run.identity
    (plain,) = plan(expand({"seed": 0, "aggregator": "gma", "model": "logistic"}), Materials("cpu"), None)
    assert "task" not in plain.recorded
    assert plain.metrics == ()
    assert plain.fingerprint == "bff6a71a89a3ca86"  # of before tasks existed


def test_a_task_is_passed_in_python():
    space = {}
    exec(TASK, space)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 2)).astype(np.float32), rng.normal(size=60)
    outcome = fedgma.run({**SHORT, "partition": {"clients": 4}}, data=(x, y), task=space["Task"]())
    assert outcome.runs[0].settings["task"] == "own:Task"
    assert outcome.runs[0].settings["partition.name"] == "iid"
    assert "test far in EUR (lower is better)" in repr(outcome)
    assert outcome.comparisons[0].cells[0].verdict.of == 4


def test_a_users_accuracy_may_have_another_unit(prices, tmp_path):
    text = TASK.replace('"far"', '"accuracy"').replace('"EUR"', '"of 1000"').replace(": apart,", ": 1000 + apart,")
    (prices / "mine.py").write_text(text)
    code, _, _ = call("run", *words(prices, "seed=0"), "--out", str(prices / "runs"))
    assert code == 0
    assert all(run.rounds[-1]["test"]["accuracy"] > 1000 for run in read_runs(prices / "runs"))


def test_text_is_learned_token_by_token(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} short text of {name}. " * 20)
    chosen = {**SHORT, "task": "next_token", "dataset": f"{tmp_path}/", "partition": "natural", "clients_per_round": 2}
    outcome = fedgma.run({**chosen, "sequence_length": 16, "aggregator": "gma", "seed": 0}, model=Reader)
    line = outcome.runs[0].rounds[-1]
    assert line["test"]["perplexity"] == pytest.approx(np.exp(line["test"]["loss"]), rel=1e-5)
    assert line["clients"]["worst_decile"] >= line["clients"]["mean"]  # the worst is the highest
    with pytest.raises(ConfigError, match="next_token needs a model"):
        fedgma.run(chosen)


def test_the_examples_give_a_verdict_on_their_metrics(tmp_path, capsys):
    outcome = load_script("examples/own_task.py").main(samples=160, rounds=2, seeds=1)
    assert any(word in outcome.comparisons[0].text for word in ("ahead by", "behind by", "are equal"))
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"a page on {name}. " * 60)
    outcome = load_script("examples/tokens.py").main(tmp_path, pages=2, windows=4, rounds=1, seeds=1)
    assert "in perplexity" in outcome.comparisons[0].text
    printed = capsys.readouterr().out
    assert "test within in percent" in printed
    assert "The model" in printed


def test_what_does_not_fit_is_refused_with_a_sentence(prices):
    wrong = {
        "needs targets that are numbers": {"task": "regression"},
        "attack: 'label_flip' changes class labels": {
            "task": "regression",
            "dataset": f"{prices}/prices.npz",
            "partition": {"name": "natural"},
            "clients_per_round": 2,
            "attack": "label_flip",
        },
        "label_skew.* has none": {"task": "regression", "dataset": f"{prices}/prices.npz", "partition": "label_skew"},
        "unknown task 'regresion'": {"task": "regresion"},
        "no file 'none.py'": {"task": "none.py:Task"},
        "has no 'Other'": {"task": f"{prices}/mine.py:Other"},
    }
    for sentence, settings in wrong.items():
        with pytest.raises(ConfigError, match=sentence):
            fedgma.run({"rounds": 1, "seed": 0, "model": "logistic", **settings})
