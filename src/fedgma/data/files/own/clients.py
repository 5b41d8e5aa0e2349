"""The data of several clients as one: samples are put one after the other, with the name of their client."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedgma.data.files.own.roles import Parts
from fedgma.data.files.own.tables import aligned
from fedgma.errors import DataError


def join_clients(train: Mapping[Any, Parts], test: Mapping[Any, Parts], where: str) -> Parts:
    """The parts of clients as one, with their names as client ids."""
    in_order = aligned([*train.values(), *test.values()], where)
    train = dict(zip(train, in_order, strict=False))
    test = dict(zip(test, in_order[len(train) :], strict=True))
    named = [part._replace(client=[name] * len(part.x)) for name, part in train.items()]
    tests = [(name, part.x, part.y) for name, part in test.items()]
    tests += [(name, part.x_test, part.y_test) for name, part in train.items() if part.x_test is not None]
    joined = stack_parts([part._replace(x_test=None, y_test=None) for part in named], where)
    if not tests:
        return joined
    if not test and len(tests) < len(train):
        lacking = next(name for name, part in train.items() if part.x_test is None)
        raise DataError(f"{where}: every client must have a test part, or none; {lacking} has none")
    owners = [name for name, x, _ in tests for _ in range(len(x))]
    x, y = (_concatenated([entry[i] for entry in tests], where) for i in (1, 2))
    return joined._replace(x_test=x, y_test=y, client_test=owners)


def stack_parts(parts: Sequence[Parts], where: str) -> Parts:
    """Several parts of one layout as one."""
    parts = aligned(parts, where)
    first = parts[0]
    names = first.classes
    if any(part.classes != names for part in parts):
        raise DataError(f"{where}: all parts must name the same classes")
    fields = {
        field: None if getattr(first, field) is None else _concatenated([getattr(p, field) for p in parts], where)
        for field in ("x", "y", "client", "x_test", "y_test", "client_test")
    }
    remarks = tuple(dict.fromkeys(r for part in parts for r in part.remarks))
    return Parts(**fields, classes=names, remarks=remarks, columns=first.columns)


def _concatenated(arrays: Sequence[Any], where: str) -> npt.NDArray[Any]:
    arrays = [np.asarray(array) for array in arrays]
    shapes = {array.shape[1:]: None for array in arrays}
    kinds = {array.dtype.kind: None for array in arrays if array.size}
    if len(shapes) > 1 or len({kind in "US" for kind in kinds}) > 1:
        listed = " and ".join(f"{array.dtype}{list(array.shape[1:])}" for array in _different(arrays))
        raise DataError(f"{where}: the samples of all clients must have one shape and type, got {listed}")
    return np.concatenate(arrays)


def _different(arrays: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    """The first array, and the first that differs from it."""
    other = next(a for a in arrays if (a.shape[1:], a.dtype.kind) != (arrays[0].shape[1:], arrays[0].dtype.kind))
    return [arrays[0], other]
