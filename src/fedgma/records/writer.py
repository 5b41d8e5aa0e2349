"""Write run folders: settings, one JSON line per round, checkpoints, and `done` at the end.

Besides the files that `format` describes, a folder has a file `lock`, which the writing process locks.

A run that is killed at any moment can be resumed: `resume` returns to the newest valid checkpoint and truncates
`rounds.jsonl` to it. Only one process writes a folder at a time; the system releases the lock of a dead process.
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

from fedgma.errors import ConfigError, IntegrityError
from fedgma.records.checkpoints import (
    Checkpoint,
    checkpoint_rounds,
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
        self.wait = wait  # seconds to wait for the lock; `is_running` of another process holds it for a moment
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
                raise ConfigError(
                    f"another process is writing {self.path}; wait until it ends or stop it first"
                ) from None
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
        """The checkpoint to resume from, with `rounds.jsonl` truncated to it; None to start from the beginning."""
        lines = self.path / "rounds.jsonl"
        complete = complete_lines(lines)
        checkpoint = read_checkpoint(self.path / "checkpoints", lambda round: round <= len(complete))
        kept = complete[: checkpoint.round] if checkpoint is not None else []
        newest = max(checkpoint_rounds(self.path / "checkpoints"), default=0)
        if newest > len(complete):  # lines are on the disk before their checkpoint is
            message = "%s is damaged: it has %d rounds, but there is a checkpoint of round %d; resuming from round %d"
            LOG.warning(message, lines, len(complete), newest, len(kept))
        if checkpoint is not None:
            self.saved = checkpoint.round
            self._warn_of_changes(read_head(self.path))
        with written_to(self.path):
            write_atomic(lines, b"".join(kept))
            self._lines = lines.open("ab")
        return checkpoint

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a round."""
        with written_to(self.path):
            self._lines.write(dump(line) + b"\n")
            self._lines.flush()

    def checkpoint(self, round: int, state: Mapping[str, np.ndarray]) -> None:
        """Write a checkpoint, so that a resume loses nothing up to this round."""
        with written_to(self.path):
            os.fsync(self._lines.fileno())
            write_checkpoint(self.path / "checkpoints", round, state)
        self.saved = round

    def begin_from(self, shorter: Path, point: Checkpoint, lines: Sequence[Record]) -> None:
        """Copy the last state and the rounds of a finished shorter run to where `resume` finds them."""
        self._warn_of_changes(read_head(shorter))
        with written_to(self.path):
            write_head(self.path, {**self.head, "extends": shorter.name})
            write_atomic(self.path / "rounds.jsonl", b"".join(dump(line) + b"\n" for line in lines))
            write_checkpoint(
                self.path / "checkpoints", point.round, point.state
            )  # last, so that a kill before it loses nothing

    def finish(self, round: int, parameters: Mapping[str, np.ndarray], *, keep: bool = False) -> None:
        """Mark the run as done, with the checksum of its model; `keep` the last checkpoint for an extension."""
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
        """Write `run.json`, or compare it with the existing one."""
        file = self.path / "run.json"
        if not file.exists():
            if checkpoint_rounds(self.path / "checkpoints"):
                raise IntegrityError(f"{self.path} has checkpoints but no run.json that says of which run; restore it")
            with written_to(self.path):
                write_head(self.path, self.head)
            return
        recorded: Record = read_head(self.path)
        for name in ("settings", "parameters"):
            if recorded.get(name) != _plain(self.head[name]):
                raise ConfigError(
                    f"{file} has different {name} than this run ({_differing(recorded, _plain(self.head), name)})"
                )
        if is_older(self.path):  # a folder has one format, and new rounds are in the current one
            with written_to(self.path):
                write_head(self.path, recorded)

    def _warn_of_changes(self, recorded: Mapping[str, Any]) -> None:
        """Warn if a run continues with different software or on a different device."""
        for name in ("device", "versions"):
            before, now = recorded.get(name), _plain(self.head.get(name))
            if before != now:
                LOG.warning(
                    "%s continues with different %s, so its results may differ in the last bits: before %s, now %s",
                    self.path,
                    name,
                    before,
                    now,
                )


def write_head(folder: Path, head: Mapping[str, Any]) -> None:
    """Write `run.json`: one entry per line, each list of numbers on one line."""
    text = json.dumps(_plain(head), indent=1)
    text = re.sub(r"\[([\d\s,]+)\]", lambda match: "[" + ", ".join(match[1].replace(",", " ").split()) + "]", text)
    write_atomic(folder / "run.json", text.encode() + b"\n")


def is_running(folder: Path) -> bool:
    """Whether a process is writing this folder."""
    from filelock import FileLock, Timeout

    if not (folder / "lock").exists():
        return False
    try:
        with FileLock(folder / "lock", timeout=0):
            return False
    except Timeout:
        return True


def dump(value: Mapping[str, Any]) -> bytes:
    """One line of JSON; non-finite numbers become null.

    >>> dump({"loss": float("nan"), "accuracy": 0.5})
    b'{"loss": null, "accuracy": 0.5}'
    """
    return json.dumps(_plain(value), allow_nan=False).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _differing(recorded: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> str:
    recorded_value, new_value = recorded.get(name), wanted[name]
    if not isinstance(recorded_value, dict) or not isinstance(new_value, dict):
        return f"recorded {recorded_value!r}, this run {new_value!r}; delete the folder or use another --out"
    return "differing: " + ", ".join(
        sorted(key for key in {*recorded_value, *new_value} if recorded_value.get(key) != new_value.get(key))
    )
