"""`fedgma report`: tables, pictures and a page from run folders. `fedgma compare`: two arms, paired by seed."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgma.cli.play import Quiet
from fedgma.cli.runs import Json

if TYPE_CHECKING:
    from fedgma.records.reader import Run
    from fedgma.reports.report import Report
    from fedgma.statistics.comparisons import Comparison

Metric = Annotated[str, typer.Option(help="The statistic of a run to compare: best, last10 or final.")]
Of = Annotated[
    str | None, typer.Option("--of", help="What is scored: loss, or a metric of the task (default: its first)")
]
Split = Annotated[str, typer.Option("--on", help="The split to compare on: test, or another that was evaluated.")]
Where = Annotated[
    list[str] | None,
    typer.Option("--where", help="Only runs with this setting: dataset=t.npz, or model=lenet,cnn; may be repeated."),
]

Target = Annotated[
    list[float] | None,
    typer.Option(
        "--target",
        help="A score (shares in percent): report the rounds and the time that runs take to reach it; may be repeated.",
    ),
]


def report(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders that hold them (default: runs).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page, the tables and the pictures.")] = Path("report"),
    metric: Metric = "last10",
    split: Split = "test",
    where: Where = None,
    of: Of = None,
    target: Target = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write tables, pictures and one self-contained page about finished runs, and print the verdicts."""
    from fedgma.errors import ConfigError
    from fedgma.reports.pages import write_report
    from fedgma.reports.report import make_report

    made = make_report(
        runs or [Path("runs")], metric=metric, split=split, where=where or (), of=of, targets=target or ()
    )
    try:
        page = write_report(made, out)
    except OSError as error:
        raise ConfigError(f"cannot write to {str(out)!r}: {error.strerror or error}") from None
    if as_json:
        typer.echo(json.dumps({**report_object(made), "page": str(page)}))
    elif not quiet:
        say_report(made)
        typer.echo(f"\npage: {page}\ntables and pictures: {out}")


def say_report(made: "Report") -> None:
    """Print verdicts, notes and tables of a report as plain text."""
    from fedgma.reports.tables import text

    for line in [*made.verdicts, *made.notes]:
        typer.echo(f"{line}.")
    for table in made.tables:
        typer.echo(f"\n{table.title}\n{text(table)}")


def report_object(made: "Report") -> dict[str, object]:
    """A report as a JSON object: verdicts, notes, and the rows of every table."""
    from fedgma.cli.tables import objects

    tables = {table.name: objects(table) for table in made.tables}
    return {"title": made.title, "verdicts": list(made.verdicts), "notes": list(made.notes), "tables": tables}


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A folder, or an arm: gma, or aggregator=gma,tau=0.4.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The arm to compare it with.")],
    runs: Annotated[
        list[Path] | None, typer.Option("--runs", help="Folders to search for the runs of an arm (default: runs).")
    ] = None,
    metric: Metric = "last10",
    split: Split = "test",
    where: Where = None,
    of: Of = None,
    as_json: Json = False,
) -> None:
    """Compare two arms, paired by seed and settings: difference, 95 % CI, and p values corrected for all settings."""
    from fedgma.errors import DataError
    from fedgma.reports.result_tables import differences_table
    from fedgma.reports.tables import text
    from fedgma.statistics import comparisons
    from fedgma.statistics.arms import without_extended
    from fedgma.statistics.selection import finished_of

    sides = [side(name, runs or [Path("runs")], where or []) for name in (first, second)]
    (ours, ours_fixed), (theirs, theirs_fixed) = sides
    check_disjoint(ours, theirs)
    names = (_name(first, second), _name(second, first))
    finished_of([*ours, *theirs])
    for arm, one in zip(names, (ours, theirs), strict=True):
        finished_of(one, arm)
    apart = [*ours_fixed, *theirs_fixed]
    extended = 0
    if "rounds" not in apart:
        (ours, shorter), (theirs, also) = without_extended(ours), without_extended(theirs)
        extended = len(shorter) + len(also)
    made = comparisons.compare(ours, theirs, names, metric=metric, split=split, apart=apart, of=of)
    if not made.cells:
        free = ", ".join(dict.fromkeys(apart)) or "the arm"
        raise DataError(f"{names[0]} and {names[1]}: {made.text}; they have to agree in all but {free}")
    if as_json:
        typer.echo(json.dumps(_plain(made), indent=1))
        return
    typer.echo(f"{made.text}.\nThe arms differ in {', '.join(made.differ) or 'nothing that was set'}.")
    left = (
        (made.alone, "finished runs have no partner"),
        (_late([*ours, *theirs]), "runs are unfinished"),
        (extended, "runs were extended to more rounds"),
    )
    for count, what in left:
        if count:
            typer.echo(f"{count} {what} and are left out.")
    for words in made.versions:
        typer.echo(f"{words} and are left out.")
    typer.echo(f"\n{text(differences_table(made))}")


def side(name: str, runs: list[Path], filters: list[str]) -> "tuple[list[Run], list[str]]":
    """The runs of an arm and the settings that its name gives: all of a folder, or those in `runs` that match."""
    from fedgma.records.reader import read_runs
    from fedgma.statistics.selection import select_arm, where

    if Path(name).is_dir():
        return where(read_runs([Path(name)]), filters), []
    return select_arm(where(read_runs(runs), filters), name)


def check_disjoint(first: "list[Run]", second: "list[Run]") -> None:
    """Refuse two arms that share runs: a run does not differ from itself."""
    from fedgma.errors import ConfigError
    from fedgma.statistics.labels import counted

    if shared := {run.folder for run in first} & {run.folder for run in second}:
        raise ConfigError(f"both arms hold {counted(len(shared), 'run')} in common; name two arms that share none")


def _name(arm: str, other: str) -> str:
    """The name of an arm in a sentence: of a folder its last part, unless both folders have the same."""
    from fedgma.statistics.labels import in_sentence

    last = Path(arm).name if Path(arm).is_dir() and Path(arm).name != Path(other).name else arm
    return in_sentence(last)


def _late(runs: "list[Run]") -> int:
    return sum(not run.finished for run in runs)


def _plain(made: "Comparison") -> dict[str, object]:
    """The comparison as a JSON object."""
    from fedgma.statistics.metrics import is_lost
    from fedgma.statistics.verdicts import as_object

    cells = [
        {
            **cell._asdict(),
            "differences": [None if is_lost(value) else value for value in cell.differences],
            "verdict": as_object(cell.verdict),
            "best": as_object(cell.best),
            "settled": None if cell.settled is None else as_object(cell.settled),
            "convergence": {**cell.convergence._asdict(), "converged": cell.convergence.converged},
        }
        for cell in made.cells
    ]
    apart = [run.folder.name for run in made.apart]
    overall = None if made.overall is None else as_object(made.overall)
    score = made.score._asdict()
    return {"text": made.text, **made._asdict(), "cells": cells, "overall": overall, "apart": apart, "score": score}
