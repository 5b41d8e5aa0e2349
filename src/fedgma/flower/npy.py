"""Arrays in numpy's file format, of unknown origin: the header is matched and never evaluated, nothing is allocated.

`numpy.load` evaluates the header as a Python literal and allocates what it claims; a few bytes are enough to exhaust
memory or the parser's stack. Here the header must have the form that `numpy.save` writes (the order of its three
entries does not matter), hold a number type of fedgma, and match the bytes that follow.
"""

import math
import re
from typing import NamedTuple

import numpy as np

from fedgma.aggregation.gate import Refused
from fedgma.arrays import FLOATS, INTEGERS, Spec

MAGIC = b"\x93NUMPY"
LONGEST = 10_000  # bytes of a header, as in numpy
DIMENSIONS = 32
TYPES = {np.dtype(name).str[1:]: np.dtype(name) for name in FLOATS | INTEGERS if name != "bfloat16"}  # f4, i8, ...
ENTRY = re.compile(
    r"'descr':'(?P<descr>[<>=|]?[A-Za-z]\d{0,10})'|'fortran_order':(?P<fortran>True|False)|"
    r"'shape':\((?P<shape>(?:\d{1,18},)*(?:\d{1,18})?)\)"
)


class Header(NamedTuple):
    """What a header says: shape and number type, byte order and layout, and where the data begin."""

    spec: Spec
    dtype: np.dtype
    fortran: bool
    offset: int


def read_header(data: bytes) -> Header:
    """Read the header of an array; raises `Refused` unless the bytes after it are exactly its data.

    >>> from io import BytesIO
    >>> np.save(stream := BytesIO(), np.zeros((2, 3), np.float32))
    >>> read_header(stream.getvalue()).spec
    Spec(shape=(2, 3), dtype='float32')
    """
    if data[:6] != MAGIC or data[6:8] not in (b"\x01\x00", b"\x02\x00", b"\x03\x00"):
        raise Refused("unreadable", f"expected an array in numpy's format, got bytes that begin with {data[:8]!r}")
    width = 2 if data[6] == 1 else 4
    length = int.from_bytes(data[8 : 8 + width], "little")
    offset = 8 + width + length
    if length > LONGEST or offset > len(data):
        raise Refused(
            "unreadable", f"expected a header of at most {LONGEST} bytes, got one of {length} in {len(data)} bytes"
        )
    descr, fortran, shape = _read_entries(data[8 + width : offset])
    if len(shape) > DIMENSIONS:
        raise Refused("unreadable", f"expected at most {DIMENSIONS} dimensions, got {len(shape)}")
    dtype = _read_type(descr)
    size = math.prod(shape) * dtype.itemsize
    if size != len(data) - offset:
        raise Refused("unreadable", f"expected {size} bytes for {dtype.name}{list(shape)}, got {len(data) - offset}")
    return Header(Spec(shape, dtype.name), dtype, fortran, offset)


def read_array(data: bytes, header: Header) -> np.ndarray:
    """The array as a read-only view of its bytes."""
    flat = np.frombuffer(data, header.dtype, offset=header.offset)
    return flat.reshape(header.spec.shape, order="F" if header.fortran else "C")


def _read_entries(header: bytes) -> tuple[str, bool, tuple[int, ...]]:
    text = re.sub(r"[ \n]", "", header.decode("latin-1")).replace('"', "'")
    entries: dict[str, str] = {}
    position = 1
    while (entry := ENTRY.match(text, position)) is not None and entry.lastgroup not in entries:
        entries[str(entry.lastgroup)] = entry[str(entry.lastgroup)]
        position = entry.end() + text.startswith(",", entry.end())
    if text[:1] != "{" or text[position:] != "}" or len(entries) != 3:
        raise Refused("unreadable", f"expected a header with type, order and shape, got {text[:60]!r}")
    shape = tuple(int(number) for number in entries["shape"].split(",") if number)
    return entries["descr"], entries["fortran"] == "True", shape


def _read_type(descr: str) -> np.dtype:
    dtype = TYPES.get(descr.lstrip("<>=|"))
    if dtype is None:
        raise Refused("dtype", f"expected an array of numbers, got the type {descr!r}")
    return dtype.newbyteorder(">") if descr[0] == ">" else dtype
