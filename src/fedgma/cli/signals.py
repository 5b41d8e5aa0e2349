"""Signals: how a command ends after Ctrl-C or SIGTERM. Needs no other packages, so that it is there from the start.

Training ends after the round that it is in; everything else ends at once.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
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


class Stopping:
    """Whether a stop was requested. The first signal lets the round finish, the second ends the process.

    With `training` in this process, a signal before the end of the first round ends the process too: there is nothing
    to save yet, and kernels may be compiling. Such an end does not wait for threads that train; run folders are safe at
    any moment.
    """

    def __init__(self, *, training: bool = False) -> None:
        self.code: int | None = None
        self._training = training
        self._asked = 0  # times; runs ask before and after a round is trained

    def __call__(self) -> bool:
        """True once a signal was received."""
        self._asked += 1
        return self.code is not None

    def receive(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        again, self.code = self.code is not None, 128 + number
        if self._training and (again or self._asked < 2):
            end_now(self.code)
        if again:
            raise SystemExit(self.code)


@contextlib.contextmanager
def obeying_signals(*, training: bool = False, following: bool = False) -> Iterator[Stopping]:
    """Ctrl-C and SIGTERM set a flag instead of raising in the middle of a round; `training` as in `Stopping`.

    A process that is `following` another one ignores them, and ends when that one does.
    """
    stopping = Stopping(training=training)
    receive = signal.SIG_IGN if following else stopping.receive
    before = {number: signal.signal(number, receive) for number in SIGNALS}
    try:
        yield stopping
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
