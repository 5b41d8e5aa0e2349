"""What a rule is: a few pure functions over arrays, and the methods that pass updates to them.

A server calls the functions on the updates of one round, streamed or stacked; a fleet calls them on those of many runs
at once. The library's rules are in `rules`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from fedgma.aggregation import kernels
from fedgma.aggregation.aggregate import Aggregate, finish
from fedgma.aggregation.gate import Gate, Refused, read_array, read_schema
from fedgma.aggregation.gpu_stack import begin, finish_stack
from fedgma.aggregation.masks import Mask, VoteMask
from fedgma.aggregation.prepared import Prepared
from fedgma.aggregation.stack import Stack, Weights, align_clients
from fedgma.aggregation.tally import Tally
from fedgma.aggregation.view import (
    FUSED,
    Compute,
    Step,
    View,
    arguments_of,
    further_of,
    own_memory,
    read_only,
    read_step,
    total_measures,
)
from fedgma.arrays import (
    Array,
    Params,
    Placement,
    Spec,
    cast,
    flatten,
    is_torch,
    move_to,
    placement,
    spec,
    to_native,
    to_user,
    working_type,
    zeros,
)
from fedgma.errors import ConfigError, DataError, Diverged, FedgmaError

Updates = Params | Sequence[Params] | Sequence[Sequence[Array]]
Prepare = Callable[[Params, Collection[str] | None], Params]
RuleState = Mapping[str, Mapping[str, Array]]  # name -> array of the model -> values; plain arrays


class Space(Protocol):
    """Other arrays in place of a model's, such as products of its adapters: how to get there, and back."""

    def lift(self, params: Params) -> Params:
        """A model in this space."""

    def lift_update(self, update: Params | Refused, params: Params, *, cast: bool = False) -> Params | Refused:
        """An update of a model in this space, or why there is none; `cast` accepts other floating types."""

    def lower(self, after: Params, before: Params, params: Params) -> dict[str, Array]:
        """The next model, from its form in this space after and before the step, and the model before."""


