"""A user's own rule in experiments: named in the settings or passed in Python, part of a run's identity, resumed."""

import textwrap
from pathlib import Path

import numpy as np
import pytest
from small_runs import SMALL

import fedgma
from fedgma.experiments.grid import expand
from fedgma.experiments.materials import Materials
from fedgma.experiments.own.named import own_name
from fedgma.experiments.plan import grid_of, plan
from fedgma.experiments.settings import Settings
from fedgma.records.reader import read_head
from fedgma.reports.report import in_markdown, make_report
from scripts import load_script

ROOT = Path(__file__).parents[2]
TINY = {**SMALL, "model": "logistic", "rounds": 1, "seed": [0], "client_test_size": 0, "mask_every": 0}
TINY_SETTINGS = Settings(model="logistic", rounds=1)
MINE = """
    FACTOR = {factor}

    class Smooth:
        state = {{"last": 0.0}}

        def __call__(self, mean, positive, negative, last):
            return FACTOR * mean + 0.1 * last, None, {{"last": mean}}

    def plain(mean):
        return mean
"""


def write(folder, factor=0.5):
    file = folder / "mine.py"
    file.write_text(textwrap.dedent(MINE.format(factor=factor)))
    return file


def head_of(run):
    return read_head(run.folder)


def test_a_rule_in_a_file_is_run_labelled_and_known_by_its_code(tmp_path):
    file = write(tmp_path)
    config = {**TINY, "aggregator": ["mean", f"{file}:Smooth"]}
    first = fedgma.run(config, out=tmp_path / "runs")
    mine = next(run for run in first.runs if run.settings["aggregator"] == "mine.py:Smooth")
    assert head_of(mine)["settings"]["aggregator"] == "mine.py:Smooth"
    assert len(head_of(mine)["identity"]["rule"]) == 64
    assert "rule" not in head_of(next(run for run in first.runs if run is not mine))["identity"]
    assert [one.names for one in first.comparisons] == [("mine.py:Smooth", "the mean")]
    assert len(first.comparisons[0].cells) == 1
    file.write_text(file.read_text() + "\n# a comment\n")
    again = fedgma.run(config, out=tmp_path / "runs")
    assert {run.folder for run in again.runs} == {run.folder for run in first.runs}
    write(tmp_path, factor=0.25)
    changed = fedgma.run(config, out=tmp_path / "runs")
    assert len({run.folder for run in (*changed.runs, *first.runs)}) == 3


def test_a_rule_passed_in_python_is_compared_with_the_mean():
    def halved(mean, votes):
        return 0.5 * mean

    outcome = fedgma.run(TINY, aggregator=halved)
    assert [run.settings["aggregator"] for run in outcome.runs] == ["mean", "own:halved"]
    beside = fedgma.run({**TINY, "aggregator": "gma"}, aggregator=halved)
    assert [run.settings["aggregator"] for run in beside.runs] == ["gma", "own:halved"]
    assert [run.settings["aggregator"] for run in fedgma.run(TINY, aggregator=fedgma.median()).runs][1] == "own:median"


def test_rules_of_the_librarys_parts_are_fingerprinted_too():
    def of(rule):
        (planned,) = plan(grid_of(TINY_SETTINGS, own_name(rule)), Materials("cpu", aggregator=rule), None)
        return planned.identity["rule"], planned.notes

    rules = [
        fedgma.keep_norm(fedgma.by_array(fedgma.masked_mean(tau), {"*bias": fedgma.wiener()})) for tau in (0.2, 0.4)
    ]
    assert of(rules[0]) == of(fedgma.keep_norm(fedgma.by_array(fedgma.masked_mean(0.2), {"*bias": fedgma.wiener()})))
    assert of(rules[0])[0] != of(rules[1])[0]
    assert of(rules[0])[1] == ()


def test_the_function_that_gives_the_mean_is_the_mean(tmp_path):
    write(tmp_path)
    outcome = fedgma.run({**TINY, "aggregator": ["mean", f"{tmp_path}/mine.py:plain"], "rounds": 2})
    mean, mine = (run.rounds[-1]["train"] for run in outcome.runs)
    assert mean == mine


