"""Run folders from strangers: a report is text, whatever they hold, and spreadsheets find no formulas."""

import csv
import io
import json

import pytest

from commands import call
from fedgma.records.reader import read_runs
from fedgma.reports.pages import SCRIPT
from fedgma.reports.pictures import _class_counts
from fedgma.reports.tables import Table, comma_separated
from run_folders import write_run

FORMULAS = ["=1+1", "+1+1", "-2+cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", " =1", "\r\n=1", "＝1", "\ufeff=1"]
NUMBERS = ["-1", "+1", "-0.5", "-1e-05", "+.5"]


def cells(text):
    return [cell for line in csv.reader(io.StringIO(text)) for cell in line]


@pytest.mark.parametrize("formula", FORMULAS)
def test_no_cell_of_a_csv_file_is_a_formula(formula):
    written = cells(comma_separated(Table("t", "", (formula, "n"), ((formula, -0.5),))))
    assert [cell[0] for cell in (written[0], written[2])] == ["'", "'"]
    assert written[3] == "-0.5"


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_stay_numbers(number):
    assert cells(comma_separated(Table("t", "", ("n",), ((number,), (float(number),)))))[1:] == [
        number,
        repr(float(number)),
    ]


def hostile(change, out):
    """Two arms with a change in each: `change(head, lines)`."""
    for aggregator in ("mean", "gma"):
        folder = write_run(out, rounds=2, aggregator=aggregator)
        head = json.loads((folder / "run.json").read_text())
        lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        change(head, lines)
        (folder / "run.json").write_text(json.dumps(head))
        (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


SCRIPTS = [
    "<script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    "\\input{/etc/passwd}",
    "../../../escape",
    "=1",
]


def in_settings(head, lines):
    head["settings"].update({text: text for text in SCRIPTS}, model=SCRIPTS[0], dataset=SCRIPTS[1])


def in_rounds(head, lines):
    for line in lines:
        line.update({text: {"accuracy": 0.5} for text in SCRIPTS})


def beyond_floats(head, lines):
    head["settings"].update(tau=10**400, momentum=-(10**400))
    lines[0].update(ood={"accuracy": 0.5, "loss": 10**400})


@pytest.mark.parametrize("change", [in_settings, in_rounds, beyond_floats])
def test_a_hostile_run_folder_is_text_or_one_sentence(tmp_path, change):
    hostile(change, tmp_path / "runs")
    before = set(tmp_path.rglob("*"))
    code, _, said = call("report", tmp_path / "runs", "--out", tmp_path / "out")
    assert code == 0, said
    assert all(path.is_relative_to(tmp_path / "out") for path in set(tmp_path.rglob("*")) - before)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8").replace(SCRIPT, "").lower()
    assert page.count("<script") == page.count("<script></script>") == 1  # the page's own
    assert "<img" not in page
    assert "\\input{" not in "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "out").rglob("*.tex"))
    for path in (tmp_path / "out").rglob("*.csv"):
        assert not [
            cell for cell in cells(path.read_text(encoding="utf-8")) if cell.strip().startswith(("=", "+", "@"))
        ]


@pytest.mark.parametrize("counts", [[[10**400, 1], [2, 3]], [[-1, 2]], [["=1", "b"]], [[1], [1, 2]], [[]], 3, {"a": 1}])
def test_a_partition_that_cannot_be_is_not_drawn(tmp_path, counts):
    def change(head, lines):
        head["data"].update(counts=counts, classes=counts)
        head["settings"]["partition"] = {"name": "dirichlet", "clients": 10**9, "alpha": 1.0, "min_size": 0, "seed": 0}

    hostile(change, tmp_path)
    assert _class_counts(read_runs(tmp_path)[0]) is None
