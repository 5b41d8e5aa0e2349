"""Reports compare runs of one version of data and model, and take a run that was extended once."""

import json
import re
import textwrap

import numpy as np
import pytest

from commands import call
from fedgma.errors import ConfigError
from fedgma.records.reader import read_runs
from fedgma.reports.pages import write_report
from fedgma.reports.report import make_report
from fedgma.statistics.arms import rows, without_extended
from fedgma.statistics.baseline import against_baseline
from fedgma.statistics.comparisons import compare
from fedgma.statistics.selection import where
from run_folders import write_duel, write_run

OTHER = {"sha256": "ef" * 32}


def test_runs_of_other_data_are_not_paired(tmp_path):
    for seed in range(3):
        write_run(tmp_path, aggregator="mean", seed=seed, dataset="t.npz")
        write_run(tmp_path, aggregator="gma", seed=seed, dataset="t.npz", data=OTHER, lift=20)
    (made,) = against_baseline(read_runs(tmp_path))
    assert made.cells == ()
    assert made.versions == ("the arms used different versions of t.npz",)
    report = make_report(tmp_path)
    assert "nothing can be paired: the arms used different versions of t.npz" in report.verdicts[0]
    assert [row.label for row in report.rows] == [
        {"data_version": "abababab", "aggregator": "mean"},
        {"data_version": "efefefef", "aggregator": "gma"},
    ]


def test_runs_without_a_partner_of_their_version_are_listed_apart(tmp_path):
    write_duel(tmp_path, seeds=3, dataset="t.npz")
    for seed in range(5):
        write_run(tmp_path, aggregator="gma", seed=seed, dataset="t.npz", data=OTHER, lift=20)
    report = make_report(tmp_path)
    (cell,) = report.comparisons[0].cells
    assert cell.seeds == (0, 1, 2)
    assert cell.verdict.mean == pytest.approx(1.2, abs=0.5)  # not the 20 points of other data
    assert "5 runs used another version of t.npz and are listed apart" in report.notes
    (apart,) = [table for table in report.tables if table.name == "apart"]
    assert [row[:3] for row in apart.rows] == [("efefefef", "gma", 5)]
    assert "efefefef" not in str(report.rows)
    assert "no partner" not in " ".join(report.notes)
    page = write_report(report, str(tmp_path / "report")).read_text()
    assert "Other versions of data or model" in page
    assert "5 runs used another version of t.npz" in page


def test_every_version_that_has_both_arms_is_a_cell_of_its_own(tmp_path):
    write_duel(tmp_path, seeds=2, lift=1.0)
    write_duel(tmp_path, seeds=2, lift=5.0, data=OTHER)
    (made,) = against_baseline(read_runs(tmp_path))
    assert [cell.label for cell in made.cells] == [{"data_version": "abababab"}, {"data_version": "efefefef"}]
    assert made.cells[1].verdict.mean - made.cells[0].verdict.mean == pytest.approx(4.0)
    assert made.apart == ()


def test_a_version_is_named_where_a_data_set_has_several_whatever_else_differs(tmp_path):
    write_duel(tmp_path, seeds=2, rounds=6)
    write_run(tmp_path, rounds=3, data=OTHER)
    labels = [row.label for row in make_report(tmp_path).rows]
    assert [(label["rounds"], label["data_version"]) for label in labels] == [
        (3, "efefefef"),
        (6, "abababab"),
        (6, "abababab"),
    ]


def test_runs_whose_data_were_not_recorded_pair_with_their_like_only(tmp_path):
    for folder in [*write_duel(tmp_path, seeds=2), write_run(tmp_path, seed=5)]:
        head = json.loads((folder / "run.json").read_text())
        del head["data"]
        (folder / "run.json").write_text(json.dumps(head))
    write_run(tmp_path, seed=5, aggregator="mean")
    (made,) = against_baseline(read_runs(tmp_path))
    assert [cell.seeds for cell in made.cells] == [(0, 1)]
    assert "unknown" in {row.label.get("data_version") for row in rows(read_runs(tmp_path))}


