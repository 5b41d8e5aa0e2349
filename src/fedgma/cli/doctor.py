"""`fedgma doctor`: check packages, device, data and (on request) speed of this machine, with advice."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedgma.experiments.doctor import Finding
    from fedgma.reports.tables import Table


def doctor(
    out: Annotated[Path, typer.Option(help="Where runs would be written.")] = Path("runs"),
    seconds: Annotated[
        float, typer.Option(min=0.0, help="Also train for so many seconds, to measure the speed.")
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list and nothing else.")] = False,
) -> None:
    """Check this machine and print advice for each problem. The exit code is 2 if runs cannot be trained here."""
    from fedgma.cli.tables import say_table
    from fedgma.experiments.doctor import examine, measure_speed

    findings = list(examine(out))
    broken = any(finding.must and finding.advice for finding in findings)
    if seconds > 0 and not broken:
        findings.append(measure_speed(seconds))
    if as_json:
        typer.echo(json.dumps([finding._asdict() for finding in findings]))
    else:
        say_table(_table(findings))
    if broken:
        raise typer.Exit(2)


def _table(findings: "Sequence[Finding]") -> "Table":
    from fedgma.reports.tables import Table

    rows = tuple((finding.what, finding.found, finding.advice) for finding in findings)
    return Table("doctor", "", ("", "found", "what to do"), rows)
