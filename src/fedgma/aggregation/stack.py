"""Clients' updates as a stack: for each entry one array with the client axis first."""

from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

from fedgma.aggregation.gate import Refused, read_schema
from fedgma.arrays import Array, Params, Spec, native, rows
from fedgma.errors import DataError

Weights = Sequence[object] | Array | None  # raw sample counts; None: equal


def lined_up(
    count: int, weights: Weights, clients: Sequence[Hashable] | None, what: str
) -> tuple[list[object], list[Hashable]]:
    """A weight and a name for each of `count` clients: those given, or ones and numbers; refuses other lengths."""
    values = [1] * count if weights is None else list(weights)
    labels: list[Hashable] = list(range(count)) if clients is None else list(clients)
    if not count == len(values) == len(labels):
        raise DataError(f"there are {count} {what}, {len(values)} weights and {len(labels)} names of clients")
    return values, labels


class Stack(NamedTuple):
    """A stack of updates as read at the door: native entries [client, entry], raw weights, labels."""

    entries: dict[str, Array]
    schema: dict[str, Spec]
    weights: list[object]
    clients: list[Hashable]
    named: bool

    @property
    def size(self) -> int:
        """Number of clients."""
        return len(self.clients)

    def taken(self, name: str, keep: Collection[int]) -> Array:
        """One entry's rows of the clients kept; the entry itself where that is all of them."""
        return self.entries[name] if len(keep) == self.size else self.entries[name][list(keep)]

    @staticmethod
    def read(
        updates: Params,
        weights: Weights = None,
        clients: Sequence[Hashable] | None = None,
        first: int = 0,
    ) -> "Stack":
        """Check that all entries and weights are of equally many clients."""
        try:
            found = read_schema(updates)
        except Refused as refused:
            raise DataError(f"updates: {refused.detail}") from None
        counts = {name: entry.shape[0] if entry.shape else 0 for name, entry in found.items()}
        size = next(iter(counts.values()))
        values = [1] * size if weights is None else list(weights)
        labels: list[Hashable] = list(range(first, first + size)) if clients is None else list(clients)
        for name, count in counts.items():
            if count != size or not found[name].shape:
                raise DataError(f"updates[{name!r}] holds {count} clients, but the first entry holds {size}")
        if len(values) != size or len(labels) != size:
            raise DataError(f"updates hold {size} clients, but there are {len(values)} weights and {len(labels)} names")
        schema = {name: Spec(entry.shape[1:], entry.dtype) for name, entry in found.items()}
        return Stack({name: rows(native(updates[name])) for name in found}, schema, values, labels, clients is not None)
