"""Data sets whose targets are not classes: numbers, vectors of 0 and 1, and tokens.

class    int64 [sample], from 0
float    float32 [sample, output]
labels   float32 [sample, label], each 0 or 1
tokens   int64 [sample, position], and so are the samples; PADDING in a target is ignored
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedgma.data.files.dataset import Dataset, Labels, Split, integers, split_test
from fedgma.data.files.reader import source_of
from fedgma.errors import DataError

TARGETS = ("class", "float", "labels", "tokens")
PADDING = -100  # of a target of tokens: no token is to be predicted there
MOST_TOKENS = 1_000_000  # of a vocabulary
WANTED = {
    "class": "whole numbers from 0, one for each sample",
    "float": "numbers, one or a row for each sample",
    "labels": "a row of 0 and 1 for each sample",
    "tokens": "a row of whole numbers from 0 for each sample",
}


def guess(y: Any) -> str:
    """The kind of targets that an array looks like.

    >>> [guess(y) for y in ([0, 2], [0.5, 1.5], [[0, 1], [1, 1]], [[5, 7], [7, 2]])]
    ['class', 'float', 'labels', 'tokens']
    """
    array = np.asarray(y)
    if array.dtype.kind == "f":
        return "float"
    if array.ndim < 2:
        return "class"
    return "labels" if np.isin(array, (0, 1)).all() else "tokens"


def with_targets(
    x: Any,
    y: Any,
    target: str,
    *,
    test: tuple[Any, Any] | None = None,
    client: npt.ArrayLike | None = None,
    classes: tuple[str, ...] | None = None,
    name: str = "own",
    test_share: float = 0.2,
    seed: int = 0,
    by_client: bool = False,
    files: tuple[Path, ...] = (),
) -> Dataset:
    """A data set with targets of one of the other kinds; without `test`, a random share of the samples is the test.

    With `by_client`, it is a share of each client's samples. `files` are those that the arrays were read from. Without
    targets of tokens, each sample's next tokens are its targets. `classes` names what the model puts out.

    >>> data = with_targets(np.zeros((10, 3), np.float32), np.arange(10.0), "float")
    >>> data.train.y.shape, data.classes, data.target
    ((8, 1), ('0',), 'float')
    """
    owners = None if client is None else integers(client, name)
    parts = [_split(x, y, target, name, owners)]
    parts += [] if test is None else [_split(*test, target, name)]
    classes = classes or _outputs(parts, target, name)
    for split in parts:
        _check(split, target, len(classes), name)
    train, held_out = (
        parts if test is not None else split_test(parts[0], owners if by_client else None, test_share, seed)
    )
    if not len(train.y) or not len(held_out.y):
        raise DataError(
            f"{name}: too few samples for a training and a test part, got {len(parts[0].y)}; give a test set"
        )
    if train.x.shape[1:] != held_out.x.shape[1:] or train.y.shape[1:] != held_out.y.shape[1:]:
        raise DataError(f"{name}: training and test samples, and their targets, must have the same shapes")
    return Dataset(name, train, held_out, classes, source_of(train, held_out, name, files), target=target)


def _split(x: Any, y: Any, target: str, name: str, client: Labels | None = None) -> Split:
    if target != "tokens":
        return Split(x, _numbers(y, target, name), client)
    tokens = _tokens(x, name, "x")
    if y is None:
        if tokens.shape[1] < 2:
            raise DataError(f"{name}: a row of tokens needs two or more, got {tokens.shape[1]}")
        return Split(np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:]), client)
    return Split(tokens, _tokens(y, name, "y"), client)


def _numbers(y: Any, target: str, name: str) -> npt.NDArray[np.float32]:
    """Targets as float32 [sample, output]."""
    try:
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes an infinity, which is refused
            array = np.asarray(y).astype(np.float32)
    except (TypeError, ValueError):
        raise DataError(f"{name}: targets must be {WANTED[target]}") from None
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or not array.shape[1]:
        raise DataError(f"{name}: targets must be {WANTED[target]}, got an array of shape {list(array.shape)}")
    if not np.isfinite(array).all():
        raise DataError(f"{name}: targets must be finite, got a NaN or an infinity")
    if target == "labels" and not np.isin(array, (0, 1)).all():
        raise DataError(f"{name}: targets must be {WANTED[target]}, got {array[~np.isin(array, (0, 1))][0]:g}")
    return array


def _tokens(values: Any, name: str, what: str) -> Labels:
    array = np.asarray(values)
    if array.ndim != 2 or array.dtype.kind not in "iu":
        got = f"{array.dtype}{list(array.shape)}"
        raise DataError(f"{name}: {what} must be {WANTED['tokens']}, got {got}")
    return array.astype(np.int64)


def _outputs(parts: list[Split], target: str, name: str) -> tuple[str, ...]:
    """Numbers as names of what the model puts out: columns of the targets, or tokens of the vocabulary."""
    if target != "tokens":
        return tuple(map(str, range(parts[0].y.shape[1])))
    most = 1 + max(int(array.max(initial=0)) for split in parts for array in (split.x, split.y))
    if most > MOST_TOKENS:
        raise DataError(f"{name}: tokens must be below {MOST_TOKENS}, got {most - 1}; number them from 0")
    return tuple(map(str, range(most)))


def _check(split: Split, target: str, outputs: int, name: str) -> None:
    if len(split.x) != len(split.y) or not len(split.y):
        raise DataError(f"{name}: expected one target for each of {len(split.x)} samples, got {len(split.y)}")
    if split.client is not None and len(split.client) != len(split.y):
        raise DataError(f"{name}: expected one client id for each of {len(split.y)} samples, got {len(split.client)}")
    if split.x.dtype == np.float32 and not np.isfinite(split.x).all():
        raise DataError(f"{name}: features must be finite, got a NaN or an infinity")
    if target == "tokens":
        real = split.y[split.y != PADDING]
        for what, array in (("x", split.x), ("y", real)):
            if array.size and not 0 <= int(array.min()) <= int(array.max()) < outputs:
                raise DataError(
                    f"{name}: tokens in {what} must be from 0 to {outputs - 1} (padding of y is {PADDING}), "
                    f"got {array.min()} to {array.max()}"
                )
        if split.x.shape != split.y.shape:
            raise DataError(f"{name}: x and y must have the same shape, got {split.x.shape} and {split.y.shape}")
    elif split.y.shape[1] != outputs:
        raise DataError(f"{name}: expected {outputs} names for {split.y.shape[1]} columns of the targets")
