"""Tables of a user, from a .csv or .parquet file or as an object in Python: columns become samples, labels and clients.

A column of arrays or of encoded images named `x`, `image`, ... holds the samples. Without one, every column of numbers
is a feature.
"""

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedgma.data.files.images import decode
from fedgma.data.files.own.numbering import is_missing
from fedgma.data.files.own.roles import CLIENTS, LABELS, SAMPLES, Parts, find, plain
from fedgma.data.files.reader import check_announced
from fedgma.errors import DataError, FedgmaError

Column = npt.NDArray[Any]
COLUMN_LABELS = (*LABELS[1:], LABELS[0])  # a column y may be a coordinate; it is the label if no other column is
NUMBERINGS = {"", "unnamed0", "index", "id", "level0"}  # columns that number the rows, as pandas writes them
DELIMITERS = ",;\t|"
COMMA_NUMBER = re.compile(r"[+-]?(\d{1,3}([. \u00a0\u202f]\d{3})+|\d*)(,\d+)?([eE][+-]?\d+)?")  # 1.234,5 and 0,5
THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?")  # 1,234.5
TRUTH = {"True": True, "False": False}
SHOWN = 8  # names of columns in a remark
ENOUGH = 20  # rows, all of which differ in a column, that make it look like ids


class UnpreparedError(DataError):
    """A table that could be used, but not as it is; `options` are those that its preparation needs."""

    def __init__(self, said: str, options: str = "") -> None:
        super().__init__(said)
        self.options = options


def read_csv(path: Path, *, decimal_comma: bool = False) -> dict[str, Column]:
    """The columns of a .csv or .tsv file with a header, as numbers where all cells are numbers."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            first = stream.readline()
            stream.seek(0)
            delimiter = max(DELIMITERS, key=first.count)
            rows = csv.reader(stream, delimiter=delimiter, strict=True)
            header = [name.strip() for name in next(rows, [])]
            _check_header(header, path.name)
            cells: list[list[str]] = [[] for _ in header]
            for row in filter(None, rows):
                if len(row) != len(header):
                    where = f"{path.name}, line {rows.line_num}"
                    raise DataError(f"{where}: expected {len(header)} cells as in the header, got {len(row)}")
                for column, cell in zip(cells, row, strict=True):
                    column.append(cell)
    except UnicodeDecodeError:
        raise DataError(f"{path.name} is not UTF-8 text; save it as UTF-8") from None
    except csv.Error as error:
        raise DataError(f"{path.name} cannot be read as a table: {error}") from None
    if decimal_comma:
        cells = [
            with_points(column, f"{path.name}: column {name!r}") for name, column in zip(header, cells, strict=True)
        ]
    return {name: typed(column) for name, column in zip(header, cells, strict=True)}


def with_points(cells: Sequence[str], where: str) -> list[str]:
    """Cells in which numbers with a decimal comma have a point, and none between thousands.

    >>> with_points(["0,5", "1.234,5", "-12", "red, blue"], "column 'a'")
    ['0.5', '1234.5', '-12', 'red, blue']
    """
    if comma_of(cells) == "thousands":
        cell, row = next((cell.strip(), row) for row, cell in enumerate(cells, 1) if "," in cell)
        raise DataError(
            f"{where} has {cell!r} in row {row}, with commas between thousands, which --decimal-comma would read as "
            f"decimal commas; write {cell.replace(',', '')}"
        )
    changed = [_with_point(cell.strip()) for cell in cells]
    for row, (cell, after) in enumerate(zip(cells, changed, strict=True), 1):
        if after is None and "." in cell and is_number(cell):
            raise DataError(f"{where} has {cell!r} in row {row}: with --decimal-comma a point only separates thousands")
    return [cell if after is None else after for cell, after in zip(cells, changed, strict=True)]


def _with_point(cell: str) -> str | None:
    """A number with a decimal comma as one with a point; None for any other text."""
    if not COMMA_NUMBER.fullmatch(cell) or not any(map(str.isdecimal, cell)):
        return None
    return re.sub(r"[. \u00a0\u202f]", "", cell).replace(",", ".")


def _check_header(header: Sequence[str], file: str) -> None:
    if not header or all(is_number(name) for name in header):
        raise DataError(f"{file} must begin with a line of column names, one of them `label`; add that line")
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataError(f"{file} has several columns named {twice[0]!r}; give each a name of its own")


def is_number(text: str) -> bool:
    """Whether a text can be read as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def typed(cells: Sequence[str]) -> Column:
    """Cells as truth values, else as integers, else as floats, else as texts without spaces around them."""
    if cells and all(cell in TRUTH for cell in cells):  # as pandas writes them
        return np.array([TRUTH[cell] for cell in cells])
    for kind in (int, float):
        try:
            return np.array([kind(cell) for cell in cells], np.int64 if kind is int else np.float64)
        except (ValueError, OverflowError):
            continue
    return np.array([cell.strip() for cell in cells], "U")


