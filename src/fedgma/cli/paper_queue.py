"""`fedgma paper queue`: what is left of the planned runs, in their order."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgma.cli.paper_compare import RUNS, Rates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedgma.paper.queue import Left

RESULTS = Path("results")


def queue(
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]...", help="Only these plans (default: all that are queued).")
    ] = None,
    runs: Annotated[
        list[Path] | None,
        typer.Option(help="Run folders or exported results; repeat it for several (default: results and runs/paper)."),
    ] = None,
    rates: Rates = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
) -> None:
    """Show planned runs in order: how many are done, and the samples and minutes of a GPU that are left.

    A run is done if it has the planned settings, rounds included, wherever it was made, and is not outdated.
    """
    from fedgma.errors import DataError
    from fedgma.paper.catalogue import catalogue, experiment
    from fedgma.paper.entries import merged, read_entries
    from fedgma.paper.queue import Job, outlook, read_queue
    from fedgma.paper.rates import read_chosen

    paths = runs or [path for path in (RESULTS, RUNS) if path.is_dir()]
    if missing := [str(path) for path in paths if not path.is_dir()]:
        raise DataError(f"no such folder: {', '.join(missing)}")
    entries, unfinished = read_entries(paths)
    only = {experiment(name).id for name in ids or ()}
    queued = read_queue()
    jobs = [job for job in queued if not only or job.id in only]
    others = [Job(name, "") for name, planned in catalogue().items() if planned.parts and (not only or name in only)]
    others = [job for job in others if job.id not in {listed.id for listed in queued}]
    left = outlook([*jobs, *others], merged(entries), read_chosen(rates))
    first, rest = left[: len(jobs)], left[len(jobs) :]
    exports = [str(path) for path in paths if any(path.rglob("runs.jsonl"))]
    if as_json:
        typer.echo(json.dumps(_document(first, rest, unfinished, exports), indent=1))
    else:
        _say(first, rest, unfinished, exports)


def _document(
    queued: "Sequence[Left]", others: "Sequence[Left]", unfinished: int, exports: "Sequence[str]"
) -> dict[str, Any]:
    known = [entry.seconds for entry in queued if entry.seconds is not None]
    total = {
        "planned": sum(entry.planned - entry.earlier for entry in queued),
        "done": sum(entry.done for entry in queued),
        "runs_left": sum(entry.runs for entry in queued),
        "samples_left": sum(entry.samples for entry in queued),
        "gpu_minutes": round(sum(known) / 60, 1),
        "without_rate": sum(entry.runs > 0 and entry.seconds is None for entry in queued),
    }
    lists = {"queue": queued, "not_queued": others}
    rows = {name: [_row(entry, exports) for entry in listed] for name, listed in lists.items()}
    return {**rows, "total": total, "unfinished": unfinished}


def _row(left: "Left", exports: "Sequence[str]") -> dict[str, Any]:
    return {
        "id": left.job.id,
        "cells": left.job.cells,
        "why": left.job.why,
        "planned": left.planned,
        "done": left.done,
        "outdated": dict(left.outdated),
        "made_by_earlier_jobs": left.earlier,
        "runs_left": left.runs,
        "samples_left": left.samples,
        "samples_per_second": None if left.rate is None else round(left.rate),
        "gpu_minutes": None if left.seconds is None else round(left.seconds / 60, 1),
        "rates_missing": list(left.unsearched),
        "command": left.job.command(exports),
    }


def _say(queued: "Sequence[Left]", others: "Sequence[Left]", unfinished: int, exports: "Sequence[str]") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, header_style="bold")
    table.add_column("id")
    for name in ("step", "planned", "done", "left", "M samples", "k/s", "GPU min"):
        table.add_column(name, justify="right", no_wrap=True)
    for step, entry in enumerate(queued, 1):
        table.add_row(entry.job.id, str(step), *_numbers(entry))
    total = _document(queued, (), 0, exports)["total"]
    counts = [f"{total[name]:,}" for name in ("planned", "done", "runs_left")]
    table.add_row("total", "", *counts, f"{total['samples_left'] / 1e6:,.0f}", "", f"{total['gpu_minutes']:,.0f}")
    console.print(table)
    reasons = [f"step {step}, {entry.job.id}: {_reason(entry)}" for step, entry in enumerate(queued, 1)]
    for line in (*reasons, *_notes(queued, others, unfinished, exports)):
        console.print(line, soft_wrap=True, markup=False)


def _numbers(left: "Left") -> tuple[str, ...]:
    rate = "" if left.rate is None else f"{left.rate / 1e3:,.0f}"
    minutes = ("?" if left.runs else "0") if left.seconds is None else f"{left.seconds / 60:,.1f}"
    return f"{left.planned:,}", f"{left.done:,}", f"{left.runs:,}", f"{left.samples / 1e6:,.0f}", rate, minutes


def _reason(left: "Left") -> str:
    """Why a job is in the queue, its cells, and the rates that it waits for."""
    from fedgma.paper.catalogue import experiment

    cells = f" (cells {left.job.cells})" if left.job.cells else ""
    needed = f"; needs the rates of {experiment(left.job.id).search}" if left.unsearched and left.runs else ""
    return f"{left.job.why}{cells}{needed}"


def _notes(
    queued: "Sequence[Left]", others: "Sequence[Left]", unfinished: int, exports: "Sequence[str]"
) -> "Sequence[str]":
    """What the table does not say: runs to be made again, what is not queued, the next command."""
    notes = [
        f"{entry.job.id}: {count} runs have to be made again: {why}"
        for entry in queued
        for why, count in entry.outdated.items()
    ]
    notes += [
        f"{entry.job.id}: the runs that have to be made again are in {', '.join(sorted(entry.precisions))}, not in "
        f"{entry.job.precision}; runs in another precision would not pair with the other arms"
        for entry in queued
        if entry.precisions - {entry.job.precision}
    ]
    if unfinished:
        notes.append(f"{unfinished} unfinished runs count as missing; where their folders are, they are resumed")
    parts = [f"{entry.job.id} {entry.done} of {entry.planned}" for entry in others if entry.done < entry.planned]
    notes += [f"not queued: {', '.join(parts)} runs done"] if parts else []
    ready = next((entry for entry in queued if entry.runs and not entry.unsearched), None)
    return [*notes, f"next: {ready.job.command(exports)}"] if ready else notes
