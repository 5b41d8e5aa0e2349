"""The logs that a person on call reads: what the supervisor said and what the app printed, with dates.

Flower keeps what an app prints in the SuperLink's database, where it cannot be read once the SuperLink has ended. Here
it is copied to a file, each line with the time at which it came.
"""

import contextlib
import re
import time
from pathlib import Path

from fedgma.flower.database import printed
from fedgma.flower.deployment import private

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
SAID, PRINTED = "supervisor.log", "app.log"


class Journal:
    """Writes `supervisor.log` and `app.log` in a folder; a full disk is no error here, the supervisor looks at it."""

    def __init__(self, logs: Path, database: Path) -> None:
        self.logs, self.database = logs, database
        self._copied: int | None = None  # number of the last piece that was copied; None before the first one

    def say(self, text: str) -> None:
        """Append one of the supervisor's messages."""
        self._write(SAID, "a", dated(time.time(), text))

    def copy(self) -> None:
        """Append what the app has printed since; the first time, write all that the database has."""
        if not (pieces := printed(self.database, self._copied or 0)):
            return
        self._write(PRINTED, "w" if self._copied is None else "a", "".join(dated(p.time, p.text) for p in pieces))
        self._copied = pieces[-1].number

    def begin_database(self) -> None:
        """The database is a new one, which counts from the beginning; what was copied stays."""
        self._copied = 0

    def _write(self, name: str, mode: str, text: str) -> None:
        with (
            contextlib.suppress(OSError),
            open(self.logs / name, mode, encoding="utf-8", errors="replace", opener=private) as stream,
        ):
            stream.write(text)


def dated(at: float, text: str) -> str:
    r"""Each line of a text after the local time, without colours.

    >>> dated(0.0, "\x1b[92mINFO \x1b[0m: a\nb\n")[4:10], dated(0.0, "\x1b[92mINFO \x1b[0m: a\nb\n")[19:29]
    ('-01-01', ' INFO : a\n')
    """
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    return "".join(f"{stamp} {line}\n" for line in COLOURS.sub("", text).splitlines() if line.strip())
