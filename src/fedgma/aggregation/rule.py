"""What a rule is: a few functions over arrays, and the ways in which updates reach them.

The pieces are pure functions: a server calls them on one round's updates, streamed or stacked, and a fleet on those of
many runs at once. The library's own rules are in `rules`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedgma.aggregation.aggregate import Aggregate, finish
from fedgma.aggregation.gate import Gate, Refused, read_schema
from fedgma.aggregation.gpu_stack import finish_stack
from fedgma.aggregation.masks import Mask, VoteMask
from fedgma.aggregation.stack import Stack, Weights, lined_up
from fedgma.aggregation.tally import Tally
from fedgma.arrays import Array, Params, delivered, flat, is_torch, native, placement, spec
from fedgma.errors import DataError

Updates = Params | Sequence[Params] | Sequence[Sequence[Array]]
Prepare = Callable[[Params, Collection[str] | None], Params]
Change = Callable[[str, Array, Array], Array]  # (name, mean, mask) -> mask, each [..., entry]: one run or many at once


@dataclass(frozen=True)
class Rule:
    """Turns updates and weights into an `Aggregate`; the pieces let a server stream, and a fleet run many at once.

    `mask` makes the mask of a tally's votes (None: no mask); `change` makes another mask of (name, mean, mask), array
    by array; `prepare` changes one client's update before it counts; `combine`, where it is set, gives an entry's mean
    from all updates [client, ...] instead, so they must be in memory together.
    """

    name: str
    mask: Mask | None = None
    change: Change | None = None
    prepare: Prepare | None = None
    combine: Callable[[Array], Array] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        """Whether clients can be added to a tally one at a time and forgotten."""
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
        """Aggregate; `weights` are raw sample counts (None: equal). Refused clients are named in the notes.

        `like` (the model's entries) fixes names, shapes and types; without it those that most clients have are taken.
        """
        if isinstance(updates, Mapping) and self.prepare is None and self.combine is None:
            tally = Tally(like, buffers=buffers, gate=gate)
            vote_mask = self.mask if isinstance(self.mask, VoteMask) else None
            if self.mask is vote_mask:
                fused = finish_stack(tally, updates, weights, clients, vote_mask)
                if fused is not None:
                    return self._changed(fused)
            tally.add_many(updates, weights, clients=clients)
            return self.conclude(tally)
        listed = _as_list(updates)
        counts, labels = lined_up(len(listed), weights, clients, "updates")
        tally = Tally(_usual(listed) if like is None else like, buffers=buffers, gate=gate)
        return self.over(zip(listed, counts, labels, strict=True), tally, buffers)

    def over(
        self, replies: Iterable[tuple[Params, object, Hashable]], tally: Tally, buffers: Collection[str] | None = None
    ) -> Aggregate:
        """Aggregate (update, weight, client) as they come, through an empty tally; keeps them only if it must."""
        kept = []
        for update, weight, client in replies:
            ready = update if self.prepare is None else self.prepare(update, buffers)
            if tally.add(ready, weight, client=client) is None and self.combine is not None:
                kept.append(ready)
        merged = self.conclude(tally)
        return merged if self.combine is None else merged._replace(mean=_combined(merged.mean, kept, self.combine))

    def conclude(self, tally: Tally) -> Aggregate:
        """The answer that a tally gives."""
        return self._changed(finish(tally, mask="none" if self.mask is None else self.mask))

    def _changed(self, merged: Aggregate) -> Aggregate:
        if self.change is None or merged.mask is None:
            return merged
        changed = {}
        for name, mask in merged.mask.items():
            flat_mask = self.change(name, flat(native(merged.mean[name])), flat(native(mask)))
            changed[name] = delivered(flat_mask, spec(mask), placement(mask))
        return merged._replace(mask=changed)


def _as_list(updates: Updates) -> list[Any]:
    """One mapping of entries per client, from any of the accepted forms."""
    if isinstance(updates, Mapping):
        clients = Stack.read(updates).size
        return [{name: entry[client] for name, entry in updates.items()} for client in range(clients)]
    if isinstance(updates, str | bytes) or not isinstance(updates, Sequence):
        raise DataError(f"updates: expected a mapping of arrays or a list of clients, got {type(updates).__name__}")
    return [_named(update) for update in updates]


def _named(update: object) -> object:
    if isinstance(update, Sequence) and not isinstance(update, str | bytes):
        return {str(place): array for place, array in enumerate(update)}
    return update


def _usual(listed: list[Any]) -> Params | None:
    """An update with the schema that most clients have, so that one odd client cannot set it for all."""
    schemas = {}
    for place, update in enumerate(listed):
        try:
            schemas[place] = tuple(sorted(read_schema(update).items()))
        except Refused:
            continue
    if not schemas:
        return None
    usual = Counter(schemas.values()).most_common(1)[0][0]
    return listed[next(place for place, schema in schemas.items() if schema == usual)]  # type: ignore[no-any-return]


def _combined(means: dict[str, Array], kept: list[Params], combine: Callable[[Array], Array]) -> dict[str, Array]:
    result = {}
    for name, like in means.items():
        entries = [native(update[name]) for update in kept]
        result[name] = delivered(combine(_stacked(entries)), spec(like), placement(like))
    return result


def _stacked(entries: list[Array]) -> Array:
    if is_torch(entries[0]):
        import torch

        return torch.stack(entries)
    return np.stack(entries)
