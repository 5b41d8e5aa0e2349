"""Bytes of tallies with damage of every kind, which no reader may accept in silence.

A tally of a few clients is written down and then hurt: bits flip, parts are cut off, repeated, exchanged or taken from
another tally; or somebody writes a header of his own and a checksum that fits. `run_case` reads the result and says
what went wrong: nothing may be accepted that is not the tally as it was written, nothing may be raised but
`fedgma.DataError`, and a reading takes less than a second and less than 100 MB.
"""

import hashlib
import json
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import fedgma
from fedgma.aggregation.kernels.plain import FURTHER

MAGIC, CHECKSUM = len(b"fedgma tally 2\n"), 32
SECONDS, MEGABYTES = 1.0, 100
SHAPES = [(3,), (2, 2), (), (0,), (40,)]


def make_tally(rng):
    """A tally of one to six clients over two or three entries, with refusals."""
    dtype = str(rng.choice(["float64", "float32", "float16"]))
    shapes = {"w": SHAPES[rng.integers(len(SHAPES))], "bn.running_var": SHAPES[rng.integers(len(SHAPES))]}
    tally = fedgma.Tally(further=[name for name in FURTHER if rng.integers(3) == 0])
    for client in range(rng.integers(1, 7)):
        update = {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}
        update["steps"] = np.array(client)
        name = [client, f"site {client}", None][rng.integers(3)]
        tally.add(update, int(rng.integers(1, 500)), client=name)
        tally.add({**update, "w": "rubbish"}, 1, client=f"bad {client}")
    return tally


# -- damage by accident: the checksum finds it -------------------------------------------------------------------------


def flip(rng, sent, other):
    damaged = bytearray(sent)
    for _ in range(rng.integers(1, 4)):
        damaged[rng.integers(len(sent))] ^= 1 << int(rng.integers(8))
    return bytes(damaged)


def truncate(rng, sent, other):
    return sent[: rng.integers(len(sent))]


def behead(rng, sent, other):
    return sent[rng.integers(1, len(sent)) :]


def append(rng, sent, other):
    return sent + other[: rng.integers(1, len(other))]


def splice(rng, sent, other):
    first, second = rng.integers(len(sent)), rng.integers(len(other))
    return sent[:first] + other[second:]


def exchange(rng, sent, other):
    start, size = rng.integers(len(sent) - 1), rng.integers(1, 64)
    return sent[:start] + sent[start : start + size][::-1] + sent[start + size :]


def erase(rng, sent, other):
    start, size = rng.integers(len(sent)), rng.integers(1, 64)
    return sent[:start] + bytes(len(sent[start : start + size])) + sent[start + size :]


# -- damage by intent: the checksum fits -------------------------------------------------------------------------------


def read_parts(sent):
    """Table, header, and the other arrays' bytes."""
    length = int.from_bytes(sent[MAGIC : MAGIC + 8], "little")
    table = json.loads(sent[MAGIC + 8 : MAGIC + 8 + length])
    content = sent[MAGIC + 8 + length : -CHECKSUM]
    arrays, start = {}, 0
    for key, dtype, size in table:
        stop = start + size * np.dtype(dtype).itemsize
        arrays[key] = np.frombuffer(content[start:stop], dtype).copy()
        start = stop
    return arrays


def seal(arrays, table=None, start=None):
    """The bytes of these arrays, with a checksum that fits."""
    if start is None:
        further = any(key.startswith(("positive", "negative", "squares")) for key in arrays)
        start = b"fedgma tally 3\n" if further else b"fedgma tally 2\n"
    if table is None:
        table = json.dumps([[key, array.dtype.name, array.size] for key, array in arrays.items()]).encode()
    body = start + len(table).to_bytes(8, "little") + table + b"".join(array.tobytes() for array in arrays.values())
    return body + hashlib.sha256(body).digest()


def with_header(sent, change):
    """The same tally with another header: `change` gets the header and returns it, or the bytes to put there."""
    arrays = read_parts(sent)
    header = change(json.loads(arrays["header"].tobytes()))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return seal({**arrays, "header": np.frombuffer(text, np.uint8)})


def of_clients(rng, header):
    return {
        **header,
        "clients": pick(rng, [0, -1, header["clients"] * 10**14, 2**63, 10**30, 1.0, "2", None, True, []]),
    }


