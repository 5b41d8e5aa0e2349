"""Reads the idx files of MNIST and Fashion-MNIST, gzipped or not, as streams."""

import gzip
import math
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedgma.data.files.dataset import Split
from fedgma.data.files.reader import DAMAGED, Finder, FoundFiles, Raw, check_announced, first_existing, read_exactly
from fedgma.errors import DataError

PARTS = ("train-images", "train-labels", "t10k-images", "t10k-labels")


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array in an idx file; raises for an invalid header, a truncated file, or extra bytes."""
    gzipped = path.suffix == ".gz"
    try:
        with gzip.open(path) if gzipped else path.open("rb") as stream:
            zeros, kind, dimensions = struct.unpack(">HBB", read_exactly(stream, 4, path.name))
            if zeros != 0 or kind != 8 or not 1 <= dimensions <= 4:
                raise DataError(f"{path.name} is not an idx file of bytes: got the header {(zeros, kind, dimensions)}")
            shape = struct.unpack(f">{dimensions}I", read_exactly(stream, 4 * dimensions, path.name))
            size = check_announced(math.prod(shape), path)
            content = read_exactly(stream, size, path.name)
            if stream.read(1):
                raise DataError(f"{path.name} holds more than the {size} bytes that its header announces")
    except DAMAGED as error:
        raise DataError(f"{path.name} is damaged or truncated: {error}") from None
    return np.ndarray(shape, np.uint8, content)


def read_pair(images: Path, labels: Path) -> Split:
    """Images and labels of one split."""
    x, y = read_idx(images), read_idx(labels)
    if x.ndim != 3 or y.ndim != 1:
        raise DataError(
            f"{images.name} and {labels.name} must hold 3-d images and 1-d labels, got {x.ndim}-d and {y.ndim}-d"
        )
    return Split(x[:, None], y.astype(np.int64))


def finder(test_counts: tuple[int, ...], *folders: str) -> Finder:
    """A finder of the four files in a folder or its subfolders of these names.

    MNIST and Fashion-MNIST use the same file names. So files in a folder of another name are used only if their test
    labels have the class counts of this set.
    """

    def find(folder: Path) -> FoundFiles | None:
        for name in folders:
            for subfolder in (folder / name, folder / name / "raw"):
                if files := _find_files(subfolder):
                    return FoundFiles(files, lambda files=files: _read(files))  # type: ignore[misc]
        files = _find_files(folder)
        named = folder.name.lower() in {name.lower() for name in folders}
        if files and (named or tuple(np.bincount(read_idx(files[3]), minlength=10)) == test_counts):
            return FoundFiles(files, lambda: _read(files))
        return None

    return find


def _find_files(folder: Path) -> tuple[Path, ...]:
    paths = []
    for part in PARTS:
        kind = "idx3" if part.endswith("images") else "idx1"
        names = [f"{part}{dot}{kind}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
        if (path := first_existing(folder, *names)) is None:
            return ()
        paths.append(path)
    return tuple(paths)


def _read(files: tuple[Path, ...]) -> Raw:
    return Raw(read_pair(files[0], files[1]), read_pair(files[2], files[3]))
