"""Serialise a tally as arrays, or as bytes with a checksum, to send it to another process or store it in a file.

`pack` and `unpack` are for transports that carry arrays (`numpy.savez`, safetensors, ...), `to_bytes` and `from_bytes`
for those that carry bytes:

    "fedgma tally 2\\n" | length of the table, 8 bytes | table, JSON: [key, number type, length] of each array |
    the arrays' bytes in the table's order | SHA-256 of all that; numbers are little-endian

A tally with further sums (`Tally(further=...)`) is written in format 3, which names them; one without, in format 2.

Received data is checked before it is used: nothing is executed, and sizes are bounded before anything is parsed. A
tally that cannot be a sum over clients raises `DataError`: more votes than clients, votes of all for one sign and a sum
of the other, a mean outside its number type, weights outside the gate's limits. The checksum detects damage; it does
not authenticate the sender, who can claim any clients with any updates.
"""

import hashlib
import importlib.util
import json
import math
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from fedgma.aggregation.contradictions import find_contradiction, lost
from fedgma.aggregation.gate import MIN_WEIGHT, Gate, Refusal, check_members
from fedgma.aggregation.kernels.plain import FURTHER, Sums, empty_sums, select
from fedgma.aggregation.tally import Tally
from fedgma.arrays import FLOATS, INTEGERS, Array, Placement, Spec, blocks, is_torch, spec
from fedgma.errors import DataError, IntegrityError

VERSIONS = (2, 3)  # without and with further sums
MAGICS = {version: b"fedgma tally %d\n" % version for version in VERSIONS}
MAGIC = MAGICS[2]
CHECKSUM = hashlib.sha256().digest_size
WIRE = frozenset({"float64", "float32"}) | INTEGERS  # number types in a packed tally
MAX_TEXT = 1 << 22  # bytes of header and of table: names of some 100,000 clients, read in a second
MAX_CLIENTS = 1 << 48
MAX_AXES = 32
LARGEST = {"float64": 1.8e308, "float32": 3.4028235e38, "float16": 65504.0, "bfloat16": 3.3895314e38}


def pack(tally: Tally) -> dict[str, np.ndarray[Any, Any]]:
    """Pack a tally as numpy arrays: a JSON header (bytes) and the sums, numbered in the header's order."""
    return {key: np.array(array) for key, array in _to_arrays(tally).items()}


def _to_arrays(tally: Tally) -> dict[str, np.ndarray[Any, Any]]:
    if not isinstance(tally, Tally):
        raise DataError(f"expected a tally, got {type(tally).__name__}")
    with tally.turns.use():
        arrays = {"header": np.frombuffer(_write_header(tally), np.uint8)}
        for position, name in enumerate(tally.schema or {}):
            if name in tally.maxima:
                arrays[f"maximum.{position}"] = _to_host(tally.maxima[name])
            if name in tally.sums:
                parts = tally.sums[name]._asdict().items()
                arrays.update({f"{part}.{position}": _to_host(array) for part, array in parts if array is not None})
    return arrays


def _write_header(tally: Tally) -> bytes:
    schema = tally.schema or {}
    kinds = tally.kinds(schema)
    header = {
        "version": _version(tally),
        "clients": tally.clients,
        "weight": tally.weight_parts,
        "heaviest": tally.heaviest,
        "library": tally.placement.library,
        "entries": [[name, list(entry.shape), entry.dtype, kinds[name]] for name, entry in schema.items()],
        "seen": sorted(map(_write_client, tally.seen), key=lambda client: (isinstance(client, str), client)),
        "refused": [[_write_label(refusal.client), refusal.reason, refusal.detail] for refusal in tally.refused],
    }
    if tally.further:
        header["further"] = list(tally.further)
    text = json.dumps(header).encode()
    if len(text) > MAX_TEXT:
        raise DataError(f"the names in this tally take {len(text):,} bytes, at most {MAX_TEXT:,} can be sent")
    return text


def _version(tally: Tally) -> int:
    return 3 if tally.further else 2


def _write_client(client: Hashable) -> str | int:
    """A client's name as JSON has it: a name that comes back as another one would be counted twice."""
    if isinstance(client, str):
        return str(client)
    if isinstance(client, int | np.integer) and not isinstance(client, bool) and abs(int(client)) < 1 << 128:
        return int(client)
    raise DataError(f"to send a tally, name its clients by strings or integers, got {type(client).__name__}")


def _write_label(client: Hashable) -> str | int:
    try:
        return _write_client(client)
    except DataError:
        return f"{client!r:.60}"  # of a refused client, which is not counted


