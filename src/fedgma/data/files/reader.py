"""What the readers of file formats share: the files they find, the data they read, checksums, limits."""

import hashlib
import lzma
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from fedgma.data.files.dataset import Source, Split
from fedgma.errors import ConfigError, DataError, IntegrityError

BLOCK = 1 << 20
SMALL = 1 << 28  # bytes that any file may unpack to
RATIO = 100  # a larger file may unpack to so many times its size; images and features stay below 20
VARIABLE = "FEDGMA_MAX_BYTES"  # replaces both limits

# What Python's zip, gzip and tar modules raise for damaged files. RuntimeError: encrypted, or an unknown compression.
DAMAGED = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, RuntimeError, UnicodeError)


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


def source_of(train: Split, test: Split, name: str, files: Sequence[Path]) -> Source:
    """The source of a user's data: the `files` that they were read from, or else the arrays themselves."""
    if files:
        first = files[0]
        return Source("folder", first.resolve().name if first.is_dir() else first.name, sha256_of(files))
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for s in (train, test) for a in s[:2]))
    return Source("arrays", name, digest.hexdigest())


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


def read_exactly(stream: Readable, size: int, name: str) -> bytearray:
    """Read exactly `size` bytes; raises `DataError` if there are fewer."""
    content = bytearray()  # grows with what is there, not with what a header announces
    while len(content) < size:
        block = stream.read(min(size - len(content), BLOCK))
        if not block:
            raise DataError(f"{name} is truncated: expected {size} more bytes, got {len(content)}")
        content += block
    return content


def largest(usual: int) -> int:
    """The most bytes that may be read at once: $FEDGMA_MAX_BYTES, or the usual number."""
    chosen = os.environ.get(VARIABLE, "")
    if not chosen:
        return usual
    if not chosen.isascii() or not chosen.isdigit() or len(chosen) > 18:
        raise ConfigError(f"{VARIABLE} must be a number of bytes, got {chosen!r}")
    return int(chosen)


def largest_of(path: Path) -> int:
    """The most bytes that a file may unpack to."""
    return largest(max(SMALL, RATIO * path.stat().st_size))


def check_announced(size: int, path: Path) -> int:
    """Return the number of bytes that a file announces; raises if that is more than a file of its size may hold."""
    if size > (limit := largest_of(path)):
        raise DataError(
            f"{path.name} has {path.stat().st_size} bytes but announces {size}, more than {limit}; "
            f"if the file is right, set {VARIABLE} to a larger number"
        )
    return size


def first_existing(folder: Path, *names: str) -> Path | None:
    """The first of these names that exists in the folder."""
    return next((folder / name for name in names if (folder / name).exists()), None)
