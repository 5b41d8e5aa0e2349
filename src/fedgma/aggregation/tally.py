"""The tally: everything that masked averaging needs to know of any number of clients, in the space of a few models.

Masked averaging is made of sums: weighted updates, integer sign votes, total weight, number of clients. A `Tally` holds
them, takes one client at a time, a stack of clients or another tally, in any order, and `finish` turns it into the
paper's masked mean, the AND-mask's or the plain one. Simulator, servers and adapters all end in that one function.

Conventions, tested:

- an update is `local - global`; the server adds it. The client axis comes first. Weights are raw sample counts.
- one client, one vote, whatever its weight; a zero is no vote but its client stays in the count.
- trainable floating entries are masked; buffers (running statistics) take the weighted mean, integer counters the
  maximum, and neither votes.
- a client that fails the gate is left out of the mean and of the count, and named in `refused`.
"""

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedgma.aggregation import kernels
from fedgma.aggregation.gate import (
    Gate,
    Refusal,
    Refused,
    compare,
    norm,
    read_schema,
    read_update,
    read_weight,
    treatment,
)
from fedgma.aggregation.kernels.plain import Sums, empty, merge, two_sum, widened
from fedgma.aggregation.masks import vote_type
from fedgma.aggregation.stack import Stack, Weights
from fedgma.arrays import (
    Array,
    Params,
    Placement,
    Spec,
    beside,
    delivered,
    flat,
    is_torch,
    largest,
    native,
    placement,
    spec,
)
from fedgma.errors import DataError

PLAIN_NUMBERS = {int, float, np.int64, np.int32, np.float64, np.float32}


