"""Serialise a tally as arrays, or as bytes with a checksum, to send it to another process or store it in a file.

`pack` and `unpack` are for transports that carry arrays (`numpy.savez`, safetensors, ...), `to_bytes` and `from_bytes`
for those that carry bytes:

    "fedgma tally 1\\n" | length of the table, 8 bytes | table, JSON: [key, number type, length] of each array |
    the arrays' bytes in the table's order | SHA-256 of all that; numbers are little-endian

Received data is checked before it is used: nothing is executed, and a tally that cannot be a sum over clients raises
`DataError`. The checksum detects damage; it does not authenticate the sender.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedgma.aggregation.gate import Gate, Refusal
from fedgma.aggregation.kernels.plain import Sums
from fedgma.aggregation.masks import VOTE_LIMITS, vote_type
from fedgma.aggregation.tally import Tally
from fedgma.arrays import FLOATS, INTEGERS, Array, Placement, Spec, is_torch
from fedgma.errors import DataError, IntegrityError

VERSION = 1
PARTS = ("total", "rest", "votes")
MAGIC = b"fedgma tally 1\n"
CHECKSUM = hashlib.sha256().digest_size
WIRE = frozenset({"float64", "float32"}) | INTEGERS  # number types in a packed tally


def pack(tally: Tally) -> dict[str, np.ndarray[Any, Any]]:
    """Pack a tally as numpy arrays: a JSON header (bytes) and the sums, numbered in the header's order."""
    return {key: np.array(array) for key, array in _to_arrays(tally).items()}


def _to_arrays(tally: Tally) -> dict[str, np.ndarray[Any, Any]]:
    schema = tally.schema or {}
    kinds = tally.kinds(schema)
    header = {
        "version": VERSION,
        "clients": tally.clients,
        "weight": tally.weight_parts,
        "library": tally.placement.library,
        "entries": [[name, list(entry.shape), entry.dtype, kinds[name]] for name, entry in schema.items()],
        "seen": sorted(map(str, tally.seen)),
        "refused": [[str(refusal.client), refusal.reason, refusal.detail] for refusal in tally.refused],
    }
    arrays = {"header": np.frombuffer(json.dumps(header).encode(), np.uint8)}
    for position, name in enumerate(schema):
        if name in tally.maxima:
            arrays[f"maximum.{position}"] = _to_host(tally.maxima[name])
        if name in tally.sums:
            parts = zip(PARTS, tally.sums[name], strict=True)
            arrays.update({f"{part}.{position}": _to_host(array) for part, array in parts if array is not None})
    return arrays


def unpack(arrays: Mapping[str, np.ndarray[Any, Any]], *, gate: Gate | None = None) -> Tally:
    """Unpack a tally; raises `DataError` if the arrays are not a packed tally.

    >>> tally = Tally()
    >>> tally.add({"w": np.array([1.0, -1.0])}, weight=10)
    >>> unpack(pack(tally)).votes["w"].tolist()
    [1, -1]
    """
    header = _read_header(arrays)
    entries = {name: Spec(tuple(shape), dtype) for name, shape, dtype, _ in header["entries"]}
    averaged = [name for name, _, _, kind in header["entries"] if kind == "averaged"]
    tally = Tally(buffers=averaged, gate=gate)
    tally.schema = entries or None
    tally.clients = header["clients"]
    tally.weight_parts = tuple(header["weight"])
    tally.placement = Placement(header["library"], "cpu" if header["library"] == "torch" else None)
    tally.seen = set(header["seen"])
    tally.refused = [Refusal(*refusal) for refusal in header["refused"]]
    for position, (name, _, dtype, kind) in enumerate(header["entries"] if tally.clients else []):
        if kind == "maximum":
            tally.maxima[name] = _read_array(arrays, f"maximum.{position}", dtype, math.prod(entries[name].shape))
        else:
            tally.sums[name] = _read_sums(arrays, position, entries[name], kind == "masked", tally.clients)
    return tally


def to_bytes(tally: Tally) -> bytes:
    """Serialise a tally as bytes with a checksum; the bytes are the same on every machine."""
    arrays = {key: array.astype(array.dtype.newbyteorder("<"), copy=False) for key, array in _to_arrays(tally).items()}
    table = json.dumps([[key, array.dtype.name, array.size] for key, array in arrays.items()]).encode()
    contents: list[Any] = [
        array.reshape(-1).view(np.uint8).data for array in arrays.values()
    ]  # copied once, at the end
    parts = [MAGIC, len(table).to_bytes(8, "little"), table, *contents]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return b"".join([*parts, digest.digest()])


