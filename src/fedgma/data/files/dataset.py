"""A data set in memory: two splits of samples and targets, names of what a model puts out, and the source."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedgma.data.shifts import Shift
from fedgma.errors import ConfigError, DataError
from fedgma.seeds import generator

Images = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]
SHOWN = 8  # classes in a remark


class Split(NamedTuple):
    """One part of a data set; `client` holds the owner (such as a writer) of each sample, if known."""

    # images [sample, channel, height, width], features [sample, ...], or tokens [sample, position]
    x: npt.NDArray[np.uint8] | npt.NDArray[np.float32] | Labels
    y: npt.NDArray[Any]  # int64 [sample] for classes; `targets` describes the other kinds
    client: Labels | None = None  # [sample]


class Source(NamedTuple):
    """Where a data set was read from, for the record of a run; names files, never folders."""

    kind: str  # embedded | folder | debian | download | arrays
    name: str
    sha256: str
    cached: bool = False


class Dataset(NamedTuple):
    """A named data set with disjoint train and test splits."""

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]  # names of what a model puts out: classes, columns of a target, or tokens
    source: Source
    notes: tuple[str, ...] = ()
    shift: Shift | None = None  # feature shift of the data set (FedCMNIST, FedRotMNIST)
    more_tests: Mapping[str, Split] = {}
    target: str = "class"  # the kind of its targets: one of `targets.TARGETS`
    reading: tuple[str, ...] = ()  # how a user's arrays were understood, where they are not used as they are
    own_tests: bool = False  # whether a client is tested on its own samples of the test split


def histogram(split: Split, classes: int) -> tuple[int, ...]:
    """Samples of each class.

    >>> histogram(Split(np.zeros((3, 1, 2, 2), np.uint8), np.array([0, 2, 2])), 3)
    (1, 0, 2)
    """
    return tuple(np.bincount(split.y, minlength=classes).tolist())


def split_test(samples: Split, groups: npt.NDArray[Any] | None, share: float, seed: int) -> tuple[Split, Split]:
    """The samples, and a random share of each group (of all samples, if there are no groups) as test samples.

    >>> samples = Split(np.zeros((10, 2), np.float32), np.arange(10), np.repeat([0, 1], 5))
    >>> [part.client.tolist() for part in split_test(samples, samples.client, 0.4, seed=0)]
    [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1]]
    """
    if not 0 < share < 1:
        raise ConfigError(f"test_share must be between 0 and 1, got {share}")
    rng, in_test = generator(seed, "own", "test"), np.zeros(len(samples.y), bool)
    everyone = [np.arange(len(samples.y))]
    for members in everyone if groups is None else [np.flatnonzero(groups == group) for group in np.unique(groups)]:
        in_test[rng.permutation(members)[: round(share * len(members)) or int(groups is None)]] = True
    return _select(samples, ~in_test), _select(samples, in_test)


def only_tested(y: npt.NDArray[Any], y_test: npt.NDArray[Any], classes: Sequence[str]) -> list[str]:
    """A sentence on each class without a training sample that has test samples; no model can learn it.

    >>> only_tested(np.array([0, 1]), np.array([0, 2, 2]), ("a", "b", "c"))
    ["class 'c' has 2 test samples and no training sample"]
    """
    train, test = (np.bincount(part, minlength=len(classes)) for part in (y, y_test))
    lost = np.flatnonzero((train == 0) & (test > 0)).tolist()
    held = {label: f"{test[label]} test sample{'' if test[label] == 1 else 's'}" for label in lost[:SHOWN]}
    lines = [f"class {classes[label]!r} has {samples} and no training sample" for label, samples in held.items()]
    return [*lines, f"{len(lost) - SHOWN} more classes have no training sample"] if len(lost) > SHOWN else lines


def _select(samples: Split, mask: npt.NDArray[np.bool_]) -> Split:
    return Split(samples.x[mask], samples.y[mask], None if samples.client is None else samples.client[mask])


def check_split(name: str, part: str, split: Split, classes: int) -> Split:
    """Return the split; raises `DataError` if its arrays do not match each other or the number of classes."""
    where = f"{name} ({part})"
    if split.x.dtype not in (np.uint8, np.float32):
        raise DataError(f"{where}: samples must be uint8 images or float32 features, got {split.x.dtype}")
    if split.x.dtype == np.uint8 and split.x.ndim != 4:
        raise DataError(f"{where}: images must be [sample, channel, height, width], got shape {split.x.shape}")
    if len(split.x) != len(split.y):
        raise DataError(f"{where}: expected one label for each of {len(split.x)} samples, got {len(split.y)} labels")
    if len(split.y) and not 0 <= int(split.y.min()) <= int(split.y.max()) < classes:
        raise DataError(f"{where}: labels must be from 0 to {classes - 1}, got {split.y.min()} to {split.y.max()}")
    if split.client is not None and len(split.client) != len(split.y):
        raise DataError(f"{where}: expected one client id for each of {len(split.y)} labels, got {len(split.client)}")
    if split.x.dtype == np.float32 and not np.isfinite(split.x).all():
        bad = np.flatnonzero(~np.isfinite(split.x.reshape(len(split.x), -1)).all(axis=1))
        count = f"{len(bad)} of {len(split.x)} samples, first in sample {bad[0]}"
        raise DataError(
            f"{where}: features must be finite, got NaN or infinity in {count}; leave them out or fill them"
        )
    return split


def check_counts(name: str, part: str, split: Split, expected: Sequence[int]) -> Split:
    """Return the split; raises `DataError` if its class histogram is not the expected one."""
    counts = histogram(split, len(expected))
    if counts != tuple(expected):
        raise DataError(
            f"{name} ({part}): expected {sum(expected)} samples with class counts {_short(expected)}, "
            f"got {sum(counts)} with {_short(counts)}; the file is incomplete or holds another data set"
        )
    return split


def _short(counts: Sequence[int]) -> str:
    text = " ".join(map(str, counts[:10]))
    return f"[{text}{' ...' if len(counts) > 10 else ''}]"


def integers(values: Any, where: str) -> Labels:
    """Labels or client ids as int64; raises `DataError` if they are not a list of integers.

    >>> integers([3, 1], "mine.npz").tolist()
    [3, 1]
    """
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):  # lists of different lengths, numbers beyond 64 bits
        array = np.empty(0, object)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        got = f"{array.dtype}{list(array.shape)}"
        whole = array.ndim == 1 and array.dtype.kind == "f" and bool((array == np.round(array)).all())
        fix = "; convert them with .astype(int)" if whole else ""
        raise DataError(f"{where}: labels and client ids must be a 1-d array of integers, got {got}{fix}")
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{where}: labels and client ids must be below 2**63, got {array.max()}")
    return array.astype(np.int64)


def get_array(arrays: Mapping[str, npt.NDArray[np.generic]], key: str, file: str) -> npt.NDArray[np.generic]:
    """One array of an `.npz`; raises `DataError` if it is missing."""
    try:
        return arrays[key]
    except KeyError:
        raise DataError(f"{file} has no array {key!r}; it holds {', '.join(sorted(arrays)) or 'nothing'}") from None
