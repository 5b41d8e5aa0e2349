"""Data sets in the hub's parquet files: a column of encoded pictures, a label, perhaps a writer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedgma.data.files.dataset import Split
from fedgma.data.files.images import decode_all
from fedgma.data.files.reader import Finder, Found, Raw
from fedgma.errors import DataError, FedgmaError

PICTURES = ("image", "img")
LABELS = ("label", "fine_label", "character", "labels")
WRITERS = ("writer_id", "client_id", "client")
SPLITS = {"train": ("train",), "test": ("test", "valid", "validation")}


def finder(mode: str, side: int, *folders: str) -> Finder:
    """Looks for parquet files below folders of these names; the file's name begins with its split."""

    def find(folder: Path) -> Found | None:
        for place in (folder / name for name in folders):
            files = sorted(place.rglob("*.parquet")) if place.is_dir() else []
            train, test = (_of(files, names) for names in SPLITS.values())
            if train:
                return Found((*train, *test), lambda t=train, v=test: read_parquet(t, v, mode, side))  # type: ignore[misc]
        return None

    return find


def _of(files: Sequence[Path], splits: Sequence[str]) -> list[Path]:
    return [file for file in files if file.name.startswith(tuple(splits)) or file.parent.name in splits]


def read_parquet(train: Sequence[Path], test: Sequence[Path], mode: str, side: int) -> Raw:
    """Both splits; a set with no test files gives an empty test split."""
    columns = [_columns(files) for files in (train, test)]
    names = sorted({writer for _, _, writers in columns for writer in writers or []})
    number = {name: n for n, name in enumerate(names)}
    splits = []
    for pictures, labels, writers in columns:
        x = decode_all(pictures, mode, (side, side))
        owner = None if writers is None else np.array([number[name] for name in writers], np.int64)
        splits.append(Split(x, np.array(labels, np.int64), owner))
    if not test:
        splits[1] = splits[1]._replace(client=None if splits[0].client is None else np.empty(0, np.int64))
    return Raw(splits[0], splits[1])


def _columns(files: Sequence[Path]) -> tuple[list[bytes], list[int], list[str] | None]:
    """Encoded pictures, labels and writers of some files."""
    pictures: list[bytes] = []
    labels: list[int] = []
    writers: list[str] | None = None
    for file in files:
        table = _table(file)
        pictures += [cell["bytes"] if isinstance(cell, dict) else cell for cell in table[_pick(table, PICTURES, file)]]
        labels += table[_pick(table, LABELS, file)]
        if any(name in table for name in WRITERS):
            writers = (writers or []) + [str(name) for name in table[_pick(table, WRITERS, file)]]
    return pictures, labels, writers


def _table(file: Path) -> dict[str, list[Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise FedgmaError("reading parquet files needs pyarrow: pip install 'fedgma[hub]'") from None
    try:
        wanted = [name for name in parquet.read_schema(file).names if name in {*PICTURES, *LABELS, *WRITERS}]
        return dict(parquet.ParquetFile(file).read(columns=wanted).to_pydict())
    except (ArrowException, OSError) as error:
        raise DataError(f"{file.name} is not a parquet file, or damaged: {error}") from None


def _pick(table: dict[str, list[Any]], names: Sequence[str], file: Path) -> str:
    for name in names:
        if name in table:
            return name
    raise DataError(f"{file.name} has none of the columns {', '.join(names)}; it has {', '.join(table)}")
