"""The SuperLink's database: a damaged one is set aside, since the run's own folder has all that is needed to go on.

Flower keeps its accounts of runs, nodes and messages there. A SuperLink that is killed while it creates or migrates
the tables leaves a database with which no later one starts.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from fedgma.errors import DataError

LOCK_TIMEOUT = 5.0  # seconds to wait for another process


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
