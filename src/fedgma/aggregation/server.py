"""The server that the framework adapters share: what it keeps from round to round, and one round of it.

Replies are added to a tally one at a time, so memory does not grow with their number. A round commits completely or
not at all: if too few replies are valid or the step is not finite, model and optimiser state stay unchanged and the
error is returned.
"""

import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from fedgma.aggregation.aggregate import Aggregate
from fedgma.aggregation.gate import Gate, Refusal, Refused, check_buffers, check_gate, entry_kind, read_schema
from fedgma.aggregation.norms import norm
from fedgma.aggregation.optimizers import ServerOptimizer, State, join_states, sgd, split_state
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.rules import masked_mean
from fedgma.aggregation.share import Capped, cap_share
from fedgma.aggregation.tally import Tally
from fedgma.aggregation.wrappers import check_patterns
from fedgma.arrays import FLOATS, Array, Params, cast, flatten, is_torch, spec, to_native
from fedgma.errors import ConfigError, Diverged, FedgmaError, NotEnoughClients

WINDOW = 5  # rounds whose median norms are kept
FARTHEST = 2**48  # a counter that moves so far in a round is an accident, and would leave honest clients behind
Reply = tuple[Params | Refused, object, Hashable]  # update, weight, client


class Step(NamedTuple):
    """The result of a round: the next model, or None and the error that left the model unchanged."""

    params: dict[str, Array] | None
    refused: tuple[Refusal, ...]
    statistics: dict[str, float]
    error: FedgmaError | None = None
    capped: tuple[Capped, ...] = ()


