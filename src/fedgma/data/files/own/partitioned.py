"""Data that another library has divided: a `FederatedDataset` or a partitioner of Flower Datasets.

Both are known by what they can do, and each partition is a table; nothing of Flower is imported here.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fedgma.data.files.own.roles import TEST, TRAIN, VALID, Parts, find
from fedgma.data.files.own.tables import Column, classes_of, columns_of, label_column, parts_of_table
from fedgma.errors import DataError


def is_partitioned(value: Any) -> bool:
    """Whether an object hands out partitions: a `FederatedDataset`, or a partitioner that has its data."""
    return hasattr(value, "load_partition") and (hasattr(value, "num_partitions") or hasattr(value, "partitioners"))


def parts_of_partitions(value: Any, where: str) -> Parts:
    """Samples and labels of all partitions; the number of a partition is the client id of its samples.

    The test part of a `FederatedDataset` is its split `test` (or `validation`): by client if that is partitioned too.
    """
    if not hasattr(value, "partitioners"):
        return _joined(value.load_partition, lambda: int(value.num_partitions), where)
    divided: Mapping[str, Any] = value.partitioners
    train = find(divided, TRAIN[1:]) or next(iter(divided))
    first = _of_split(value, train, where)
    test = next((_of_split(value, name, where) for name in divided if name != train and name in (*TEST, *VALID)), None)
    test = test or _whole(value, where, {train})
    if test is None:
        return first
    return first._replace(x_test=test.x, y_test=test.y, client_test=test.client)


def _of_split(value: Any, split: str, where: str) -> Parts:
    return _joined(
        lambda number: value.load_partition(number, split), lambda: int(value.partitioners[split].num_partitions), where
    )


def _whole(value: Any, where: str, known: set[str]) -> Parts | None:
    """The first test split that there is and that is not partitioned."""
    for name in (*TEST, *VALID):
        if name in known:
            continue
        try:
            table = value.load_split(name)
        except (KeyError, ValueError):  # there is no such split
            continue
        return _parts(columns_of(table), table, where)._replace(client=None)
    return None


def _joined(load: Callable[[int], Any], count: Callable[[], int], where: str) -> Parts:
    """All partitions as one table; only a loaded partition makes sure that the count is known."""
    tables = [load(0)]
    tables += [load(number) for number in range(1, count())]
    columns = [columns_of(table) for table in tables]
    sizes = [len(next(iter(part.values()), ())) for part in columns]
    filled = [part for part, size in zip(columns, sizes, strict=True) if size]
    if not filled:
        raise DataError(f"{where}: none of the {len(tables)} partitions holds a sample")
    joined = {name: np.concatenate([part[name] for part in filled]) for name in filled[0]}
    return _parts(joined, tables[0], where)._replace(client=np.repeat(np.arange(len(tables)), sizes))


def _parts(columns: dict[str, Column], table: Any, where: str) -> Parts:
    return parts_of_table(columns, where, classes_of(table, label_column(columns, where)))