@dataclass(frozen=True)
class Rule:
    """Turns updates and weights into an `Aggregate`.

    `mask` computes the mask from a tally's votes (None: no mask). `compute` is a function of sums (`view`): it asks for
    them by the names of its arguments and returns, array by array, the mean, (mean, mask) or (mean, mask, state).
    `measure` is one too and returns numbers by name, which are summed over the arrays of the model and given to
    `compute` as `measured`. `state` names arrays that `compute` is given and returns changed, with their first value.
    `prepare` changes one client's update before it is counted. `combine` replaces the weighted mean: it computes an
    entry from all updates [client, ...], so they must be in memory together; if it is `weighted`, from their weights
    and names too. `select` gives the rows of the clients that `combine` reads, out of all updates [client, entry]. With
    `keep_length` the server's step with the changed mask is scaled, per array, to the length of its step with the mask
    of the votes. With a `space` the rule works on other arrays than those of the model, which the server computes from
    the model and each update (`adapters`). An `entrywise` `combine` treats every entry alike, so a fleet calls it once
    for a whole model.
    """

    name: str
    mask: Mask | None = None
    compute: Compute | None = None
    prepare: Prepare | None = None
    combine: Callable[..., Array] | None = None
    select: Callable[[Array], Array] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    weighted: bool = False
    keep_length: bool = False
    measure: Compute | None = None
    state: Mapping[str, float] = field(default_factory=dict)
    space: Space | None = None
    entrywise: bool = False

    def __post_init__(self) -> None:
        self.further  # noqa: B018  a wrong argument of a function is found here and not in the first round

    @property
    def streams(self) -> bool:
        """Whether clients can be added to a tally one at a time, without keeping their updates."""
        return self.combine is None

    @property
    def needs(self) -> tuple[str, ...]:
        """What the rule reads: the weighted mean, the sign votes, further sums, or all updates; the server's model."""
        model = () if self.space is None else ("model",)
        if self.combine is not None:
            return ("updates", *model)
        return (*(("mean",) if self.mask is None else ("mean", "votes")), *self.further, *model)

    def lift(self, params: Params) -> Params:
        """The server's model as the rule sees it."""
        return params if self.space is None else self.space.lift(params)

    def lift_update(self, update: Params | Refused, params: Params, *, cast: bool = False) -> Params | Refused:
        """A client's update as the rule sees it; `params` is the server's model."""
        return update if self.space is None else self.space.lift_update(update, params, cast=cast)

    def lower(self, after: Params, before: Params, params: Params) -> dict[str, Array]:
        """The next model, from what the rule sees of it after and before the step; `params` is the model before."""
        return dict(after) if self.space is None else self.space.lower(after, before, params)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The values that `compute` asks for."""
        return () if self.compute is None else arguments_of(self.compute, self.state, self.name)

    @cached_property
    def measures(self) -> tuple[str, ...]:
        """The values that `measure` asks for."""
        return () if self.measure is None else arguments_of(self.measure, self.state, self.name)

    @cached_property
    def further(self) -> tuple[str, ...]:
        """The sums that a tally keeps for this rule beside weighted updates and votes: `Tally(further=...)`."""
        return further_of(self.asks)

    @property
    def asks(self) -> tuple[str, ...]:
        """All values that its functions ask for; a function that takes the view as a whole names them in `reads`."""
        return (*self.reads, *self.measures, *getattr(self.compute, "reads", ()))

    @cached_property
    def _one_pass(self) -> bool:
        """Whether a pass that sums nothing but votes and weighted updates gives all that this rule reads."""
        return isinstance(self.mask, VoteMask | None) and {*self.reads, *self.measures} <= FUSED

    def step(self, view: View) -> Step:
        """What `compute` makes of one array; an error of a user's function becomes a sentence that names the rule."""
        if self.compute is None:
            return Step(view.mean, view.mask)
        return read_step(self._call(self.compute, self.reads, view), view, self.name)

    def measured(self, view: View) -> dict[str, Array]:
        """What `measure` finds in one array: numbers [...]."""
        if self.measure is None:
            return {}
        numbers = self._call(self.measure, self.measures, view)
        if not isinstance(numbers, Mapping) or any(
            np.shape(value) != view.mean.shape[:-1] for value in numbers.values()
        ):
            raise ConfigError(f"rule {self.name!r}: measure must return a number by name, summed over the last axis")
        return {name: value if is_torch(value) else np.asarray(value) for name, value in numbers.items()}

    def _call(self, function: Compute, arguments: tuple[str, ...], view: View) -> Any:
        try:
            return view.call(function, arguments)
        except FedgmaError:
            raise
        except Exception as error:
            raise ConfigError(
                f"rule {self.name!r} failed on {view.name!r} ({type(error).__name__}: {error})"
            ) from error

    def open(
        self, like: Params | None = None, *, buffers: Collection[str] | None = None, gate: Gate | None = None
    ) -> Tally:
        """An empty tally with the sums that this rule reads; one with a `prepare` takes `prepared` updates alone."""
        tally = Tally(like, buffers=buffers, gate=gate, further=self.further)
        tally.prepared_for = "" if self.prepare is None else self.name
        return tally

    def __call__(
        self,
        updates: Updates,
        weights: Weights = None,
        *,
        clients: Sequence[Hashable] | None = None,
        like: Params | None = None,
        buffers: Collection[str] | None = None,
        gate: Gate | None = None,
        state: RuleState | None = None,
    ) -> Aggregate:
        """Aggregate; `weights` are raw sample counts (None: equal). The notes list refused clients.

        `like` (the model's entries) sets names, shapes and types; without it the most common ones among the clients do.
        `state` is that of the aggregate of the round before, for rules that have one.
        """
        if self.space is not None:
            raise ConfigError(f"{self.name} needs the server's model; use `server_round` in place of a call")
        if isinstance(updates, Mapping) and self.prepare is None and self.combine is None:
            mask = self.mask if isinstance(self.mask, VoteMask) else None
            fits = self._one_pass
            begun = begin(updates, weights, mask, clients, like, buffers, gate) if fits else None
            tally = self.open(like, buffers=buffers, gate=gate)
            merged = finish_stack(tally, updates, weights, clients, mask, begun) if fits else None
            if merged is not None:
                return _computed(self, merged, None, state)
            tally.add_many(updates, weights, clients=clients)
            return self.conclude(tally, state)
        per_client = _as_list(updates)
        counts, labels = align_clients(len(per_client), weights, clients, "updates")
        tally = self.open(_typical_update(per_client) if like is None else like, buffers=buffers, gate=gate)
        return self.over(zip(per_client, counts, labels, strict=True), tally, buffers, state)

    def over(
        self,
        replies: Iterable[tuple[Params | Refused, object, Hashable]],
        tally: Tally,
        buffers: Collection[str] | None = None,
        state: RuleState | None = None,
    ) -> Aggregate:
        """Aggregate a stream of (update, weight, client) through an empty tally; keeps updates only for `combine`."""
        kept: list[Any] = []
        for update, weight, client in replies:
            prepared = self.prepared(update, buffers)
            if tally.add(prepared, weight, client=client, round=tally.gate.round) is None and self.combine is not None:
                kept.append((prepared, weight, client))
        if self.combine is None:
            return self._concluded(tally, state)
        merged = finish(tally, mask="none" if self.mask is None else self.mask)
        if self.select is not None:
            rows = self.select(_flat_stack([update for update, _, _ in kept], list(merged.mean)))
            kept = [kept[row] for row in rows.tolist()]
        return _computed(self, merged._replace(mean=_combine(merged.mean, kept, self)), tally, state)

    def prepared(self, update: Params | Refused, buffers: Collection[str] | None) -> Params | Refused:
        """The update as it is counted; one that could not be read is left for the gate to refuse."""
        if self.prepare is None or isinstance(update, Refused):
            return update
        changed = self.prepare(update, buffers)
        return Prepared(changed) if isinstance(changed, Mapping) else changed  # else it is refused

    def conclude(self, tally: Tally, state: RuleState | None = None) -> Aggregate:
        """Compute the aggregate of a tally; `state` is that of the aggregate of the round before."""
        if self.combine is not None:
            raise DataError(
                f"{self.name} needs all updates in memory together, which a tally does not keep; call the rule on them "
                "or use `server_round`"
            )
        if self.space is not None:
            raise DataError(f"{self.name} needs the server's model; use `server_round` in place of a tally")
        return self._concluded(tally, state)

    def _concluded(self, tally: Tally, state: RuleState | None) -> Aggregate:
        if missing := [group for group in self.further if group not in tally.further]:
            raise DataError(
                f"rule {self.name!r} reads sums that this tally does not keep: {', '.join(missing)}; make the tally by "
                f"rule.open() or with Tally(further={self.further})"
            )
        merged = finish(tally, mask="none" if self.mask is None else self.mask)
        return _computed(self, merged, tally, state)

    def combined(self, stack: Array, weights: Sequence[float], clients: Sequence[Hashable]) -> Array:
        """What `combine` makes of one entry of all updates [client, ...]."""
        assert self.combine is not None
        return self.combine(stack, weights, clients) if self.weighted else self.combine(stack)


