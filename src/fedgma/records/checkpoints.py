"""Checkpoints: named arrays in a safetensors file with a manifest of checksums, written atomically.

Each checkpoint is a folder named by its round. The writer fills a temporary folder, syncs it and renames it. The reader
takes the newest checkpoint that matches its manifest and the records of its run, and skips the others. Entries come
back in the order in which they were written. Nothing that is read is executed.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedgma.errors import DataError, IntegrityError
from fedgma.records.format import CHECKPOINT_FORMAT, CHECKSUM, Record, Records, is_intact, with_checksum
from fedgma.records.reader import read_content, read_object

STATE, MANIFEST = "state.safetensors", "manifest.json"
BINARY = getattr(os, "O_BINARY", 0)  # Windows would write line ends of its own
LOG = logging.getLogger(__name__)

State = dict[str, np.ndarray]


class Checkpoint(NamedTuple):
    """The state of a run after a round, and the records that it belongs to (None in format 1)."""

    round: int
    state: State
    records: Record | None = None


def write_checkpoint(
    folder: Path, round: int, state: Mapping[str, np.ndarray], *, records: Records | None = None, before: int = 0
) -> None:
    """Publish a checkpoint below `folder`; of the earlier ones only that of the round `before` is kept.

    Later ones stay until a new one replaces them: they may be valid, of a run whose records were damaged.
    """
    from safetensors.numpy import save

    payload = save({name: np.asarray(value, order="C") for name, value in state.items()})
    manifest = with_checksum(
        {
            "format": CHECKPOINT_FORMAT,
            "round": round,
            "records": records,
            "order": list(state),
            "files": {STATE: hashlib.sha256(payload).hexdigest()},
        }
    )
    staged, target = folder / f".staged-{os.getpid()}", folder / f"{round:08d}"
    make_folder(folder)
    _discard(staged)
    staged.mkdir()
    write_synced(staged / STATE, payload)
    write_synced(staged / MANIFEST, json.dumps(manifest).encode())
    sync_folder(staged)
    _discard(target)  # damaged, or of a run whose records were damaged
    staged.rename(target)
    sync_folder(folder)
    drop_checkpoints(folder, {old for old in checkpoint_rounds(folder) if old < round} - {before})


def drop_checkpoints(folder: Path, rounds: Collection[int]) -> None:
    """Delete the checkpoints of these rounds, and leftovers of a killed writer."""
    for old in sorted(rounds):
        _discard(folder / f"{old:08d}")
    for left in folder.glob(".*"):
        shutil.rmtree(left, ignore_errors=True)


def read_checkpoint(
    folder: Path,
    accept: Callable[[int], bool] = lambda round: True,
    problem: Callable[[int, Record | None], str] = lambda round, records: "",
) -> Checkpoint | None:
    """The newest valid checkpoint of an accepted round below `folder`; None if the folder has no checkpoint.

    `problem` tells from a round and from the records in its manifest (None in format 1) why a checkpoint does not
    belong to its run. Checkpoints with a problem and damaged ones are skipped with a warning. If no other is left, that
    is an error and not a fresh start.
    """
    rounds = [round for round in reversed(checkpoint_rounds(folder)) if accept(round)]
    unusable = []
    for round in rounds:
        try:
            return _read(folder / f"{round:08d}", round, problem)
        except IntegrityError as error:
            LOG.warning("%s; trying the checkpoint before it", error)
            unusable.append(str(error))
    if unusable:
        choice = f"restore what is damaged from a copy, or delete {folder.parent} to start this run again"
        raise IntegrityError(f"no checkpoint can be used: {unusable[0]}; {choice}")
    return None


def digest(state: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over named arrays: names, types, shapes and bytes.

    >>> digest({"w": np.zeros(2)}) == digest({"w": np.zeros((2, 1))})
    False
    """
    hasher = hashlib.sha256()
    for name in sorted(state):
        value = np.asarray(state[name], order="C")  # ascontiguousarray would add an axis to a scalar
        hasher.update(f"{name} {value.dtype.str} {value.shape}\n".encode())
        hasher.update(value.tobytes())
    return hasher.hexdigest()


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY, 0o666)
    try:
        write_all(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, data: bytes) -> None:
    """Write to an open file; nothing is buffered, so that an error comes here and not when the file is closed."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def write_atomic(path: Path, data: bytes) -> None:
    """Write a temporary file and rename it, so that the file is either complete or unchanged."""
    staged = path.with_name(f".{path.name}-{os.getpid()}")
    write_synced(staged, data)
    staged.replace(path)
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it; wait until the entries of new ones are on the disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder are on the disk, where the system supports that."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """Turn an operating system error into a `DataError` of one sentence."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise DataError(f"cannot write to {str(folder)!r}: {error.filename!r} is a file; give another folder") from None
    except OSError as error:
        elsewhere = isinstance(error, FileNotFoundError | PermissionError) or error.errno == errno.EROFS
        then = "give another folder" if elsewhere else "nothing finished is lost, run it again"
        raise DataError(f"cannot write to {str(folder)!r}: {error.strerror or error}; {then}") from None


def checkpoint_rounds(folder: Path) -> list[int]:
    """Rounds that have a checkpoint, valid or not, in ascending order."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdecimal())


def _read(folder: Path, round: int, problem: Callable[[int, Record | None], str]) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    manifest = _manifest(folder)
    files, order = manifest.get("files"), manifest.get("order")
    payload = read_content(folder / STATE, sys.maxsize)
    wanted = files.get(STATE) if isinstance(files, dict) else None
    if hashlib.sha256(payload).hexdigest() != wanted or manifest.get("round") != round:
        raise IntegrityError(f"checkpoint {folder} does not match its manifest")
    if why := problem(round, manifest.get("records")):
        raise IntegrityError(f"checkpoint {folder} {why}")
    try:
        state = load(payload)
    except (SafetensorError, ValueError, KeyError) as error:
        raise IntegrityError(f"checkpoint {folder} is damaged ({error})") from None
    if order is not None and (not isinstance(order, list) or sorted(map(str, order)) != sorted(state)):
        raise IntegrityError(f"checkpoint {folder} has other entries than its manifest lists")
    ordered = state if order is None else {name: state[name] for name in order}
    return Checkpoint(round, ordered, manifest.get("records"))


def _manifest(folder: Path) -> Record:
    """The manifest of a checkpoint; format 1 had no checksum, no order and no records."""
    manifest = read_object(folder / MANIFEST)
    version = manifest.get("format")
    if (version == CHECKPOINT_FORMAT or CHECKSUM in manifest) and not is_intact(manifest):
        raise IntegrityError(f"the manifest of checkpoint {folder} does not match its checksum")
    if version not in (1, CHECKPOINT_FORMAT):
        raise DataError(f"checkpoint {folder} has format {version!r}; this version reads 1 to {CHECKPOINT_FORMAT}")
    return manifest


def _discard(folder: Path) -> None:
    """Rename a folder before deleting it, so that a kill in between leaves no partial checkpoint."""
    if folder.exists():
        gone = folder.with_name(f".gone-{os.getpid()}")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
