"""Reads data sets in parquet files, as the Hugging Face hub has them: encoded images, labels, sometimes writers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedgma.data.files.dataset import Split
from fedgma.data.files.images import decode_all
from fedgma.data.files.reader import Finder, FoundFiles, Raw
from fedgma.errors import DataError, FedgmaError

IMAGES = ("image", "img")
LABELS = ("label", "fine_label", "character", "labels")
WRITERS = ("writer_id", "client_id", "client")
SPLITS = {"train": ("train",), "test": ("test", "valid", "validation")}


def finder(mode: str, side: int, *folders: str) -> Finder:
    """A finder of parquet files in folders of these names; a file or its folder is named after the split."""

    def find(folder: Path) -> FoundFiles | None:
        for subfolder in (folder / name for name in folders):
            files = sorted(subfolder.rglob("*.parquet")) if subfolder.is_dir() else []
            train, test = (_files_of_split(files, names) for names in SPLITS.values())
            if train:
                return FoundFiles((*train, *test), lambda t=train, v=test: read_parquet(t, v, mode, side))  # type: ignore[misc]
        return None

    return find


def _files_of_split(files: Sequence[Path], splits: Sequence[str]) -> list[Path]:
    return [file for file in files if file.name.startswith(tuple(splits)) or file.parent.name in splits]


def read_parquet(train: Sequence[Path], test: Sequence[Path], mode: str, side: int) -> Raw:
    """Read both splits; without test files the test split is empty."""
    columns = [_read_columns(files) for files in (train, test)]
    names = sorted({writer for _, _, writers in columns for writer in writers or []})
    number = {name: n for n, name in enumerate(names)}
    splits = []
    for images, labels, writers in columns:
        x = decode_all(images, mode, (side, side))
        client = None if writers is None else np.array([number[name] for name in writers], np.int64)
        splits.append(Split(x, np.array(labels, np.int64), client))
    if not test:
        splits[1] = splits[1]._replace(client=None if splits[0].client is None else np.empty(0, np.int64))
    return Raw(splits[0], splits[1])


def _read_columns(files: Sequence[Path]) -> tuple[list[bytes], list[int], list[str] | None]:
    """Encoded images, labels and writers of some files."""
    images: list[bytes] = []
    labels: list[int] = []
    writers: list[str] | None = None
    for file in files:
        table = _read_table(file)
        cells = table[_find_column(table, IMAGES, file)]
        images += [cell["bytes"] if isinstance(cell, dict) else cell for cell in cells]
        labels += table[_find_column(table, LABELS, file)]
        if any(name in table for name in WRITERS):
            writers = (writers or []) + [str(name) for name in table[_find_column(table, WRITERS, file)]]
    return images, labels, writers


def _read_table(file: Path) -> dict[str, list[Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise FedgmaError("reading parquet files needs pyarrow: pip install 'fedgma[hub]'") from None
    try:
        wanted = [name for name in parquet.read_schema(file).names if name in {*IMAGES, *LABELS, *WRITERS}]
        return dict(parquet.ParquetFile(file).read(columns=wanted).to_pydict())
    except (ArrowException, OSError) as error:
        raise DataError(f"{file.name} is not a parquet file, or is damaged: {error}") from None


def _find_column(table: dict[str, list[Any]], names: Sequence[str], file: Path) -> str:
    for name in names:
        if name in table:
            return name
    raise DataError(f"{file.name} must have one of the columns {', '.join(names)}, got {', '.join(table)}")
