"""Columns of a table as features of a model: numbers filled and standardised, texts as columns of 0 and 1.

`fit` learns from training rows what `apply` needs to prepare any rows in the same way: those of the training part, of
the test part, and new ones when a model is used.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedgma.data.files.own.numbering import is_missing
from fedgma.data.files.own.tables import (
    ENOUGH,
    Column,
    comma_of,
    has_decimal_comma,
    is_nested,
    is_number,
    looks_like_ids,
    numbers_rows,
    wrong_cell,
)
from fedgma.documents import PathLike, read_bytes
from fedgma.errors import ConfigError, DataError, did_you_mean, nearest

Floats = npt.NDArray[np.float64]
MISSING = ("na", "n/a", "null", "?")  # cells that count as missing, beside those of labels
TRUTH = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0}
MOST_VALUES = 20  # columns of 0 and 1 for the values of a column of texts
KINDS = ("number", "truth", "text", "missing")  # of "missing", only whether a cell is missing is a feature
FORMAT = 1  # of the file that holds what was prepared


class Feature(NamedTuple):
    """What becomes of a column."""

    name: str
    kind: str  # one of KINDS
    fill: float = 0.0  # in place of a missing number: the median of the training rows
    mean: float | None = None  # of the training rows, after filling; None: not standardised
    deviation: float | None = None
    values: tuple[str, ...] = ()  # of texts, each a column of 0 and 1
    other: bool = False  # whether texts that are none of the values have a column
    missing: bool = False  # whether missing cells have a column

    @property
    def names(self) -> list[str]:
        """The names of its columns in `x`."""
        more = [f"{self.name} other"] * self.other + [f"{self.name} missing"] * self.missing
        own = {"text": [f"{self.name} {value}" for value in self.values], "missing": []}
        return own.get(self.kind, [self.name]) + more


class Prepared(NamedTuple):
    """What is needed to prepare rows of a table as the training rows were."""

    features: tuple[Feature, ...]
    label: str
    client: str | None = None
    classes: tuple[str, ...] | None = None  # None: the labels are numbers to predict
    left_out: Mapping[str, str] = {}  # column to why

    @property
    def names(self) -> list[str]:
        """The names of the columns of `x`."""
        return [name for feature in self.features for name in feature.names]


def fit(
    columns: Mapping[str, Column],
    rows: npt.NDArray[np.int64],
    label: str,
    client: str | None = None,
    *,
    drop: Iterable[str] = (),
    keep: Iterable[str] = (),
    as_text: Iterable[str] = (),
    standardise: bool = True,
    most_values: int = MOST_VALUES,
    where: str = "the table",
) -> Prepared:
    """How to prepare the columns of a table, as its training `rows` tell; no other row matters.

    >>> table = {"age": np.array([30.0, np.nan, 50.0]), "town": np.array(["Rome", "Oslo", "Rome"])}
    >>> fit(table, np.arange(3), "label", standardise=False).names
    ['age', 'age missing', 'town Rome', 'town Oslo']
    """
    features, left_out = [], dict.fromkeys(drop, "as asked")
    for name, column in columns.items():
        if name in (label, client) or name in left_out:
            continue
        training = column[rows]
        kind = _kind(name, column, rows, where)
        kind = "text" if name in as_text else kind
        why = None if name in keep else _id(name, training, kind)
        if kind == "text" or why is not None:
            fitted = why or _fit_texts(name, words(training), most_values)
        else:
            fitted = _fit_numbers(name, numbers(column, name, kind, where)[rows], kind, standardise)
        if isinstance(fitted, Feature):
            features.append(fitted)
        else:
            left_out[name] = fitted
    if not features:
        said = "; ".join(f"{name!r}: {why}" for name, why in left_out.items()) or "the table has no other columns"
        raise DataError(f"{where}: expected a column that can be a feature besides the label, got none ({said})")
    return Prepared(tuple(features), label, client, left_out=left_out)


def apply(columns: Mapping[str, Column], prepared: Prepared, where: str = "the table") -> npt.NDArray[np.float32]:
    """Samples [row, feature] of a table's rows; columns that are not needed may be missing.

    >>> prepared = fit({"age": np.array([30, 30, 60])}, np.arange(3), "label", standardise=False)
    >>> apply({"age": np.array([20, 70])}, prepared).tolist()
    [[20.0], [70.0]]
    """
    for feature in prepared.features:
        check_column(columns, feature.name, where)
    x = np.concatenate([_applied(columns[feature.name], feature, where) for feature in prepared.features], 1)
    with np.errstate(over="ignore"):
        samples = x.astype(np.float32)
    if not np.isfinite(samples).all():
        row, place = np.argwhere(~np.isfinite(samples))[0].tolist()
        name = prepared.names[place]
        raise DataError(f"{where}: column {name!r} has in row {row + 1} a number that is too large; correct that cell")
    return samples


def as_json(prepared: Prepared) -> str:
    """A preparation as the text of a JSON file; every number is read back to the bit."""
    features = [feature._asdict() for feature in prepared.features]
    return json.dumps({"format": FORMAT, **prepared._asdict(), "features": features, "names": prepared.names}, indent=1)


def read_prepared(path: PathLike) -> Prepared:
    """The preparation in a JSON file that `fedgma data prepare` has written."""
    try:
        fields = json.loads(read_bytes(Path(path), 1 << 28))
        if fields.pop("format") != FORMAT:
            raise ValueError("another format")
        fields.pop("names")
        features = tuple(Feature(**{**each, "values": tuple(each["values"])}) for each in fields.pop("features"))
        classes = fields.pop("classes")
        return Prepared(features, classes=None if classes is None else tuple(classes), **fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is not what `fedgma data prepare` writes ({error}); prepare the table again") from None


def check_column(columns: Mapping[str, Column], name: str, where: str) -> None:
    """Refuse the name of a column that the table does not have."""
    if name not in columns:
        has = f"{', '.join(map(repr, list(columns)[:ENOUGH]))}{' ...' if len(columns) > ENOUGH else ''}"
        raise ConfigError(f"{where} has no column {name!r}, it has {has}{did_you_mean(nearest(name, columns))}")


def _kind(name: str, column: Column, rows: npt.NDArray[np.int64], where: str) -> str:
    """What the training cells of a column are: numbers, truth values or texts."""
    if column.dtype.kind in "iufb" and column.ndim == 1:
        return "truth" if column.dtype.kind == "b" else "number"
    if column.dtype.kind not in "OU" or is_nested(column) or not all(map(_is_plain, column.tolist())):
        got = "arrays or objects" if column.dtype.kind == "O" or column.ndim > 1 else str(column.dtype)
        raise DataError(
            f"{where}: column {name!r} must hold numbers, truth values or texts, got {got}; convert it or --drop it"
        )
    present = [word for word in words(column[rows]) if word is not None]
    if present and all(word.lower() in ("true", "false") for word in present):
        return "truth"
    likely = sum(is_number(word.replace(",", ".")) for word in present)
    return "number" if 2 * likely > len(present) else "text"


def _is_plain(cell: object) -> bool:
    return isinstance(cell, str | int | float) or is_missing(cell)


def words(column: Column) -> list[str | None]:
    """The cells of a column as texts, None where one is missing; whole numbers are written in one way.

    >>> words(np.array([7.0, np.nan])), words(np.array(["07", " b ", "NA"]))
    (['7', None], ['7', 'b', None])
    """
    return [_word(cell) for cell in column.tolist()]


def _word(cell: Any) -> str | None:
    text = str(cell).strip()
    if is_missing(cell) or text.lower() in MISSING:
        return None
    try:
        return str(int(text))
    except ValueError:
        if not is_number(text) or not np.isfinite(number := float(text)):
            return text
        return str(int(number)) if number.is_integer() else repr(number)


def _id(name: str, training: Column, kind: str) -> str | None:
    """Why a column is left out, if it numbers the rows or has another text or whole number in each."""
    if numbers_rows(name, training):
        return "it numbers the rows"
    if training.dtype.kind in "iuf" and kind == "number":
        return "another whole number in each row, as ids have" if looks_like_ids(training) else None
    present = words(training) if kind != "truth" else []
    whole = kind == "text" or all(word is not None and word.lstrip("-").isdecimal() for word in present)
    if whole and len(present) >= ENOUGH and None not in present and len(set(present)) == len(present):
        return f"another {'text' if kind == 'text' else 'whole number'} in each row, as ids have"
    return None


def _fit_numbers(name: str, values: Floats, kind: str, standardise: bool) -> Feature | str:
    """What becomes of a column of numbers, NaN where one is missing, or why it is left out."""
    missing = np.isnan(values)
    if missing.all():
        return "all cells are missing"
    # of truth values the median must be one of them
    fill = float(np.quantile(values[~missing], 0.5, method="linear" if kind == "number" else "lower"))
    filled = np.where(missing, fill, values)
    mean, deviation = float(filled.mean()), float(filled.std())
    if filled.min() == filled.max() or deviation == 0:
        return Feature(name, "missing", missing=True) if missing.any() else f"always {fill:g}"
    feature = Feature(name, kind, fill, missing=bool(missing.any()))
    return feature._replace(mean=mean, deviation=deviation) if standardise and kind == "number" else feature


def _fit_texts(name: str, cells: Sequence[str | None], most: int) -> Feature | str:
    """What becomes of a column of texts, or why it is left out."""
    counts = Counter(cells)
    missing = counts.pop(None, 0) > 0
    if len(counts) + missing < 2:
        return f"always {next(iter(counts))!r}" if counts else "all cells are missing"
    ranked = sorted(counts, key=lambda value: (-counts[value], str(value)))
    return Feature(name, "text", values=tuple(map(str, ranked[:most])), other=len(ranked) > most, missing=missing)


def _applied(column: Column, feature: Feature, where: str) -> Floats:
    """The features of a column [row, feature]."""
    if feature.kind == "text":
        place = {value: number for number, value in enumerate(feature.values)}
        width, cells = len(feature.names), words(column)
        x = np.zeros((len(column), width + 1))  # the last place is for cells without a column
        other = len(place) if feature.other else width
        missing = width - 1 if feature.missing else (other if feature.other else width)
        places = [missing if cell is None else place.get(cell, other) for cell in cells]
        x[np.arange(len(column)), places] = 1
        return x[:, :width]
    if feature.kind == "missing":
        return np.array([[float(cell is None)] for cell in words(column)]).reshape(-1, 1)
    values = numbers(column, feature.name, feature.kind, where)
    missing_cells = np.isnan(values)
    filled = np.where(missing_cells, feature.fill, values)
    if feature.mean is not None and feature.deviation is not None:
        with np.errstate(over="ignore"):
            filled = (filled - feature.mean) / feature.deviation
    return np.stack([filled, missing_cells] if feature.missing else [filled], 1)


def numbers(column: Column, name: str, kind: str, where: str) -> Floats:
    """The cells of a column as numbers that float32 can hold, NaN where one is missing."""
    if column.dtype.kind in "iuf" and kind == "number":
        values = column.astype(np.float64)
        missing = np.isnan(values)
    else:
        cells = words(column)
        missing = np.array([cell is None for cell in cells], bool)
        known = TRUTH if kind == "truth" else {}
        wrong = [c is not None and c.lower() not in known if known else not is_number(c or "0") for c in cells]
        if any(wrong):
            _refuse(name, kind, cells, wrong.index(True), where)
        values = np.array([known[c.lower()] if c and known else float(c or 0) for c in cells], np.float64)
        values[missing] = np.nan
    too_large = ~missing & ~(np.abs(values) <= float(np.finfo(np.float32).max))
    if too_large.any():
        row = int(np.flatnonzero(too_large)[0]) + 1
        raise DataError(f"{where}: column {name!r} has no finite number in row {row}; correct that cell or empty it")
    return values


def _refuse(name: str, kind: str, cells: Sequence[str | None], row: int, where: str) -> None:
    what = "numbers" if kind == "number" else "truth values"
    commas = comma_of(cells) if kind == "number" else ""
    got = wrong_cell(cells[row], row + 1, commas) if kind == "number" else f"{cells[row]!r} in row {row + 1}"
    comma = ", give --decimal-comma" if commas in ("decimal", "either") and has_decimal_comma(cells[row]) else ""
    raise DataError(
        f"{where}: column {name!r} must hold {what}, got {got}; correct or empty such cells{comma}, or take the column "
        f"as texts with --as-text {name!r}"
    )
