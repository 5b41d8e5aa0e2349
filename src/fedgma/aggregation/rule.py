"""What a rule is: a few pure functions over arrays, and the methods that pass updates to them.

A server calls the functions on the updates of one round, streamed or stacked; a fleet calls them on those of many runs
at once. The library's rules are in `rules`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedgma.aggregation import kernels
from fedgma.aggregation.aggregate import Aggregate, finish
from fedgma.aggregation.gate import Gate, Refused, read_array, read_schema
from fedgma.aggregation.gpu_stack import finish_stack
from fedgma.aggregation.masks import Mask, VoteMask
from fedgma.aggregation.stack import Stack, Weights, align_clients
from fedgma.aggregation.tally import Tally
from fedgma.arrays import Array, Params, flatten, is_torch, move_to, placement, spec, to_native, to_user
from fedgma.errors import DataError, Diverged

Updates = Params | Sequence[Params] | Sequence[Sequence[Array]]
Prepare = Callable[[Params, Collection[str] | None], Params]
Change = Callable[[str, Array, Array], Array]  # (name, mean, mask) -> mask, each [..., entry]: one run or many at once


@dataclass(frozen=True)
class Rule:
    """Turns updates and weights into an `Aggregate`.

    `mask` computes the mask from a tally's votes (None: no mask). `change` replaces that mask, array by array, given
    (name, mean, mask). `prepare` changes one client's update before it is counted. `combine` replaces the weighted
    mean: it computes an entry from all updates [client, ...], so they must be in memory together; if it is `weighted`,
    from their weights and names too. `select` gives the rows of the clients that `combine` reads, out of all updates
    [client, entry]. With `keep_length` the server's step with the changed mask is scaled, per array, to the length of
    its step with the mask of the votes. A rule that is `late` applies a round's mask in the next one.
    """

    name: str
    mask: Mask | None = None
    change: Change | None = None
    prepare: Prepare | None = None
    combine: Callable[..., Array] | None = None
    select: Callable[[Array], Array] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    weighted: bool = False
    keep_length: bool = False
    late: bool = False

    @property
    def streams(self) -> bool:
        """Whether clients can be added to a tally one at a time, without keeping their updates."""
        return self.combine is None

    @property
    def needs(self) -> tuple[str, ...]:
        """What the rule reads: the weighted mean, the sign votes, or all updates at once."""
        if self.combine is not None:
            return ("updates",)
        return ("mean",) if self.mask is None else ("mean", "votes")

    def __call__(
        self,
        updates: Updates,
        weights: Weights = None,
        *,
        clients: Sequence[Hashable] | None = None,
        like: Params | None = None,
        buffers: Collection[str] | None = None,
        gate: Gate | None = None,
    ) -> Aggregate:
        """Aggregate; `weights` are raw sample counts (None: equal). The notes list refused clients.

        `like` (the model's entries) sets names, shapes and types; without it the most common ones among the clients do.
        """
        if isinstance(updates, Mapping) and self.prepare is None and self.combine is None:
            tally = Tally(like, buffers=buffers, gate=gate)
            vote_mask = self.mask if isinstance(self.mask, VoteMask) else None
            if self.mask is vote_mask:
                fused = finish_stack(tally, updates, weights, clients, vote_mask)
                if fused is not None:
                    return self._change_mask(fused)
            tally.add_many(updates, weights, clients=clients)
            return self.conclude(tally)
        per_client = _as_list(updates)
        counts, labels = align_clients(len(per_client), weights, clients, "updates")
        tally = Tally(_typical_update(per_client) if like is None else like, buffers=buffers, gate=gate)
        return self.over(zip(per_client, counts, labels, strict=True), tally, buffers)

    def over(
        self,
        replies: Iterable[tuple[Params | Refused, object, Hashable]],
        tally: Tally,
        buffers: Collection[str] | None = None,
    ) -> Aggregate:
        """Aggregate a stream of (update, weight, client) through an empty tally; keeps updates only for `combine`."""
        kept: list[Any] = []
        for update, weight, client in replies:
            prepared = self.prepared(update, buffers)
            if tally.add(prepared, weight, client=client, round=tally.gate.round) is None and self.combine is not None:
                kept.append((prepared, weight, client))
        merged = self.conclude(tally)
        if self.combine is None:
            return merged
        if self.select is not None:
            rows = self.select(_flat_stack([update for update, _, _ in kept], list(merged.mean)))
            kept = [kept[row] for row in rows.tolist()]
        return merged._replace(mean=_combine(merged.mean, kept, self))

    def prepared(self, update: Params | Refused, buffers: Collection[str] | None) -> Params | Refused:
        """The update as it is counted; one that could not be read is left for the gate to refuse."""
        return update if self.prepare is None or isinstance(update, Refused) else self.prepare(update, buffers)

    def conclude(self, tally: Tally) -> Aggregate:
        """Compute the aggregate of a tally."""
        return self._change_mask(finish(tally, mask="none" if self.mask is None else self.mask))

    def combined(self, stack: Array, weights: Sequence[float], clients: Sequence[Hashable]) -> Array:
        """What `combine` makes of one entry of all updates [client, ...]."""
        assert self.combine is not None
        return self.combine(stack, weights, clients) if self.weighted else self.combine(stack)

    def _change_mask(self, merged: Aggregate) -> Aggregate:
        if self.late:
            return merged._replace(mask=None, next_mask=merged.mask)
        if self.change is None or merged.mask is None:
            return merged
        changed = {}
        for name, mask in merged.mask.items():
            flat_mask = self.change(name, flatten(to_native(merged.mean[name])), flatten(to_native(mask)))
            changed[name] = to_user(flat_mask, spec(mask), placement(mask))
        return merged._replace(mask=changed, length=merged.mask if self.keep_length else None)


def _as_list(updates: Updates) -> list[Any]:
    """One mapping of entries per client, from any accepted form of updates."""
    if isinstance(updates, Mapping):
        clients = Stack.read(updates).size
        return [{name: entry[client] for name, entry in updates.items()} for client in range(clients)]
    if isinstance(updates, str | bytes) or not isinstance(updates, Sequence):
        raise DataError(f"updates: expected a mapping of arrays or a list of clients, got {type(updates).__name__}")
    return [_name_entries(update) for update in updates]


def _name_entries(update: object) -> object:
    if isinstance(update, Sequence) and not isinstance(update, str | bytes):
        return {str(position): array for position, array in enumerate(update)}
    return update


def _typical_update(updates: list[Any]) -> Params | None:
    """The first update with the most common schema, so that one bad client cannot set the schema for all."""
    schemas = {}
    for client, update in enumerate(updates):
        try:
            schemas[client] = tuple(sorted(read_schema(update).items()))
        except Refused:
            continue
    if not schemas:
        return None
    common = Counter(schemas.values()).most_common(1)[0][0]
    return updates[next(client for client, schema in schemas.items() if schema == common)]  # type: ignore[no-any-return]


def _combine(means: dict[str, Array], kept: list[tuple[Params, Any, Hashable]], rule: Rule) -> dict[str, Array]:
    weights, clients = [float(weight) for _, weight, _ in kept], [client for _, _, client in kept]
    result = {}
    for name, like in means.items():
        entry = spec(like)
        entries = [read_array(name, update[name], spec(update[name]), entry) for update, _, _ in kept]
        with np.errstate(over="ignore", invalid="ignore"):
            result[name] = to_user(rule.combined(_stack(entries), weights, clients), entry, placement(like))
        if kernels.first_nonfinite([flatten(to_native(result[name]))]) is not None:
            raise Diverged(f"the result of {name!r} overflows; nothing was changed, scale the updates down")
    return result


def _flat_stack(kept: list[Params], names: list[str]) -> Array:
    """The entries of all clients as one array [client, entry]."""
    return _stack([_join([flatten(to_native(update[name])) for name in names]) for update in kept])


def _join(parts: list[Array]) -> Array:
    if is_torch(parts[0]):
        import torch

        return torch.cat(parts)
    return np.concatenate(parts)


def _stack(entries: list[Array]) -> Array:
    entries = [move_to(entry, entries[0]) for entry in entries]
    if is_torch(entries[0]):
        import torch

        return torch.stack(entries)
    return np.stack(entries)
