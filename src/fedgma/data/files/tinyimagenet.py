"""Reads TinyImageNet as published: the zip, without extracting it, or its folder."""

import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedgma.data.files.dataset import Split
from fedgma.data.files.images import decode_all
from fedgma.data.files.reader import DAMAGED, FoundFiles, Raw, check_announced, first_existing
from fedgma.errors import DataError

ROOT = "tiny-imagenet-200"
LARGEST = 1 << 20  # bytes of an image; typical ones have 2 kB
TEXT = 1 << 23  # bytes of a text file; words.txt has 2.7 MB


class Tree:
    """Reads files by their name below `tiny-imagenet-200/`, from a zip or a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.archive = None if path.is_dir() else _open(path)
        self.sizes = dict(_folder_sizes(path) if self.archive is None else _zip_sizes(self.archive))
        if self.archive is not None:
            check_announced(sum(self.sizes.values()), path)

    def read(self, name: str) -> bytes:
        """Read one file; raises if it is missing or too large."""
        largest = TEXT if name.endswith(".txt") else LARGEST
        if name not in self.sizes or self.sizes[name] > largest:
            raise DataError(f"{self.path.name}: {name} is missing or larger than {largest} bytes")
        if self.archive is None:
            return (self.path / name).read_bytes()
        try:
            with self.archive.open(f"{ROOT}/{name}") as stream:
                return stream.read(largest + 1)
        except DAMAGED as error:
            raise DataError(f"{self.path.name} is damaged at {name}: {error}") from None

    def lines(self, name: str) -> list[str]:
        """The lines of a text file."""
        return self.read(name).decode("utf-8", "replace").splitlines()


def find_tinyimagenet(folder: Path) -> FoundFiles | None:
    """Find the zip or the unpacked folder."""
    path = first_existing(folder, f"{ROOT}.zip", ROOT)
    if path is None and (folder / "wnids.txt").is_file() and (folder / "train").is_dir():
        path = folder
    return None if path is None else FoundFiles((path,), lambda: read_tree(Tree(path)))


def read_tree(tree: Tree) -> Raw:
    """Read the train and validation images; labels number the class ids in sorted order."""
    ids = sorted(" ".join(tree.lines("wnids.txt")).split())
    label_of = {wnid: label for label, wnid in enumerate(ids)}
    train = [(name, label_of.get(name.split("/")[1])) for name in sorted(tree.sizes) if _is_train(name)]
    rows = [line.split("\t") for line in tree.lines("val/val_annotations.txt") if line]
    val = [(f"val/images/{name}", label_of.get(rest[0]) if rest else None) for name, *rest in rows]
    if any(label is None for _, label in train + val):
        raise DataError(f"{tree.path.name} holds images of classes that wnids.txt does not list")
    words = dict(line.split("\t", 1) for line in tree.lines("words.txt") if "\t" in line)
    return Raw(_split(tree, train), _split(tree, val), tuple(words.get(wnid, wnid) for wnid in ids))


def _is_train(name: str) -> bool:
    return name.startswith("train/") and name.endswith(".JPEG")


def _split(tree: Tree, images: list[tuple[str, int | None]]) -> Split:
    x = decode_all([tree.read(name) for name, _ in images], "RGB", (64, 64))
    return Split(x, np.array([label for _, label in images], np.int64))


def _open(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except DAMAGED as error:
        raise DataError(f"{path.name} is damaged or truncated: {error}") from None


def _zip_sizes(archive: zipfile.ZipFile) -> Iterator[tuple[str, int]]:
    for entry in archive.infolist():
        if entry.filename.startswith(f"{ROOT}/") and not entry.filename.endswith("/"):
            yield entry.filename.removeprefix(f"{ROOT}/"), entry.file_size


def _folder_sizes(path: Path) -> Iterator[tuple[str, int]]:
    for file in path.rglob("*"):
        if file.is_file():
            yield file.relative_to(path).as_posix(), file.stat().st_size
