"""Writes results/provenance.md: device, precision, versions, commit and command of every exported run.

python tools/write_provenance.py
"""

import json
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgma.reports.tables import Table, markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
LOST = "not recorded"
NOTE = (
    "One row for runs of an experiment that share all of it. Runs are shared: an experiment may take runs that were "
    "made for another. Where the command was not recorded, `fedgma paper run ID --precision PRECISION` makes runs of "
    "the same settings. A commit that is not in the history cannot be checked out; its runs have to be made "
    "again to be reproduced exactly."
)


def rows(known: set[str] | None) -> list[tuple[str | int, ...]]:
    """Every combination with its number of runs; `known` are the commits of the history, None if it is not there."""
    counts: Counter[tuple[str, ...]] = Counter()
    for file in sorted(RESULTS.glob("*/runs.json"), key=lambda file: (file.parent.name[0], int(file.parent.name[1:]))):
        shared = json.loads(file.read_text(encoding="utf-8"))
        for text in (file.parent / "runs.jsonl").read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            facts = {**shared["circumstances"][line["circumstances"]], **line["facts"]}
            counts[file.parent.name, *_facts(facts, known)] += 1
    return [(*row, count) for row, count in counts.items()]


def _facts(facts: Mapping[str, Any], known: set[str] | None) -> tuple[str, ...]:
    versions = facts.get("versions", {})
    commit = str(versions.get("commit", ""))
    lost = known is not None and bool(commit) and not any(one.startswith(commit) for one in known)
    return (
        str(facts.get("device", LOST)),
        str(facts.get("precision", LOST)),
        str(versions.get("fedgma", LOST)),
        str(versions.get("torch", LOST)),
        f"{commit[:12]}{' (not in the history)' if lost else ''}" if commit else LOST,
        str(facts.get("command", LOST)),
        str(facts["started"])[:10] if "started" in facts else LOST,
    )


def history() -> set[str]:
    """Every commit of this repository."""
    asked = ["git", "-C", str(ROOT), "log", "--all", "--format=%H"]
    return set(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split())


def page(known: set[str] | None) -> str:
    """The page as Markdown."""
    header = ("experiment", "device", "precision", "fedgma", "torch", "commit", "command", "day", "runs")
    return (
        "# Provenance of the exported runs\n\n" + markdown(Table("", "Runs", header, tuple(rows(known)), NOTE)) + "\n"
    )


if __name__ == "__main__":
    (RESULTS / "provenance.md").write_text(page(history()), encoding="utf-8")
