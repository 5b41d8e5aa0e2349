"""Reading a node's reply: whatever is wrong with it costs that node, with a reason, and nothing else.

A reply is not trusted. Its size is checked first, then the names, shapes and types of its arrays against the
model that was sent, and only then are its numbers read. Everything that goes wrong is a `Refusal` that names the node.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fedgma.aggregation.gate import Refusal, Refused, check_schema, read_schema, read_weight
from fedgma.aggregation.server_round import difference
from fedgma.arrays import Array, Params, spec
from fedgma.flower.npy import LONGEST, read_array, read_header

BESIDES = 2**20  # bytes that a reply may hold besides its arrays: metrics, settings, names
DETAIL = 300  # characters of a text from a node that are logged or recorded


class Answer:
    """A reply that can be read: the update, its weight, and its records without the arrays."""

    def __init__(self, update: Params, weight: object, content: RecordDict) -> None:
        self.update, self.weight, self.content = update, weight, content


def read_reply(message: Message, sent: Mapping[str, Array], weighted_by: str, *, cast: bool) -> Answer | Refusal:
    """A node's update, or the reason why it cannot be read."""
    node = int(message.metadata.src_node_id)
    try:
        content = message.content
        arrays, metrics = _only(content.array_records, "arrays"), _only(content.metric_records, "metrics")
        rest = _without_arrays(content)
        stored = {name: _data(name, array) for name, array in arrays.items()}
        local = read_arrays(stored, sent, cast=cast)
        return Answer(subtract(local, sent, cast=cast), metrics.get(weighted_by), rest)
    except Refused as refused:
        return Refusal(node, refused.reason, shorten(refused.detail))
    except Exception as error:  # untrusted bytes may raise anything
        return Refusal(node, "unreadable", shorten(f"{type(error).__name__}: {error}"))


def read_arrays(stored: Mapping[str, bytes], sent: Mapping[str, Array], *, cast: bool) -> dict[str, np.ndarray]:
    """The arrays of a reply in numpy's format; raises `Refused` unless they have the entries of the model sent."""
    expected = read_schema(sent)
    limit = sum(LONGEST + 16 + 8 * np.size(array) for array in sent.values())
    size = sum(map(len, stored.values()))
    if size > limit:
        raise Refused("size", f"the arrays of a reply must have at most {limit} bytes, got {size}")
    check_schema({name: expected.get(name, spec(0)) for name in stored}, expected, cast)  # the names alone
    headers = {}
    for name, data in stored.items():
        try:
            headers[name] = read_header(data)
        except Refused as refused:
            raise Refused(refused.reason, f"{name!r}: {refused.detail}") from None
    check_schema({name: header.spec for name, header in headers.items()}, expected, cast)
    return {name: read_array(data, headers[name]) for name, data in stored.items()}


def subtract(local: Params, sent: Params, *, cast: bool) -> Params:
    """A node's update; raises `Refused` if there is none."""
    with np.errstate(all="ignore"):  # the gate finds what is not finite
        update: Any = difference(local, sent, cast=cast)
    if isinstance(update, Refused):
        raise update
    return update  # type: ignore[no-any-return]


def read_metrics(message: Message, weighted_by: str) -> RecordDict | Refusal:
    """The records of a reply to an evaluation, or the reason why they cannot be used."""
    node = int(message.metadata.src_node_id)
    try:
        content = _without_arrays(message.content)
        read_weight(_only(content.metric_records, "metrics").get(weighted_by), float("inf"))
        return content
    except Refused as refused:
        return Refusal(node, refused.reason, shorten(refused.detail))
    except Exception as error:  # untrusted bytes may raise anything
        return Refusal(node, "unreadable", shorten(f"{type(error).__name__}: {error}"))


def shorten(text: object) -> str:
    """A text from a node on one line, cut to a length that a log can hold."""
    line = " ".join(str(text)[: 4 * DETAIL].split())
    return line if len(line) <= DETAIL else line[: DETAIL - 3] + "..."


def _without_arrays(content: RecordDict) -> RecordDict:
    """A reply without its arrays, to keep after they have been counted; raises `Refused` if it is too large to keep."""
    rest = RecordDict({name: record for name, record in content.items() if not isinstance(record, ArrayRecord)})
    size = sum(len(name) + _bytes(value) for record in rest.values() for name, value in record.items())
    if size > BESIDES:
        raise Refused("size", f"metrics and settings of a reply must have at most {BESIDES} bytes, got {size}")
    return rest


def _only(records: Mapping[str, ArrayRecord | MetricRecord], what: str) -> ArrayRecord | MetricRecord:
    if len(records) != 1:
        raise Refused("schema", f"a reply must hold one record of {what}, got {len(records)}")
    return next(iter(records.values()))


def _data(name: str, array: object) -> bytes:
    data, kind = getattr(array, "data", None), getattr(array, "stype", None)
    if kind != "numpy.ndarray" or not isinstance(data, bytes):
        raise Refused("unreadable", f"{name!r} must be an array in numpy's format, got {kind!r}")
    return data


def _bytes(value: object) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return sum(map(_bytes, value)) if isinstance(value, Sequence) else 8