def unpack(arrays: Mapping[str, np.ndarray[Any, Any]], *, gate: Gate | None = None) -> Tally:
    """Unpack a tally; raises `DataError` if the arrays are not a packed tally.

    >>> tally = Tally()
    >>> tally.add({"w": np.array([1.0, -1.0])}, weight=10)
    >>> unpack(pack(tally)).votes["w"].tolist()
    [1, -1]
    """
    gate = gate or Gate()
    header, text = _read_header(arrays, gate)
    tally = _begin(header, gate)
    for position, (name, entry) in enumerate((tally.schema or {}).items() if tally.clients else ()):
        kind = header["entries"][position][3]
        if kind == "maximum":
            tally.maxima[name] = _read_array(arrays, f"maximum.{position}", "int64", math.prod(entry.shape))
        else:
            tally.sums[name] = _read_sums(arrays, position, entry, kind == "masked", tally)
    if _write_header(tally) != text:
        raise DataError("not a packed tally: its header is not written as a tally's is (a field or name twice?)")
    return tally


def _begin(header: dict[str, Any], gate: Gate) -> Tally:
    """A tally with all that the header holds, without sums."""
    averaged = [name for name, _, _, kind in header["entries"] if kind == "averaged"]
    tally = Tally(buffers=averaged, gate=gate, further=header.get("further", ()))
    tally.schema = {name: Spec(tuple(shape), dtype) for name, shape, dtype, _ in header["entries"]} or None
    tally.clients = header["clients"]
    tally.weight_parts, tally.heaviest = tuple(header["weight"]), header["heaviest"]
    tally.placement = _read_placement(header["library"], tally.schema or {})
    tally.seen = set(header["seen"])
    tally.refused = [Refusal(*refusal) for refusal in header["refused"]]
    check_members(tally.seen, tally.clients, gate)
    return tally


def _read_placement(library: str, schema: Mapping[str, Spec]) -> Placement:
    if library == "numpy" and all(entry.dtype != "bfloat16" for entry in schema.values()):
        return Placement("numpy")
    if importlib.util.find_spec("torch") is None:
        raise DataError("the tally is one of torch tensors: install torch to read it")
    import torch

    return Placement("torch", torch.device("cpu"))


def to_bytes(tally: Tally) -> bytes:
    """Serialise a tally as bytes with a checksum; the bytes are the same on every machine."""
    arrays = {key: array.astype(array.dtype.newbyteorder("<"), copy=False) for key, array in _to_arrays(tally).items()}
    table = _write_table(arrays)
    contents: list[Any] = [array.reshape(-1).view(np.uint8).data for array in arrays.values()]  # copied at the end
    parts = [MAGICS[_version(tally)], len(table).to_bytes(8, "little"), table, *contents]
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
    if not isinstance(data, bytes | bytearray | memoryview) or not memoryview(data).c_contiguous:
        raise DataError(f"a tally is read from bytes, got {type(data).__name__}")
    view = memoryview(data).cast("B")
    if bytes(view[: len(MAGIC)]) not in MAGICS.values():
        raise DataError(f"not a tally: the bytes must begin with {MAGIC!r}, got {bytes(view[: len(MAGIC)])!r}")
    body, checksum = view[:-CHECKSUM], view[-CHECKSUM:]
    if len(view) < len(MAGIC) + 8 + CHECKSUM or hashlib.sha256(body).digest() != checksum:
        raise IntegrityError("the tally's checksum does not match: the bytes are damaged or truncated; send them again")
    start = len(MAGIC) + 8
    stop = start + int.from_bytes(body[len(MAGIC) : start], "little")
    if stop > min(len(body), start + MAX_TEXT):
        raise DataError(f"not a tally: a table of {stop - start:,} bytes, where {MAX_TEXT:,} are allowed")
    table = bytes(body[start:stop])
    tally = unpack(_split_content(_read_table(table), body[stop:]), gate=gate)
    if _write_table(_to_arrays(tally)) != table or bytes(view[: len(MAGIC)]) != MAGICS[_version(tally)]:
        raise DataError("not a tally: its arrays are not those of its header")
    return tally


def _write_table(arrays: Mapping[str, np.ndarray[Any, Any]]) -> bytes:
    text = json.dumps([[key, spec(array).dtype, array.size] for key, array in arrays.items()]).encode()
    if len(text) > MAX_TEXT:
        raise DataError(f"the table of the tally's {len(arrays):,} arrays takes more than {MAX_TEXT:,} bytes")
    return text


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
            raise DataError(f"not a tally: array {key!r:.40} needs {stop - start} bytes, got {len(content) - start}")
        arrays[key] = np.frombuffer(content[start:stop], dtype)
        start = stop
    if start != len(content):
        raise DataError(f"not a tally: {len(content) - start} bytes follow the last array")
    return arrays


