"""CIFAR-10 and CIFAR-100 in their binary version: the archive, read as a stream, or the folder of .bin files."""

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from fedgma.data.files.dataset import Split
from fedgma.data.files.reader import Found, Raw, first_file, read_exactly
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


def find_cifar10(folder: Path) -> Found | None:
    """CIFAR-10's binary archive or folder."""
    return _find(folder, CIFAR10)


def find_cifar100(folder: Path) -> Found | None:
    """CIFAR-100's binary archive or folder."""
    return _find(folder, CIFAR100)


def _find(folder: Path, layout: Layout) -> Found | None:
    if (path := first_file(folder, layout.archive, layout.folder)) is not None:
        return Found((path,), lambda: _read(path, layout))
    if all((folder / name).is_file() for name in (*layout.train, layout.test)):
        return Found(tuple(folder / name for name in (*layout.train, layout.test)), lambda: _read(folder, layout))
    if (pickled := first_file(folder, *layout.pickled)) is not None:
        raise DataError(
            f"{pickled.name} holds Python pickles, which can run code and are never read; "
            f"put the binary version, {layout.archive}, in its place"
        )
    return None


def _read(path: Path, layout: Layout) -> Raw:
    wanted = {*layout.train, layout.test, layout.names}
    members = dict(_folder_members(path, wanted) if path.is_dir() else _archive_members(path, wanted))
    missing = {*layout.train, layout.test} - set(members)
    if missing:
        raise DataError(f"{path.name} lacks {', '.join(sorted(missing))}; it is incomplete or another data set")
    train = [_records(members[name], name, layout.label_bytes) for name in layout.train]
    joined = Split(np.concatenate([part.x for part in train]), np.concatenate([part.y for part in train]))
    classes = tuple(members.get(layout.names, b"").decode("ascii", "replace").split())
    return Raw(joined, _records(members[layout.test], layout.test, layout.label_bytes), classes)


def _folder_members(path: Path, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    for name in sorted(wanted):
        if (path / name).is_file():
            size = _allowed((path / name).stat().st_size, name)
            with (path / name).open("rb") as stream:
                yield name, read_exactly(stream, size, name)


def _archive_members(path: Path, wanted: set[str]) -> Iterator[tuple[str, bytes]]:
    """Wanted regular files of an archive, in one pass; nothing is written, so names and links cannot lead astray."""
    try:
        with tarfile.open(path, "r|gz") as archive:
            for entry in archive:
                name = PurePosixPath(entry.name).name
                if name in wanted and entry.isreg() and (stream := archive.extractfile(entry)) is not None:
                    yield name, read_exactly(stream, _allowed(entry.size, name), name)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path.name} is damaged or truncated: {error}") from None


def _allowed(size: int, name: str) -> int:
    largest = LARGEST if name.endswith(".bin") else SMALL
    if size > largest:
        raise DataError(f"{name} holds {size} bytes, more than the {largest} that such a file can")
    return size


def _records(content: bytes, name: str, label_bytes: int) -> Split:
    record = PIXELS + label_bytes
    if not content or len(content) % record:
        raise DataError(f"{name} holds {len(content)} bytes, which is not a whole number of {record}-byte records")
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    return Split(rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1].astype(np.int64))
