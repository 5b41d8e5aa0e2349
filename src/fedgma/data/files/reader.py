"""What the readers of file formats share: the files they find, the data they read, checksums."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from fedgma.data.files.dataset import Split
from fedgma.errors import DataError, IntegrityError

BLOCK = 1 << 20


class Raw(NamedTuple):
    """A data set as read from its files, before any check."""

    train: Split
    test: Split
    classes: tuple[str, ...] = ()  # empty if the files do not name them
    notes: tuple[str, ...] = ()


class FoundFiles(NamedTuple):
    """Files of a data set, and the function that reads them."""

    paths: tuple[Path, ...]
    read: Callable[[], Raw]
    sha256: str | None = None  # expected checksum, if known


Finder = Callable[[Path], FoundFiles | None]


def sha256_of(files: Iterable[Path]) -> str:
    """Checksum of a file, or of the list of checksums of several files; a folder stands for all files in it."""
    paths = sorted(path for file in files for path in (file.rglob("*") if file.is_dir() else [file]) if path.is_file())
    digests = [(_sha256(path), path.name) for path in paths]
    if len(digests) == 1:
        return digests[0][0]
    return hashlib.sha256("".join(f"{digest}  {name}\n" for digest, name in digests).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_sha256(files: FoundFiles) -> str:
    """Return the checksum of the files; raises if it is not the expected one."""
    digest = sha256_of(files.paths)
    if files.sha256 is not None and digest != files.sha256:
        raise IntegrityError(
            f"{files.paths[0].name}: expected sha256 {files.sha256}, got {digest}; the file is damaged, get it again"
        )
    return digest


class Readable(Protocol):
    """An object with a `read` method that returns bytes."""

    def read(self, size: int = ..., /) -> bytes:
        """Up to `size` bytes; empty at the end."""
        ...


def read_exactly(stream: Readable, size: int, name: str) -> bytes:
    """Read exactly `size` bytes; raises `DataError` if there are fewer."""
    parts, left = [], size
    while left > 0:
        block = stream.read(min(left, BLOCK))
        if not block:
            raise DataError(f"{name} is truncated: expected {size} more bytes, got {size - left}")
        parts.append(block)
        left -= len(block)
    return b"".join(parts)


def first_existing(folder: Path, *names: str) -> Path | None:
    """The first of these names that exists in the folder."""
    return next((folder / name for name in names if (folder / name).exists()), None)
