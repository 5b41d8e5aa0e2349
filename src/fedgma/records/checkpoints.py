"""Checkpoints: named arrays in a safetensors file with a SHA-256 manifest, there whole or not at all.

One folder a checkpoint, named by its round. It is written beside its place, synced, and renamed; on reading, the newest
whose bytes match its manifest wins, and a damaged one is passed over. Nothing that is read is executed.
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

KEPT = 2  # newest ones; never fewer while a run goes on
STATE, MANIFEST = "state.safetensors", "manifest.json"
LOG = logging.getLogger(__name__)

State = dict[str, np.ndarray]


class Checkpoint(NamedTuple):
    """A state as it was after a round."""

    round: int
    state: State


def write_checkpoint(folder: Path, round: int, state: Mapping[str, np.ndarray]) -> None:
    """Publish a checkpoint below `folder` and drop all but the newest ones."""
    from safetensors.numpy import save

    payload = save({name: np.asarray(value, order="C") for name, value in state.items()})
    manifest = {"format": CHECKPOINT_FORMAT, "round": round, "files": {STATE: hashlib.sha256(payload).hexdigest()}}
    staged, target = folder / f".staged-{os.getpid()}", folder / f"{round:08d}"
    folder.mkdir(exist_ok=True)
    _discard(staged)
    staged.mkdir()
    write_synced(staged / STATE, payload)
    write_synced(staged / MANIFEST, json.dumps(manifest).encode())
    sync_folder(staged)
    _discard(target)  # only a damaged one can stand there
    staged.rename(target)
    sync_folder(folder)
    drop_checkpoints(folder, KEPT)


def drop_checkpoints(folder: Path, keep: int) -> None:
    """Drop all but the newest ones, and what a writer that died left of one."""
    for old in checkpoint_rounds(folder)[:-keep]:
        _discard(folder / f"{old:08d}")
    for left in folder.glob(".*"):
        shutil.rmtree(left, ignore_errors=True)


def read_checkpoint(folder: Path, accept: Callable[[int], bool] = lambda round: True) -> Checkpoint | None:
    """The newest valid checkpoint of an accepted round below `folder`, or None where there is none at all.

    Damaged ones are passed over with a warning; where all are damaged that is an error, not a fresh start.
    """
    rounds = [round for round in reversed(checkpoint_rounds(folder)) if accept(round)]
    damaged = []
    for round in rounds:
        try:
            return _read(folder / f"{round:08d}", round)
        except IntegrityError as error:
            LOG.warning("%s; going back to the one before", error)
            damaged.append(str(error))
    if damaged:
        raise IntegrityError(f"no checkpoint can be used: {damaged[0]}; delete {folder.parent} to start this run anew")
    return None


def digest(state: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over named arrays: names, types, shapes and bytes.

    >>> digest({"w": np.zeros(2)}) == digest({"w": np.zeros((2, 1))})
    False
    """
    whole = hashlib.sha256()
    for name in sorted(state):
        value = np.asarray(state[name], order="C")  # ascontiguousarray would give a number an axis
        whole.update(f"{name} {value.dtype.str} {value.shape}\n".encode())
        whole.update(value.tobytes())
    return whole.hexdigest()


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file beside its place and rename it: there whole or as it was before."""
    staged = path.with_name(f".{path.name}-{os.getpid()}")
    write_synced(staged, data)
    staged.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where the system can do that."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """Turn a failing disk into one sentence."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"cannot write to {str(folder)!r}: {reason}; nothing finished is lost, run it again") from None


def checkpoint_rounds(folder: Path) -> list[int]:
    """Rounds of which there is a checkpoint, valid or not, in rising order."""
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
        return Checkpoint(round, load(payload))
    except (SafetensorError, ValueError) as error:
        raise IntegrityError(f"checkpoint {folder} is damaged ({error})") from None


def _discard(folder: Path) -> None:
    """Take a folder out of sight first, so that a death in between leaves no half of one."""
    if folder.exists():
        gone = folder.with_name(f".gone-{os.getpid()}")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
