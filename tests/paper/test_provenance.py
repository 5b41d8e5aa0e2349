"""Where the exported runs come from: every one is accounted for, and what was not recorded is said to be lost."""

import json
import re
from pathlib import Path

import pytest

from scripts import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    return load_script("tools/write_provenance.py")


def test_the_page_lists_every_exported_run(tool):
    written = (ROOT / "results" / "provenance.md").read_text(encoding="utf-8")
    assert written.replace(" (not in the history)", "") == tool.page(None)
    runs = sum(len(file.read_text().splitlines()) for file in (ROOT / "results").glob("*/runs.jsonl"))
    assert sum(int(line.rsplit("|", 2)[1]) for line in written.splitlines() if re.match(r"\| [CE]\d", line)) == runs


def test_a_lost_commit_is_said_to_be_lost(tool):
    facts = {"device": "cpu", "versions": {"fedgma": "0.1.0", "commit": "ab" * 20}}
    assert tool._facts(facts, {"ab" * 20})[4] == "abababababab"
    assert tool._facts(facts, set())[4] == "abababababab (not in the history)"
    assert tool._facts({"versions": {"commit": "abab"}}, {"ab" * 20})[4] == "abab"  # the first digits of one
    assert tool._facts({}, set()) == ("not recorded",) * 7
    assert tool._facts({"command": "fedgma paper run C8"}, set())[5] == "fedgma paper run C8"


def test_runs_of_a_cpu_are_not_credited_to_a_gpu():
    """The notes of an experiment name every device, with its number of runs."""
    report = (ROOT / "results" / "E1" / "report.md").read_text(encoding="utf-8")
    shared = json.loads((ROOT / "results" / "E1" / "runs.json").read_text())
    for one in shared["circumstances"]:
        assert f"on {one['device']} in {one['precision']}" in report
    assert "96 runs took" in report
