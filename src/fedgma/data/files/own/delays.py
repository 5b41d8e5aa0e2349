"""Measured delays: seconds that devices took, from a user's table or arrays."""

from pathlib import Path

import numpy as np

from fedgma.data.files.npy import read_npz
from fedgma.data.files.own.roles import CLIENTS
from fedgma.data.files.own.tables import read_csv
from fedgma.errors import DataError

SUFFIXES = (".csv", ".npz")
LONGEST = 1e12  # seconds


def read_delays(path: Path) -> tuple[np.ndarray, ...]:
    """The seconds of each device, float64: one array a device, in the order of their names.

    A table has a column `seconds` and, where devices have several rows, a column that names the device, such as
    `client`. An .npz file has an array `seconds`, [device] or [device, measurement].
    """
    columns = dict(read_csv(path)) if path.suffix.lower() == ".csv" else dict(read_npz(path))
    if "seconds" not in columns:
        raise DataError(f"{path.name} must hold `seconds`, the delay of each device; it holds {', '.join(columns)}")
    seconds = columns.pop("seconds")
    if seconds.dtype.kind not in "iuf" or seconds.ndim not in (1, 2) or not seconds.size:
        got = f"{seconds.dtype} {list(seconds.shape)}" if seconds.dtype.kind not in "UT" else _odd(seconds)
        raise DataError(f"{path.name}: `seconds` must be numbers, [device] or [device, measurement], got {got}")
    seconds = seconds.astype(np.float64)
    if not ((seconds >= 0) & (seconds <= LONGEST)).all():
        raise DataError(f"{path.name}: `seconds` must be from 0 to {LONGEST:g}")
    named = next((columns[name] for name in columns if name.lower() in CLIENTS), None)
    if named is None or seconds.ndim == 2:
        return tuple(np.atleast_1d(row) for row in seconds)
    if len(named) != len(seconds):
        raise DataError(f"{path.name}: expected a device for each of {len(seconds)} delays, got {len(named)}")
    _, device = np.unique(named, return_inverse=True)
    return tuple(seconds[device == which] for which in range(int(device.max()) + 1))


def _odd(texts: np.ndarray) -> str:
    """The first of the texts that is no number, and its row."""
    for row, text in enumerate(texts.ravel().tolist(), 1):
        try:
            float(text)
        except ValueError:
            return f"{text!r:.60} in row {row}" if text else f"an empty cell in row {row}"
    return "texts"
