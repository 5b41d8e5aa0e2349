"""Write run folders: settings, one JSON line per round, checkpoints, and `done` at the end.

Besides the files that `format` describes, a folder has the files `lock` and `writer` of `state`.

A run that is killed at any moment can be resumed: `resume` returns to the newest checkpoint that is valid and belongs
to the lines of `rounds.jsonl`, and truncates these to it. Where no checkpoint can be used, that is an error and nothing
is changed. Only one process writes a folder at a time; the system releases the lock of a dead process.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedgma.errors import ConfigError, IntegrityError, InUseError
from fedgma.machine import this_machine
from fedgma.records.checkpoints import (
    BINARY,
    Checkpoint,
    checkpoint_rounds,
    digest,
    drop_checkpoints,
    make_folder,
    read_checkpoint,
    sync_folder,
    write_all,
    write_atomic,
    write_checkpoint,
    written_to,
)
from fedgma.records.format import CHECKSUM, FORMAT, SUMS, Done, Record, Records, present, with_checksum
from fedgma.records.reader import SUMMED, complete_lines, digest_of_lines, is_done, is_older, read_head, sums
from fedgma.records.repair import DAMAGED, repaired
from fedgma.records.state import WRITER, elsewhere

LOG = logging.getLogger(__name__)


class RunFolder:
    """One run's folder, open for writing; a context manager that holds the lock."""

    def __init__(self, path: Path, head: Mapping[str, Any], *, wait: float = 0.5) -> None:
        self.path = path
        self.head = {**head, "format": FORMAT}
        self.wait = wait  # seconds to wait for the lock; `is_running` of another process holds it for a moment
        self.saved = 0  # round of the newest checkpoint
        self._before = 0  # round of the checkpoint before it
        self._lock: Any = None
        self._run = ""  # the checksum in run.json
        self._handle: int | None = None  # rounds.jsonl
        self._hash = hashlib.sha256()  # of the lines in it

    def __enter__(self) -> "RunFolder":
        from filelock import FileLock, Timeout

        with written_to(self.path):
            make_folder(self.path)
            self._lock = FileLock(self.path / "lock", timeout=self.wait)
            try:
                self._lock.acquire()
            except Timeout:
                raise InUseError(
                    f"another process is writing {self.path}; wait until it ends or stop it first"
                ) from None
        try:
            self._check_head()
            self._remove_leftovers()
            if (machine := elsewhere(self.path)) is not None:
                left = "%s was left unfinished by a process on %s; if it still runs there, stop one of the two"
                LOG.warning(left, self.path, machine or "another machine")
            with written_to(self.path):
                write_atomic(self.path / WRITER, dump(this_machine()) + b"\n")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with contextlib.suppress(OSError):
                (self.path / WRITER).unlink(missing_ok=True)
            if self._handle is not None:
                with contextlib.suppress(OSError):  # what matters was synced before
                    os.close(self._handle)
                self._handle = None
        finally:
            self._lock.release()

    def resume(self, *, repair: bool = False) -> Checkpoint | None:
        """The checkpoint to resume from, with `rounds.jsonl` truncated to it; None to start from the beginning.

        If `rounds.jsonl` is damaged, an older checkpoint is used or an error raised. With `repair`, the newest
        checkpoint is used all the same: lines that cannot be read are marked as lost, and the file is kept as
        `rounds.damaged`.
        """
        file = self.path / "rounds.jsonl"
        lines = complete_lines(file)
        problem = partial(_other_run, self._run) if repair else partial(_mismatch, self._run, lines)
        point = read_checkpoint(self.path / "checkpoints", problem=problem)
        if point is not None:
            if why := _other_lines(lines, point.round, point.records):
                lines = self._repaired(point, why)
            self.saved = point.round
            self._warn_of_changes(read_head(self.path))
        elif lines:
            LOG.warning("%s has %d rounds but no checkpoint; it starts again from round 1", self.path, len(lines))
        kept = b"".join(lines[: self.saved])
        with written_to(self.path):
            write_atomic(file, kept)
            self._handle = os.open(file, os.O_WRONLY | os.O_APPEND | BINARY)
        self._hash = hashlib.sha256(kept)
        return point

    def _repaired(self, point: Checkpoint, why: str) -> list[bytes]:
        """Repair `rounds.jsonl` up to a checkpoint that does not belong to it, and write that checkpoint again."""
        file, checkpoints = self.path / "rounds.jsonl", self.path / "checkpoints"
        content = file.read_bytes() if file.exists() else b""
        lines, lost = repaired(content, point.round)
        what = f"the records of rounds {lost} are lost" if lost else "some records are not as they were written"
        LOG.warning("%s is damaged: a checkpoint %s; %s; resuming from round %d", file, why, what, point.round)
        records = Records(run=self._run, lines=digest_of_lines(lines))
        before = max((old for old in checkpoint_rounds(checkpoints) if old < point.round), default=0)
        with written_to(self.path):
            if not (self.path / DAMAGED).exists():
                write_atomic(self.path / DAMAGED, content)
            write_atomic(file, b"".join(lines))
            write_checkpoint(checkpoints, point.round, point.state, records=records, before=before)
        return lines

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a round."""
        content = dump(line) + b"\n"
        with written_to(self.path):
            write_all(self._lines, content)
        self._hash.update(content)

    def checkpoint(self, round: int, state: Mapping[str, np.ndarray]) -> None:
        """Write a checkpoint, so that a resume loses nothing up to this round."""
        if round != self.saved:
            self._before, self.saved = self.saved, round
        with written_to(self.path):
            os.fsync(self._lines)
            write_checkpoint(self.path / "checkpoints", round, state, records=self._records, before=self._before)

    def begin_from(self, shorter: Path, point: Checkpoint, lines: Sequence[Record]) -> None:
        """Copy the last state and the rounds of a finished shorter run to where `resume` finds them."""
        self._warn_of_changes(read_head(shorter))
        content = b"".join(dump(line) + b"\n" for line in lines)
        with written_to(self.path):
            self._run = write_head(self.path, {**self.head, "extends": shorter.name})
            write_atomic(self.path / "rounds.jsonl", content)
            records = Records(run=self._run, lines=digest_of_lines([content]))
            write_checkpoint(  # last, so that a kill before it loses nothing
                self.path / "checkpoints", point.round, point.state, records=records
            )

    def finish(self, round: int, parameters: Mapping[str, np.ndarray], *, keep: bool = False) -> None:
        """Mark the run as done, with the checksum of its model; `keep` the last checkpoint for an extension."""
        checkpoints = self.path / "checkpoints"
        with written_to(self.path):
            os.fsync(self._lines)
            if keep:
                drop_checkpoints(checkpoints, {*checkpoint_rounds(checkpoints)} - {round})
            done = dump(Done(rounds=round, sha256=digest(parameters))) + b"\n"
            known = {"rounds.jsonl": self._hash.hexdigest(), "done": hashlib.sha256(done).hexdigest()}
            write_sums(self.path, known)
            write_atomic(self.path / "done", done)
            if not keep:
                shutil.rmtree(checkpoints, ignore_errors=True)
            sync_folder(self.path)

    @property
    def _lines(self) -> int:
        assert self._handle is not None, "resume() comes before a round is written"
        return self._handle

    @property
    def _records(self) -> Records:
        return Records(run=self._run, lines=self._hash.hexdigest())

    def _check_head(self) -> None:
        """Write `run.json`, or compare it with the existing one."""
        file = self.path / "run.json"
        if not file.exists():
            if checkpoint_rounds(self.path / "checkpoints") or is_done(self.path):
                raise IntegrityError(f"{file} is missing; restore it from a copy, or delete {self.path} and run again")
            with written_to(self.path):
                self._run = write_head(self.path, self.head)
            return
        recorded: Record = read_head(self.path)
        for name in ("settings", "parameters"):
            if _known(recorded.get(name)) != _known(_plain(self.head[name])):
                raise ConfigError(
                    f"{file} has different {name} than this run ({_differing(recorded, _plain(self.head), name)})"
                )
        if is_older(self.path):  # a folder has one format, and new rounds are in the current one
            with written_to(self.path):
                recorded = {**recorded, CHECKSUM: rewrite_head(self.path, recorded)}
        self._run = str(recorded[CHECKSUM])

    def _remove_leftovers(self) -> None:
        """Delete the temporary files of a writer that was killed."""
        for left in self.path.glob(".*-*"):
            with contextlib.suppress(OSError):
                left.unlink()

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


def write_head(folder: Path, head: Mapping[str, Any]) -> str:
    """Write `run.json` and return its checksum."""
    write_atomic(folder / "run.json", head_text(head))
    return str(with_checksum(_plain(head))[CHECKSUM])


def head_text(head: Mapping[str, Any]) -> bytes:
    """The text of `run.json`, with its checksum: one entry per line, each list of numbers on one line."""
    text = json.dumps(with_checksum(_plain(head)), indent=1)
    # only a list is followed by a line break: in a text, such as the command `fedgma run seed=[0,1]`, it is escaped
    text = re.sub(r"\[\n([\d\s,]+)\]", lambda match: "[" + ", ".join(match[1].replace(",", " ").split()) + "]", text)
    return text.encode() + b"\n"


def rewrite_head(folder: Path, head: Mapping[str, Any]) -> str:
    """Rewrite a `run.json` of an older format; of a finished run after `SHA256SUMS`, which older ones do not need."""
    if is_done(folder):
        write_sums(folder, {"run.json": hashlib.sha256(head_text(head)).hexdigest()})
    return write_head(folder, head)


def write_sums(folder: Path, known: Mapping[str, str]) -> None:
    """Write `SHA256SUMS`: the known digests, and those of the other files as they are in the folder."""
    others = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in SUMMED if name not in known}
    write_atomic(folder / SUMS, sums({name: {**others, **known}[name] for name in SUMMED}))


def mismatch_in(folder: Path) -> Callable[[int, Record | None], str]:
    """What `read_checkpoint` asks: why a checkpoint does not belong to the records of this folder."""
    return partial(_mismatch, read_head(folder).get("checksum", ""), complete_lines(folder / "rounds.jsonl"))


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


def _known(value: Any) -> Any:
    """Settings without those that are None: a run of before a setting existed has the same ones."""
    return present(value) if isinstance(value, Mapping) else value


def _mismatch(run: str, lines: Sequence[bytes], round: int, records: Record | None) -> str:
    """Why a checkpoint of this round does not belong to a `run.json` and to lines of `rounds.jsonl`; "" if it does."""
    return _other_run(run, round, records) or _other_lines(lines, round, records)


def _other_run(run: str, round: int, records: Record | None) -> str:
    return "" if records is None or records.get("run") == run else "belongs to another run.json"


def _other_lines(lines: Sequence[bytes], round: int, records: Record | None) -> str:
    if round > len(lines):
        return f"is of round {round}, but rounds.jsonl has {len(lines)} complete lines"
    if records is None or records.get("lines") == digest_of_lines(lines[:round]):
        return ""
    return "belongs to other lines of rounds.jsonl"


def _differing(recorded: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> str:
    recorded_value, new_value = recorded.get(name), wanted[name]
    if not isinstance(recorded_value, dict) or not isinstance(new_value, dict):
        return f"recorded {recorded_value!r}, this run {new_value!r}; delete the folder or use another --out"
    return "differing: " + ", ".join(
        sorted(key for key in {*recorded_value, *new_value} if recorded_value.get(key) != new_value.get(key))
    )
