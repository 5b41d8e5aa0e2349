"""The root of the command line: registers the commands and turns errors into one sentence and an exit code."""

import re
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from fedgma.cli import data, flower, paper, report
from fedgma.cli.advise import advise
from fedgma.cli.convert import convert
from fedgma.cli.doctor import doctor
from fedgma.cli.export import export
from fedgma.cli.ls import ls
from fedgma.cli.power import power
from fedgma.cli.rm import rm
from fedgma.cli.run import run
from fedgma.cli.show import show
from fedgma.cli.sweep import sweep
from fedgma.cli.watch import watch
from fedgma.errors import DataError, FedgmaError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="markdown")
WORDS = {"ignore_unknown_options": True}  # they reach the command as words, which say what was meant
COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Train": (run, sweep, advise, watch),
    "Results": (report.report, report.compare, power, ls, show, export, rm, convert),
    "More": (doctor,),
}
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(rich_help_panel=panel, context_settings=WORDS if command in (run, sweep, advise) else None)(command)
for name, group in (("data", data.app), ("paper", paper.app), ("flower", flower.app)):
    app.add_typer(group, name=name, rich_help_panel="More")


def _version(wanted: bool) -> None:
    if wanted:
        from fedgma import __version__

        typer.echo(f"fedgma {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Compare aggregation rules for federated learning: the plain mean, gradient masked averaging (GMA) and others.

    Begin with `fedgma run`, a demo on embedded images, or `fedgma run dataset=FILE` on your own data.
    """


def run_app() -> None:
    """Run the command line; an expected error becomes one sentence on stderr and its documented exit code."""
    try:
        app(prog_name="fedgma")
    except FedgmaError as error:
        sentence = re.sub(r"\s*\n\s*", " ", str(error))  # a user's code may raise one of several lines
        typer.echo(f"fedgma: {sentence}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:  # a name that is too long, a disk that is full, a folder without permission
        where = "the output" if error.filename is None else repr(str(error.filename)[:200])
        typer.echo(f"fedgma: {error.strerror or error}: {where}", err=True)
        sys.exit(DataError.exit_code)
    except MemoryError as error:
        typer.echo(f"fedgma: not enough memory ({error}); use less data, smaller batches or fewer epochs", err=True)
        sys.exit(DataError.exit_code)
