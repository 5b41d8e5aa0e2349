"""A cache of decoded data sets on disk: one folder for each, with .npy files that can be memory-mapped and a manifest.

A folder is written under a temporary name, synced and then renamed, so an incomplete folder is never read. Several
processes may write at once, and one that is killed leaves no broken data set.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedgma.data.files.dataset import Dataset, Source, Split
from fedgma.data.files.npy import map_npy
from fedgma.documents import read_json
from fedgma.errors import DataError, IntegrityError

VERSION = 1  # of the layout; a set in another version is read again from its source
MANIFEST = "manifest.json"
LARGEST = 1 << 24  # bytes of a manifest
LOG = logging.getLogger(__name__)


class Cached(NamedTuple):
    """A data set from the cache, and the files that it was read from."""

    dataset: Dataset
    origin: Mapping[str, int]  # name to size in bytes


def cache_folder() -> Path:
    """`$FEDGMA_CACHE`, or `fedgma` in the user's cache folder."""
    if chosen := os.environ.get("FEDGMA_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fedgma"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "fedgma" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedgma"


def open_cached(cache: Path, name: str) -> Cached | None:
    """Open the cached set of that name with read-only memory maps; raises if a file does not match the manifest."""
    folder = cache / "datasets" / name
    try:
        if not (folder / MANIFEST).exists():
            return None
        manifest = read_json(folder / MANIFEST, LARGEST)
    except DataError as error:
        raise IntegrityError(f"the manifest of the cached {name} cannot be read ({error}); {_remedy(folder)}") from None
    if not isinstance(manifest, dict) or manifest.get("version") != VERSION:
        return None
    try:
        arrays = {key: _open_array(folder, key, digest) for key, digest in dict(manifest["arrays"]).items()}
        train, test = (_split(arrays, part) for part in ("train", "test"))
        source = Source(**manifest["source"], cached=True)
        classes, notes = tuple(manifest["classes"]), tuple(manifest["notes"])
        return Cached(Dataset(name, train, test, classes, source, notes), dict(manifest["origin"]))
    except (KeyError, TypeError, OSError, ValueError) as error:
        raise IntegrityError(f"the cached {name} is damaged ({error}); {_remedy(folder)}") from None


def _remedy(folder: Path) -> str:
    return f"delete {folder} and load it again"


def _open_array(folder: Path, key: str, digest: str) -> Any:
    path = folder / f"{key}.npy"
    with path.open("rb") as stream:
        actual = hashlib.file_digest(stream, "sha256").hexdigest()
    if actual != digest:
        raise ValueError(f"{path.name} has sha256 {actual[:12]}, expected {digest[:12]}")
    return map_npy(path)


def _split(arrays: Mapping[str, Any], part: str) -> Split:
    return Split(arrays[f"{part}_x"], arrays[f"{part}_y"], arrays.get(f"{part}_client"))


def store(cache: Path, dataset: Dataset, origin: Mapping[str, int]) -> bool:
    """Write a data set to the cache, replacing another of its name; returns False if the cache cannot be written."""
    parent = cache / "datasets"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=f".{dataset.name}-", dir=parent))
    except OSError as error:
        LOG.warning("%s is not cached: %s", dataset.name, error)
        return False
    try:
        _write(stage, dataset, origin)
        _publish(stage, parent / dataset.name)
    except OSError as error:
        LOG.warning("%s is not cached: %s", dataset.name, error)
        return False
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return True


def _write(stage: Path, dataset: Dataset, origin: Mapping[str, int]) -> None:
    digests = {}
    for part, split in (("train", dataset.train), ("test", dataset.test)):
        for field, array in split._asdict().items():
            if array is not None:
                digests[f"{part}_{field}"] = _write_array(stage / f"{part}_{field}.npy", array)
    manifest = {
        "version": VERSION,
        "name": dataset.name,
        "source": {"kind": dataset.source.kind, "name": dataset.source.name, "sha256": dataset.source.sha256},
        "origin": dict(origin),
        "samples": {"train": len(dataset.train.y), "test": len(dataset.test.y)},
        "classes": list(dataset.classes),
        "notes": list(dataset.notes),
        "arrays": digests,
    }
    with (stage / MANIFEST).open("w") as stream:
        json.dump(manifest, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(stage)


def _write_array(path: Path, array: Any) -> str:
    with path.open("w+b") as stream:
        np.save(stream, np.ascontiguousarray(array), allow_pickle=False)
        stream.flush()
        os.fsync(stream.fileno())
        stream.seek(0)
        return hashlib.file_digest(stream, "sha256").hexdigest()


def discard(cache: Path, name: str) -> None:
    """Remove a damaged set from the cache."""
    final = cache / "datasets" / name
    _remove(final, final.with_name(f".{name}-{os.getpid()}.damaged"))


def _publish(stage: Path, final: Path) -> None:
    """Rename to the final name; an equal set that another process wrote is kept, a different one is removed first."""
    for _ in range(20):  # another process may publish between the two renames: try again
        try:
            stage.rename(final)
        except OSError:
            if _same(stage, final):
                return
            _remove(final, stage.with_name(f"{stage.name}.old"))
        else:
            _sync_folder(final.parent)
            return
    raise OSError(f"other processes keep replacing {final.name}")


def _same(stage: Path, final: Path) -> bool:
    try:
        return (stage / MANIFEST).read_bytes() == (final / MANIFEST).read_bytes()
    except OSError:
        return False


def _remove(final: Path, aside: Path) -> None:
    """Rename before deleting, so that no process can open a folder that is partly deleted."""
    with contextlib.suppress(OSError):  # another process may have moved it first
        final.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
