"""Run folders as they are written: settings, one JSON line a round, checkpoints, a mark at the end.

Beside what `format` describes there is a file `lock`, held while somebody writes.

A run killed at any moment leaves a folder from which the next one goes on: `resume` goes back to the newest valid
checkpoint and cuts `rounds.jsonl` there. One process writes a folder at a time; the system frees a dead one's lock.
"""

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedgma.errors import ConfigError
from fedgma.records.checkpoints import (
    Checkpoint,
    digest,
    drop_checkpoints,
    read_checkpoint,
    sync_folder,
    write_atomic,
    write_checkpoint,
    written_to,
)
from fedgma.records.format import FORMAT, Done, Record
from fedgma.records.reader import complete_lines, is_older, read_head

LOG = logging.getLogger(__name__)


class RunFolder:
    """One run's folder, open for writing; a context manager that holds the lock."""

    def __init__(self, path: Path, head: Mapping[str, Any], *, wait: float = 0.5) -> None:
        self.path = path
        self.head = {**head, "format": FORMAT}
        self.wait = wait  # seconds for somebody else to let go of it; looking whether a run is running takes a moment
        self.saved = 0  # round of the newest checkpoint
        self._lock: Any = None
        self._lines: Any = None

    def __enter__(self) -> "RunFolder":
        from filelock import FileLock, Timeout

        with written_to(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.path / "lock", timeout=self.wait)
            try:
                self._lock.acquire()
            except Timeout:
                raise ConfigError(f"another process is writing {self.path}; wait for it or stop it first") from None
        try:
            self._check_head()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        self._lock.release()

    def resume(self) -> Checkpoint | None:
        """Where to go on from, with `rounds.jsonl` cut to it; None is from the start."""
        lines = self.path / "rounds.jsonl"
        complete = complete_lines(lines)
        found = read_checkpoint(self.path / "checkpoints", lambda round: round <= len(complete))
        kept = complete[: found.round] if found is not None else []
        if found is not None:
            self.saved = found.round
            self._warn_of_changes(read_head(self.path))
        with written_to(self.path):
            write_atomic(lines, b"".join(kept))
            self._lines = lines.open("ab")
        return found

    def append(self, line: Mapping[str, Any]) -> None:
        """Add a round."""
        with written_to(self.path):
            self._lines.write(dump(line) + b"\n")
            self._lines.flush()

    def checkpoint(self, round: int, state: Mapping[str, np.ndarray]) -> None:
        """Make sure that a resume loses nothing up to this round."""
        with written_to(self.path):
            os.fsync(self._lines.fileno())
            write_checkpoint(self.path / "checkpoints", round, state)
        self.saved = round

    def begin_from(self, shorter: Path, point: Checkpoint, lines: Sequence[Record]) -> None:
        """Put a finished shorter run's last state and rounds where `resume` finds them."""
        self._warn_of_changes(read_head(shorter))
        with written_to(self.path):
            write_head(self.path, {**self.head, "extends": shorter.name})
            write_atomic(self.path / "rounds.jsonl", b"".join(dump(line) + b"\n" for line in lines))
            write_checkpoint(
                self.path / "checkpoints", point.round, point.state
            )  # last: a death before it costs nothing

    def finish(self, round: int, parameters: Mapping[str, np.ndarray], *, keep: bool = False) -> None:
        """Mark the run as done, with the checksum of its model; `keep` the last checkpoint to go on from."""
        with written_to(self.path):
            os.fsync(self._lines.fileno())
            if keep:
                drop_checkpoints(self.path / "checkpoints", 1)
            done = Done(rounds=round, sha256=digest(parameters))
            write_atomic(self.path / "done", dump(done) + b"\n")
            if not keep:
                shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
            sync_folder(self.path)

    def _check_head(self) -> None:
        """Write run.json, or compare it with what stands there."""
        file = self.path / "run.json"
        if not file.exists():
            with written_to(self.path):
                write_head(self.path, self.head)
            return
        held: Record = read_head(self.path)
        for name in ("settings", "parameters"):
            if held.get(name) != _plain(self.head[name]):
                raise ConfigError(f"{file} has other {name} than this run ({_differing(held, self.head, name)})")
        if is_older(self.path):  # one format a folder: what is appended from here on is of the present one
            with written_to(self.path):
                write_head(self.path, held)

    def _warn_of_changes(self, held: Mapping[str, Any]) -> None:
        """Say so where a run goes on with other software or on another device than it began with."""
        for name in ("device", "versions"):
            before, now = held.get(name), _plain(self.head.get(name))
            if before != now:
                LOG.warning(
                    "%s goes on with other %s, so its bits may differ: %s, now %s", self.path, name, before, now
                )


def write_head(folder: Path, head: Mapping[str, Any]) -> None:
    """run.json of a folder: one entry a line, lists of numbers in one line each."""
    text = json.dumps(_plain(head), indent=1)
    text = re.sub(r"\[([\d\s,]+)\]", lambda found: "[" + ", ".join(found[1].replace(",", " ").split()) + "]", text)
    write_atomic(folder / "run.json", text.encode() + b"\n")


def is_running(folder: Path) -> bool:
    """Whether a process is writing a folder now."""
    from filelock import FileLock, Timeout

    if not (folder / "lock").exists():
        return False
    try:
        with FileLock(folder / "lock", timeout=0):
            return False
    except Timeout:
        return True


def dump(value: Mapping[str, Any]) -> bytes:
    """One line of JSON; what is not finite becomes null.

    >>> dump({"loss": float("nan"), "accuracy": 0.5})
    b'{"loss": null, "accuracy": 0.5}'
    """
    return json.dumps(_plain(value), allow_nan=False).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(held) for held in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _differing(held: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> str:
    one, two = held.get(name), wanted[name]
    if not isinstance(one, dict) or not isinstance(two, dict):
        return f"{one!r} there, {two!r} here; delete the folder or use another --out"
    return "differing: " + ", ".join(sorted(key for key in {*one, *two} if one.get(key) != two.get(key)))
