"""The idx files of MNIST and Fashion-MNIST, gzipped or not, read as streams."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedgma.data.files.dataset import Split
from fedgma.data.files.reader import Finder, Found, Raw, first_file, read_exactly
from fedgma.errors import DataError

LARGEST = 1 << 31  # bytes; more than any idx file known, less than a header gone wrong asks for
PARTS = ("train-images", "train-labels", "t10k-images", "t10k-labels")


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array in an idx file; refuses a wrong header, a truncated file and anything left over."""
    packed = path.suffix == ".gz"
    try:
        with gzip.open(path) if packed else path.open("rb") as stream:
            zeros, kind, dimensions = struct.unpack(">HBB", read_exactly(stream, 4, path.name))
            if zeros != 0 or kind != 8 or not 1 <= dimensions <= 4:
                raise DataError(f"{path.name} is not an idx file of bytes: its header is {(zeros, kind, dimensions)}")
            shape = struct.unpack(f">{dimensions}I", read_exactly(stream, 4 * dimensions, path.name))
            size = int(np.prod(shape, dtype=object))
            if size > LARGEST:
                raise DataError(f"{path.name} claims to hold {size} bytes, more than the {LARGEST} that are read")
            content = read_exactly(stream, size, path.name)
            if stream.read(1):
                raise DataError(f"{path.name} goes on after the {size} bytes that its header announces")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path.name} is damaged or truncated: {error}") from None
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_pair(images: Path, labels: Path) -> Split:
    """Images and labels of one split."""
    x, y = read_idx(images), read_idx(labels)
    if x.ndim != 3 or y.ndim != 1:
        raise DataError(f"{images.name} and {labels.name} should hold images and labels, not {x.ndim}-d and {y.ndim}-d")
    return Split(x[:, None], y.astype(np.int64))


def finder(test_counts: tuple[int, ...], *folders: str) -> Finder:
    """Looks for the four files in a folder or its subfolders.

    MNIST and Fashion-MNIST use the same file names; files that lie in no folder of the set's own name are taken only
    if the test labels are those of this set.
    """

    def find(folder: Path) -> Found | None:
        for name in folders:
            for place in (folder / name, folder / name / "raw"):
                if files := _four(place):
                    return Found(files, lambda files=files: _read(files))  # type: ignore[misc]
        files = _four(folder)
        named = folder.name.lower() in {name.lower() for name in folders}
        if files and (named or tuple(np.bincount(read_idx(files[3]), minlength=10)) == test_counts):
            return Found(files, lambda: _read(files))
        return None

    return find


def _four(folder: Path) -> tuple[Path, ...]:
    found = []
    for part in PARTS:
        kind = "idx3" if part.endswith("images") else "idx1"
        names = [f"{part}{dot}{kind}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
        if (path := first_file(folder, *names)) is None:
            return ()
        found.append(path)
    return tuple(found)


def _read(files: tuple[Path, ...]) -> Raw:
    return Raw(read_pair(files[0], files[1]), read_pair(files[2], files[3]))
