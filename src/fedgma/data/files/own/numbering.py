"""Labels and client ids as numbers from 0: of texts, of numbers with gaps, of numbers that begin at 1."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedgma.data.files.dataset import Labels, integers
from fedgma.errors import DataError

MOST_CLASSES = 100_000
SHOWN = 6  # names in a remark
MISSING = ("", "nan", "nat", "<na>")  # texts that missing values become, as numpy and pandas write them


class Numbered(NamedTuple):
    """Labels of several parts as numbers from 0, the names of the classes, and a remark if the labels were others."""

    parts: list[Labels]
    classes: tuple[str, ...]
    remark: str | None = None


def number_labels(parts: Sequence[Any], classes: tuple[str, ...] | None, where: str) -> Numbered:
    """Number the labels of all parts together, in sorted order; with `classes`, labels are these names or positions.

    >>> number_labels([["cat", "ant", "cat"]], None, "mine.csv")
    Numbered(parts=[array([1, 0, 1])], classes=('ant', 'cat'), remark='the labels ant, cat are numbered from 0')
    >>> number_labels([[1, 2, 3], [3]], None, "mine.csv").classes
    ('1', '2', '3')
    >>> number_labels([[[0.0, 1.0], [1.0, 0.0]]], None, "mine.npz").parts
    [array([1, 0])]
    """
    arrays = [_column(part, where) for part in parts]
    if all(map(_is_one_hot, arrays)):
        width = arrays[0].shape[1]
        names = tuple(map(str, range(width))) if classes is None else classes
        remark = f"the labels are one-hot rows of {width} numbers, of which the place of the 1 is the class"
        return Numbered([array.argmax(axis=1).astype(np.int64) for array in arrays], names, remark)
    texts = [array.dtype.kind == "U" for array in arrays]
    if all(texts):
        names = tuple(np.unique(np.concatenate(arrays)).tolist()) if classes is None else classes
        numbered = [_positions(array, names, where) for array in arrays]
        return Numbered(numbered, names, None if classes is not None else _remark("labels", names))
    if any(texts):
        raise DataError(f"{where}: labels of the training and the test part must be both texts or both integers")
    for array in arrays:
        if array.dtype.kind == "f":
            raise DataError(f"{where}: labels must be integers or texts, got {array.dtype}; {_advice(array)}")
    numbers = [integers(array, where) for array in arrays]
    if classes is not None:
        return Numbered(numbers, classes)
    values = np.unique(np.concatenate(numbers))
    if len(values) > MOST_CLASSES:
        raise DataError(f"{where}: labels must have at most {MOST_CLASSES} different values, got {len(values)}")
    names = tuple(map(str, values.tolist()))
    if np.array_equal(values, np.arange(len(values))):
        return Numbered(numbers, names)
    return Numbered([np.searchsorted(values, part) for part in numbers], names, _remark("labels", names))


def _advice(numbers: npt.NDArray[Any]) -> str:
    """What to do with labels that are floating-point numbers."""
    if missing := int((~np.isfinite(numbers)).sum()):
        return f"{missing} of {len(numbers)} are missing or infinite, so leave these samples out first"
    fraction = numbers[numbers != np.round(numbers)]
    if fraction.size:
        return f"for numbers to predict, such as {fraction[0]:g}, set task=regression"
    return "for classes convert them with y.astype(int), for numbers to predict set task=regression"


def number_clients(parts: Sequence[Any], where: str) -> tuple[list[Labels | None], str | None]:
    """Client ids of all parts (None: a part has none) as integers; texts are numbered in sorted order.

    >>> number_clients([["rome", "oslo"], None], "mine.csv")
    ([array([1, 0]), None], 'the clients oslo, rome are numbered from 0')
    """
    arrays = [None if part is None else _column(part, where) for part in parts]
    given = [array for array in arrays if array is not None]
    if not given or any(array.dtype.kind != "U" for array in given):
        return [None if array is None else integers(array, where) for array in arrays], None
    names = tuple(np.unique(np.concatenate(given)).tolist())
    numbered = [None if array is None else _positions(array, names, where) for array in arrays]
    return numbered, _remark("clients", names)


def _column(values: Any, where: str) -> npt.NDArray[Any]:
    """A column as an array; texts and bytes become texts, booleans integers, a table of one column loses that axis."""
    try:
        array = np.asarray(values)
        lacking = array.dtype == object and any(map(is_missing, array.flat))
        if array.dtype == object and array.size:
            array = _typed(array)
    except (ValueError, OverflowError):  # lists of different lengths, numbers beyond 64 bits
        raise DataError(f"{where}: labels and client ids must be one list of integers or of texts") from None
    if lacking:
        raise DataError(f"{where}: labels and client ids must be complete, got a missing one; fill it in")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim == 1 and array.dtype.kind == "S":
        return np.char.decode(array, "utf-8", "replace")
    if array.dtype.kind == "U" and _has_surrogates(array):
        raise DataError(f"{where}: labels and client ids must be UTF-8 text; write them again in that encoding")
    if array.dtype.kind == "U" and (missing := np.isin(np.char.lower(array), MISSING)).any():
        row = int(np.flatnonzero(missing)[0]) if array.ndim == 1 else 0
        raise DataError(
            f"{where}: labels and client ids must be complete, got {str(array.flat[row])!r} in {missing.sum()} of "
            f"{len(array)} samples, first in sample {row}; leave such samples out or fill them in"
        )
    return array.astype(np.int64) if array.dtype.kind == "b" else array


def is_missing(value: Any) -> bool:
    """Whether a label or an id is missing: None, a NaN, or an empty text.

    >>> is_missing(float("nan")), is_missing("nan"), is_missing("none"), is_missing(0)
    (True, True, False, False)
    """
    if isinstance(value, str | float | None):
        return value is None or str(value).strip().lower() in MISSING
    return type(value).__name__ in ("NAType", "NaTType")  # of pandas


def _has_surrogates(texts: npt.NDArray[Any]) -> bool:
    """Whether a text cannot be written as UTF-8, such as bytes of another encoding that Python has kept in it."""
    if not texts.size or not texts.dtype.itemsize:
        return False
    native = np.ascontiguousarray(texts, dtype=texts.dtype.newbyteorder("="))
    return bool((native.view(np.uint32) >> 11 == 0xD800 >> 11).any())


def _is_one_hot(array: npt.NDArray[Any]) -> bool:
    """Whether each row of a table of numbers holds one 1 and else zeros."""
    if array.ndim != 2 or array.shape[1] < 2 or not len(array) or array.dtype.kind not in "iuf":
        return False
    return bool(((array == 0) | (array == 1)).all() and (array.sum(axis=1) == 1).all())


def _typed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """An array of objects as texts or integers, if all of them are."""
    if all(isinstance(value, str) for value in array.flat):
        return array.astype("U")
    whole = all(isinstance(value, int | np.integer) for value in array.flat)
    return array.astype(np.int64) if whole else array


def _positions(array: npt.NDArray[Any], names: tuple[str, ...], where: str) -> Labels:
    number = {name: position for position, name in enumerate(names)}
    unknown = sorted({str(text) for text in np.unique(array)} - set(number))
    if unknown:
        raise DataError(f"{where}: every label must be one of the classes {_listed(names)}, got {unknown[0]!r}")
    return np.array([number[str(text)] for text in array.tolist()], np.int64)


def _remark(what: str, names: tuple[str, ...]) -> str:
    return f"the {what} {_listed(names)} are numbered from 0"


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
