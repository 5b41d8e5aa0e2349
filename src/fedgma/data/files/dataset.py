"""What a data set is once it is read: two splits of uint8 images, class names, and where they came from."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedgma.data.shifts import Shift
from fedgma.errors import DataError

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


class Split(NamedTuple):
    """One part of a data set; `client` holds a natural owner (a writer) for each sample where there is one."""

    x: npt.NDArray[np.uint8] | npt.NDArray[np.float32]  # [sample, channel, height, width]; features are float32
    y: Labels  # [sample]
    client: Labels | None = None  # [sample]


class Source(NamedTuple):
    """Where a data set came from, for the record of a run; names files, never folders."""

    kind: str  # embedded | folder | debian | download | arrays
    name: str
    sha256: str
    cached: bool = False


class Dataset(NamedTuple):
    """A named data set: train and test, never overlapping."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    source: Source
    notes: tuple[str, ...] = ()
    shift: Shift | None = None  # the feature shift that belongs to the set (FedCMNIST, FedRotMNIST)
    more_tests: Mapping[str, Split] = {}


def histogram(split: Split, classes: int) -> tuple[int, ...]:
    """Samples of each class.

    >>> histogram(Split(np.zeros((3, 1, 2, 2), np.uint8), np.array([0, 2, 2])), 3)
    (1, 0, 2)
    """
    return tuple(np.bincount(split.y, minlength=classes).tolist())


def check_split(name: str, part: str, split: Split, classes: int) -> Split:
    """Refuse a split whose parts do not fit together; returns it unchanged."""
    where = f"{name} ({part})"
    if split.x.dtype not in (np.uint8, np.float32):
        raise DataError(f"{where}: pixels must be uint8 (or float32 features), not {split.x.dtype}")
    if split.x.dtype == np.uint8 and split.x.ndim != 4:
        raise DataError(f"{where}: images must be [sample, channel, height, width], not of shape {split.x.shape}")
    if len(split.x) != len(split.y):
        raise DataError(f"{where}: {len(split.x)} images but {len(split.y)} labels")
    if len(split.y) and not 0 <= int(split.y.min()) <= int(split.y.max()) < classes:
        raise DataError(f"{where}: labels run from {split.y.min()} to {split.y.max()}, expected 0 to {classes - 1}")
    if split.client is not None and len(split.client) != len(split.y):
        raise DataError(f"{where}: {len(split.client)} client ids but {len(split.y)} labels")
    if split.x.dtype == np.float32 and not np.isfinite(split.x).all():
        raise DataError(f"{where}: features hold values that are not finite")
    return split


def check_counts(name: str, part: str, split: Split, expected: Sequence[int]) -> Split:
    """Refuse a split whose class histogram is not the known one; returns it unchanged."""
    found = histogram(split, len(expected))
    if found != tuple(expected):
        raise DataError(
            f"{name} ({part}): expected {sum(expected)} samples with classes {_short(expected)}, "
            f"found {sum(found)} with {_short(found)}; the file is incomplete or holds another data set"
        )
    return split


def _short(counts: Sequence[int]) -> str:
    text = " ".join(map(str, counts[:10]))
    return f"[{text}{' ...' if len(counts) > 10 else ''}]"


def member(arrays: Mapping[str, npt.NDArray[np.generic]], key: str, file: str) -> npt.NDArray[np.generic]:
    """One array of an `.npz`, or a sentence that says which is missing."""
    try:
        return arrays[key]
    except KeyError:
        raise DataError(f"{file} has no array {key!r}; it holds {', '.join(sorted(arrays)) or 'nothing'}") from None
