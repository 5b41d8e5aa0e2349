"""The tally: the sums that rules need: weighted updates, integer sign votes, total weight, clients; more on demand.

It takes one client, a stack of clients or another tally, in any order. `finish` turns it into a mean and a mask.
Conventions, tested:

- An update is `local - global`; the server adds it. The client axis comes first. Weights are raw sample counts.
- Each client has one vote per entry, whatever its weight. A zero is no vote, but its client stays in the count.
- Trainable floating entries are masked. Buffers (running statistics) take the weighted mean, integer counters the
  maximum; neither votes.
- A client that fails the gate is left out of the mean and of the count, and listed in `refused`.
- Threads take turns. A tally whose change is interrupted (Ctrl-C, no memory) raises at its next use.
- What a tally hands out is a copy, and it keeps no array that it was given.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedgma.aggregation import kernels, model_sums
from fedgma.aggregation.gate import (
    Gate,
    Refusal,
    Refused,
    check_buffers,
    check_finite,
    check_first,
    check_gate,
    check_identity,
    check_members,
    check_norms,
    check_schema,
    entry_kind,
    in_words,
    nonfinite,
    plain_arrays,
    read_further,
    read_mapping,
    read_schema,
    read_update,
    read_weight,
)
from fedgma.aggregation.kernels.plain import Sums, two_sum
from fedgma.aggregation.masks import vote_type
from fedgma.aggregation.prepared import check_prepared
from fedgma.aggregation.stack import Stack, Weights
from fedgma.aggregation.turns import Shared, Turns
from fedgma.arrays import (
    Array,
    Params,
    Placement,
    Spec,
    column_max,
    copy,
    is_torch,
    no_entries,
    placement,
    spec,
    to_user,
)
from fedgma.errors import DataError, NotEnoughClients


class Tally(Shared):
    """Sums over clients' updates: exact votes, a weighted sum as a pair of numbers, in the memory of a few models.

    `like` (the model's entries) sets names, shapes and types; without it the first valid update does. `buffers` names
    floating entries that are averaged and not masked, beside torch's running statistics, which always are. `further`
    names sums beside the weighted updates and the votes: "parts", "counts", "weights", "squares" (docs/rules.md).

    >>> tally = Tally()
    >>> for update in ([3.0, 3.0], [3.0, 3.0], [3.0, -3.0]):
    ...     tally.add({"w": np.array(update)}, weight=10)
    >>> tally.votes["w"].tolist()
    [3, 1]
    """

    clients: int  # counted so far
    refused: list[Refusal]
    norms: list[float]  # of all readable updates, if the gate limits norms
    buffer_norms: list[float]  # those of their floating buffers
    schema: dict[str, Spec] | None  # None until the first valid update
    weight_parts: tuple[float, float]  # total weight, and its rounding error
    heaviest: float  # the largest weight of a client
    placement: Placement  # library and device of the result
    device_sample: Array  # empty; on the device of the sums
    sums: dict[str, Sums]
    maxima: dict[str, Array]  # of integer counters
    seen: set[Hashable]  # names of the clients counted
    further: tuple[str, ...]  # sums that are kept beside the weighted updates and the votes
    prepared_for: str = ""  # the rule that changes every update before it is counted, if there is one
    _width: str  # number type of the votes
    turns: Turns  # of the threads that use it

    def __init__(
        self,
        like: Params | None = None,
        *,
        buffers: Collection[str] | None = None,
        gate: Gate | None = None,
        further: Collection[str] = (),
    ) -> None:
        self.gate = check_gate(gate or Gate())
        self.further = read_further(further)
        self.buffers = buffers
        self.turns = Turns()
        self.clear()
        check_buffers(buffers, buffers or ())
        if like is not None:
            try:
                self.set_schema(read_schema(like), next(iter(like.values())))
            except Refused as refused:
                raise DataError(f"the model: {refused.detail}") from None

    @property
    def weight(self) -> float:
        """Total weight of the clients counted."""
        return self.weight_parts[0] + self.weight_parts[1]

    @property
    def notes(self) -> dict[str, Any]:
        """Number of clients counted, their total weight, and the refused clients with reasons."""
        return {"clients": self.clients, "weight": self.weight, "refused": tuple(self.refused)}

    @property
    def votes(self) -> dict[str, Array]:
        """Sum of signs per entry of each trainable array, in the smallest integer type that holds it; copies."""
        with self.turns.use():
            return {
                name: to_user(copy(sums.votes), Spec(self.schema[name].shape, spec(sums.votes).dtype), self.placement)
                for name, sums in self.sums.items()
                if self.schema is not None and sums.votes is not None
            }

    def add(
        self, update: Params | Refused, weight: object = 1, *, client: Hashable = None, round: int | None = None
    ) -> Refusal | None:
        """Count one client. Returns None, or the refusal if the client fails the gate; then the sums stay unchanged."""
        check_prepared(update, self.prepared_for)
        with self.turns.use():
            label = self.clients + len(self.refused) if client is None else client
            try:
                check_identity(client, round, self.seen, self.gate)
                value = read_weight(weight, self.gate.max_weight)
                entries = read_mapping(update)
                if self._add_unchecked(entries, value, client):
                    return None
                schema, arrays = self.read(entries)
                check_first(schema, self.schema, self.buffers)
                if self.gate.limits_norms:
                    check_norms(self.parts(arrays), self.gate, (self.norms, self.buffer_norms))
            except Refused as refused:
                return self._refuse(label, refused.reason, refused.detail)
            self.turns.begin()
            if self.schema is None:
                self.set_schema(schema, next(iter(entries.values())))
            self._add_arrays(arrays, value, client)
            self.turns.end()
        return None

    def read(self, entries: Mapping[str, Any]) -> tuple[dict[str, Spec], dict[str, Array]]:
        """The schema and the flat arrays of an update; raises `Refused` unless they are those of this tally."""
        if self.schema is not None and (plain := plain_arrays(entries, self.schema)) is not None:
            return self.schema, check_finite(plain, self.schema, self.schema)
        schema = read_schema(entries)
        expected = self.schema or schema
        check_schema(schema, expected, self.gate.cast)
        return schema, read_update(entries, schema, expected)

    def parts(self, arrays: Mapping[str, Array]) -> list[list[Array]]:
        """The arrays of an update that vote, and its floating buffers: the gate limits the norms of both."""
        kinds = {name: entry_kind(name, spec(array), self.buffers) for name, array in arrays.items()}
        return [[array for name, array in arrays.items() if kinds[name] == kind] for kind in ("masked", "averaged")]

    def add_many(
        self, updates: Params, weights: Weights = None, *, clients: Sequence[Hashable] | None = None
    ) -> list[Refusal]:
        """Count a stack of clients, client axis first, in order; returns the refusals."""
        check_prepared(updates, self.prepared_for)
        with self.turns.use():
            before = len(self.refused)
            stack = self.read_stack(updates, weights, clients)
            keep = self.admit(stack)
            fresh = self._sum_rows(stack, keep)
            if keep:
                counters = {name: column_max(stack.select(name, keep)) for name in self.names("maximum", stack.schema)}
                self.turns.begin()
                self.count(list(keep.values()), [stack.clients[row] for row in keep] if stack.named else [])
                self._merge_sums(fresh, counters)
                self.turns.end()
            return self.refused[before:]

    def merge(self, other: "Tally") -> None:
        """Count all clients of another tally and take over its refusals. The other tally stays unchanged."""
        if not isinstance(other, Tally):
            raise DataError(f"a tally merges with a tally, got {type(other).__name__}; bytes are read by from_bytes")
        if other is self:
            raise DataError("a tally cannot be merged with itself: its clients would count twice")
        first, second = sorted((self, other), key=id)  # one order for all threads, so that none waits for another
        with first.turns.use(), second.turns.use():
            self._check_merge(other)
            self.turns.begin()
            self._take_over(other)
            self.turns.end()

    # -- steps of `add_many`, for functions that sum a stack themselves ----------------------------------------------

    def set_schema(self, schema: Mapping[str, Spec], sample: Array) -> None:
        """Set the schema of updates, and the library and device of the result."""
        check_buffers(self.buffers, schema)
        self.schema, self.placement = dict(schema), placement(sample)
        self.device_sample = no_entries(self.placement)

    def read_stack(self, updates: Params, weights: Weights, clients: Sequence[Hashable] | None) -> Stack:
        """Read a stack and check its schema; raises `DataError`, since no single client is at fault."""
        stack = Stack.read(updates, weights, clients, self.clients + len(self.refused))
        if self.schema is None:
            self.set_schema(stack.schema, next(iter(updates.values())))
        assert self.schema is not None
        try:
            check_schema(stack.schema, self.schema, self.gate.cast)
        except Refused as refused:
            raise DataError(f"updates: {refused.detail}") from None
        return stack.convert(self.schema)

    def admit(self, stack: Stack) -> dict[int, float]:
        """Rows of a stack whose client, weight and norm pass the gate, with weights; NaNs are not checked yet."""
        if (plain := stack.plain_weights(self.gate)) is not None:
            return plain
        keep: dict[int, float] = {}
        named: dict[Hashable, int] = {}
        for row, client in enumerate(stack.clients):
            try:
                check_identity(client if stack.named else None, self.gate.round, self.seen, self.gate)
                if (first := named.get(client)) is not None and not self._refuse_rows(stack, keep, [first], row):
                    raise Refused("duplicate", f"client {client!r} is in the stack twice; only the first one counts")
                named.pop(client, None)  # not finite: the next one may count
                value = read_weight(stack.weights[row], self.gate.max_weight)
                self._check_row_norm(stack, row)
            except Refused as refused:
                self._refuse(stack.label(row), refused.reason, refused.detail)
                continue
            keep[row] = value
            if client is not None:
                named[client] = row
        return keep

    def refuse_nonfinite(self, stack: Stack, keep: dict[int, float]) -> bool:
        """Drop the rows that hold NaN or infinities; returns whether there were any (a sum can also overflow)."""
        return self._refuse_rows(stack, keep, list(keep), stack.size)

    def _refuse_rows(self, stack: Stack, keep: dict[int, float], rows: Sequence[int], judged: int) -> bool:
        """Drop those of these rows that are not finite; the refusals stay in the order of the `judged` first rows."""
        bad: dict[int, str] = {}
        for name in (*self.names("masked", stack.schema), *self.names("averaged", stack.schema)):
            for row in rows:
                if row not in bad and kernels.first_nonfinite([stack.entries[name][row]]) is not None:
                    bad[row] = name
        before = [row for row in range(judged) if row not in keep]
        first = len(self.refused) - len(before)
        refusals = dict(zip(before, self.refused[first:], strict=True))
        for row, name in bad.items():
            del keep[row]
            detail = nonfinite(name, stack.schema, self.schema or stack.schema)
            refusals[row] = Refusal(stack.label(row), "nonfinite", detail)
        self.refused[first:] = [refusals[row] for row in sorted(refusals)]
        return bool(bad)

    def count(self, weights: Sequence[float], clients: Iterable[Hashable]) -> None:
        """Add clients to the count, with their weights and, where given, their names."""
        self.clients += len(weights)
        self.heaviest = max([self.heaviest, *weights])
        for weight in weights:
            self._add_weight(weight)
        self.seen.update(client for client in clients if client is not None)

    # -- everything below trusts its arguments ------------------------------------------------------------------------

    def check_round(self) -> None:
        """Raise `NotEnoughClients` unless there are clients to average and none has more than its share of weight."""
        if self.schema is None or not self.clients:
            raise NotEnoughClients(f"no valid update to average ({in_words(self.refused)}); nothing was changed")
        self.check_share()

    def check_share(self) -> None:
        """Raise `NotEnoughClients` if one client has more than its share of the weight."""
        share = self.heaviest / self.weight
        if share > self.gate.max_share:
            raise NotEnoughClients(
                f"one client has {share:.1%} of the weight of the {self.clients} clients, at most "
                f"{self.gate.max_share:.1%} are allowed; nothing was changed"
            )

    def clear(self) -> None:
        """Empty the tally; the gate and the names of buffers stay."""
        self.clients, self.refused, self.norms, self.schema = 0, [], [], None
        self.weight_parts, self.heaviest, self.buffer_norms = (0.0, 0.0), 0.0, []
        self.placement, self.device_sample = Placement("numpy"), np.empty(0)
        self.sums, self.maxima, self.seen, self._width = {}, {}, set(), ""
        self.turns.end()

    def kinds(self, schema: Mapping[str, Spec]) -> dict[str, str]:
        """How each entry is aggregated: "masked", "averaged" or "maximum"."""
        return {name: entry_kind(name, entry, self.buffers) for name, entry in schema.items()}

    def names(self, kind: str, schema: Mapping[str, Spec]) -> list[str]:
        """Names of the entries of one kind."""
        return [name for name, of_entry in self.kinds(schema).items() if of_entry == kind]

    def _widen_sums(self) -> None:
        """Make sums for every entry, with a vote type that holds the votes of all clients counted."""
        if self._width == vote_type(self.clients):
            return
        self._width = vote_type(self.clients)
        model_sums.widen(self.sums, self.clients)
        if not self.sums and self.schema is not None:
            self.sums = self._empty_sums(self.schema, self.clients)

    def _empty_sums(self, schema: Mapping[str, Spec], clients: int) -> model_sums.ModelSums:
        return model_sums.empty(schema, self.kinds(schema), clients, self.device_sample, self.further)

    def _add_unchecked(self, entries: Mapping[str, Any], weight: float, client: Hashable) -> bool:
        """Count an update of plain arrays if its values turn out to be finite; False if nothing has changed."""
        wide_enough = bool(self.sums) and self._width == vote_type(self.clients + 1)
        if self.schema is None or not wide_enough or self.further or self.gate.limits_norms:
            return False
        arrays = plain_arrays(entries, self.schema)
        if arrays is None or is_torch(self.device_sample):
            return False
        self.turns.begin()
        added = model_sums.add_if_finite(self.sums, self.maxima, arrays, weight)
        if added:
            self.count([weight], [client])
        self.turns.end()
        return added

    def _add_arrays(self, arrays: Mapping[str, Array], weight: float, client: Hashable) -> None:
        self.count([weight], [client])
        self._widen_sums()
        model_sums.add(self.sums, self.maxima, arrays, weight, self.device_sample)

    def _check_merge(self, other: "Tally") -> None:
        if repeated := self.seen & other.seen:
            raise DataError(f"clients are in both tallies, such as {min(map(repr, repeated))}; count each once")
        check_members(other.seen, other.clients, self.gate)
        if other.clients and (self.clients or self.further) and self.further != other.further:
            mine, theirs = (", ".join(tally.further) or "none" for tally in (self, other))
            raise DataError(f"the tallies must keep the same further sums, got {mine} and {theirs}")
        if self.schema is None or other.schema is None or not other.clients:
            return
        if self.kinds(self.schema) != other.kinds(other.schema) or self.schema != other.schema:
            raise DataError("the tallies belong to different models: names, shapes, types and buffers must be the same")

    def _take_over(self, other: "Tally") -> None:
        if other.schema is not None and other.clients:
            self.further = other.further  # the same, or this tally is empty
            if self.schema is None:
                self.buffers = other.names("averaged", other.schema)
                self.schema, self.placement = dict(other.schema), other.placement
                self.device_sample = other.device_sample
            self.clients += other.clients
            self.heaviest = max(self.heaviest, other.heaviest)
            for part in other.weight_parts:
                self._add_weight(part)
            self._merge_sums(other.sums, other.maxima)
        self.seen |= other.seen
        self.refused.extend(other.refused)
        self.norms.extend(other.norms)
        self.buffer_norms.extend(other.buffer_norms)

    def _check_row_norm(self, stack: Stack, row: int) -> None:
        """Refuse a row of a stack whose norm is above the limit; one with NaN or infinities is refused later."""
        if self.gate.limits_norms:
            voters, buffers = self.parts({name: rows[row] for name, rows in stack.entries.items()})
            if kernels.first_nonfinite([*voters, *buffers]) is None:
                check_norms((voters, buffers), self.gate, (self.norms, self.buffer_norms))

    def _refuse(self, client: Hashable, reason: str, detail: str) -> Refusal:
        self.refused.append(Refusal(f"{client!r:.60}" if reason == "client" else client, reason, detail))
        return self.refused[-1]

    def _add_weight(self, weight: float) -> None:
        total, lost = two_sum(self.weight_parts[0], weight)
        self.weight_parts = (total, self.weight_parts[1] + lost)

    def _sum_rows(self, stack: Stack, keep: dict[int, float]) -> model_sums.ModelSums:
        """New sums of the kept rows; drops rows that are not finite from `keep` and then sums again."""
        while keep:
            fresh = self._empty_sums(stack.schema, len(keep))
            finite = model_sums.add_rows(fresh, stack, list(keep), list(keep.values()), self.device_sample)
            if finite or not self.refuse_nonfinite(stack, keep):
                return fresh
        return {}

    def _merge_sums(self, sums: model_sums.ModelSums, maxima: model_sums.Maxima) -> None:
        if not self.sums:  # this tally is empty
            self.sums, self._width, sums = model_sums.copied(sums), "", {}
        self._widen_sums()
        model_sums.merge(self.sums, sums)
        model_sums.update_maxima(self.maxima, maxima)