def _to_host(array: Array) -> np.ndarray[Any, Any]:
    return np.asarray(array.cpu().numpy() if is_torch(array) else array)


def _read_header(arrays: Mapping[str, np.ndarray[Any, Any]], gate: Gate) -> tuple[dict[str, Any], bytes]:
    try:
        text = np.asarray(arrays["header"], np.uint8).tobytes()
        if len(text) > MAX_TEXT:
            raise ValueError(f"{len(text):,} bytes, where {MAX_TEXT:,} are allowed")
        header: dict[str, Any] = json.loads(text.decode())
        version = header["version"]
        if version in VERSIONS:
            _check_header(header, gate)
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, AttributeError) as error:
        detail = f"{type(error).__name__}: {error}"
        raise DataError(f"not a packed tally: its header cannot be read ({detail:.200})") from None
    if version not in VERSIONS:
        known = " or ".join(map(str, VERSIONS))
        raise DataError(
            f"expected a tally in format version {known}, got {version!r:.20}; use the same fedgma version on both ends"
        )
    return header, text


def _check_header(header: dict[str, Any], gate: Gate) -> None:
    clients, entries, seen = header["clients"], header["entries"], header["seen"]
    if type(clients) is not int or not 0 <= clients <= MAX_CLIENTS or header["library"] not in ("numpy", "torch"):
        raise ValueError("clients or library")
    _check_weight(header["weight"], header["heaviest"], clients, gate)
    for entry in entries:
        _check_entry(*entry)
    if len({name for name, *_ in entries}) != len(entries) or (clients and not entries):
        raise ValueError("entries are missing, or one is there twice")
    if len(seen) > clients or not all(type(client) in (int, str) for client in seen):
        raise ValueError("seen")
    for client, reason, detail in header["refused"]:
        if type(client) not in (int, str) or not isinstance(reason, str) or not isinstance(detail, str):
            raise ValueError("refused")
    further = header["further"] if header["version"] == 3 else []
    if not isinstance(further, list) or [group for group in FURTHER if group in further] != further:
        raise ValueError("further")


def _check_weight(weight: Any, heaviest: Any, clients: int, gate: Gate) -> None:
    total, rest = weight
    if not all(type(part) is float and math.isfinite(part) for part in (total, rest, heaviest)):
        raise ValueError(f"weight {weight!r:.40}")
    slack = 1 + 1e-9
    others = (clients - 1) * MIN_WEIGHT
    shared = total <= clients * heaviest * slack and heaviest + others <= total * slack
    if abs(rest) > lost(clients) * total or (not shared if clients else total or heaviest):
        raise ValueError(f"{clients} clients cannot have a weight of {total:g}, the heaviest {heaviest:g}")
    if heaviest > gate.max_weight:
        raise ValueError(f"a client's weight must be at most {gate.max_weight:g}, got {heaviest:g}")


def _check_entry(name: Any, shape: Any, dtype: Any, kind: Any) -> None:
    kinds = ("maximum",) if dtype == "int64" else ("masked", "averaged") if dtype in FLOATS else ()
    lengths = isinstance(shape, list) and len(shape) <= MAX_AXES and all(type(n) is int and n >= 0 for n in shape)
    if not isinstance(name, str) or kind not in kinds or not lengths or sum(n.bit_length() for n in shape) > 60:
        raise ValueError(f"entry {name!r:.60}")


def _read_array(arrays: Mapping[str, np.ndarray[Any, Any]], key: str, dtype: str, size: int) -> np.ndarray[Any, Any]:
    if key not in arrays:
        raise DataError(f"the packed tally has no array {key!r}")
    array = np.asarray(arrays[key])
    actual, expected = spec(array), Spec((size,), dtype)
    if actual != expected:
        raise DataError(f"the packed tally's {key!r} must be {expected}, got {actual}")
    return array.astype(dtype)  # a copy, in this machine's byte order


def _read_sums(
    arrays: Mapping[str, np.ndarray[Any, Any]], position: int, entry: Spec, masked: bool, tally: Tally
) -> Sums:
    size = math.prod(entry.shape)
    layout = empty_sums(0, entry.dtype, tally.clients, masked, np.empty(0), tally.further)
    dtypes = {part: spec(array).dtype for part, array in layout._asdict().items() if array is not None}
    parts = {part: _read_array(arrays, f"{part}.{position}", dtype, size) for part, dtype in dtypes.items()}
    sums = Sums(**{"votes": None, **parts})
    for part in blocks(size):
        if wrong := find_contradiction(select(sums, part), tally.clients, tally.weight, LARGEST[entry.dtype]):
            raise DataError(f"the packed tally's entry {position} {wrong}")
    return sums
