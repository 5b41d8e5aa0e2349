"""Whether the run of a folder is done, running or stopped: what its files and the system's lock say.

A process that writes a folder holds the system's lock on the file `lock`. The lock ends with the process, whatever ends
it, so no process id is looked at and nothing has to be cleared up after a kill or a reboot. On a shared disk another
machine may not see the lock. So a writer also names its machine in the file `writer`, and deletes that file at its end:
where it is left, the writer was killed, or writes on another machine.
"""

import os
from pathlib import Path
from typing import Literal

from fedgma.errors import DataError
from fedgma.machine import this_machine
from fedgma.records.reader import is_done, read_object

FAILED = "failed"  # the file that says why a Flower run gave up
WRITER = "writer"  # the file that names the machine of a process that writes

State = Literal["done", "running", "stopped", "failed", "unknown"]


def state_of(folder: Path) -> State:
    """Whether a run is done, running, stopped and to be continued, gave up with a reason, or cannot be judged here."""
    if is_done(folder):
        return "done"
    locked = _lock_on(folder)
    if locked:
        return "running"
    if is_done(folder):  # since it was looked at
        return "done"
    if (folder / FAILED).exists():
        return "failed"
    return "unknown" if locked is None or elsewhere(folder) is not None else "stopped"


def is_running(folder: Path) -> bool:
    """Whether a process is seen to write this folder; the folder itself may be read-only."""
    return bool(_lock_on(folder))


def elsewhere(folder: Path) -> str | None:
    """The name of the other machine whose process did not end its writing of a folder; None if there is none.

    After a restart a machine has its name still, and a new container has the system of the one before it.
    """
    try:
        writer, here = read_object(folder / WRITER), this_machine()
    except DataError:  # no such file, or a damaged one
        return None
    known = any(here[part] and writer.get(part) == here[part] for part in ("machine", "boot"))
    return None if known else str(writer.get("machine", ""))


def last_written(folder: Path) -> float | None:
    """When the newest line of a run was written, in seconds of the epoch; None if there is none yet."""
    try:
        return (folder / "rounds.jsonl").stat().st_mtime
    except OSError:
        return None


def _lock_on(folder: Path) -> bool | None:
    """Whether a process holds the lock of a folder; None if the system does not tell."""
    try:
        handle = os.open(folder / "lock", os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait
    except FileNotFoundError:
        return False
    except OSError:  # not for us to read
        return None
    try:
        return _is_locked(handle, folder)
    except OSError:  # a disk without locks
        return None
    finally:
        os.close(handle)


def _is_locked(handle: int, folder: Path) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows
        return _is_locked_by_another(folder)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file is closed
    except BlockingIOError:
        return True
    return False


def _is_locked_by_another(folder: Path) -> bool:
    from filelock import FileLock, Timeout

    try:
        with FileLock(folder / "lock", timeout=0):
            return False
    except Timeout:
        return True