def of_weight(rng, header):
    total = header["weight"][0]
    wrong = [[1e-300, 0.0], [1e300, 0.0], [-total, 0.0], [total, total], [0.0, 0.0], [total], [total, 0.0, 0.0]]
    return {**header, "weight": pick(rng, [*wrong, [10**400, 0.0], ["1", 0.0], None, [True, 0.0], total])}


def of_heaviest(rng, header):
    total = header["weight"][0]
    return {**header, "heaviest": pick(rng, [0.0, -1.0, total * 2, total / 1e6, 1e300, "1", None, 1])}


def of_entries(rng, header):
    entries = header["entries"]
    name, shape, dtype, kind = entries[0]
    wrong = [
        [*entries, entries[0]], entries[:-1], entries[::-1], [], {}, [[]], "w", None,
        [[name, [9] * 400_000, dtype, kind], *entries[1:]], [[name, [2**62, 2**62], dtype, kind], *entries[1:]],
        [[name, [*shape, -1], dtype, kind], *entries[1:]], [[name, [*shape, 1.0], dtype, kind], *entries[1:]],
        [[name, [0, 2**61], dtype, kind], *entries[1:]], [[name, shape, "object", kind], *entries[1:]],
        [[name, shape, "int8", kind], *entries[1:]], [[name, shape, dtype, "maximum"], *entries[1:]],
        [[name, shape, dtype, "averaged"], *entries[1:]], [[3, shape, dtype, kind], *entries[1:]],
        [[f"e{k}", [0], dtype, kind] for k in range(60_000)],
    ]  # fmt: skip
    return {**header, "entries": pick(rng, wrong)}


def of_names(rng, header):
    seen = header["seen"]
    many = [f"client {k}" for k in range(header["clients"] + 1)]
    wrong = [many, [*seen, None], [*seen, 1.5], [*seen, [1]], [*seen, True], "abc", None, {"a": 1}, [["x"]], 3]
    if seen:
        wrong += [[*seen[:-1], seen[0]] if len(seen) > 1 else [*seen, *seen], {str(name): 1 for name in seen}]
    return {**header, "seen": pick(rng, wrong)}


def of_refused(rng, header):
    return {
        **header,
        "refused": pick(rng, [[["a", "b"]], [[1, 2, 3]], "abc", None, [[None, "a", "b"]], [[["a"], "b", "c"]]]),
    }


def of_library(rng, header):
    return {**header, "library": pick(rng, ["jax", None, 3, ["numpy"], ""])}


def of_fields(rng, header):
    header = dict(header)
    name = pick(rng, list(header))
    if rng.integers(2):
        del header[name]
        return header
    return {**header, pick(rng, ["extra", "Clients"]): 1}


def of_version(rng, header):
    return {**header, "version": pick(rng, [1, 4, 5 - header["version"], "2", None, "9" * 1_000_000, 2.0])}


def of_text(rng, header):
    text = json.dumps(header)
    wrong = [
        b"", b"{}", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, text.encode()[:-1],
        text.encode() + b" ", text.replace('"clients"', '"clients": 9, "clients"', 1).encode(),
        text.replace(", ", ",").encode(), b"9" * 4_000_000, b"[" + b"[]," * 1_300_000 + b"[]]",
        b" " * 5_000_000 + text.encode(), text.replace("[]", "[ ]").encode() + b"\n", b"NaN",
        json.dumps({**header, "seen": ["ab"] * 500_000}).encode(),
    ]  # fmt: skip
    return pick(rng, wrong)


HEADERS = (
    of_clients, of_weight, of_heaviest, of_entries, of_names, of_refused, of_library, of_fields, of_version, of_text,
)  # fmt: skip


def craft_header(rng, sent, other):
    change = HEADERS[rng.integers(len(HEADERS))]
    return with_header(sent, lambda header: change(rng, header))


