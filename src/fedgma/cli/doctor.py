"""`fedgma doctor`: check packages, device, data and speed of this machine, with advice for each problem."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedgma.experiments.doctor import Finding


def doctor(
    out: Annotated[Path, typer.Option(help="Where runs would be written.")] = Path("runs"),
    seconds: Annotated[float, typer.Option(min=0.0, help="Length of the speed check; 0 skips it.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list and nothing else.")] = False,
) -> None:
    """Check this machine and print advice for each problem. The exit code is 2 if runs cannot be trained here."""
    from fedgma.experiments.doctor import examine, measure_speed

    findings = list(examine(out))
    broken = any(finding.must and finding.advice for finding in findings)
    if seconds > 0 and not broken:
        findings.append(measure_speed(seconds))
    if as_json:
        typer.echo(json.dumps([finding._asdict() for finding in findings]))
    else:
        _print(findings)
    if broken:
        raise typer.Exit(2)


def _print(findings: "Sequence[Finding]") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "found", "what to do", box=None, header_style="bold")
    for finding in findings:
        colour = "green" if not finding.advice else "red" if finding.must else "yellow"
        table.add_row(f"[{colour}]{finding.what}[/{colour}]", escape(finding.found), escape(finding.advice))
    Console(highlight=False).print(table)