def test_other_models_and_precisions_are_other_versions_too(tmp_path):
    folders = write_duel(tmp_path, seeds=2, model="m.py:Net")
    for folder, more in zip(folders, [{}, {}, {"model": "b"}, {"precision": "bf16"}], strict=True):
        head = json.loads((folder / "run.json").read_text())
        identity = {"data": "a", "model": "a", "precision": "fp32", **more}
        (folder / "run.json").write_text(json.dumps({**head, "format": 2, "identity": identity}))
    (made,) = against_baseline(read_runs(tmp_path))
    assert made.cells == ()
    (said,) = made.versions
    assert "different versions of model m.py:Net" in said
    assert "different precisions" in said


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        (["dataset=a.npz"], 4),
        (["dataset=a.npz", "gma"], 2),
        (["dataset=a.npz,b.npz", "seed=1"], 4),
        (["algorithm=fedadam"], 4),
        ("aggregator=gma,tau=0.4", 4),
        ([], 8),
    ],
)
def test_filters_take_settings_with_one_value_or_several(tmp_path, filters, count):
    write_duel(tmp_path, seeds=2, rounds=3, dataset="a.npz")
    write_duel(tmp_path, seeds=2, rounds=3, dataset="b.npz", algorithm="fedadam")
    assert len(where(read_runs(tmp_path), filters)) == count
    assert len(make_report(tmp_path, where=filters).runs) == count


def test_a_version_can_be_filtered_by_what_its_label_says(tmp_path):
    write_duel(tmp_path, seeds=2, rounds=3)
    write_duel(tmp_path, seeds=3, rounds=3, data=OTHER)
    assert len(where(read_runs(tmp_path), "data_version=efefefef")) == 6


def test_a_filter_that_nothing_fits_is_refused_with_what_there_is(tmp_path):
    write_run(tmp_path, rounds=3, dataset="a.npz")
    for text, said in (("dataset=b.npz", "the runs have a.npz"), ("datset=a.npz", "did you mean 'dataset'")):
        with pytest.raises(ConfigError, match=said):
            where(read_runs(tmp_path), text)


def test_the_commands_take_filters(tmp_path):
    write_duel(tmp_path / "runs", seeds=2, rounds=3, dataset="a.npz")
    write_duel(tmp_path / "runs", seeds=2, rounds=3, dataset="b.npz", model="cnn")
    code, said, _ = call("report", tmp_path / "runs", "--out", tmp_path / "out", "--where", "dataset=a.npz")
    assert code == 0
    assert "4 of 4 runs finished" in said
    assert "b.npz" not in (tmp_path / "out" / "report.html").read_text()
    made = call("compare", "gma", "mean", "--runs", tmp_path / "runs", "--where", "model=cnn", "--json")[1]
    assert len(json.loads(made)["cells"]) == 1


def test_a_run_that_was_extended_is_replaced_by_the_longer_one(tmp_path):
    write_duel(tmp_path, seeds=2, rounds=6)
    write_duel(tmp_path, seeds=2, rounds=12)
    write_run(tmp_path, seed=7, rounds=6)
    write_run(tmp_path, seed=7, rounds=12, stop=8)  # not finished yet, so the shorter one still stands
    report = make_report(tmp_path)
    assert sorted(run.planned for row in report.rows for run in row.runs) == [6, 12, 12, 12, 12]
    assert [note for note in report.notes if "extended" in note] == [
        "4 runs were extended to more rounds; of these only the longer runs are shown"
    ]
    assert len(report.comparisons[0].cells) == 1
    said = call("compare", "gma", "mean", "--runs", tmp_path)[1]
    assert "4 runs were extended to more rounds and are left out." in said
    assert make_report(tmp_path, where="rounds=6").comparisons[0].cells[0].seeds == (0, 1)


def test_runs_that_are_compared_over_their_rounds_are_not_replaced(tmp_path):
    write_duel(tmp_path, seeds=2, rounds=6)
    write_duel(tmp_path, seeds=2, rounds=12)
    made = call("compare", "rounds=6", "rounds=12", "--runs", tmp_path, "--json")[1]
    assert json.loads(made)["differ"] == ["rounds"]