def craft_array(rng, sent, other):
    """Sums that no clients can have."""
    arrays = read_parts(sent)
    header = json.loads(arrays["header"].tobytes())
    filled = [key for key, array in arrays.items() if key != "header" and array.size]
    key = pick(rng, filled)
    part, position = key.split(".")
    array, dtype = arrays[key], header["entries"][int(position)][2]
    place = rng.integers(array.size)
    if part == "total":
        beyond = [np.nan, np.inf, -np.inf] + ([1e300, -1e300] if dtype != "float64" else [])
        array[place] = pick(rng, beyond)
    elif part == "rest":
        array[place] = pick(rng, [np.nan, np.inf, -np.inf])
    elif part == "votes" and rng.integers(2):
        arrays[f"total.{position}"][place] = -5.0
        array[place] = header["clients"]  # all for one sign, the sum of the other
    elif part == "votes":
        array[place] = pick(rng, [header["clients"] + 1, -header["clients"] - 1, 127, -128])
    else:
        arrays[key] = array.astype("float64")
    return seal(arrays)


def craft_table(rng, sent, other):
    """A table that is not that of its arrays."""
    arrays = read_parts(sent)
    table = [[key, array.dtype.name, array.size] for key, array in arrays.items()]
    row = rng.integers(len(table))
    way = rng.integers(9)
    if way == 0:
        table[row][2] = pick(rng, [10**13, -1, 2**63, 10**400, None, 1.0, True, table[row][2] + 1])
    elif way == 1:
        table[row][1] = pick(rng, ["object", "V8", "complex128", "bool", 3, None, ["float64"], "O" * 100_000])
    elif way == 2:
        table[row][0] = pick(rng, ["total.9", "header.0", "", 3, None, "x" * 100_000])
    elif way == 3:
        table.append(["total.0", "float64", 0])
    elif way == 4:
        return seal({**arrays, "extra": np.zeros(2)})
    elif way == 5:
        del arrays[pick(rng, [key for key in arrays if key != "header"])]
        return seal(arrays)
    elif way == 6:
        return seal(arrays, b"[" * 100_000)
    elif way == 7:
        return seal(arrays, json.dumps(table).encode() + b" ")
    else:
        return seal(arrays, b"[" + b'["a","int8",0],' * 150_000 + b"[]]")
    return seal(arrays, json.dumps(table).encode())


def craft_start(rng, sent, other):
    """Another version, or a table longer than the bytes."""
    if rng.integers(2):
        return seal(read_parts(sent), start=pick(rng, [b"fedgma tally 1\n", b"fedgma tally 4\n", b"", b"PK\x03\x04"]))
    length = pick(rng, [2**63, 2**64 - 1, len(sent), 2**32])
    body = sent[:MAGIC] + int(length).to_bytes(8, "little") + sent[MAGIC + 8 : -CHECKSUM]
    return body + hashlib.sha256(body).digest()


ACCIDENTS = (flip, truncate, behead, append, splice, exchange, erase)
INTENTS = (craft_header, craft_array, craft_table, craft_start)


def pick(rng, choices):
    return choices[rng.integers(len(choices))]


# -- reading -----------------------------------------------------------------------------------------------------------


def run_case(seed, seconds=SECONDS):
    """Damage a tally and read it; returns what went wrong, or None."""
    rng = np.random.default_rng(seed)
    tally, other = make_tally(rng), make_tally(rng)
    sent = fedgma.to_bytes(tally)
    ways = ACCIDENTS if rng.integers(2) else INTENTS
    way = ways[rng.integers(len(ways))]
    damaged = way(rng, sent, fedgma.to_bytes(other))
    whole = damaged in (sent, fedgma.to_bytes(other))
    problem = None if whole else read(damaged, seconds, measure_memory=seed % 16 == 0)  # which takes time
    return None if problem is None else f"seed {seed}, {way.__name__}: {problem}"


def read(data, seconds=SECONDS, measure_memory=False):
    """Read damaged bytes; returns what went wrong, or None."""
    if measure_memory:
        tracemalloc.start()
    start = time.thread_time()  # of this thread alone: others do not slow it down
    try:
        fedgma.from_bytes(data)
        problem = "accepted"
    except fedgma.DataError as error:
        problem = "a long message" if len(str(error)) > 1000 else None
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if time.thread_time() - start > seconds and not measure_memory:
        problem = f"took {time.thread_time() - start:.1f} s"
    if measure_memory:
        peak = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
        problem = problem or (f"took {peak:.0f} MB" if peak > MEGABYTES else None)
    return problem
