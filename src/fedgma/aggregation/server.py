"""A masked server between messages: what it keeps from round to round, and what it makes of a round's replies.

Replies go one at a time through the same tally as everywhere else, so memory does not grow with their number. A round
commits as a whole or not at all: where too few replies are valid or a step would not be finite, model, moments and all
else stay as they were, and the reason comes back.
"""

import sys
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from fedgma.aggregation.aggregate import Aggregate
from fedgma.aggregation.gate import Gate, Refusal, norm, treatment
from fedgma.aggregation.optimizers import ServerOptimizer, State, sgd
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.rules import masked_mean
from fedgma.aggregation.tally import Tally
from fedgma.arrays import Array, Params, flat, is_torch, native, spec
from fedgma.errors import ConfigError, Diverged, FedgmaError, NotEnoughClients

WINDOW = 5  # rounds whose norms are remembered
Reply = tuple[Params, object, Hashable]  # update, weight, client


class Step(NamedTuple):
    """What a round's replies gave: the next model, or None and the reason why it stays as it is."""

    params: dict[str, Array] | None
    refused: tuple[Refusal, ...]
    statistics: dict[str, float]
    error: FedgmaError | None = None


@dataclass
class MaskedServer:
    """Rule, server optimiser and gate, with the optimiser's state and the lengths of recent updates.

    An update longer than `norm_factor` times the usual length is refused. The usual length is the median over the last
    five rounds of each round's median, both the lower one, over all updates that could be read: known before the round
    begins, so that replies need not be kept, and moved neither by a minority of clients nor by one bad round. In the
    first round the length of the model itself stands in for it; a model of zeros has no limit then.
    """

    rule: Rule = field(default_factory=masked_mean)
    optimizer: ServerOptimizer = field(default_factory=sgd)
    gate: Gate = field(default_factory=Gate)
    buffers: Collection[str] | None = None
    norm_factor: float | None = 10.0
    quorum: int = 1
    state: State | None = None
    medians: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.norm_factor is not None and not self.norm_factor > 0:
            raise ConfigError(f"norm_factor is a number above 0, or None for no limit, got {self.norm_factor!r}")
        if self.quorum < 1:
            raise ConfigError(f"quorum is the least number of valid replies, at least 1, got {self.quorum!r}")

    @property
    def settings(self) -> dict[str, object]:
        """What must be the same for a stopped run to go on."""
        return {
            "aggregator": [self.rule.name, dict(self.rule.settings)],
            "optimizer": [self.optimizer.name, dict(self.optimizer.settings)],
            "norm_factor": self.norm_factor,
            "quorum": self.quorum,
        }

    def step(self, params: Params, replies: Iterable[Reply], selected: Collection[Hashable] | None = None) -> Step:
        """Tally the replies, mask, step. `selected` are the clients that were asked; others are refused."""
        tally = self.open(params, selected)
        return self._commit(params, tally, lambda: self.rule.over(replies, tally, self.buffers))

    def open(self, params: Params | None, selected: Collection[Hashable] | None = None) -> Tally:
        """An empty tally behind this server's gate, for frameworks that hand replies over one at a time.

        Without `params` the first valid update says what updates look like.
        """
        return Tally(params, buffers=self.buffers, gate=self._gate(params, selected))

    def add(self, tally: Tally, update: Params, weight: object, client: Hashable) -> Refusal | None:
        """Count one reply in an open round; the refusal where it failed the gate."""
        if not self.rule.streams:
            raise ConfigError(f"{self.rule.name} needs all updates in memory together; hand them over with `step`")
        ready = update if self.rule.prepare is None else self.rule.prepare(update, self.buffers)
        return tally.add(ready, weight, client=client)

    def close(self, tally: Tally, params: Params | None = None) -> Step:
        """The step of an open round; without `params` the step itself comes back, as if the model were zero."""
        return self._commit(params, tally, lambda: self.rule.conclude(tally))

    def _commit(self, params: Params | None, tally: Tally, merge: Callable[[], Aggregate]) -> Step:
        """All of the round or nothing of it."""
        try:
            merged = merge()
            if tally.clients < self.quorum:
                raise NotEnoughClients(f"{tally.clients} valid replies, but the quorum is {self.quorum}")
            model = _zeros(merged) if params is None else params
            state = self.optimizer.init(model) if self.state is None else self.state
            moved, self.state = self.optimizer.step(merged, state, model)
        except (NotEnoughClients, Diverged) as error:
            return Step(None, tuple(tally.refused), {}, error)
        finally:
            if tally.norms:
                self.medians = [*self.medians, _lower_median(tally.norms)][-WINDOW:]
        return Step(moved, tuple(tally.refused), statistics(merged))

    def _gate(self, params: Params | None, selected: Collection[Hashable] | None) -> Gate:
        asked = selected if self.gate.selected is None else self.gate.selected
        if self.norm_factor is None:
            return replace(self.gate, selected=asked)
        usual = _lower_median(self.medians) if self.medians else _length(params or {}, self.buffers)
        limit = self.norm_factor * usual or sys.float_info.max  # finite: lengths are measured all the same
        return replace(self.gate, selected=asked, max_norm=min(self.gate.max_norm, limit))


