"""A data set from what a user has in Python: arrays, a mapping of arrays, a table of pandas, Arrow or `datasets`, or
partitions of Flower Datasets.

Tables are known by what they can do, so none of these packages is imported here.
"""

import os
from collections.abc import Mapping
from typing import Any

from fedgma.data.files.dataset import Dataset
from fedgma.data.files.own import dataset_of, from_arrays
from fedgma.data.files.partitioned import is_partitioned, parts_of_partitions
from fedgma.data.files.roles import TEST, TRAIN, VALID, Parts, find, parts_of
from fedgma.data.files.tables import classes_of, columns_of, is_table, label_column, parts_of_table
from fedgma.errors import DataError


def from_data(data: Any, name: str = "own", *, target: str = "class") -> Dataset:
    """A data set from a user's object; `target` as in `from_arrays`.

    Known are (x, y), (x, y, client), ((x, y), (x_test, y_test)), a mapping with `x` and `y` (or other usual names), a
    table, a mapping of tables or pairs with `train` and `test`, and a `FederatedDataset` or partitioner of Flower
    Datasets, whose partitions are the clients.

    >>> from_data({"x_train": [[0.5], [1.5]], "y_train": ["no", "yes"], "x_test": [[0.1]], "y_test": ["no"]}).classes
    ('no', 'yes')
    """
    if isinstance(data, Dataset):
        return data
    if isinstance(data, tuple | list) and len(data) == 2 and all(_is_pair(part) for part in data):
        return from_arrays(*data[0], test=data[1], name=name, target=target)
    if isinstance(data, tuple | list) and len(data) in (2, 3):
        return from_arrays(*data[:2], client=data[2] if len(data) == 3 else None, name=name, target=target)
    if is_partitioned(data):
        return dataset_of(parts_of_partitions(data, name), name, target=target)
    if is_table(data):
        return dataset_of(_parts(data, name), name, target=target)
    if isinstance(data, Mapping):
        return dataset_of(_parts_of_mapping(data, name, unlabelled=target in ("tokens", "any")), name, target=target)
    if isinstance(data, str | os.PathLike):
        raise DataError(f"data must be arrays or a table, got a path; name it in the settings: dataset={str(data)!r}")
    raise DataError(
        "data must be (x, y), (x, y, client), a mapping with x and y, partitions of Flower Datasets, or "
        f"a table of pandas, Arrow or datasets, got {type(data).__name__}"
    )


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) in (2, 3)


def _parts(value: Any, where: str) -> Parts:
    """The parts of a table or of a pair of arrays."""
    if is_table(value):
        columns = columns_of(value)
        return parts_of_table(columns, where, classes_of(value, label_column(columns, where)))
    if _is_pair(value):
        return Parts(*value)
    raise DataError(f"{where}: the parts of data must be tables or (x, y), got {type(value).__name__}")


def _parts_of_mapping(data: Mapping[str, Any], where: str, *, unlabelled: bool) -> Parts:
    train = find(data, TRAIN[1:])
    if train is None:
        return parts_of(data, where, unlabelled=unlabelled)
    first, test = _parts(data[train], where), find(data, (*TEST, *VALID))
    if test is None:
        return first
    second = _parts(data[test], where)
    unused = sorted(set(data) - {train, test})
    remarks = (*first.remarks, *([f"not used: {', '.join(unused)}"] if unused else []))
    return first._replace(x_test=second.x, y_test=second.y, client_test=second.client, remarks=remarks)
