"""The command line: one module for each command. The work itself is done by the library."""

import signal
import sys
from types import FrameType


def main() -> None:
    """Entry point of the `fedgma` script. If the extra `sim` is missing, exit with the command that installs it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    try:
        import typer  # noqa: F401
    except ImportError:
        sys.exit("The fedgma command needs the simulator's packages: pip install 'fedgma[sim]'")
    from fedgma.cli.app import run_app

    run_app()


def leave(number: int, frame: FrameType | None) -> None:
    """A signal handler: exit with the code that a shell reports for the signal, without a traceback."""
    raise SystemExit(128 + number)