def read_parquet_table(path: Path) -> dict[str, Column]:
    """The columns of a .parquet file."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise FedgmaError("reading parquet files needs pyarrow: pip install 'fedgma[hub]'") from None
    try:
        opened = parquet.ParquetFile(path)
        check_announced(opened.metadata.num_rows * opened.metadata.num_columns, path)
        table = opened.read()
    except DataError:
        raise
    except Exception as error:  # pyarrow raises many types of errors for damaged files
        raise DataError(f"{path.name} cannot be read as a parquet file: {error}") from None
    return columns_of(table)


def is_table(value: Any) -> bool:
    """Whether an object is a table with named columns: of pandas, polars, Arrow or Hugging Face's `datasets`."""
    named = hasattr(value, "columns") or hasattr(value, "column_names")
    return named and hasattr(value, "__getitem__") and not isinstance(value, Mapping)


def columns_of(table: Any) -> dict[str, Column]:
    """The columns of a table object."""
    if hasattr(table, "with_format"):  # of `datasets`: keeps the types of arrays and decodes images
        table = table.with_format("numpy")
    names: Iterable[Any] = table.column_names if hasattr(table, "column_names") else table.columns
    return {str(name): _array(table[name]) for name in names}


def classes_of(table: Any, column: str) -> tuple[str, ...] | None:
    """The names of a label column's classes, where a table of `datasets` states them."""
    features = getattr(table, "features", None)
    names = getattr(features[column], "names", None) if isinstance(features, Mapping) and column in features else None
    return tuple(map(str, names)) if names else None


def _array(cells: Any) -> Column:
    for way in ("to_numpy", "to_pylist"):  # Arrow converts nested cells in the second way only
        try:
            values = getattr(cells, way)()
            return np.asarray(values) if way == "to_numpy" else _objects(values)
        except (AttributeError, NotImplementedError, ValueError, TypeError):
            continue
    listed = list(cells)
    plain_cells = listed and isinstance(listed[0], int | float | str | bool | np.generic)
    return np.array(listed) if plain_cells else _objects(listed)


def _objects(cells: Sequence[Any]) -> Column:
    array = np.empty(len(cells), object)
    array[:] = cells
    return array


def parts_of_table(columns: Mapping[str, Column], where: str, classes: tuple[str, ...] | None = None) -> Parts:
    """Samples, labels and client ids of a table."""
    label = label_column(columns, where)
    client = find(columns, CLIENTS)
    for name in (label, client):
        if name is not None:
            check_filled(columns[name], name, where)
    rest = {name: column for name, column in columns.items() if name not in (label, client)}
    samples = next((name for name in rest if plain(name) in map(plain, SAMPLES) and is_nested(rest[name])), None)
    if samples is not None:
        unused, named = [name for name in rest if name != samples], None
        remarks = (f"not used: {', '.join(unused)}",) if unused else ()
        x = _stacked(rest[samples], samples, where)
    else:
        numbering = [name for name, column in rest.items() if numbers_rows(name, column)]
        remarks = (f"not used, since it numbers the rows: {_listed(numbering)}",) if numbering else ()
        features = {name: column for name, column in rest.items() if name not in numbering}
        x, named = _features(features, where), tuple(features)
    owners = None if client is None else columns[client]
    return Parts(x, columns[label], owners, classes=classes, remarks=remarks, columns=named)


def remarks_on(features: npt.NDArray[Any], names: Sequence[str]) -> list[str]:
    """Which columns of a table a model sees, and which of them look like ids.

    >>> remarks_on(np.stack([np.arange(30) * 7, np.zeros(30)], 1), ["patient", "age"])[1]
    "another whole number in each row: 'patient'; remove it if it is an id"
    """
    ids = [name for name, column in zip(names, features.T, strict=True) if looks_like_ids(column)]
    remarks = [f"the features are {_listed(names)}"]
    return [*remarks, f"another whole number in each row: {_listed(ids)}; remove it if it is an id"] if ids else remarks


