import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedgma as fedgma_package
from commands import call
from run_folders import write_duel, write_run


class Done(NamedTuple):
    """What a command in this process did."""

    returncode: int
    stdout: str
    stderr: str


def fedgma(*arguments, cwd):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        patch.setenv("COLUMNS", "200")
        return Done(*call(*arguments))


def test_report_prints_the_verdict_first_and_says_where_the_page_is(tmp_path):
    write_duel(tmp_path / "runs", rounds=12, seeds=4)
    done = fedgma("report", "--out", "out", cwd=tmp_path)  # of ./runs
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("GMA ahead by")
    assert "page: out/report.html" in done.stdout
    assert (tmp_path / "out" / "report.html").stat().st_size > 50_000


def test_reporting_does_not_import_torch(tmp_path):
    write_duel(tmp_path / "runs", seeds=1, rounds=3)
    code = (
        "import sys; sys.argv = ['fedgma', 'report', 'runs']\nfrom fedgma.cli.app import app\n"
        "app(standalone_mode=False)\nprint('torch' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(fedgma_package.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("report", "nowhere"), 3, "'nowhere' holds no run: no such folder"),
        (("report", "empty"), 3, "no run.json in it or its subfolders"),
        (("report", "half"), 3, "none of the 1 runs has finished (the furthest is at round 4 of 30)"),
        (("report", "runs", "--metric", "worst"), 2, "unknown metric 'worst'; known: best, last10, final"),
        (("report", "runs", "--on", "nothing"), 3, "has no accuracy on 'nothing'"),
        (("report", "runs", "--out", "file/out"), 2, "cannot write to 'file/out'"),
        (("compare", "gma", "median", "--runs", "runs"), 2, "no run has 'median'"),
        (("compare", "gma", "mean"), 0, ""),
        (("compare", "gma", "gma"), 2, "in common; name two arms that share none"),
        (("compare", "gma", "fedavg"), 2, "in common; name two arms that share none"),
        (("power", "gma", "fedavg"), 2, "in common; name two arms that share none"),
        (("compare", "runs", "half"), 3, "half: none of the 1 runs has finished (the furthest is at round 4 of 30)"),
        (("compare", "runs", "other"), 3, "nothing can be paired"),
        (
            ("compare", "lenet", "cnn", "--runs", "late"),
            3,
            ": none of the 2 runs has finished (the furthest is at round 5",
        ),
        (("power", "lenet", "cnn", "--runs", "late"), 3, "none of the 2 runs has finished"),
    ],
)
def test_every_refusal_is_one_sentence_with_its_exit_code(tmp_path, arguments, code, sentence):
    write_duel(tmp_path / "runs", seeds=2, rounds=3)
    write_run(tmp_path / "half", stop=4)
    write_run(tmp_path / "other", rounds=4, seed=9)
    for model in ("lenet", "cnn"):
        write_run(tmp_path / "late", model=model, stop=4 + (model == "cnn"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    done = fedgma(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == (1 if code else 0)


def test_compare_prints_every_setting_with_signs_and_corrected_p(tmp_path):
    for algorithm in ("fedavg", "fedadam"):
        write_duel(tmp_path / "runs", algorithm=algorithm, rounds=12)
    write_run(tmp_path / "runs", seed=5, stop=2)
    done = fedgma("compare", "gma", "mean", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("GMA ahead in 2 of 2 settings")
    assert "The arms differ in aggregator." in lines
    assert "1 runs are unfinished and are left out." in lines
    assert [line.split()[0] for line in lines[-3:]] == ["algorithm", "fedadam", "fedavg"]


def test_an_arm_may_be_named_as_tables_name_it(tmp_path):
    for seed in range(2):
        write_run(tmp_path / "runs", aggregator="mean", seed=seed)
        for tau in (0.2, 0.4):
            write_run(tmp_path / "runs", aggregator="gma", tau=tau, seed=seed, lift=tau)
    done = fedgma("compare", "GMA, tau 0.2", "mean", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["differ"][0] == "aggregator"
    assert len(json.loads(done.stdout)["cells"]) == 1
    said = fedgma("compare", "GMA, tau 0.3", "mean", cwd=tmp_path).stderr
    assert "or an arm as tables name it: 'mean', 'GMA, tau 0.2', 'GMA, tau 0.4'" in said


def test_compare_takes_folders_and_gives_json(tmp_path):
    for seed in range(2):
        write_run(tmp_path / "a", aggregator="gma", seed=seed, lift=1)
        write_run(tmp_path / "b", aggregator="mean", seed=seed)
    done = fedgma("compare", "a", "b", "--json", cwd=tmp_path)
    made = json.loads(done.stdout)
    assert made["names"] == ["a", "b"]
    assert made["cells"][0]["seeds"] == [0, 1]
    one = fedgma("compare", "a/" + os.listdir(tmp_path / "a")[0], "b", "--json", cwd=tmp_path)
    assert json.loads(one.stdout)["cells"][0]["verdict"]["low"] is None


words = st.sampled_from(
    ["gma", "mean", "tau=0.4", "runs", "--json", "--metric", "best", "--on", "test", "--runs", "=", ","]
)


@pytest.fixture(scope="module")
def duel(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    write_duel(out, seeds=1, rounds=2)
    return out


@settings(max_examples=150)
@given(arguments=st.lists(words | st.text(max_size=5), max_size=6))
def test_no_list_of_arguments_ends_in_a_traceback(duel, arguments):
    code, _, said = call("compare", "--runs", duel, *arguments)
    assert code in (0, 2, 3), said
    assert "Traceback" not in said