@dataclass
class MaskedServer:
    """Rule, server optimiser and gate, with the state of rule and optimiser and the norms of recent updates.

    An update with a norm above `norm_factor` times the usual norm is refused. The usual norm is the median over the
    last five rounds of each round's median over all readable updates (lower medians in both cases). It is known before
    the round begins, so replies need not be kept, and neither a minority of clients nor a single bad round can move
    it. The first round takes the norm of the model instead, and has no limit if the model is zero. Floating buffers
    have a usual change of their own, and no limit in the first round: their first values say nothing about later ones.

    With `share_cap`, from one half to below one, a client of `step` counts with at most that share of the weight. With
    `lookahead`, clients are `sent` the model that the server's momentum alone would step to (FedACG).
    """

    rule: Rule = field(default_factory=masked_mean)
    optimizer: ServerOptimizer = field(default_factory=sgd)
    gate: Gate = field(default_factory=Gate)
    buffers: Collection[str] | None = None
    norm_factor: float | None = 10.0
    quorum: int = 1
    share_cap: float | None = None
    state: State | None = None
    medians: list[float] = field(default_factory=list)
    lookahead: bool = False
    buffer_medians: list[float] = field(default_factory=list)  # as `medians`, of changes of the floating buffers

    def __post_init__(self) -> None:
        if self.norm_factor is not None and not (_is_number(self.norm_factor) and self.norm_factor > 0):
            raise ConfigError(f"norm_factor must be a number above 0, or None for no limit, got {self.norm_factor!r}")
        check_gate(self.gate)
        if isinstance(self.quorum, bool) or not isinstance(self.quorum, int) or self.quorum < 1:
            raise ConfigError(f"quorum (the number of valid replies needed) must be at least 1, got {self.quorum!r}")
        if self.lookahead and self.optimizer.name != "momentum":
            raise ConfigError(f"a lookahead needs the server optimiser momentum, got {self.optimizer.name!r}")
        if self.rule.space is not None and "average" in self.optimizer.settings:
            raise ConfigError(f"an average of models needs a rule over the model's own arrays, got {self.rule.name!r}")
        if self.share_cap is not None and not (_is_number(self.share_cap) and 0.5 <= self.share_cap < 1):
            raise ConfigError(f"share_cap must be at least 0.5 and below 1, or None for no cap, got {self.share_cap!r}")

    @property
    def settings(self) -> dict[str, object]:
        """Settings that must not change when a stopped run is resumed."""
        return {
            "aggregator": [self.rule.name, dict(self.rule.settings)],
            "optimizer": [self.optimizer.name, dict(self.optimizer.settings)],
            "norm_factor": self.norm_factor,
            "quorum": self.quorum,
            "share_cap": self.share_cap,
            "buffers": None if self.buffers is None else sorted(self.buffers),
            "gate": {name: _listed(value) for name, value in vars(self.gate).items()},
            **({"lookahead": True} if self.lookahead else {}),  # runs from before this setting can be resumed
        }

    def forget(self) -> None:
        """Begin anew: without the state and the usual norms of earlier rounds."""
        self.state, self.medians, self.buffer_medians = None, [], []

    def sent(self, params: Params) -> Params:
        """What clients are to start from: the model, or with `lookahead` where momentum alone would take it."""
        momentum = (self.state or {}).get("z")
        if not self.lookahead or momentum is None:
            return params
        factor = self.optimizer.settings["learning_rate"] * self.optimizer.settings["beta1"]
        ahead = {name: cast(params[name] + factor * z, spec(params[name]).dtype) for name, z in momentum.items()}
        return {**params, **ahead}

    def evaluated(self, params: Params) -> Params:
        """The model to evaluate and to use: the average that the optimiser keeps (`averaged`), or the model."""
        average = (self.state or {}).get("average")
        if average is None:
            return params
        return {**params, **{name: cast(array, spec(params[name]).dtype) for name, array in average.items()}}

    def step(self, params: Params, replies: Iterable[Reply], selected: Collection[Hashable] | None = None) -> Step:
        """Aggregate the replies and step. `selected` are the clients of the round; others are refused."""
        model = self.rule.lift(params)
        tally = self.open(model, selected)
        replies = ((self._bounded(update), weight, client) for update, weight, client in replies)
        if self.rule.space is not None:
            cast = self.gate.cast
            lift = self.rule.lift_update
            replies = ((lift(update, params, cast=cast), weight, client) for update, weight, client in replies)
        capped: list[Capped] = []
        if self.share_cap is not None:
            replies = cap_share(replies, tally, self.rule, self.share_cap, capped)
        step = self._commit(model, tally, lambda state: self.rule.over(replies, tally, self.buffers, state))
        after = None if step.params is None else self.rule.lower(step.params, model, params)
        return step._replace(params=after, capped=tuple(capped))

    def open(self, params: Params | None, selected: Collection[Hashable] | None = None) -> Tally:
        """Open a round: an empty tally with this server's gate, for frameworks that deliver replies one at a time.

        Without `params` the first valid update sets the schema.
        """
        if params is not None:
            check_buffers(self.buffers, params)
            check_patterns(self.rule, params)
        return self.rule.open(params, buffers=self.buffers, gate=self._round_gate(params, selected))

    def add(self, tally: Tally, update: Params | Refused, weight: object, client: Hashable) -> Refusal | None:
        """Count one reply in an open round; returns the refusal if it fails the gate."""
        if self.rule.space is not None:
            raise ConfigError(f"{self.rule.name} needs the server's model; pass it and the updates to `step`")
        if not self.rule.streams:
            raise ConfigError(f"{self.rule.name} needs all updates in memory together; pass them to `step`")
        prepared = self.rule.prepared(self._bounded(update), self.buffers)
        return tally.add(prepared, weight, client=client, round=tally.gate.round)

    def close(self, tally: Tally, params: Params | None = None) -> Step:
        """Close an open round and step. Without `params` the model is taken as zero, so the result is the step."""
        return self._commit(params, tally, lambda state: self.rule.conclude(tally, state))

    def _commit(self, params: Params | None, tally: Tally, merge: Callable[[State], Aggregate]) -> Step:
        """Merge and step; on an error keep model and state unchanged."""
        try:
            moments, before = split_state(self.state)
            merged = merge(before)
            if tally.clients < self.quorum:
                raise NotEnoughClients(f"the round needs {self.quorum} valid replies, got {tally.clients}")
            model = _zero_model(merged) if params is None else params
            moments = self.optimizer.init(model) if moments is None else moments
            next_params, moments = self.optimizer.step(merged, moments, model)
            self.state = join_states(moments, merged.state)
            step = Step(next_params, tuple(tally.refused), statistics(merged))
        except (NotEnoughClients, Diverged) as error:
            step = Step(None, tuple(tally.refused), {}, error)
        if tally.norms:  # a round that was interrupted does not count
            self.medians = [*self.medians, _lower_median(tally.norms)][-WINDOW:]
        if tally.buffer_norms:
            self.buffer_medians = [*self.buffer_medians, _lower_median(tally.buffer_norms)][-WINDOW:]
        return step

    def _bounded(self, update: Params | Refused) -> Params | Refused:
        """The update, or its refusal if a counter moves by far more than is usual."""
        if self.norm_factor is None or not isinstance(update, Mapping):
            return update
        try:
            counters = [name for name, entry in read_schema(update).items() if entry.dtype not in FLOATS]
        except Refused:
            return update  # the gate says why
        if far := [name for name in counters if bool((abs(to_native(update[name])) > FARTHEST).any())]:
            return Refused("norm", f"{far[0]!r} is too far from the server's counter")
        return update

    def _round_gate(self, params: Params | None, selected: Collection[Hashable] | None) -> Gate:
        clients = selected if self.gate.selected is None else self.gate.selected
        if self.norm_factor is None:
            return replace(self.gate, selected=clients)
        usual = _lower_median(self.medians) if self.medians else _model_norm(params or {}, self.buffers)
        change = _lower_median(self.buffer_medians) if self.buffer_medians else 0.0
        longest = min(self.gate.max_norm, _limit(self.norm_factor * usual))
        largest = min(self.gate.max_buffer_norm, _limit(self.norm_factor * change))
        return replace(self.gate, selected=clients, max_norm=longest, max_buffer_norm=largest)