def test_only_runs_that_differ_in_nothing_but_their_rounds_replace_each_other(tmp_path):
    write_run(tmp_path, rounds=6)
    write_run(tmp_path, rounds=12, tau=0.6)
    write_run(tmp_path, rounds=12, data=OTHER)
    assert without_extended(read_runs(tmp_path))[1] == []


# --- the commands of a user -------------------------------------------------------------------------------------------

TINY = ["partition=iid", "partition.clients=4", "rounds=2", "seed=0,1,2", "client_test_size=0", "mask_every=0"]
NET = """
from torch import nn

def Net(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], {width}), nn.ReLU(), nn.Linear({width}, classes))
"""


def save(path, shift=0.0):
    rng = np.random.default_rng(0)
    y = np.arange(120) % 2
    np.savez(path, x=(rng.normal(size=(120, 4)) + shift * y[:, None]).astype(np.float32), y=y)


def run(*words):
    code, said, error = call("run", "dataset=t.npz", *TINY, *words)
    assert code == 0, error
    return said


def test_the_mean_on_one_file_and_gma_on_another_of_its_name_are_not_compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("t.npz")
    run("model=logistic", "aggregator=mean")
    save("t.npz", shift=5.0)
    run("model=logistic", "aggregator=gma")
    code, said, _ = call("report", "runs")
    assert code == 0
    assert "different versions of t.npz" in said.splitlines()[0]
    assert "ahead" not in said.splitlines()[0]
    code, _, error = call("compare", "gma", "mean")
    assert code == 3
    assert "the arms used different versions of t.npz" in error
    run("model=logistic", "aggregator=mean")  # the partner: now there is one cell, and the first runs stand apart
    said = call("compare", "gma", "mean")[1]
    assert "3 runs used another version of t.npz and are left out." in said
    report = make_report("runs")
    assert [cell.seeds for cell in report.comparisons[0].cells] == [(0, 1, 2)]
    assert "3 runs used another version of t.npz and are listed apart" in report.notes


def test_an_edited_model_is_not_mixed_with_what_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("t.npz")
    for width in (3, 8):
        (tmp_path / "m.py").write_text(textwrap.dedent(NET.format(width=width)))
        run("model=m.py:Net", "aggregator=mean,gma")
    runs = read_runs("runs")
    assert len(runs) == 12
    arms = rows(runs)
    assert [len(arm.runs) for arm in arms] == [3] * 4
    assert all(len({run.head["parameters"] for run in arm.runs}) == 1 for arm in arms)
    report = make_report("runs")
    assert [cell.seeds for cell in report.comparisons[0].cells] == [(0, 1, 2)] * 2
    assert "model_version" in report.comparisons[0].cells[0].label


def numbers(line):
    return re.findall(r"\d+\.\d+", line)


def test_run_and_report_print_the_same_numbers_of_every_arm(tmp_path):
    words = ["aggregator=mean,damped_mean", "algorithm=fedadam", "mask_position=after,before", "seed=0,1", "rounds=2"]
    few = ["model=logistic", "partition.clients=10", "client_test_size=0"]
    code, said, error = call("run", *words, *few, "--out", tmp_path / "runs")
    assert code == 0, error
    ran = {tuple(numbers(line)) for line in said.splitlines() if "±" in line}
    assert len(ran) == 3  # the mean, and the damped mean on either side of the preconditioner
    code, said, error = call("report", tmp_path / "runs", "--out", tmp_path / "out")
    assert code == 0, error
    assert {tuple(numbers(line)) for line in said.splitlines() if "±" in line} == ran
    assert "repeat" not in said
    report = make_report(tmp_path / "runs")
    assert [len(row.runs) for row in report.rows] == [2, 2, 2]
    first, second = (compare(*side, ("a", "b")).cells[0].verdict.mean for side in pairs(report))
    assert [cell.verdict.mean for cell in report.comparisons[0].cells] == pytest.approx([first, second])


def pairs(report):
    """The runs of either damped arm with those of the mean."""
    mean, *damped = [list(row.runs) for row in report.rows]
    return [(arm, mean) for arm in damped]
