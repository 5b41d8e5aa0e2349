"""Reads packed data sets: one .npz each, with images as lossless WebP tiles or as concatenated JPEG files.

A tile is a 10 x 10 grid of 100 consecutive images, row by row; the last one may be padded.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedgma.data.files.dataset import Images, Split, get_array
from fedgma.data.files.images import decode_all
from fedgma.data.files.npy import read_npz
from fedgma.data.files.reader import Finder, FoundFiles, Raw
from fedgma.errors import DataError

Arrays = Mapping[str, npt.NDArray[np.generic]]

SHA256 = {
    "cifar10.npz": "110dc6bd81783e7d900f090e3dfc1dc19f0129390150a4fe021d7f8b2693d645",
    "femnist.npz": "e6fcd61de8e6c7b421207dde28ce683ef467f2ebd8f93f3ea83d0f2961553716",
    "mnist.npz": "ceb57726a3f97da75ac6f93d6adb53b93f8394de3675c8dfbbd980eb8b30c357",
    "tinyimagenet_subset.npz": "74953695a10f5dca30c3cdbaddc0792638ee845de410e2ced882882099d31192",
}
GRID = 10


def finder(file: str, kind: str) -> Finder:
    """A finder of a packed file of that name."""

    def find(folder: Path) -> FoundFiles | None:
        path = folder / file
        if not path.is_file():
            return None
        return FoundFiles((path,), lambda: KINDS[kind](read_npz(path), file), SHA256[file])

    return find


def untile(arrays: Arrays, key: str, count: int, side: int, mode: str, file: str) -> Images:
    """The first `count` images of a row of tiles: [sample, channel, side, side]."""
    prefix = f"{key}_" if key else ""
    encoded = _split_bytes(arrays, f"{prefix}webp", f"{prefix}offsets", file)
    tiles = decode_all(encoded, mode, (GRID * side, GRID * side))
    if len(tiles) * GRID * GRID < count:
        raise DataError(f"{file} must hold an image for each of {count} labels, got {len(tiles)} tiles of {GRID**2}")
    rows = tiles.reshape(-1, tiles.shape[1], GRID, side, GRID, side)
    return np.ascontiguousarray(rows.transpose(0, 2, 4, 1, 3, 5).reshape(-1, tiles.shape[1], side, side)[:count])


def _split_bytes(arrays: Arrays, content: str, offsets: str, file: str) -> list[bytes]:
    joined, bounds = get_array(arrays, content, file), get_array(arrays, offsets, file)
    return [joined[int(a) : int(b)].tobytes() for a, b in pairwise(bounds.tolist())]


def _labels(arrays: Arrays, key: str, file: str) -> npt.NDArray[np.int64]:
    return get_array(arrays, key, file).astype(np.int64)


def _cifar10(arrays: Arrays, file: str) -> Raw:
    train, test = (_read_tiles(arrays, part, 32, "RGB", file) for part in ("train", "test"))
    return Raw(train, test, tuple(map(str, get_array(arrays, "classes", file))))


def _mnist_writers(arrays: Arrays, file: str) -> Raw:
    train, test = (
        _read_tiles(arrays, part, 28, "L", file)._replace(client=_labels(arrays, f"{part}_writers", file))
        for part in ("train", "test")
    )
    return Raw(train, test)


def _read_tiles(arrays: Arrays, part: str, side: int, mode: str, file: str) -> Split:
    y = _labels(arrays, f"{part}_labels", file)
    return Split(untile(arrays, part, len(y), side, mode, file), y)


def _mnist(arrays: Arrays, file: str) -> Raw:
    raw = _mnist_writers(arrays, file)
    return Raw(raw.train._replace(client=None), raw.test._replace(client=None))


def _femnist(arrays: Arrays, file: str) -> Raw:
    y, writer = _labels(arrays, "labels", file), _labels(arrays, "writer", file)
    x = untile(arrays, "", len(y), 28, "L", file)
    test = get_array(arrays, "is_test", file).astype(bool)
    note = "a part of FEMNIST: 396 whole writers and the test part of 314 more, of about 3,550"
    classes = tuple(map(str, get_array(arrays, "classes", file)))
    return Raw(Split(x[~test], y[~test], writer[~test]), Split(x[test], y[test], writer[test]), classes, (note,))


def _tinyimagenet(arrays: Arrays, file: str) -> Raw:
    train, val = (_jpegs(arrays, part, file) for part in ("train", "val"))
    note = "a part of TinyImageNet: 40 of 500 training and 20 of 50 validation images of each class"
    return Raw(train, val, tuple(map(str, get_array(arrays, "class_names", file))), (note,))


def _jpegs(arrays: Arrays, part: str, file: str) -> Split:
    x = decode_all(_split_bytes(arrays, f"{part}_jpeg", f"{part}_offsets", file), "RGB", (64, 64))
    return Split(x, _labels(arrays, f"{part}_labels", file))


KINDS = {
    "cifar10": _cifar10,
    "mnist": _mnist,
    "mnist-writers": _mnist_writers,
    "femnist-62": _femnist,
    "tinyimagenet": _tinyimagenet,
}
