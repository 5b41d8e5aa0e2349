"""`fedgma paper compare` and `results`: compare runs with the paper's numbers, and export them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgma.cli.report import report_object, say_report
from fedgma.cli.runs import Json

if TYPE_CHECKING:
    from fedgma.paper.catalogue import Experiment
    from fedgma.paper.findings import Finding

RUNS = Path("runs/paper")
Cells = Annotated[str, typer.Option(help="Only these cells, e.g. 'dataset=mnist|fmnist,tau=0.4'.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="A quick trial: use the embedded images in place of the data sets.")
]
Unfinished = Annotated[
    float,
    typer.Option(
        "--unfinished",
        min=0.0,
        max=1.0,
        help="Also use stopped runs that completed at least this share of their rounds.",
    ),
]
Rates = Annotated[Path | None, typer.Option(help="File of learning rates (default: the one in the package).")]


def compare(
    name: Annotated[str, typer.Argument(metavar="ID", help="E1 to E18, or 'Table 2'.")],
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders, or exported results.")] = None,
    cells: Cells = "",
    quick: Quick = False,
    statistic: Annotated[str, typer.Option(help="The accuracy that verdicts are about: last10, best or final.")] = (
        "last10"
    ),
    out: Annotated[Path | None, typer.Option(help="Folder for page, tables and figures (default: report/ID).")] = None,
    rates: Rates = None,
    unfinished_from: Unfinished = 1.0,
    as_json: Json = False,
) -> None:
    """Compare runs with the numbers printed in the paper, cell by cell and claim by claim."""
    from fedgma.errors import ConfigError, DataError
    from fedgma.paper.catalogue import experiment as look_up
    from fedgma.paper.compare import compare as compare_runs
    from fedgma.paper.entries import read_entries
    from fedgma.paper.plans import Cut, check_cells
    from fedgma.paper.rates import read_chosen
    from fedgma.paper.results import findings_of, write_comparison
    from fedgma.statistics.arms import Summary

    experiment, paths = look_up(name), runs or [RUNS]
    if statistic not in Summary._fields:
        raise ConfigError(f"unknown statistic {statistic!r}; known: {', '.join(Summary._fields)}")
    findings = findings_of(experiment, paths)
    if not experiment.parts:
        _say_analysis(experiment, paths, findings, as_json=as_json)
        return
    cut = Cut(cells=cells, quick=quick)
    chosen = read_chosen(rates)
    check_cells(experiment, chosen, cut)
    entries, unfinished = read_entries(paths, unfinished_from)
    made = compare_runs(experiment, entries, chosen, cut, unfinished=unfinished, statistic=statistic)
    if not made.entries:
        tried = not quick and compare_runs(experiment, entries, chosen, Cut(quick=True), statistic=statistic).entries
        todo = "add --quick to see the quick trial that is there" if tried else f"run: fedgma paper run {experiment.id}"
        raise DataError(f"no finished run of {experiment.id} in {', '.join(map(str, paths))}; {todo}")
    folder = Path("report") / experiment.id if out is None else out
    report = write_comparison(made, folder, findings=findings)
    if as_json:
        typer.echo(json.dumps({**report_object(report), "page": str(folder / "report.html")}))
        return
    say_report(report)
    typer.echo(f"\npage: {folder / 'report.html'}\ntables and figures: {folder}")


def _say_analysis(experiment: "Experiment", paths: list[Path], findings: "list[Finding]", *, as_json: bool) -> None:
    """Print the claims and all findings of an experiment that has an analysis but no runs."""
    from fedgma.errors import DataError
    from fedgma.paper.claims import look_at
    from fedgma.paper.compare import compare as compare_runs
    from fedgma.paper.rates import Chosen
    from fedgma.paper.results import find_analysis

    folder = find_analysis(experiment, paths)
    if folder is None:
        raise DataError(
            f"no analysis of {experiment.id} in {', '.join(map(str, paths))}; run: fedgma paper run {experiment.id}"
        )
    answers = look_at(compare_runs(experiment, [], Chosen()), findings)
    if as_json:
        verdicts = [f"{answer.claim.text}: {answer.verdict}" for answer in answers]
        notes = [finding.text for finding in findings]
        typer.echo(json.dumps({"verdicts": verdicts, "notes": notes, "folder": str(folder)}))
        return
    for answer in answers:
        typer.echo(f"{answer.claim.text}: {answer.verdict}.")
    for finding in findings:
        typer.echo(f"- {finding.text}")
    typer.echo(f"\ntables and figures: {folder}")


def results(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, folders that hold them, or earlier exports.")],
    out: Annotated[Path, typer.Option(help="Folder for the export.")] = Path("results"),
    only: Annotated[list[str] | None, typer.Option(help="Only these experiments.")] = None,
    rates: Rates = None,
    unfinished_from: Unfinished = 1.0,
) -> None:
    """Export runs with tables and figures, together with what the folder already holds: nothing in it is lost.

    Rounds are thinned: the export is small, and can be compared and exported again, alone or beside run folders.
    """
    from fedgma.paper.catalogue import catalogue
    from fedgma.paper.catalogue import experiment as look_up
    from fedgma.paper.entries import merged, read_entries
    from fedgma.paper.rates import read_chosen
    from fedgma.paper.results import export, export_analysis, findings_of

    entries, unfinished = read_entries(runs, unfinished_from)
    entries, chosen = merged(entries), read_chosen(rates)
    for experiment in [look_up(name) for name in only] if only else catalogue().values():
        analysed = export_analysis(experiment, runs, out)  # first, because it overwrites an older report in that folder
        count = export(experiment, entries, chosen, out, findings=findings_of(experiment, runs))
        if count or analysed:
            typer.echo(
                f"{experiment.id}: {count} runs{' and the analysis' if analysed else ''} in {out / experiment.id}"
            )
    if unfinished:
        typer.echo(f"{unfinished} unfinished runs were left out")
