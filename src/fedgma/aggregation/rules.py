"""Aggregators: many clients' updates in, one `Aggregate` out.

    masked_mean(tau)            gradient masked averaging: the paper's
    mean()                      the plain weighted mean
    and_mask(tau)               the mean where clients agree, nothing elsewhere
    rlr(threshold)              robust learning rate: the mean, reversed where too few agree
    median(), trimmed_mean()    per entry, unweighted: for comparison
    damped_mean(tau)            control: the plain mean, made as short per array as the masked one
    shuffled_mask(tau, seed)    control: the mask's values, dealt to random entries of the array
    clipped(aggregator, norm)   any of them, over updates of bounded norm

Call one with the updates and the clients' raw sample counts. Updates may be a mapping of names to arrays with the
client axis first, a list of mappings (a `state_dict` of differences per client, buffers and counters included), or a
list of lists of arrays as other servers hold them (entries are then named "0", "1", ...).
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from fedgma.aggregation.aggregate import Aggregate, finish
from fedgma.aggregation.gate import Gate, Refused, norm, read_schema, treatment
from fedgma.aggregation.gpu_stack import finish_stack
from fedgma.aggregation.masks import VoteMask, hard_mask, reversing_mask, soft_mask
from fedgma.aggregation.stack import Stack, Weights, lined_up
from fedgma.aggregation.tally import Tally
from fedgma.arrays import Array, Params, cast, delivered, flat, home, is_torch, native, spec
from fedgma.errors import ConfigError, DataError
from fedgma.seeds import generator

Updates = Params | Sequence[Params] | Sequence[Sequence[Array]]
Prepare = Callable[[Params, Collection[str] | None], Params]
Change = Callable[[str, Array, Array], Array]


@dataclass(frozen=True)
class Aggregator:
    """Turns updates and weights into an `Aggregate`; the pieces let a server stream as well.

    `mask` makes the mask of a tally's votes (None: no mask); `change` makes another mask of (name, mean, mask), array
    by array; `prepare` changes one client's update before it counts; `combine`, where it is set, gives an entry's mean
    from all updates [client, ...] instead, so they must be in memory together.
    """

    name: str
    mask: VoteMask | None = None
    change: Change | None = None
    prepare: Prepare | None = None
    combine: Callable[[Array], Array] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        """Whether clients can be added to a tally one at a time and forgotten."""
        return self.combine is None

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
            fused = finish_stack(tally, updates, weights, clients, self.mask)
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
        changed = {name: self.change(name, merged.mean[name], mask) for name, mask in merged.mask.items()}
        return merged._replace(mask=changed)


def masked_mean(tau: float = 0.4) -> Aggregator:
    """Gradient masked averaging: the weighted mean, scaled down where fewer than (1 + tau) / 2 of the clients agree.

    >>> updates = {"w": np.array([[3.0, 3.0], [3.0, 3.0], [3.0, -3.0]])}
    >>> masked_mean(tau=0.5)(updates, [10, 10, 10]).update
    {'w': array([3.        , 0.33333333])}
    """
    mask = soft_mask(tau)
    return Aggregator("gma", mask, settings={"tau": mask.tau})


def mean() -> Aggregator:
    """The plain weighted mean.

    >>> mean()({"w": np.array([[1.0], [4.0]])}, [20, 10]).update
    {'w': array([2.])}
    """
    return Aggregator("mean")


def and_mask(tau: float = 0.4, inverse_sparsity_scale: bool = False) -> Aggregator:
    """The weighted mean where agreement reaches tau, nothing elsewhere (Parascandolo et al. 2020).

    `inverse_sparsity_scale` divides each array's survivors by their share, as that paper's code can.
    """
    mask = hard_mask(tau)
    settings = {"tau": mask.tau, "inverse_sparsity_scale": inverse_sparsity_scale}
    return Aggregator("and_mask", mask, change=_rescaled if inverse_sparsity_scale else None, settings=settings)


def rlr(threshold: int) -> Aggregator:
    """Robust learning rate (Ozdayi et al. 2021): the weighted mean, reversed where |votes| is below the threshold."""
    mask = reversing_mask(threshold)
    return Aggregator("rlr", mask, settings={"threshold": mask.threshold})


def median() -> Aggregator:
    """The median of each entry over clients, unweighted.

    >>> median()({"w": np.array([[1.0], [2.0], [90.0]])}, [10, 10, 10]).update
    {'w': array([2.])}
    """
    return Aggregator("median", combine=partial(_middle, share=0.5))


def trimmed_mean(share: float = 0.1) -> Aggregator:
    """The mean of each entry without the `share` largest and the `share` smallest clients, unweighted.

    >>> trimmed_mean(0.25)({"w": np.array([[1.0], [2.0], [4.0], [90.0]])}, [10] * 4).update
    {'w': array([3.])}
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 0.5:
        raise ConfigError(f"share is the part cut off at each end, from 0 to below 0.5, got {share!r}")
    return Aggregator("trimmed_mean", combine=partial(_middle, share=float(share)), settings={"share": share})


