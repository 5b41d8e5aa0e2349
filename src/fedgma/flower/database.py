"""The SuperLink's database: a damaged one is set aside, since the run's own folder has all that is needed to go on.

Flower keeps its accounts of runs, nodes and messages there. A SuperLink that is killed while it creates or migrates
the tables leaves a database with which no later one starts. Nodes and what apps print are read from it, without a
change: the tables are those of flwr 1.41 and 1.42, and where they are others nothing is found.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from fedgma.errors import DataError

LOCK_TIMEOUT = 5.0  # seconds to wait for another process
READ_TIMEOUT = 1.0
REGISTERED = ("registered", "online", "offline")  # a node that may take part


class Node(NamedTuple):
    """A node as the SuperLink knows it."""

    number: int  # by which messages and logs call it
    key: bytes  # its public key, as PEM
    online: bool  # it has connected, and not said good-bye
    name: str  # of its key's file, if it was registered under it
    until: float  # POSIX time from which it does not count as connected unless it is heard of again


class Printed(NamedTuple):
    """What an app has printed: a piece of text, its number, and when it came (POSIX time)."""

    number: int
    time: float
    text: str


def nodes(path: Path) -> list[Node]:
    """The nodes that may take part, connected or not."""
    rows = _rows(path, "SELECT node_id, public_key, status, name, online_until FROM node ORDER BY registered_at")
    return [
        Node(int(number) % 2**64, bytes(key or b""), status == "online", str(name or ""), float(until or 0.0))
        for number, key, status, name, until in rows
        if status in REGISTERED
    ]


def printed(path: Path, after: int = 0) -> list[Printed]:
    """What apps have printed, from the piece after this number on."""
    query = "SELECT rowid, timestamp, log FROM task_logs WHERE rowid > ? ORDER BY rowid"
    return [Printed(int(number), float(time), str(text)) for number, time, text in _rows(path, query, after)]


def _rows(path: Path, query: str, *values: object) -> list[Any]:
    if not path.exists():
        return []
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=READ_TIMEOUT)) as database:
            return database.execute(query, values).fetchall()
    except sqlite3.Error:
        return []


def damage(path: Path) -> str | None:
    """What is wrong with a database; None if nothing is, or if it does not exist."""
    if not path.exists():
        return None
    try:
        with closing(sqlite3.connect(path, timeout=LOCK_TIMEOUT)) as database:
            answer = str(database.execute("PRAGMA quick_check(1)").fetchone()[0])
            halves = database.execute("SELECT name FROM sqlite_master WHERE name LIKE '%alembic_tmp%'").fetchall()
    except sqlite3.OperationalError as error:
        raise DataError(f"cannot read {str(path)!r}: {error}; stop the process that uses it") from None
    except sqlite3.DatabaseError as error:
        return str(error)
    if answer != "ok":
        return answer
    return f"a migration stopped half way ({halves[0][0]})" if halves else None


def set_aside(path: Path) -> Path:
    """Rename a database, with the files that belong to it; replaces one that was set aside before."""
    aside = path.with_name(f"{path.name}.damaged")
    for ending in ("", "-wal", "-shm", "-journal"):
        part = path.with_name(path.name + ending)
        goal = aside.with_name(aside.name + ending)
        goal.unlink(missing_ok=True)
        if part.exists():
            part.rename(goal)
    return aside
