"""Reads .npy arrays and .npz archives of unknown origin.

A header is matched, never evaluated. What it announces is compared with the bytes that are there before memory is
taken for it. Object arrays, which need pickle, are refused.
"""

import math
import re
import zipfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from fedgma.data.files.reader import DAMAGED, Readable, check_announced, read_exactly
from fedgma.errors import DataError

MAGIC = b"\x93NUMPY"
LONGEST = 1 << 16  # bytes of a header; numpy's have about a hundred
KINDS = "biufcUS"  # booleans, numbers, texts
FIELD = re.compile(
    r"""\s*['"](descr|fortran_order|shape)['"]\s*:\s*(?:['"]([<>|=]?[a-zA-Z]\d{0,9})['"]|(True|False)|\(([\d,\s]*)\))\s*,?"""
)


class Header(NamedTuple):
    """What an .npy file announces."""

    dtype: np.dtype[Any]
    order: Literal["C", "F"]
    shape: tuple[int, ...]
    start: int  # of the data, in bytes

    @property
    def size(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_npz(path: Path) -> dict[str, npt.NDArray[Any]]:
    """All arrays of an .npz archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]
            check_announced(sum(entry.file_size for entry in entries), path)
            arrays = {}
            for entry in entries:
                name = entry.filename.removesuffix(".npy")
                with archive.open(entry) as stream:
                    arrays[name] = read_npy(stream, entry.file_size, f"{path.name}: {name}")
            return arrays
    except DAMAGED as error:
        raise DataError(f"{path.name} cannot be read as an .npz of plain arrays: {error}") from None


def read_npy(stream: Readable, size: int, name: str) -> npt.NDArray[Any]:
    """The array in an .npy stream of `size` bytes."""
    header = read_header(stream, name)
    _check_size(header, size, name)
    content = read_exactly(stream, header.size, name)
    return _array(header, content, name)


def map_npy(path: Path) -> npt.NDArray[Any]:
    """The array in an .npy file as a read-only memory map."""
    with path.open("rb") as stream:
        header = read_header(stream, path.name)
    _check_size(header, path.stat().st_size, path.name)
    if not header.size:  # an empty file cannot be mapped
        return _array(header, bytearray(), path.name)
    return np.memmap(path, header.dtype, "r", header.start, header.shape, order=header.order)


def read_header(stream: Readable, name: str) -> Header:
    """The header at the start of an .npy stream."""
    start = read_exactly(stream, len(MAGIC) + 2, name)
    if start[:-2] != MAGIC or start[-2] not in (1, 2, 3):
        raise DataError(f"{name} is not an .npy array: it begins with {bytes(start)!r}")
    width = 2 if start[-2] == 1 else 4
    length = int.from_bytes(read_exactly(stream, width, name), "little")
    if length > LONGEST:
        raise DataError(f"{name} must have a header of at most {LONGEST} bytes, got {length}")
    text = bytes(read_exactly(stream, length, name)).decode("latin-1")
    return _parse(text, len(MAGIC) + 2 + width + length, name)


def _parse(text: str, start: int, name: str) -> Header:
    inside = text.strip().removeprefix("{").removesuffix("}")
    fields = {match[1]: match[2] or match[3] or match[4] for match in FIELD.finditer(inside)}
    if FIELD.sub("", inside).strip() or set(fields) != {"descr", "fortran_order", "shape"}:
        raise DataError(f"{name} must be a plain array, but its header is {text.strip()[:80]!r}")
    try:
        dtype = np.dtype(fields["descr"])
        shape = tuple(int(length) for length in (fields["shape"] or "").replace(",", " ").split())
    except (TypeError, ValueError):
        raise DataError(f"{name} must be a plain array, but its header is {text.strip()[:80]!r}") from None
    if dtype.kind not in KINDS or not dtype.itemsize:
        raise DataError(
            f"{name} must hold numbers or texts, got {fields['descr']!r}; object arrays are never read, "
            "so save texts as np.array(texts, dtype=str)"
        )
    return Header(dtype, "F" if fields["fortran_order"] == "True" else "C", shape, start)


def _check_size(header: Header, size: int, name: str) -> None:
    if header.start + header.size != size:
        raise DataError(f"{name} announces {header.size} bytes of data but holds {size - header.start}")


def _array(header: Header, content: bytearray, name: str) -> npt.NDArray[Any]:
    try:
        return np.ndarray(header.shape, header.dtype, content, order=header.order)
    except (ValueError, OverflowError, MemoryError) as error:
        raise DataError(f"{name} cannot be an array of shape {header.shape}: {error}") from None
