"""The command line: one module for each command. The work itself is done by the library."""

import contextlib
import os
import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it


def main() -> None:
    """Entry point of the `fedgma` script. If the extra `sim` is missing, exit with the command that installs it."""
    for number in SIGNALS:
        signal.signal(number, leave)
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


def leave(number: int, frame: FrameType | None) -> None:
    """A signal handler: exit with the code that a shell reports for the signal, without a traceback."""
    raise SystemExit(128 + number)


def end_now(code: int) -> None:
    """End the process without waiting for its threads, and without unloading torch, which may take seconds."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or in the middle of a write
            stream.write(SHOW_CURSOR if stream.isatty() else "")
            stream.flush()
    os._exit(code)
