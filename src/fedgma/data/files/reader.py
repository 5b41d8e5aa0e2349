"""What a reader finds in a folder, and what it makes of it."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

from fedgma.data.files.dataset import Split
from fedgma.errors import DataError, IntegrityError

BLOCK = 1 << 20


class Raw(NamedTuple):
    """A data set as read from its files, before it is checked against what is known of it."""

    train: Split
    test: Split
    classes: tuple[str, ...] = ()  # where the files name them
    notes: tuple[str, ...] = ()


class Found(NamedTuple):
    """Files that look like a data set, and the function that reads them."""

    files: tuple[Path, ...]
    read: Callable[[], Raw]
    sha256: str | None = None  # what the file must hash to, where that is known


Finder = Callable[[Path], Found | None]


def sha256_of(files: Iterable[Path]) -> str:
    """Checksum of a file, or of the list of checksums where there are several; folders count by their files."""
    paths = sorted(path for file in files for path in (file.rglob("*") if file.is_dir() else [file]) if path.is_file())
    digests = [(_sha256(path), path.name) for path in paths]
    if len(digests) == 1:
        return digests[0][0]
    return hashlib.sha256("".join(f"{digest}  {name}\n" for digest, name in digests).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_sha256(found: Found) -> str:
    """The checksum of what was found; refuses one that is not the known one."""
    digest = sha256_of(found.files)
    if found.sha256 is not None and digest != found.sha256:
        raise IntegrityError(
            f"{found.files[0].name}: expected sha256 {found.sha256}, found {digest}; the file is damaged, get it again"
        )
    return digest


class Readable(Protocol):
    """Anything bytes can be read from."""

    def read(self, size: int = ..., /) -> bytes:
        """Up to `size` bytes; none at the end."""
        ...


def read_exactly(stream: Readable, size: int, name: str) -> bytes:
    """`size` bytes and no more, whatever the file claims or unpacks to."""
    parts, left = [], size
    while left > 0:
        block = stream.read(min(left, BLOCK))
        if not block:
            raise DataError(f"{name} is truncated: expected {size} more bytes, found {size - left}")
        parts.append(block)
        left -= len(block)
    return b"".join(parts)


def first_file(folder: Path, *names: str) -> Path | None:
    """The first of these names that is a file or folder there."""
    return next((folder / name for name in names if (folder / name).exists()), None)