def statistics(merged: Aggregate) -> dict[str, float]:
    """A round's mask in numbers, under the names that all frameworks report."""
    kept, whole = mask_figures((merged.mask or {}).values())
    return {
        "gma-clients": int(merged.notes["clients"]),
        "gma-refused": len(merged.notes["refused"]),
        "gma-mask-mean": kept,
        "gma-share-unmasked": whole,
    }


def mask_figures(masks: Iterable[Array]) -> tuple[float, float]:
    """Mean of the mask, and share of its entries that are 1; both 1 where there is no mask.

    >>> mask_figures([np.array([1.0, 0.5]), np.array([1.0, 0.0])])
    (0.625, 0.5)
    """
    arrays = [np.asarray(mask.cpu() if is_torch(mask) else mask) for mask in masks]
    entries = sum(array.size for array in arrays)
    if not entries:
        return 1.0, 1.0
    total = sum(float(array.sum(dtype=np.float64)) for array in arrays)
    return total / entries, sum(int((array == 1).sum()) for array in arrays) / entries


def pack_state(server: MaskedServer, params: Params) -> dict[str, np.ndarray]:
    """Model and server as named arrays, enough to go on from."""
    packed = {f"arrays/{name}": np.asarray(array) for name, array in params.items()}
    for moment, arrays in (server.state or {}).items():
        packed |= {f"state/{moment}/{name}": np.asarray(array) for name, array in arrays.items()}
    return {**packed, "medians": np.array(server.medians, np.float64)}


def unpack_state(server: MaskedServer, packed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Put a server back to where `pack_state` saw it, and give back the model."""
    state: State = {}
    for key, array in packed.items():
        if key.startswith("state/"):
            _, moment, name = key.split("/", 2)
            state.setdefault(moment, {})[name] = array
    server.state, server.medians = state or None, packed["medians"].tolist()
    return {key.removeprefix("arrays/"): array for key, array in packed.items() if key.startswith("arrays/")}


def _zeros(merged: Aggregate) -> dict[str, Array]:
    """A model of zeros with the entries of an aggregate."""
    return {name: array * 0 for name, array in {**merged.mean, **merged.buffers}.items()}


def _length(params: Params, buffers: Collection[str] | None) -> float:
    voters = [array for name, array in params.items() if treatment(name, spec(array), buffers) == "masked"]
    return norm(flat(native(array)) for array in voters)


def _lower_median(values: list[float]) -> float:
    """The middle value, of two the smaller: one of two clients cannot move it up."""
    return sorted(values)[(len(values) - 1) // 2]
