"""Reads the binary versions of CIFAR-10 and CIFAR-100: the archive, as a stream, or the folder of .bin files."""

import gzip
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from fedgma.data.files.dataset import Split
from fedgma.data.files.reader import BLOCK, DAMAGED, FoundFiles, Raw, Readable, first_existing, largest_of, read_exactly
from fedgma.errors import DataError

PIXELS = 3 * 32 * 32
LARGEST = 60_000 * (PIXELS + 2)  # bytes of one member
SMALL = 1 << 16  # bytes of a file of class names


class Layout(NamedTuple):
    """Names and record format of one of the two sets."""

    archive: str
    folder: str
    pickled: tuple[str, ...]
    train: tuple[str, ...]
    test: str
    names: str
    label_bytes: int  # CIFAR-100 writes the coarse label first; the last one is the class


CIFAR10 = Layout(
    archive="cifar-10-binary.tar.gz",
    folder="cifar-10-batches-bin",
    pickled=("cifar-10-python.tar.gz", "cifar-10-batches-py"),
    train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
    test="test_batch.bin",
    names="batches.meta.txt",
    label_bytes=1,
)
CIFAR100 = Layout(
    archive="cifar-100-binary.tar.gz",
    folder="cifar-100-binary",
    pickled=("cifar-100-python.tar.gz", "cifar-100-python"),
    train=("train.bin",),
    test="test.bin",
    names="fine_label_names.txt",
    label_bytes=2,
)


def find_cifar10(folder: Path) -> FoundFiles | None:
    """CIFAR-10's binary archive or folder."""
    return _find(folder, CIFAR10)


def find_cifar100(folder: Path) -> FoundFiles | None:
    """CIFAR-100's binary archive or folder."""
    return _find(folder, CIFAR100)


def _find(folder: Path, layout: Layout) -> FoundFiles | None:
    if (path := first_existing(folder, layout.archive, layout.folder)) is not None:
        return FoundFiles((path,), lambda: _read(path, layout))
    if all((folder / name).is_file() for name in (*layout.train, layout.test)):
        return FoundFiles(tuple(folder / name for name in (*layout.train, layout.test)), lambda: _read(folder, layout))
    if (pickled := first_existing(folder, *layout.pickled)) is not None:
        raise DataError(
            f"{pickled.name} holds Python pickles, which can run code and are never read; "
            f"use the binary version instead: {layout.archive}"
        )
    return None


def _read(path: Path, layout: Layout) -> Raw:
    names = {*layout.train, layout.test, layout.names}
    members = dict(_folder_members(path, names) if path.is_dir() else _archive_members(path, names))
    missing = {*layout.train, layout.test} - set(members)
    if missing:
        raise DataError(f"{path.name} does not contain {', '.join(sorted(missing))}; use the complete binary version")
    train = [_records(members[name], name, layout.label_bytes) for name in layout.train]
    joined = Split(np.concatenate([part.x for part in train]), np.concatenate([part.y for part in train]))
    classes = tuple(members.get(layout.names, bytearray()).decode("ascii", "replace").split())
    return Raw(joined, _records(members[layout.test], layout.test, layout.label_bytes), classes)


def _folder_members(path: Path, names: set[str]) -> Iterator[tuple[str, bytearray]]:
    for name in sorted(names):
        if (path / name).is_file():
            size = _check_size((path / name).stat().st_size, name)
            with (path / name).open("rb") as stream:
                yield name, read_exactly(stream, size, name)


def _archive_members(path: Path, names: set[str]) -> Iterator[tuple[str, bytearray]]:
    """Wanted regular files of an archive, in one pass; nothing is extracted, so unsafe names are harmless.

    Headers are read one by one: `tarfile.open` would also follow links and read extended headers of any length.
    """
    left = largest_of(path)
    try:
        with gzip.open(path) as stream:
            while (block := stream.read(tarfile.BLOCKSIZE)).strip(b"\0"):  # zeros are the end
                entry = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
                padded = -(-entry.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
                left -= tarfile.BLOCKSIZE + padded
                if entry.size < 0 or left < 0:
                    raise DataError(f"{path.name} unpacks to more than {largest_of(path)} bytes, so it is not read")
                name = PurePosixPath(entry.name).name
                wanted = _check_size(entry.size, name) if name in names and entry.isreg() else 0
                if wanted:
                    yield name, read_exactly(stream, wanted, name)
                _skip(stream, padded - wanted)
    except (*DAMAGED, tarfile.TarError) as error:
        raise DataError(f"{path.name} is damaged or truncated: {error}") from None


def _skip(stream: Readable, size: int) -> None:
    while size > 0 and (block := stream.read(min(size, BLOCK))):
        size -= len(block)


def _check_size(size: int, name: str) -> int:
    largest = LARGEST if name.endswith(".bin") else SMALL
    if size > largest:
        raise DataError(f"{name} must hold at most {largest} bytes, got {size}")
    return size


def _records(content: bytearray, name: str, label_bytes: int) -> Split:
    record = PIXELS + label_bytes
    if not content or len(content) % record:
        raise DataError(f"{name} must hold a whole number of {record}-byte records, got {len(content)} bytes")
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    return Split(rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1].astype(np.int64))
