"""The command line: one module for each command. The work itself is done by the library."""

import io
import signal
import sys

from fedgma.cli.signals import SIGNALS, end_now, leave
from fedgma.machine import not_installed


def main() -> None:
    """Entry point of the `fedgma` script."""
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
    """Run the command line; a package that is missing is answered with the command that installs it."""
    try:
        from fedgma.cli.app import run_app

        run_app()
    except ModuleNotFoundError as error:
        if (refusal := not_installed(error)) is None:
            raise
        sys.stderr.write(f"fedgma: {refusal}\n")
        sys.exit(refusal.exit_code)