def from_bytes(data: bytes | bytearray | memoryview, *, gate: Gate | None = None) -> Tally:
    """Read a tally from bytes; `IntegrityError` if they are damaged, `DataError` if they are not a tally.

    >>> tally = Tally()
    >>> tally.add({"w": np.array([1.0, -1.0])}, weight=10)
    >>> from_bytes(to_bytes(tally)).votes["w"].tolist()
    [1, -1]
    """
    view = memoryview(data).cast("B")
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise DataError(f"not a tally: the bytes must begin with {MAGIC!r}, got {bytes(view[:15])!r}")
    body, checksum = view[:-CHECKSUM], view[-CHECKSUM:]
    if len(view) < len(MAGIC) + 8 + CHECKSUM or hashlib.sha256(body).digest() != checksum:
        raise IntegrityError("the tally's checksum does not match: the bytes are damaged or truncated; send them again")
    start = len(MAGIC) + 8
    stop = start + int.from_bytes(body[len(MAGIC) : start], "little")
    return unpack(_split_content(_read_table(bytes(body[start:stop])), body[stop:]), gate=gate)


def _read_table(text: bytes) -> list[tuple[str, str, int]]:
    try:
        table = [(key, dtype, size) for key, dtype, size in json.loads(text)]
        for key, dtype, size in table:
            if not isinstance(key, str) or dtype not in WIRE or type(size) is not int or size < 0:
                raise ValueError("entry")
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"not a tally: the table of arrays cannot be read ({type(error).__name__})") from None
    return table


def _split_content(table: list[tuple[str, str, int]], content: memoryview) -> dict[str, np.ndarray[Any, Any]]:
    arrays, start = {}, 0
    for key, name, size in table:
        dtype = np.dtype(name).newbyteorder("<")
        stop = start + size * dtype.itemsize
        if stop > len(content):
            raise DataError(f"not a tally: array {key!r} needs {stop - start} bytes, got {len(content) - start}")
        arrays[key] = np.frombuffer(content[start:stop], dtype)
        start = stop
    if start != len(content):
        raise DataError(f"not a tally: {len(content) - start} bytes follow the last array")
    return arrays


def _to_host(array: Array) -> np.ndarray[Any, Any]:
    return np.asarray(array.cpu().numpy() if is_torch(array) else array)


def _read_header(arrays: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    try:
        header: dict[str, Any] = json.loads(np.asarray(arrays["header"], np.uint8).tobytes().decode())
        version = header["version"]
        if version == VERSION:
            _check_header(header)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, AttributeError) as error:
        raise DataError(f"not a packed tally: its header cannot be read ({type(error).__name__}: {error})") from None
    if version != VERSION:
        raise DataError(
            f"expected a tally in format version {VERSION}, got {version}; use the same fedgma version on both ends"
        )
    return header


def _check_header(header: dict[str, Any]) -> None:
    clients, weight = header["clients"], header["weight"]
    if (
        type(clients) is not int
        or not 0 <= clients < VOTE_LIMITS["int64"]
        or header["library"] not in ("numpy", "torch")
    ):
        raise ValueError("clients or library")
    if len(weight) != 2 or not all(isinstance(part, int | float) and math.isfinite(part) for part in weight):
        raise ValueError("weight")
    if (sum(weight) > 0) != (clients > 0):
        raise ValueError("a positive weight needs clients, and clients need a positive weight")
    for name, shape, dtype, kind in header["entries"]:
        valid_shape = all(type(length) is int and length >= 0 for length in shape)
        valid_type = dtype in (INTEGERS if kind == "maximum" else FLOATS) and kind in ("masked", "averaged", "maximum")
        if not isinstance(name, str) or not valid_shape or not valid_type:
            raise ValueError(f"entry {name!r}")
    if not all(isinstance(client, str) for client in header["seen"]):
        raise ValueError("seen")
    if not all(len(refusal) == 3 and all(isinstance(word, str) for word in refusal) for refusal in header["refused"]):
        raise ValueError("refused")


def _read_array(arrays: Mapping[str, np.ndarray[Any, Any]], key: str, dtype: str, size: int) -> np.ndarray[Any, Any]:
    if key not in arrays:
        raise DataError(f"the packed tally has no array {key!r}")
    array = np.asarray(arrays[key])
    if array.dtype.name != dtype or array.shape != (size,):
        raise DataError(
            f"the packed tally's {key!r} must be {dtype}[{size}], got {array.dtype.name}{list(array.shape)}"
        )
    return array.astype(dtype)  # a copy, in this machine's byte order


def _read_sums(
    arrays: Mapping[str, np.ndarray[Any, Any]], position: int, entry: Spec, masked: bool, clients: int
) -> Sums:
    size = math.prod(entry.shape)
    total = _read_array(arrays, f"total.{position}", "float64", size)
    rest = _read_array(arrays, f"rest.{position}", "float64" if entry.dtype == "float64" else "float32", size)
    votes = _read_array(arrays, f"votes.{position}", vote_type(clients), size) if masked else None
    if not np.isfinite(total).all() or not np.isfinite(rest).all():
        raise DataError(f"the packed tally's entry {position} holds a NaN or an infinity")
    if votes is not None and size and int(abs(votes.astype(np.int64)).max()) > clients:
        raise DataError(f"the packed tally's entry {position} holds more than {clients} votes from {clients} clients")
    return Sums(total, rest, votes)
