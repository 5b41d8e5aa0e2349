"""Reads data sets in parquet files, as the Hugging Face hub has them: encoded images, labels, sometimes writers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedgma.data.files.dataset import Labels, Split, integers
from fedgma.data.files.images import decode_all
from fedgma.data.files.reader import Finder, FoundFiles, Raw, check_announced
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
    pixels = side * side * (1 if mode == "L" else 3)
    columns = [_read_columns(files, pixels) for files in (train, test)]
    names = sorted({writer for _, _, writers in columns for writer in writers or []})
    number = {name: n for n, name in enumerate(names)}
    splits = []
    for images, labels, writers in columns:
        x = decode_all(images, mode, (side, side))
        client = None if writers is None else np.array([number[name] for name in writers], np.int64)
        splits.append(Split(x, labels, client))
    if not test:
        splits[1] = splits[1]._replace(client=None if splits[0].client is None else np.empty(0, np.int64))
    return Raw(splits[0], splits[1])


def _read_columns(files: Sequence[Path], pixels: int) -> tuple[list[bytes], Labels, list[str] | None]:
    """Encoded images, labels and writers of some files."""
    images: list[bytes] = []
    labels: list[Labels] = [np.empty(0, np.int64)]
    writers: list[str] | None = None
    for file in files:
        table = _read_table(file, pixels)
        cells = table[_find_column(table, IMAGES, file)]
        images += [_encoded(cell, file) for cell in cells]
        labels.append(integers(table[_find_column(table, LABELS, file)], file.name))
        if any(name in table for name in WRITERS):
            writers = (writers or []) + [str(name) for name in table[_find_column(table, WRITERS, file)]]
    if writers is not None and len(writers) != len(images):
        raise DataError(f"{files[0].name} and those beside it must all name the writers, or none")
    return images, np.concatenate(labels), writers


def _encoded(cell: Any, file: Path) -> bytes:
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    if not isinstance(content, bytes):
        raise DataError(f"{file.name} must hold encoded images, got {type(content).__name__}")
    return content


def _read_table(file: Path, pixels: int) -> dict[str, list[Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise FedgmaError("reading parquet files needs pyarrow: pip install 'fedgma[hub]'") from None
    try:
        opened = parquet.ParquetFile(file)
        check_announced(opened.metadata.num_rows * pixels, file)  # a few bytes can stand for any number of rows
        wanted = [name for name in opened.schema_arrow.names if name in {*IMAGES, *LABELS, *WRITERS}]
        return dict(opened.read(columns=wanted).to_pydict())
    except FedgmaError:
        raise
    except Exception as error:  # pyarrow raises many types of errors for damaged files
        raise DataError(f"{file.name} is not a parquet file, or is damaged: {error}") from None


def _find_column(table: dict[str, list[Any]], names: Sequence[str], file: Path) -> str:
    for name in names:
        if name in table:
            return name
    raise DataError(f"{file.name} must have one of the columns {', '.join(names)}, got {', '.join(table)}")
