"""Checkpoints: named arrays in a safetensors file with a SHA-256 manifest, written atomically.

Each checkpoint is a folder named by its round. The writer fills a temporary folder, syncs it and renames it. The reader
takes the newest checkpoint whose bytes match its manifest and skips damaged ones. Nothing that is read is executed.

safetensors sorts the entries of a file. Their order is part of the state (some clients go by position), so it is kept
in the file's metadata and restored on reading.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedgma.errors import DataError, IntegrityError
from fedgma.records.format import CHECKPOINT_FORMAT

KEPT = 2  # newest checkpoints; never fewer while a run is unfinished
STATE, MANIFEST = "state.safetensors", "manifest.json"
ORDER = "order"  # entry of the file's metadata: names of the arrays, in order
LOG = logging.getLogger(__name__)

State = dict[str, np.ndarray]


class Checkpoint(NamedTuple):
    """The state of a run after a round."""

    round: int
    state: State


def write_checkpoint(folder: Path, round: int, state: Mapping[str, np.ndarray]) -> None:
    """Publish a checkpoint below `folder` and delete all but the newest."""
    from safetensors.numpy import save

    arrays = {name: np.asarray(value, order="C") for name, value in state.items()}
    payload = save(arrays, metadata={ORDER: json.dumps(list(arrays))})
    manifest = {"format": CHECKPOINT_FORMAT, "round": round, "files": {STATE: hashlib.sha256(payload).hexdigest()}}
    staged, target = folder / f".staged-{os.getpid()}", folder / f"{round:08d}"
    folder.mkdir(exist_ok=True)
    _discard(staged)
    staged.mkdir()
    write_synced(staged / STATE, payload)
    write_synced(staged / MANIFEST, json.dumps(manifest).encode())
    sync_folder(staged)
    _discard(target)  # only a damaged checkpoint can be there
    staged.rename(target)
    sync_folder(folder)
    drop_checkpoints(folder, KEPT)


def drop_checkpoints(folder: Path, keep: int) -> None:
    """Delete all but the newest checkpoints, and leftovers of a killed writer."""
    for old in checkpoint_rounds(folder)[:-keep]:
        _discard(folder / f"{old:08d}")
    for left in folder.glob(".*"):
        shutil.rmtree(left, ignore_errors=True)


def read_checkpoint(folder: Path, accept: Callable[[int], bool] = lambda round: True) -> Checkpoint | None:
    """The newest valid checkpoint of an accepted round below `folder`; None if the folder has no checkpoint.

    Damaged checkpoints are skipped with a warning. If all are damaged, that is an error and not a fresh start.
    """
    rounds = [round for round in reversed(checkpoint_rounds(folder)) if accept(round)]
    damaged = []
    for round in rounds:
        try:
            return _read(folder / f"{round:08d}", round)
        except IntegrityError as error:
            LOG.warning("%s; trying the checkpoint before it", error)
            damaged.append(str(error))
    if damaged:
        raise IntegrityError(f"no checkpoint can be used: {damaged[0]}; delete {folder.parent} to start this run again")
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
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def write_atomic(path: Path, data: bytes) -> None:
    """Write a temporary file and rename it, so that the file is either complete or unchanged."""
    staged = path.with_name(f".{path.name}-{os.getpid()}")
    write_synced(staged, data)
    staged.replace(path)
    sync_folder(path.parent)


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
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"cannot write to {str(folder)!r}: {reason}; nothing finished is lost, run it again") from None


def checkpoint_rounds(folder: Path) -> list[int]:
    """Rounds that have a checkpoint, valid or not, in ascending order."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(name) for name in names if name.isdecimal())


def _read(folder: Path, round: int) -> Checkpoint:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        manifest: Any = json.loads((folder / MANIFEST).read_bytes())
        payload = (folder / STATE).read_bytes()
        wanted, found_round, version = manifest["files"][STATE], manifest["round"], manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise IntegrityError(f"checkpoint {folder} is incomplete ({type(error).__name__})") from None
    if version != CHECKPOINT_FORMAT:
        raise DataError(f"checkpoint {folder} has format {version!r}; this version reads {CHECKPOINT_FORMAT}")
    if hashlib.sha256(payload).hexdigest() != wanted or found_round != round:
        raise IntegrityError(f"checkpoint {folder} does not match its manifest")
    try:
        return Checkpoint(round, _in_order(load(payload), payload))
    except (SafetensorError, ValueError) as error:
        raise IntegrityError(f"checkpoint {folder} is damaged ({error})") from None


def _in_order(state: State, payload: bytes) -> State:
    """The entries of a safetensors file in the order in which they were saved; a file without one keeps its own."""
    header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
    names = json.loads(header.get("__metadata__", {}).get(ORDER, "null")) or list(state)
    if sorted(names) != sorted(state):
        raise ValueError("its list of entries does not match them")
    return {name: state[name] for name in names}


def _discard(folder: Path) -> None:
    """Rename a folder before deleting it, so that a kill in between leaves no partial checkpoint."""
    if folder.exists():
        gone = folder.with_name(f".gone-{os.getpid()}")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
