"""The root of the command line: registers the commands and turns errors into one sentence and an exit code."""

import re
import sys
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

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(data.app, name="data")
app.add_typer(paper.app, name="paper")
app.add_typer(flower.app, name="flower")
WORDS = {"ignore_unknown_options": True}  # they reach the command as words, which say what was meant
app.command(context_settings=WORDS)(run)
app.command(context_settings=WORDS)(sweep)
app.command(context_settings=WORDS)(advise)
app.command()(report.report)
app.command()(report.compare)
app.command()(watch)
app.command()(power)
app.command()(ls)
app.command()(show)
app.command()(export)
app.command()(rm)
app.command()(convert)
app.command()(doctor)


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
    """Gradient masked averaging for federated learning."""


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