def looks_like_ids(column: Column) -> bool:
    """Whether each row has another whole number."""
    whole = len(column) >= ENOUGH and bool((column == np.round(column)).all())
    return whole and len(np.unique(column)) == len(column)


def aligned(parts: Sequence[Parts], where: str) -> list[Parts]:
    """Parts with the features of tables in the order of the first one; tables with other features are refused."""
    first = parts[0].columns
    return [part if part.columns == first else _in_order(part, first, where) for part in parts]


def _in_order(part: Parts, wanted: tuple[str, ...] | None, where: str) -> Parts:
    if wanted is None or part.columns is None:
        return part  # where the shapes differ, that is said elsewhere
    if single := sorted(set(part.columns) ^ set(wanted)):
        raise DataError(
            f"{where}: all tables must have the same columns of features, but not all have {_listed(single)}; "
            "remove these columns, rename them or fill them in"
        )
    order = [part.columns.index(name) for name in wanted]
    return part._replace(x=part.x[:, order], columns=wanted)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more


def label_column(columns: Mapping[str, Column], where: str) -> str:
    """The name of the column of labels: a usual name, or the last column but the clients' if that alone holds texts."""
    usual = find(columns, COLUMN_LABELS)
    if usual is not None:
        return usual
    names = [name for name in columns if name != find(columns, CLIENTS)]
    texts = [name for name in names if columns[name].dtype.kind in "OUS" and not is_nested(columns[name])]
    if names and texts == names[-1:]:
        return names[-1]
    raise UnpreparedError(
        f"{where} has no column of labels: name it `label` (or labels, target, class, y); "
        f"it has {', '.join(map(repr, names[:10]))}{' ...' if len(names) > 10 else ''}"
    )


def check_filled(column: Column, name: str, where: str) -> None:
    """Refuse labels and client ids that are missing."""
    missing = [row for row, cell in enumerate(column.tolist(), 1) if is_missing(cell)]
    if missing:
        raise UnpreparedError(f"{where}: row {missing[0]} has no {name!r}; fill it in or remove the row")


def is_nested(column: Column) -> bool:
    """Whether the cells of a column are arrays, lists or encoded images."""
    return column.ndim > 1 or (
        column.dtype == object and len(column) > 0 and not isinstance(column[0], str | int | float)
    )


def numbers_rows(name: str, column: Column) -> bool:
    """Whether a column only numbers the rows, by its name and its values."""
    whole = column.dtype.kind in "iu" and column.ndim == 1
    return plain(name) in NUMBERINGS and whole and len(np.unique(column)) == len(column)


def _stacked(column: Column, name: str, where: str) -> npt.NDArray[Any]:
    """One array of all cells of a column of samples."""
    cells = [_cell(cell) for cell in column]
    if len({cell.shape for cell in cells}) > 1:
        raise DataError(f"{where}: all cells of column {name!r} must have one shape; resize or pad them")
    stacked = np.stack(cells)
    pixels = (
        stacked.dtype.kind in "iu" and stacked.ndim > 2 and 0 <= stacked.min(initial=0) <= stacked.max(initial=0) < 256
    )
    return stacked.astype(np.uint8) if pixels else stacked


def _cell(cell: Any) -> npt.NDArray[Any]:
    content = cell.get("bytes") if isinstance(cell, Mapping) else cell
    return decode(content, "RGB") if isinstance(content, bytes) else np.asarray(content)


def _features(columns: Mapping[str, Column], where: str) -> npt.NDArray[np.float32]:
    if not columns:
        raise DataError(f"{where} has no columns of features besides the labels")
    columns = {name: _numbers(column) if column.dtype == object else column for name, column in columns.items()}
    _check_numbers({name: c for name, c in columns.items() if c.dtype.kind not in "iufb" or c.ndim != 1}, where)
    features = []
    for name, column in columns.items():
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            row = int(np.flatnonzero(~np.isfinite(column))[0])
            raise UnpreparedError(
                f"{where}: column {name!r} has no finite number in row {row + 1}; fill or remove such rows"
            )
        features.append(column.astype(np.float32))
    return np.stack(features, 1)


