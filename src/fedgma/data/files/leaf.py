"""Reads FEMNIST as LEAF writes it: folders `train` and `test` of JSON files, each with the images of some writers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedgma.data.files.dataset import Split, integers
from fedgma.data.files.reader import FoundFiles, Raw, largest
from fedgma.errors import DataError

LARGEST = 1 << 29  # bytes of one JSON file; LEAF's have about 100 MB
CHARACTERS = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


def find_leaf(folder: Path) -> FoundFiles | None:
    """Find LEAF's two folders, directly or below `femnist` or `femnist/data`."""
    for root in (folder / "femnist" / "data", folder / "femnist", folder / "data", folder):
        train, test = (sorted((root / part).glob("*.json")) for part in ("train", "test"))
        if train and test:
            return FoundFiles((*train, *test), lambda train=train, test=test: read_leaf(train, test))  # type: ignore[misc]
    return None


def read_leaf(train: Sequence[Path], test: Sequence[Path]) -> Raw:
    """Read both parts; writers are numbered in the order of their names."""
    parts = [_read_files(train), _read_files(test)]
    names = sorted({name for part in parts for name, _, _ in part})
    number = {name: n for n, name in enumerate(names)}
    if not (parts[0] and parts[1]):
        raise DataError(f"{train[0].name} and {test[0].name} must hold at least one writer each, got none")
    return Raw(_split(parts[0], number), _split(parts[1], number), CHARACTERS)


def _read_files(files: Sequence[Path]) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(writer, images, labels) of every writer of these files."""
    return [entry for file in files for entry in _parse_writers(_read_json(file), file.name)]


def _read_json(file: Path) -> Any:
    if file.stat().st_size > (limit := largest(LARGEST)):
        raise DataError(f"{file.name} must hold at most {limit} bytes, got {file.stat().st_size}")
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file.name} is not valid JSON, or truncated: {error}") from None


def _parse_writers(content: Any, file: str) -> list[tuple[str, np.ndarray, np.ndarray]]:
    try:
        users, counts, data = content["users"], content["num_samples"], content["user_data"]
        writers = [(str(user), _pixels(data[user]["x"], file), integers(data[user]["y"], file)) for user in users]
        counted = list(zip(writers, counts, strict=True))
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{file} must hold LEAF's users, num_samples and user_data: {error!r}") from None
    for (user, x, y), count in counted:
        if not len(x) == len(y) == count:
            raise DataError(f"{file}: writer {user} must have {count} samples, got {len(x)} images, {len(y)} labels")
    return writers


def _pixels(rows: Any, file: str) -> np.ndarray:
    """LEAF writes grey levels as multiples of 1/255; white is 1."""
    x = np.array(rows, np.float64).reshape(-1, 784)
    if not (np.isfinite(x).all() and x.min(initial=0) >= 0 and x.max(initial=0) <= 1):
        raise DataError(f"{file} must hold pixels in [0, 1], got values outside")
    return np.rint(x * 255).astype(np.uint8).reshape(-1, 1, 28, 28)


def _split(part: list[tuple[str, np.ndarray, np.ndarray]], number: dict[str, int]) -> Split:
    writers = np.repeat([number[name] for name, _, _ in part], [len(y) for _, _, y in part]).astype(np.int64)
    return Split(np.concatenate([x for _, x, _ in part]), np.concatenate([y for _, _, y in part]), writers)
