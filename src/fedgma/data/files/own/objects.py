"""A data set from what a user has in Python: arrays, a mapping of arrays, a table of pandas, Arrow or `datasets`, a
`Dataset` of torch, a mapping of clients, or partitions of Flower Datasets.

Tables are known by what they can do, so none of these packages is imported here.
"""

import os
from collections.abc import Mapping
from typing import Any

from fedgma.data.files.dataset import Dataset
from fedgma.data.files.own.arrays import dataset_of, from_arrays
from fedgma.data.files.own.clients import join_clients
from fedgma.data.files.own.partitioned import is_partitioned, parts_of_partitions
from fedgma.data.files.own.roles import SAMPLES, TEST, TRAIN, VALID, Parts, find, parts_of
from fedgma.data.files.own.samples import as_numpy, hands_out_samples, parts_of_samples
from fedgma.data.files.own.tables import aligned, classes_of, columns_of, is_table, label_column, parts_of_table
from fedgma.errors import DataError


def from_data(data: Any, name: str = "own", *, target: str = "class") -> Dataset:
    """A data set from a user's object; `target` as in `from_arrays`.

    Known are (x, y), (x, y, client), a mapping with `x` and `y` (or other usual names), a table, a `Dataset` of torch
    or torchvision, and a `FederatedDataset` or partitioner of Flower Datasets, whose partitions are the clients. If the
    test part is apart, give (train, test), or a mapping with `train` and `test`. A mapping of other names to (x, y), to
    tables or to data sets holds one client under each name, which is tested on samples of its own.

    >>> from_data({"x_train": [[0.5], [1.5]], "y_train": ["no", "yes"], "x_test": [[0.1]], "y_test": ["no"]}).classes
    ('no', 'yes')
    """
    if isinstance(data, Dataset):
        return data
    if isinstance(data, tuple | list) and len(data) == 2 and (all(map(_is_part, data)) or _are_alike(*data)):
        train, test = (_parts(part, name) for part in data)
        parts = _with_test(train, test, name)
        if isinstance(data, list):  # which could be meant as two clients
            parts = parts._replace(remarks=(*parts.remarks, "the first part is for training, the second for testing"))
        return dataset_of(parts, name, target=target)
    if isinstance(data, list) and len(data) > 2 and all(map(_is_part, data)):
        raise DataError("data: several clients are a mapping of their names or numbers, such as dict(enumerate(data))")
    if isinstance(data, tuple | list) and len(data) in (2, 3):
        return from_arrays(*data[:2], client=data[2] if len(data) == 3 else None, name=name, target=target)
    if is_partitioned(data):
        return dataset_of(parts_of_partitions(data, name), name, target=target)
    if is_table(data) or hands_out_samples(data):
        return dataset_of(_parts(data, name), name, target=target)
    if isinstance(data, Mapping) and _holds_clients(data):
        clients = {client: _parts(part, f"{name}, client {client}") for client, part in data.items()}
        return dataset_of(join_clients(clients, {}, name), name, target=target, own=True)
    if isinstance(data, Mapping):
        return dataset_of(_parts_of_mapping(data, name, unlabelled=target in ("tokens", "any")), name, target=target)
    if isinstance(data, str | os.PathLike):
        raise DataError(f"data must be arrays or a table, got a path; name it in the settings: dataset={str(data)!r}")
    hint = "; give its `dataset`" if hasattr(data, "dataset") else ""
    hint = "; several clients are a mapping: dict(enumerate(data))" if isinstance(data, list) else hint
    raise DataError(
        "data must be (x, y), (x, y, client), a mapping with x and y or of clients, a data set of torch, partitions of "
        f"Flower Datasets, or a table of pandas, Arrow or datasets, got {type(data).__name__}{hint}"
    )


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) in (2, 3)


def _is_part(value: Any) -> bool:
    """Whether a value holds samples with their labels, and cannot be one of the two alone, as a table can."""
    return _is_pair(value) or (hands_out_samples(value) and not is_table(value))


def _are_alike(first: Any, second: Any) -> bool:
    """Whether two values are tables with the same columns: a training and a test part, not samples and labels."""
    return is_table(first) and is_table(second) and set(columns_of(first)) == set(columns_of(second))


def _holds_clients(data: Mapping[Any, Any]) -> bool:
    """Whether each value is the data of one client; `train` and `test`, `x` and `y` are no clients."""
    names = list(map(str, data))
    if find(names, (*TRAIN[1:], *TEST, *VALID)) is not None or find(names, SAMPLES, TRAIN) is not None:
        return False
    return bool(data) and all(_is_part(part) or is_table(part) for part in data.values())


def _parts(value: Any, where: str) -> Parts:
    """The parts of a table, of a data set or of a pair of arrays."""
    if is_table(value):
        columns = columns_of(value)
        return parts_of_table(columns, where, classes_of(value, label_column(columns, where)))
    if _is_pair(value):
        return Parts(*map(as_numpy, value))
    if hands_out_samples(value):
        return parts_of_samples(value, where)
    raise DataError(f"{where}: the parts of data must be tables, data sets or (x, y), got {type(value).__name__}")


def _parts_of_mapping(data: Mapping[str, Any], where: str, *, unlabelled: bool) -> Parts:
    train = find(data, TRAIN[1:])
    if train is None:
        return parts_of(data, where, unlabelled=unlabelled)
    first, test = _parts(data[train], where), find(data, (*TEST, *VALID))
    if test is None:
        return first
    unused = sorted(set(data) - {train, test})
    remarks = (*first.remarks, *([f"not used: {', '.join(unused)}"] if unused else []))
    return _with_test(first, _parts(data[test], where), where)._replace(remarks=remarks)


def _with_test(train: Parts, test: Parts, where: str) -> Parts:
    train, test = aligned([train, test], where)
    return train._replace(x_test=test.x, y_test=test.y, client_test=test.client)