def damped_mean(tau: float = 0.4) -> Aggregator:
    """Control: the plain mean, scaled per array to the norm that the masked mean would have."""
    mask = soft_mask(tau)
    return Aggregator("damped_mean", mask, change=_damped, settings={"tau": mask.tau})


def shuffled_mask(tau: float = 0.4, seed: int = 0) -> Aggregator:
    """Control: the masked mean with each array's mask values dealt to random entries of the array."""
    mask = soft_mask(tau)
    return Aggregator(
        "shuffled_mask", mask, change=partial(_shuffled, seed=seed), settings={"tau": mask.tau, "seed": seed}
    )


def shuffled_order(name: str, size: int, seed: int) -> np.ndarray:
    """Which entry's mask value each entry of an array gets under `shuffled_mask`; the same in every round."""
    return generator(seed, "shuffled mask", name).permutation(size)


def clipped(aggregator: Aggregator, norm: float) -> Aggregator:
    """The same aggregator over updates scaled down to `norm` (over all trainable entries together) where longer."""
    if isinstance(norm, bool) or not isinstance(norm, int | float) or not 0 < norm < math.inf:
        raise ConfigError(f"norm is the greatest length of an update, above 0, got {norm!r}")
    inner = aggregator.prepare

    def prepare(update: Params, buffers: Collection[str] | None) -> Params:
        return clip(update if inner is None else inner(update, buffers), norm, buffers)

    settings = {**aggregator.settings, "norm": norm}
    return replace(aggregator, name=f"clipped_{aggregator.name}", prepare=prepare, settings=settings)


def clip(update: Params, limit: float, buffers: Collection[str] | None = None) -> Params:
    """One client's update, scaled down to the norm `limit` where it is longer; what the gate will refuse is left alone.

    >>> clip({"w": np.array([3.0, 4.0])}, 1.0)["w"].round(6).tolist()
    [0.6, 0.8]
    """
    try:
        voters = [name for name, entry in read_schema(update).items() if treatment(name, entry, buffers) == "masked"]
    except Refused:
        return update
    length = norm(flat(native(update[name])) for name in voters)
    if not limit < length < math.inf:
        return update
    factor = limit / length
    return {name: _scaled(array, factor) if name in voters else array for name, array in update.items()}


AGGREGATORS: dict[str, Callable[..., Aggregator]] = {
    "gma": masked_mean,
    "mean": mean,
    "and_mask": and_mask,
    "rlr": rlr,
    "median": median,
    "trimmed_mean": trimmed_mean,
    "damped_mean": damped_mean,
    "shuffled_mask": shuffled_mask,
}


def _scaled(array: Array, factor: float) -> Array:
    return delivered(cast(native(array), "float64") * factor, spec(array), home(array))


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
        result[name] = delivered(combine(_stacked(entries)), spec(like), home(like))
    return result


def _stacked(entries: list[Array]) -> Array:
    if is_torch(entries[0]):
        import torch

        return torch.stack(entries)
    return np.stack(entries)


def _middle(stack: Array, share: float) -> Array:
    """Mean over the clients left when `share` of them is cut off at each end; at 0.5 the one or two in the middle."""
    clients = len(stack)
    cut = min(int(share * clients), (clients - 1) // 2)
    ordered = cast(stack, "float64")
    ordered = ordered.sort(0).values if is_torch(stack) else np.sort(ordered, axis=0)
    return ordered[cut : clients - cut].mean(0)


def _rescaled(name: str, mean: Array, mask: Array) -> Array:
    return mask if not math.prod(mask.shape) else mask / (float(mask.mean()) + 1e-10)


def _damped(name: str, mean: Array, mask: Array) -> Array:
    length = norm([native(mean)])
    share = norm([native(mean * mask)]) / length if length else 1.0
    return mask * 0 + share


def _shuffled(name: str, mean: Array, mask: Array, seed: int) -> Array:
    values = mask.reshape(-1)
    order: Any = shuffled_order(name, values.shape[0], seed)
    if is_torch(mask):
        import torch

        order = torch.as_tensor(order, device=mask.device)
    return values[order].reshape(mask.shape)
