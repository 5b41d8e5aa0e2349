"""`fedgma doctor`: what is installed, which device, which data are here, how fast it is, and what to do."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedgma.experiments.doctor import Finding


def doctor(
    out: Annotated[Path, typer.Option(help="Where runs would be written.")] = Path("runs"),
    seconds: Annotated[float, typer.Option(min=0.0, help="Length of the speed check; 0 leaves it out.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list and nothing else.")] = False,
) -> None:
    """Look at this machine and say what to do about each problem; exit code 2 where runs cannot be played."""
    from fedgma.experiments.doctor import examine, measure_speed

    findings = list(examine(out))
    broken = any(one.must and one.advice for one in findings)
    if seconds > 0 and not broken:
        findings.append(measure_speed(seconds))
    if as_json:
        typer.echo(json.dumps([one._asdict() for one in findings]))
    else:
        _print(findings)
    if broken:
        raise typer.Exit(2)


def _print(findings: "Sequence[Finding]") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "found", "what to do", box=None, header_style="bold")
    for one in findings:
        colour = "red" if one.must and one.advice else "yellow" if one.advice else "green"
        table.add_row(f"[{colour}]{one.what}[/{colour}]", escape(one.found), escape(one.advice))
    Console(highlight=False).print(table)
