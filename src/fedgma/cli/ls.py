"""`fedgma ls`: the runs in a folder, with their names, states and scores."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgma.cli.runs import Json

if TYPE_CHECKING:
    from fedgma.records.reader import Run
    from fedgma.reports.tables import Table


def ls(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Folders of run folders (default: runs).")
    ] = None,
    runs: Annotated[list[Path] | None, typer.Option("--runs", help="The same, as other commands name it.")] = None,
    as_json: Json = False,
) -> None:
    """List runs: id, name, arm, seed, rounds, state, and the test score (accuracy in %) of the last ten rounds.

    Below them it says how to go on with runs that have stopped.
    """
    from fedgma.cli.tables import say_runs

    table, damaged = table_of([*(folders or []), *(runs or [])] or [Path("runs")])
    say_runs(table, as_json=as_json)
    for error in damaged:
        typer.echo(f"left out: {error}", err=True)


def table_of(folders: list[Path]) -> "tuple[Table, list[str]]":
    """The runs as a table, and what is wrong with those that cannot be read."""
    from fedgma.errors import DataError
    from fedgma.records.reader import read_run, run_folders
    from fedgma.reports.tables import Table
    from fedgma.statistics.arms import grouped

    runs, damaged = [], []
    for folder in run_folders(folders):
        try:
            runs.append(read_run(folder))
        except DataError as error:
            damaged.append(str(error))
    header = ("run", "name", "arm", "seed", "rounds", "state", "last10", "started", "advice")
    rows = [_row(run, row.name) for row in grouped(runs) for run in sorted(row.runs, key=lambda run: run.seed)]
    return Table("runs", "", header, tuple(rows)), damaged


def _row(run: "Run", arm: str) -> tuple[Any, ...]:
    from fedgma.records.label import read_label
    from fedgma.records.state import state_of
    from fedgma.reports.unfinished import advice
    from fedgma.statistics.arms import summary_of

    summary = summary_of(run)
    rounds = str(run.planned) if run.finished else f"{len(run.rounds)} of {run.planned}"
    last10 = None if summary is None else summary.last10
    started = str(run.head.get("started", ""))[:16].replace("T", " ")
    started = f"{started}Z" if started else ""  # as recorded, in UTC
    state, name = state_of(run.folder), read_label(run.folder).name
    say = advice(run.folder, state, run.head)
    return run.folder.name, name, arm, run.seed, rounds, state, last10, started, say