def _computed(rule: Rule, merged: Aggregate, tally: Tally | None, state: RuleState | None) -> Aggregate:
    """The aggregate with the means, masks and state that the rule's `compute` returns, array by array."""
    if rule.compute is None:
        return merged
    views = {name: _view(rule, merged, tally, name, state) for name in merged.mean}
    filled = {name: view for name, view in views.items() if view.mean.shape[-1]}  # a function may need one entry
    measured = total_measures([rule.measured(view) for view in filled.values()])
    untouched = {name: Step(view.mean, view.mask) for name, view in views.items()}
    steps = untouched | {name: rule.step(replace(view, measured=measured)) for name, view in filled.items()}
    masked = any(step.mask is not None for step in steps.values())
    means, masks, after = dict(merged.mean), {}, {key: {} for key in rule.state}  # type: ignore[var-annotated]
    for name, view in views.items():
        entry, home = spec(merged.mean[name]), placement(merged.mean[name])
        working = Spec(entry.shape, working_type(entry.dtype))
        step = steps[name]
        if step.mean is not view.mean:
            means[name] = _result(rule, name, step.mean, entry, home)
        if masked:
            masks[name] = _result(rule, name, view.mean * 0 + 1 if step.mask is None else step.mask, working, home)
        for key in rule.state:
            after[key][name] = _result(rule, name, step.state.get(key, view.state[key]), working, home)
    length = merged.mask if rule.keep_length else None
    return merged._replace(mean=means, mask=masks if masked else None, length=length, state=after)


def _view(rule: Rule, merged: Aggregate, tally: Tally | None, name: str, state: RuleState | None) -> View:
    mean = flatten(to_native(merged.mean[name]))
    dtype = working_type(spec(mean).dtype)
    sums = None if tally is None else tally.sums[name]
    mask = None if merged.mask is None else flatten(to_native(merged.mask[name]))
    numbers = [move_to(np.array([merged.notes[key]], np.float64), mean) for key in ("clients", "weight")]
    before = {}
    for key, first in rule.state.items():
        held = (state or {}).get(key, {}).get(name)
        given = zeros(len(mean), dtype, mean) + first if held is None else move_to(flatten(to_native(held)), mean)
        if given.shape != mean.shape:
            raise DataError(f"the state {key!r} of rule {rule.name!r} has another shape than the model's {name!r}")
        before[key] = cast(given, dtype)

    def vote_mask(function: Mask) -> Array:
        assert sums is not None
        return function(sums.votes, merged.notes["clients"], dtype)

    held_before = {key: read_only(array) for key, array in before.items()}
    return View(name, read_only(mean), read_only(mask), numbers[0], numbers[1], sums, vote_mask, held_before)


def _result(rule: Rule, name: str, array: Array, entry: Spec, place: Placement) -> Array:
    """An array that a rule returned, as the user gets it; raises `Diverged` if it is not finite."""
    with np.errstate(over="ignore"):
        result = to_user(own_memory(array), entry, place)
    if kernels.first_nonfinite([flatten(to_native(result))]) is not None:
        raise Diverged(f"rule {rule.name!r} gave values that are not finite for {name!r}; nothing was changed")
    return result


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
