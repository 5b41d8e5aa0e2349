"""`fedgma show`: everything that a run folder says about its run."""

import json
import shlex
from pathlib import Path
from typing import Any

import typer

from fedgma.cli.runs import Folders, Json, Run, folders_of


def show(run: Run, runs: Folders = None, as_json: Json = False) -> None:
    """Show a run: name and note, state, scores, settings, data, software, and whether its model was kept."""
    from fedgma.records.lookup import find_run
    from fedgma.reports.tables import printable

    facts = facts_of(find_run(run, folders_of(runs)))
    if as_json:
        typer.echo(json.dumps(facts))
        return
    for name, value in _lines(facts):
        typer.echo(printable(f"{name:24s} {value}".rstrip()))


def facts_of(folder: Path) -> dict[str, Any]:
    """What is known about a run, as a JSON object."""
    from fedgma.records.checkpoints import checkpoint_rounds
    from fedgma.records.label import read_label
    from fedgma.records.reader import read_run
    from fedgma.records.state import state_of
    from fedgma.reports.unfinished import advice
    from fedgma.statistics.arms import summary_of
    from fedgma.statistics.metrics import metrics_of

    run = read_run(folder)
    summary = summary_of(run)
    head: dict[str, Any] = dict(run.head)
    kept, state = checkpoint_rounds(folder / "checkpoints"), state_of(folder)
    return {
        "run": folder.name,
        "folder": str(folder),
        **read_label(folder)._asdict(),
        "state": state,
        "advice": advice(folder, state, head),
        "rounds": f"{len(run.rounds)} of {run.planned}",
        "model": f"of round {kept[-1]}: fedgma export {shlex.quote(str(folder))}" if kept else "not kept",
        "metric": metrics_of(run)[0].in_words,
        "scores": {} if summary is None else summary._asdict(),
        "size": sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
        **{name: head[name] for name in ("started", "device", "versions", "precision", "parameters") if name in head},
        "data": _without_counts(head.get("data")),
        "settings": {name: value for name, value in run.settings.items() if value is not None},
    }


def _without_counts(data: Any) -> Any:
    """What is recorded about the data, without the long table of samples by client and class."""
    return {name: value for name, value in data.items() if name != "counts"} if isinstance(data, dict) else data


def _lines(facts: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Nested facts as lines; what is empty is left out."""
    from fedgma.reports.tables import value_text
    from fedgma.statistics.labels import plain

    lines: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines += _lines(value, f"{name}: " if name != "settings" else "")
        elif value not in ("", None):
            lines.append((f"{before}{name}", value_text(value) if before == "scores: " else plain(value)))
    return lines