class Tally:
    """Sums over clients' updates: exact votes, a weighted sum that does not depend on the order, O(d) memory.

    `like` (the model's entries) fixes names, shapes and types; without it the first valid update does. `buffers` names
    the floating entries that are averaged and not masked; None takes torch's names for running statistics.

    >>> tally = Tally()
    >>> for update in ([3.0, 3.0], [3.0, 3.0], [3.0, -3.0]):
    ...     tally.add({"w": np.array(update)}, weight=10)
    >>> tally.votes["w"].tolist()
    [3, 1]
    """

    clients: int  # counted so far
    refused: list[Refusal]
    norms: list[float]  # of all updates that could be read, where the gate has a limit for them
    schema: dict[str, Spec] | None  # None until the first valid update
    weight_parts: tuple[float, float]  # total weight, and what rounding lost of it
    placement: Placement  # library and device of the answer
    device_sample: Array  # empty; on the device of the sums
    sums: dict[str, Sums]
    maxima: dict[str, Array]  # of integer counters
    seen: set[Hashable]  # clients counted, of those that have a name
    _width: str  # number type of the votes

    def __init__(
        self, like: Params | None = None, *, buffers: Collection[str] | None = None, gate: Gate | None = None
    ) -> None:
        self.gate = gate or Gate()
        self.buffers = buffers
        self.clear()
        if like is not None:
            try:
                self.fix(read_schema(like), next(iter(like.values())))
            except Refused as refused:
                raise DataError(f"like: {refused.detail}") from None

    @property
    def weight(self) -> float:
        """Total weight of the clients counted."""
        return self.weight_parts[0] + self.weight_parts[1]

    @property
    def notes(self) -> dict[str, Any]:
        """How many clients were counted, their total weight, and who was refused and why."""
        return {"clients": self.clients, "weight": self.weight, "refused": tuple(self.refused)}

    @property
    def votes(self) -> dict[str, Array]:
        """Sum of signs per entry of each trainable array, in the smallest integer type."""
        return {
            name: delivered(sums.votes, Spec(self.schema[name].shape, spec(sums.votes).dtype), self.placement)
            for name, sums in self.sums.items()
            if self.schema is not None and sums.votes is not None
        }

    def add(
        self, update: Params, weight: object = 1, *, client: Hashable = None, round: int | None = None
    ) -> Refusal | None:
        """Count one client; returns None, or the refusal if it failed the gate (then nothing has changed)."""
        label = self.clients + len(self.refused) if client is None else client
        try:
            self._check_identity(client, round)
            value = read_weight(weight, self.gate.max_weight)
            found = read_schema(update)
            expected = self.schema or found
            compare(found, expected, self.gate.cast)
            arrays = read_update(update, expected)
            self._check_norm((arrays[name] for name in self.names("masked", expected)), finite=True)
        except Refused as refused:
            return self._refuse(label, refused.reason, refused.detail)
        if self.schema is None:
            self.fix(found, next(iter(update.values())))
        self.count([value], [client])
        self._make_room()
        summed = [name for name in arrays if name in self.sums]
        near = [beside(arrays[name], self.device_sample) for name in summed]
        kernels.add([self.sums[name] for name in summed], near, value)
        for name in arrays.keys() - self.sums.keys():
            self._raise_maximum(name, arrays[name])
        return None

    def add_many(
        self, updates: Params, weights: Weights = None, *, clients: Sequence[Hashable] | None = None
    ) -> list[Refusal]:
        """Count a stack of clients, client axis first, in their order; returns the refusals."""
        before = len(self.refused)
        stack = self.read_stack(updates, weights, clients)
        keep = self.admit(stack)
        fresh = self._sum_rows(stack, keep)
        if keep:
            counters = {name: largest(stack.taken(name, keep)) for name in self.names("maximum", stack.schema)}
            self.count(list(keep.values()), [stack.clients[row] for row in keep] if stack.named else [])
            self._merge_sums(fresh, counters)
        return self.refused[before:]

    def merge(self, other: "Tally") -> None:
        """Count all clients of another tally; its refusals come along. The other one is left as it is."""
        if twice := self.seen & other.seen:
            raise DataError(f"clients are in both tallies, such as {min(map(repr, twice))}; count each once")
        if other.schema is not None and other.clients:
            if self.schema is None:
                self.buffers = other.names("averaged", other.schema)
                self.schema, self.placement, self.device_sample = (
                    dict(other.schema),
                    other.placement,
                    other.device_sample,
                )
            if self.kinds(self.schema) != other.kinds(other.schema) or self.schema != other.schema:
                raise DataError(
                    "the tallies are of different models: names, shapes, types and buffers must be the same"
                )
            self.clients += other.clients
            for part in other.weight_parts:
                self._weigh(part)
            self._merge_sums(other.sums, other.maxima)
        self.seen |= other.seen
        self.refused.extend(other.refused)
        self.norms.extend(other.norms)

    # -- for aggregators that read a stack themselves ----------------------------------------------------------------

    def fix(self, schema: Mapping[str, Spec], sample: Array) -> None:
        """Set what updates must look like, and the library and device of the answer."""
        self.schema, self.placement, self.device_sample = dict(schema), placement(sample), flat(native(sample))[:0]

    def read_stack(self, updates: Params, weights: Weights, clients: Sequence[Hashable] | None) -> Stack:
        """A stack that fits this tally; a stack that does not is the caller's mistake, not a client's."""
        stack = Stack.read(updates, weights, clients, self.clients + len(self.refused))
        if self.schema is None:
            self.fix(stack.schema, next(iter(updates.values())))
        assert self.schema is not None
        try:
            compare(stack.schema, self.schema, self.gate.cast)
        except Refused as refused:
            raise DataError(f"updates: {refused.detail}") from None
        return stack

    def admit(self, stack: Stack) -> dict[int, float]:
        """The rows of a stack whose client, weight and norm pass, with their weights; values are not checked yet."""
        if (plain := self._plain_weights(stack)) is not None:
            return plain
        keep: dict[int, float] = {}
        named: set[Hashable] = set()
        for row, client in enumerate(stack.clients):
            try:
                self._check_identity(client if stack.named else None, self.gate.round)
                if stack.named and client in named:
                    raise Refused("duplicate", f"client {client!r} is in the stack twice; the first one counts")
                value = read_weight(stack.weights[row], self.gate.max_weight)
                voters = self.names("masked", stack.schema)
                self._check_norm((stack.entries[name][row] for name in voters), finite=False)
            except Refused as refused:
                self._refuse(client, refused.reason, refused.detail)
                continue
            named.add(client)
            keep[row] = value
        return keep

    def refuse_nonfinite(self, stack: Stack, keep: dict[int, float]) -> bool:
        """Drop the rows that hold NaN or infinities; whether there were any (a sum can also overflow)."""
        bad: dict[int, str] = {}
        for name in (*self.names("masked", stack.schema), *self.names("averaged", stack.schema)):
            for row in keep:
                if row not in bad and kernels.first_nonfinite([stack.entries[name][row]]) is not None:
                    bad[row] = name
        for row, name in sorted(bad.items()):
            del keep[row]
            self._refuse(stack.clients[row], "nonfinite", f"{name!r} holds a NaN or an infinity")
        return bool(bad)

    def count(self, weights: Sequence[float], clients: Iterable[Hashable]) -> None:
        """Note so many more clients, their weights and, where they have one, their names."""
        self.clients += len(weights)
        for weight in weights:
            self._weigh(weight)
        self.seen.update(client for client in clients if client is not None)

    # -- inside: everything below trusts its arguments ---------------------------------------------------------------

    def clear(self) -> None:
        """Forget everything but the gate and the names of buffers."""
        self.clients, self.refused, self.norms, self.schema = 0, [], [], None
        self.weight_parts = (0.0, 0.0)
        self.placement, self.device_sample = Placement("numpy"), np.empty(0)
        self.sums, self.maxima, self.seen, self._width = {}, {}, set(), ""

    def kinds(self, schema: Mapping[str, Spec]) -> dict[str, str]:
        """What becomes of each entry: "masked", "averaged" or "maximum"."""
        return {name: treatment(name, entry, self.buffers) for name, entry in schema.items()}

    def names(self, kind: str, schema: Mapping[str, Spec]) -> list[str]:
        """The entries of one kind."""
        return [name for name, found in self.kinds(schema).items() if found == kind]

    def _make_room(self) -> None:
        """Sums for every entry, wide enough for the votes of all clients counted."""
        if self._width == vote_type(self.clients):
            return
        self._width = vote_type(self.clients)
        for name, kind in self.kinds(self.schema or {}).items():
            if name in self.sums:
                self.sums[name] = widened(self.sums[name], self.clients)
            elif kind != "maximum" and self.schema is not None:
                entry = self.schema[name]
                self.sums[name] = empty(
                    math.prod(entry.shape), entry.dtype, self.clients, kind == "masked", self.device_sample
                )

    def _check_identity(self, client: Hashable, round: int | None) -> None:
        gate = self.gate
        if client is not None and client in self.seen:
            raise Refused("duplicate", f"client {client!r} has sent an update already; the first one counts")
        if gate.selected is not None and client not in gate.selected:
            raise Refused("unselected", f"client {client!r} was not asked")
        if gate.round is not None and round != gate.round:
            raise Refused("round", f"the update is for round {round}, this is round {gate.round}")

    def _plain_weights(self, stack: Stack) -> dict[int, float] | None:
        """All rows at once, where there is nothing to check but weights and these are right; else None."""
        nothing_else = not stack.named and self.gate.selected is None and self.gate.max_norm == math.inf
        if not nothing_else or not {type(weight) for weight in stack.weights} <= PLAIN_NUMBERS:
            return None
        values = np.array(stack.weights, np.float64)
        right = bool(((values > 0) & (values <= self.gate.max_weight)).all())
        return dict(enumerate(values.tolist())) if right else None

    def _check_norm(self, arrays: Iterable[Array], *, finite: bool) -> None:
        """Refuse what is too long; in a stack (`finite=False`) NaN and infinities get their own reason later."""
        if self.gate.max_norm == math.inf:
            return
        length = norm(arrays)
        if math.isfinite(length):
            self.norms.append(length)
        if length > self.gate.max_norm and (finite or length < math.inf):
            raise Refused("norm", f"the norm must not be above {self.gate.max_norm:g}, got {length:g}")

    def _refuse(self, client: Hashable, reason: str, detail: str) -> Refusal:
        self.refused.append(Refusal(client, reason, detail))
        return self.refused[-1]

    def _weigh(self, weight: float) -> None:
        total, lost = two_sum(self.weight_parts[0], weight)
        self.weight_parts = (total, self.weight_parts[1] + lost)

    def _raise_maximum(self, name: str, array: Array) -> None:
        if name in self.maxima:
            held = beside(self.maxima[name], array)
            array = array.maximum(held) if is_torch(array) else np.maximum(array, held)
        self.maxima[name] = array.clone() if is_torch(array) else np.array(array)

    def _sum_rows(self, stack: Stack, keep: dict[int, float]) -> dict[str, Sums]:
        """Fresh sums of the rows kept; rows found not to be finite are dropped from `keep`, and it starts again."""
        kinds = self.kinds(stack.schema)
        while keep:
            weights, fresh, finite = np.array(list(keep.values())), {}, True
            for name, kind in kinds.items():
                if kind != "maximum":
                    part = beside(stack.taken(name, keep), self.device_sample)
                    fresh[name] = empty(
                        part.shape[1], stack.schema[name].dtype, len(keep), kind == "masked", self.device_sample
                    )
                    finite = kernels.add_rows(fresh[name], part, weights) and finite
            if finite or not self.refuse_nonfinite(stack, keep):
                return fresh
        return {}

    def _merge_sums(self, sums: Mapping[str, Sums], maxima: Mapping[str, Array]) -> None:
        if not self.sums:  # nothing of our own: the others' sums are ours
            self.sums = {name: Sums(*(_copied(part) for part in parts)) for name, parts in sums.items()}
            self._width, sums = "", {}
        self._make_room()
        for name, other in sums.items():
            near = self.sums[name].total
            merge(self.sums[name], Sums(*(None if part is None else beside(part, near) for part in other)))
        for name, array in maxima.items():
            self._raise_maximum(name, array)


def _copied(array: Array | None) -> Array | None:
    return None if array is None else array.clone() if is_torch(array) else array.copy()
