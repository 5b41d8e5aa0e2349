"""Clients' updates as a stack: for each entry one array with the client axis first."""

from collections.abc import Collection, Hashable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np

from fedgma.aggregation.gate import MIN_WEIGHT, Gate, Refused, Schema, read_array, read_mapping, read_schema
from fedgma.arrays import Array, Params, Spec, flatten_rows
from fedgma.errors import DataError

PLAIN_NUMBERS = {int, float, np.int64, np.int32, np.float64, np.float32}
Weights = Sequence[object] | Array | None  # raw sample counts; None: equal


def align_clients(
    count: int, weights: Weights, clients: Sequence[Hashable] | None, what: str, first: int = 0
) -> tuple[list[object], list[Hashable]]:
    """A weight and a name for each of `count` clients; defaults are ones and numbers. Raises if the lengths differ."""
    values = [1] * count if weights is None else _as_list(weights, "weights")
    labels = list(range(first, first + count)) if clients is None else _as_list(clients, "clients")
    if not count == len(values) == len(labels):
        part, got = ("weight", len(values)) if len(values) != count else ("client name", len(labels))
        raise DataError(f"expected one {part} for each of {count} {what}, got {got}")
    return values, labels


def _as_list(values: Any, name: str) -> list[Any]:
    """The values in their order; raises `DataError` for what has no order or is one value."""
    if isinstance(values, Mapping | Set | str | bytes):
        raise DataError(f"{name}: expected a list in the order of the updates, got {type(values).__name__}")
    try:
        return list(values)
    except TypeError:
        raise DataError(f"{name}: expected a list with one value for each client, got {values!r:.60}") from None


def plain_numbers(weights: Sequence[object], gate: Gate) -> list[float] | None:
    """Weights as floats, if all of them are plain numbers that pass the gate; else None."""
    if not {type(weight) for weight in weights} <= PLAIN_NUMBERS:
        return None
    try:
        values = [float(weight) for weight in weights]  # type: ignore[arg-type]
    except OverflowError:
        return None
    return values if all(MIN_WEIGHT <= value <= gate.max_weight for value in values) else None


class Stack(NamedTuple):
    """A stack of updates: native entries [client, entry], raw weights, client names."""

    entries: dict[str, Array]
    schema: dict[str, Spec]
    weights: list[object]
    clients: list[Hashable]
    named: bool  # whether the caller named the clients
    first: int  # the number of the first client, for those without a name

    @property
    def size(self) -> int:
        """Number of clients."""
        return len(self.clients)

    def label(self, row: int) -> Hashable:
        """A client's name in a refusal: its own, or its number."""
        return self.first + row if self.clients[row] is None else self.clients[row]

    def select(self, name: str, keep: Collection[int]) -> Array:
        """The kept clients' rows of one entry; no copy if all are kept."""
        return self.entries[name] if len(keep) == self.size else self.entries[name][list(keep)]

    def plain_weights(self, gate: Gate) -> dict[int, float] | None:
        """All rows with weights, if only weights need a check and all of them pass the gate; else None."""
        only_weights = not self.named and gate.selected is None and not gate.limits_norms
        values = plain_numbers(self.weights, gate) if only_weights else None
        return None if values is None else dict(enumerate(values))

    @staticmethod
    def read(
        updates: Params,
        weights: Weights = None,
        clients: Sequence[Hashable] | None = None,
        first: int = 0,
    ) -> "Stack":
        """Read a stack; raises unless all entries, weights and names are for the same number of clients."""
        try:
            arrays = read_mapping(updates)
            schema = read_schema(arrays)
            entries = {name: read_array(name, arrays[name], entry, entry) for name, entry in schema.items()}
        except Refused as refused:
            raise DataError(f"updates: {refused.detail}") from None
        counts = {name: entry.shape[0] if entry.shape else 0 for name, entry in schema.items()}
        size = next(iter(counts.values()))
        for name, count in counts.items():
            if count != size or not schema[name].shape:
                raise DataError(f"updates[{name!r}] holds {count} clients, but the first entry holds {size}")
        values, labels = align_clients(size, weights, clients, "clients", first)
        per_client = {name: Spec(entry.shape[1:], entry.dtype) for name, entry in schema.items()}
        rows = {name: flatten_rows(array) for name, array in entries.items()}
        return Stack(rows, per_client, values, labels, clients is not None, first)

    def convert(self, expected: Schema) -> "Stack":
        """The same stack in the expected number types."""
        rows = {
            name: read_array(name, array, self.schema[name], expected[name]) for name, array in self.entries.items()
        }
        return self._replace(entries=rows)