def _check_numbers(wrong: Mapping[str, Column], where: str) -> None:
    """Refuse all columns that hold something else than numbers at once, each with a cell of it."""
    if not wrong:
        return
    commas = {name: comma_of(column.tolist()) for name, column in wrong.items()}
    found = {name: _first_wrong(column, commas[name]) for name, column in wrong.items()}
    examples = {name: wrong_cell(cell, row, commas[name]) for name, (cell, row) in found.items()}
    decimal = any(has_decimal_comma(cell) and commas[name] != "thousands" for name, (cell, _) in found.items())
    options = " --decimal-comma" if decimal else ""
    refused = DataError if "thousands" in commas.values() else partial(UnpreparedError, options=options)
    last = "remove it, or name it `label` or `client` if it is that"
    if len(examples) == 1:
        ((name, cell),) = examples.items()
        fix = "fill in or remove such rows" if cell.startswith("an empty") else "replace it by numbers"
        raise refused(f"{where}: column {name!r} must hold numbers, got {cell}; {fix}, {last}")
    many = ", ".join(f"{name!r} ({cell})" for name, cell in list(examples.items())[:8])
    more = f" and {len(examples) - 8} more" if len(examples) > 8 else ""
    raise refused(
        f"{where}: these columns must hold numbers: {many}{more}; replace texts by numbers and fill in empty cells, "
        "remove the columns, or name one `label` or `client` if it is that"
    )


def _numbers(column: Column) -> Column:
    try:
        return column.astype(np.float64)
    except (ValueError, TypeError):
        return column


def _first_wrong(column: Column, comma: str) -> tuple[object, int]:
    """A cell that is not a number, and its row; one with commas if those stand between thousands."""
    cells = [(row, cell) for row, cell in enumerate(column.tolist(), 1) if comma != "thousands" or "," in str(cell)]
    return next(((cell, row) for row, cell in cells if not (isinstance(cell, str) and is_number(cell))), ("", 1))


def wrong_cell(other: object, row: int, comma: str) -> str:
    """A cell where a number was expected, and its row; `comma` is what the column's commas are, by `comma_of`."""
    shown = "an empty cell" if other == "" or other is None else repr(other)[:60]
    if not isinstance(other, str) or not _has_comma(other):
        return f"{shown} in row {row}"
    thousands, decimal = f"write {other.replace(',', '')}", f"write {other.replace(',', '.')}"
    means = {
        "decimal": "a decimal comma: write a point",
        "thousands": f"commas between thousands: {thousands}",
        "either": f"a comma between thousands: {thousands}; or a decimal comma: {decimal}",
    }
    return f"{shown} in row {row} ({means[comma]})"


def comma_of(cells: Iterable[object]) -> str:
    """What the commas in a column's numbers are: "decimal", "thousands", "either", or "" where few numbers have any.

    They stand between thousands if each is followed by three digits, and another cell shows that they are no decimals.

    >>> comma_of(["3,5", "12"]), comma_of(["1,037", "920"]), comma_of(["1,037", "2,581"]), comma_of(["red", "a, b"])
    ('decimal', 'thousands', 'either', '')
    """
    texts = [cell.strip() for cell in cells if isinstance(cell, str) and cell.strip()]
    with_comma = [text for text in texts if _has_comma(text)]
    if not with_comma:
        return ""
    if not all(map(THOUSANDS.fullmatch, with_comma)):
        return "decimal"
    whole = [text for text in texts if text.lstrip("+-").isdecimal()]
    pointed = [text for text in texts if "." in text and is_number(text) and not COMMA_NUMBER.fullmatch(text)]
    short = [text for text in whole if len(text.lstrip("+-")) <= 3]
    longer = [text for text in whole if len(text.lstrip("+-")) > 3]
    clear = any(text.count(",") > 1 or "." in text for text in with_comma) or pointed or (short and not longer)
    return "thousands" if clear else "either"


def _has_comma(text: str) -> bool:
    """Whether a text is a number with a comma, of either kind."""
    number = _with_point(text) is not None or THOUSANDS.fullmatch(text) is not None
    return "," in text and (number or has_decimal_comma(text))


def has_decimal_comma(cell: object) -> bool:
    """Whether a cell would be a number if its comma were a point.

    >>> has_decimal_comma("3,5"), has_decimal_comma("3.5"), has_decimal_comma("a, b")
    (True, False, False)
    """
    return isinstance(cell, str) and not is_number(cell) and is_number(cell.replace(",", "."))
