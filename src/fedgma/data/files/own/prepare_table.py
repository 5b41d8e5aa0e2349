"""A table as it is, made into the arrays of a data set: its roles, a test part, and features as `prepare` fits them."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedgma.data.files.dataset import Split, only_tested, split_test
from fedgma.data.files.own.arrays import dataset_of
from fedgma.data.files.own.numbering import is_missing, number_labels
from fedgma.data.files.own.prepare import MOST_VALUES, Prepared, apply, check_column, fit, numbers
from fedgma.data.files.own.roles import CLIENTS, find, parts_of
from fedgma.data.files.own.tables import Column, check_filled, label_column, read_csv, read_parquet_table, typed
from fedgma.errors import ConfigError, DataError

READERS = (".csv", ".tsv", ".parquet")
Rows = npt.NDArray[np.int64]
Columns = Mapping[str, Column]
SHARE, SEED = 0.2, 0  # of the test part that `fedgma run` splits off


class Part(NamedTuple):
    """The rows of a table that are for training, or for testing."""

    columns: Columns
    rows: Rows
    where: str


class Wanted(NamedTuple):
    """What a user asks for; a label or client of None is looked for by the usual names."""

    label: str | None = None
    client: str | None = None
    drop: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()  # columns to use although they look like ids
    as_text: tuple[str, ...] = ()
    regression: bool = False
    standardise: bool = True
    most_values: int = MOST_VALUES
    drop_incomplete: bool = False


class PreparedTable(NamedTuple):
    """The arrays of a data set, and how they were made."""

    arrays: dict[str, npt.NDArray[Any]]  # x, y, x_test, y_test; client, client_test, classes where there are any
    prepared: Prepared
    incomplete: int = 0  # rows that were left out

    @property
    def target(self) -> str:
        """The kind of the targets."""
        return "float" if self.prepared.classes is None else "class"

    @property
    def remarks(self) -> list[str]:
        """What is unusual: classes that no training row has."""
        classes = self.prepared.classes
        return [] if classes is None else only_tested(self.arrays["y"], self.arrays["y_test"], classes)


def read_table(path: Path, *, decimal_comma: bool = False) -> dict[str, Column]:
    """The columns of a .csv, .tsv or .parquet file; in one of texts numbers may have a decimal comma."""
    if path.suffix.lower() not in READERS:
        raise ConfigError(f"{path.name} has an unknown ending for a table; known: {', '.join(READERS)}")
    if path.suffix.lower() == ".parquet":
        if decimal_comma:
            raise ConfigError("--decimal-comma is for .csv and .tsv files; convert the columns of the .parquet file")
        return read_parquet_table(path)
    return read_csv(path, decimal_comma=decimal_comma)


def prepare_table(columns: Columns, wanted: Wanted, where: str, test: Columns | None = None) -> PreparedTable:
    """A table as a data set; without a `test` table a fifth of each class is split off, as for other data.

    >>> table = {"age": np.arange(10) % 4, "label": np.array(["yes", "no"] * 5)}
    >>> made = prepare_table(table, Wanted(), "mine.csv")
    >>> sorted(made.arrays), made.arrays["x"].shape, made.prepared.classes
    (['classes', 'x', 'x_test', 'y', 'y_test'], (8, 1), ('no', 'yes'))
    """
    label, client = _roles(columns, wanted, where)
    train = Part(columns, _complete(columns, (label, client), wanted, where), where)
    float_target = wanted.regression or _labels(train, label).dtype.kind == "f"
    rows = len(columns[label])
    if test is None:
        incomplete = rows - len(train.rows)
        train, held_out = _split(train, label, float_target)
        test_client = client if float_target else None  # with classes, a client's tests are drawn by its class mix
    else:
        where_test = f"{where} (test)"
        check_column(test, label, where_test)
        test_client = client if client is None or client in test else None
        held_out = Part(test, _complete(test, (label, test_client), wanted, where_test), where_test)
        incomplete = rows + len(test[label]) - len(train.rows) - len(held_out.rows)
    prepared = _fitted(train, label, client, wanted)
    x = apply(columns, prepared, where)
    x_test = x if test is None else apply(test, prepared, held_out.where)
    y, y_test, classes = _targets(train, held_out, label, float_target)
    arrays: dict[str, Any] = {"x": x[train.rows], "y": y, "x_test": x_test[held_out.rows], "y_test": y_test}
    if classes is not None:
        arrays["classes"] = np.array(classes)
    if client is not None:
        arrays["client"] = _clients(train, client)
    if test_client is not None:
        arrays["client_test"] = _clients(held_out, test_client)
    made = PreparedTable(arrays, prepared._replace(classes=classes), incomplete)
    dataset_of(parts_of(arrays, where), where, target=made.target)  # refuses what `fedgma run` would refuse
    return made


def _targets(train: Part, test: Part, label: str, float_target: bool) -> tuple[Any, Any, tuple[str, ...] | None]:
    """The targets of both parts, and the classes, if the targets are that."""
    if float_target:
        y, y_test = (numbers(part.columns[label], label, "number", part.where)[part.rows] for part in (train, test))
        return y.astype(np.float32), y_test.astype(np.float32), None
    labels = number_labels([_labels(train, label), _labels(test, label)], None, train.where)
    return labels.parts[0], labels.parts[1], labels.classes


def _fitted(train: Part, label: str, client: str | None, wanted: Wanted) -> Prepared:
    for name in (*wanted.drop, *wanted.keep, *wanted.as_text):
        check_column(train.columns, name, train.where)
    if wanted.most_values < 1:
        raise ConfigError(f"--most-values must be 1 or more, got {wanted.most_values}")
    return fit(
        train.columns,
        train.rows,
        label,
        client,
        drop=wanted.drop,
        keep=wanted.keep,
        as_text=wanted.as_text,
        standardise=wanted.standardise,
        most_values=wanted.most_values,
        where=train.where,
    )


def _roles(columns: Columns, wanted: Wanted, where: str) -> tuple[str, str | None]:
    """The columns of the labels and of the clients."""
    for name in (wanted.label, wanted.client):
        if name is not None:
            check_column(columns, name, where)
    left = {name: column for name, column in columns.items() if name not in wanted.drop}
    client = wanted.client or find([name for name in left if name != wanted.label], CLIENTS)
    try:
        label = wanted.label or label_column({name: c for name, c in left.items() if name != client}, where)
    except DataError as error:
        raise DataError(f"{error}; or say which it is with --label") from None
    for name in (label, client):
        if name in wanted.drop or label == client:
            role = "drop" if name in wanted.drop else "client"
            raise ConfigError(f"{where}: column {name!r} is named twice, with --label or --client and with --{role}")
    return label, client


def _complete(columns: Columns, names: Iterable[str | None], wanted: Wanted, where: str) -> Rows:
    """The rows that have a label and a client; others are refused, unless they are to be left out."""
    filled = np.ones(len(next(iter(columns.values()))), bool)
    for name in filter(None, names):
        cells = columns[name].tolist()
        if wanted.drop_incomplete:
            filled &= np.array([not is_missing(cell) for cell in cells], bool)
            continue
        try:
            check_filled(columns[name], name, where)
        except DataError as error:
            raise DataError(f"{error}, or leave such rows out with --drop-incomplete") from None
    if not filled.any():
        raise DataError(f"{where}: expected rows with a label, got none")
    return np.flatnonzero(filled)


def _labels(part: Part, label: str) -> Column:
    """The labels of a part, as numbers if all of them are; whole ones as integers."""
    labels = part.columns[label][part.rows]
    if labels.dtype.kind in "OU" and all(isinstance(cell, str) for cell in labels.tolist()):
        labels = typed(labels.tolist())
    if labels.dtype.kind == "f" and np.isfinite(labels).all() and (labels == np.round(labels)).all():
        return labels.astype(np.int64)
    return labels


def _clients(part: Part, client: str) -> npt.NDArray[np.str_]:
    """The clients' ids as texts; whole numbers that a missing cell has made floats are whole again."""
    ids = part.columns[client][part.rows].tolist()
    whole = [int(cell) if isinstance(cell, float) and cell.is_integer() else cell for cell in ids]
    return np.array([str(cell).strip() for cell in whole])


def _split(part: Part, label: str, float_target: bool) -> tuple[Part, Part]:
    """The rows for training and for testing, as they are chosen in a table without a test part."""
    labels = None if float_target else number_labels([_labels(part, label)], None, part.where).parts[0]
    train, test = split_test(Split(part.rows, part.rows), labels, SHARE, SEED)
    return part._replace(rows=train.y), part._replace(rows=test.y)
