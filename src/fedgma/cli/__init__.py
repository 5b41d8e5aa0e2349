"""The command line: one module for each command. The work itself is done by the library."""

import io
import signal
import sys

from fedgma.cli.signals import SIGNALS, end_now, leave


def main() -> None:
    """Entry point of the `fedgma` script. If the extra `sim` is missing, exit with the command that installs it."""
    for number in SIGNALS:
        signal.signal(number, leave)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without a sign such as the plus-minus gets a "?"
    try:
        _run()
    except SystemExit as end:
        if end.code in [128 + number for number in SIGNALS]:
            end_now(end.code)
        raise


def _run() -> None:
    try:
        import typer  # noqa: F401
    except ImportError:
        sys.exit("The fedgma command needs the simulator's packages: pip install 'fedgma[sim]'")
    from fedgma.cli.app import run_app

    run_app()