def _limit(longest: float) -> float:
    """A limit of norms: where it is zero, since nothing is usual yet, or not finite, all pass and are measured."""
    return longest if 0 < longest < sys.float_info.max else sys.float_info.max


def statistics(merged: Aggregate) -> dict[str, float]:
    """Statistics of a round's clients and mask, under the names that all adapters report."""
    mask_mean, share_unmasked = summarise_mask((merged.mask or {}).values())
    return {
        "gma-clients": int(merged.notes["clients"]),
        "gma-refused": len(merged.notes["refused"]),
        "gma-mask-mean": mask_mean,
        "gma-share-unmasked": share_unmasked,
    }


def summarise_mask(masks: Iterable[Array]) -> tuple[float, float]:
    """Mean of the mask, and share of its entries that are 1; both are 1 without a mask.

    >>> summarise_mask([np.array([1.0, 0.5]), np.array([1.0, 0.0])])
    (0.625, 0.5)
    """
    arrays = [np.asarray(mask.cpu() if is_torch(mask) else mask) for mask in masks]
    entries = sum(array.size for array in arrays)
    if not entries:
        return 1.0, 1.0
    total = sum(float(array.sum(dtype=np.float64)) for array in arrays)
    return total / entries, sum(int((array == 1).sum()) for array in arrays) / entries


def pack_state(server: MaskedServer, params: Params) -> dict[str, np.ndarray]:
    """Model and server state as named arrays, for a checkpoint."""
    packed = {f"arrays/{name}": np.asarray(array) for name, array in params.items()}
    for moment, arrays in (server.state or {}).items():
        packed |= {f"state/{moment}/{name}": np.asarray(array) for name, array in arrays.items()}
    held = {"buffer_medians": np.array(server.buffer_medians, np.float64)} if server.buffer_medians else {}
    return {**packed, "medians": np.array(server.medians, np.float64), **held}


def unpack_state(server: MaskedServer, packed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Restore the server state that `pack_state` packed, and return the model."""
    state: State = {}
    for key, array in packed.items():
        if key.startswith("state/"):
            _, moment, name = key.split("/", 2)
            state.setdefault(moment, {})[name] = array
    server.state, server.medians = state or None, packed["medians"].tolist()
    server.buffer_medians = packed["buffer_medians"].tolist() if "buffer_medians" in packed else []
    return {key.removeprefix("arrays/"): array for key, array in packed.items() if key.startswith("arrays/")}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _listed(value: object) -> object:
    """A collection as a sorted list of strings; other settings unchanged."""
    return sorted(map(str, value)) if isinstance(value, Collection) and not isinstance(value, str) else value


def _zero_model(merged: Aggregate) -> dict[str, Array]:
    """A zero model with the entries of an aggregate."""
    return {name: array * 0 for name, array in {**merged.mean, **merged.buffers}.items()}


def _model_norm(params: Params, buffers: Collection[str] | None) -> float:
    voters = [array for name, array in params.items() if entry_kind(name, spec(array), buffers) == "masked"]
    return norm(flatten(to_native(array)) for array in voters)


def _lower_median(values: list[float]) -> float:
    """The middle value, or the smaller of the two middle ones: one of two clients cannot raise it."""
    return sorted(values)[(len(values) - 1) // 2]
