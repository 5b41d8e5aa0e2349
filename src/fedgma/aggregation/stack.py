"""Clients' updates as a stack: for each entry one array with the client axis first."""

from collections.abc import Collection, Hashable, Sequence
from typing import NamedTuple

from fedgma.aggregation.gate import Refused, read_schema
from fedgma.arrays import Array, Params, Spec, flatten_rows, to_native
from fedgma.errors import DataError

Weights = Sequence[object] | Array | None  # raw sample counts; None: equal


def align_clients(
    count: int, weights: Weights, clients: Sequence[Hashable] | None, what: str
) -> tuple[list[object], list[Hashable]]:
    """A weight and a name for each of `count` clients; defaults are ones and numbers. Raises if the lengths differ."""
    values = [1] * count if weights is None else list(weights)
    labels: list[Hashable] = list(range(count)) if clients is None else list(clients)
    if not count == len(values) == len(labels):
        raise DataError(
            f"expected one weight and one client name each for {count} {what}, got {len(values)} weights "
            f"and {len(labels)} names"
        )
    return values, labels


class Stack(NamedTuple):
    """A stack of updates: native entries [client, entry], raw weights, client names."""

    entries: dict[str, Array]
    schema: dict[str, Spec]
    weights: list[object]
    clients: list[Hashable]
    named: bool  # whether the caller named the clients

    @property
    def size(self) -> int:
        """Number of clients."""
        return len(self.clients)

    def select(self, name: str, keep: Collection[int]) -> Array:
        """The kept clients' rows of one entry; no copy if all are kept."""
        return self.entries[name] if len(keep) == self.size else self.entries[name][list(keep)]

    @staticmethod
    def read(
        updates: Params,
        weights: Weights = None,
        clients: Sequence[Hashable] | None = None,
        first: int = 0,
    ) -> "Stack":
        """Read a stack; raises unless all entries, weights and names are for the same number of clients."""
        try:
            schema = read_schema(updates)
        except Refused as refused:
            raise DataError(f"updates: {refused.detail}") from None
        counts = {name: entry.shape[0] if entry.shape else 0 for name, entry in schema.items()}
        size = next(iter(counts.values()))
        values = [1] * size if weights is None else list(weights)
        labels: list[Hashable] = list(range(first, first + size)) if clients is None else list(clients)
        for name, count in counts.items():
            if count != size or not schema[name].shape:
                raise DataError(f"updates[{name!r}] holds {count} clients, but the first entry holds {size}")
        if len(values) != size or len(labels) != size:
            raise DataError(f"updates hold {size} clients, but there are {len(values)} weights and {len(labels)} names")
        entries = {name: flatten_rows(to_native(updates[name])) for name in schema}
        per_client = {name: Spec(entry.shape[1:], entry.dtype) for name, entry in schema.items()}
        return Stack(entries, per_client, values, labels, clients is not None)