def test_state_is_in_the_checkpoint_so_a_longer_run_goes_on_from_a_shorter_one(tmp_path):
    config = {**TINY, "aggregator": f"{write(tmp_path)}:Smooth"}
    whole = fedgma.run({**config, "rounds": 3}, out=tmp_path / "whole").runs[0]
    fedgma.run({**config, "rounds": 2}, out=tmp_path / "parts")
    parts = fedgma.run({**config, "rounds": 3}, out=tmp_path / "parts").runs[0]
    assert "extends" in head_of(parts)
    assert parts.rounds[-1]["train"] == whole.rounds[-1]["train"]


@pytest.mark.parametrize(
    ("aggregator", "sentence"),
    [
        ("gmaa", "aggregator: expected mean, .* or your own as 'file.py:name', got 'gmaa'; did you mean 'gma'?"),
        ("nowhere.py:rule", "aggregator: no file 'nowhere.py'"),
        ("mine.py:missing", "aggregator: mine.py has no 'missing' that can be called"),
        ("no_such_package:rule", "aggregator: 'no_such_package' could not be imported"),
        ("json:nothing", "aggregator: module 'json' has no function or class 'nothing'"),
        ("own:rule", "was passed in Python; pass it again as aggregator="),
    ],
)
def test_a_rule_that_is_not_there_gives_one_sentence(aggregator, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    with pytest.raises(fedgma.ConfigError, match=sentence):
        plan(expand({**TINY, "aggregator": aggregator}), Materials("cpu"), None)


def test_a_report_names_the_rule(tmp_path):
    write(tmp_path)
    fedgma.run({**TINY, "aggregator": ["mean", f"{tmp_path}/mine.py:Smooth"], "seed": [0, 1]}, out=tmp_path / "runs")
    text = in_markdown(make_report(tmp_path / "runs"))
    assert "mine.py:Smooth" in text
    assert "rule_version" not in text


def test_the_example_takes_the_same_step_everywhere(capsys):
    apart = load_script("examples/own_rule.py").main()
    assert {"streamed", "merged bytes", "fleet, CPU", "secure sum"} <= set(apart)
    assert "the same bits" in capsys.readouterr().out
    fedgma.run({**TINY, "aggregator": [f"{ROOT}/examples/own_rule.py:Trust"]})


class Counted:
    """Counts its calls, which it must not find changed by a trial."""

    def __init__(self):
        self.calls = 0

    def __call__(self, mean):
        self.calls += 1
        return mean / self.calls


def test_a_rule_that_mixes_runs_is_refused_before_a_folder_is_made(tmp_path):
    def mixing(mean):
        return mean / abs(mean).max()

    with pytest.raises(fedgma.ConfigError, match="'mixing' mixes runs that train together"):
        fedgma.run(TINY, aggregator=mixing, out=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    fedgma.run(TINY, aggregator=lambda mean: mean / abs(mean).max(-1, keepdims=True))


def test_a_rule_that_draws_or_counts_is_tried_and_left_as_it_is():
    draws = np.random.default_rng(0)
    fedgma.run(TINY, aggregator=lambda mean: mean + 1e-3 * draws.normal(size=mean.shape).astype("float32"))
    counted = Counted()
    fedgma.run(TINY, aggregator=counted)
    assert counted.calls == 2  # one round, two arrays


def test_a_value_of_an_option_is_a_name_in_the_file(tmp_path):
    file, text = (
        tmp_path / "mine.py",
        "from functools import partial\ndef scaled(mean, factor=0.5):\n    return factor * mean\n",
    )
    file.write_text(text + "tenth = partial(scaled, factor=0.1)\nfifth = partial(scaled, factor=0.2)\n")
    names = [f"{file}:{name}" for name in ("scaled", "tenth", "fifth")]
    runs = plan(expand({**TINY, "aggregator": names}), Materials("cpu"), None)
    assert len({run.identity["rule"] for run in runs}) == 3
