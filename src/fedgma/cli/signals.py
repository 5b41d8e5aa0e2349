"""Signals: how a command ends after Ctrl-C or SIGTERM. Needs no other packages, so that it is there from the start."""

import contextlib
import os
import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"  # a progress bar hides it


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
