"""Rules: many clients' updates in, one `Aggregate` out.

    masked_mean(tau)            gradient masked averaging: the paper's
    mean()                      the plain weighted mean
    and_mask(tau)               the mean where clients agree, nothing elsewhere
    rlr(threshold)              robust learning rate: the mean, reversed where too few agree
    median(), trimmed_mean()    per entry, unweighted: for comparison
    damped_mean(tau)            control: the plain mean, made as short per array as the masked one
    shuffled_mask(tau, seed)    control: the mask's values, dealt to random entries of the array
    clipped(rule, norm)         any of them, over updates of bounded norm

Call one with the updates and the clients' raw sample counts. Updates may be a mapping of names to arrays with the
client axis first, a list of mappings (a `state_dict` of differences per client, buffers and counters included), or a
list of lists of arrays as other servers hold them (entries are then named "0", "1", ...).

`RULES` is the one list of them: everything that names, makes, labels or runs a rule reads it from there.
"""

import inspect
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from fedgma.aggregation.gate import Refused, norm, read_schema, treatment
from fedgma.aggregation.masks import hard_mask, reversing_mask, soft_mask
from fedgma.aggregation.rule import Rule
from fedgma.arrays import Array, Params, cast, delivered, flat, is_torch, native, placement, spec
from fedgma.errors import ConfigError
from fedgma.seeds import generator


def masked_mean(tau: float = 0.4) -> Rule:
    """Gradient masked averaging: the weighted mean, scaled down where fewer than (1 + tau) / 2 of the clients agree.

    >>> updates = {"w": np.array([[3.0, 3.0], [3.0, 3.0], [3.0, -3.0]])}
    >>> masked_mean(tau=0.5)(updates, [10, 10, 10]).update
    {'w': array([3.        , 0.33333333])}
    """
    mask = soft_mask(tau)
    return Rule("gma", mask, settings={"tau": mask.tau})


def mean() -> Rule:
    """The plain weighted mean.

    >>> mean()({"w": np.array([[1.0], [4.0]])}, [20, 10]).update
    {'w': array([2.])}
    """
    return Rule("mean")


def and_mask(tau: float = 0.4, inverse_sparsity_scale: bool = False) -> Rule:
    """The weighted mean where agreement reaches tau, nothing elsewhere (Parascandolo et al. 2020).

    `inverse_sparsity_scale` divides each array's survivors by their share, as that paper's code can.
    """
    mask = hard_mask(tau)
    settings = {"tau": mask.tau, "inverse_sparsity_scale": inverse_sparsity_scale}
    return Rule("and_mask", mask, change=_rescaled if inverse_sparsity_scale else None, settings=settings)


def rlr(threshold: int) -> Rule:
    """Robust learning rate (Ozdayi et al. 2021): the weighted mean, reversed where |votes| is below the threshold."""
    mask = reversing_mask(threshold)
    return Rule("rlr", mask, settings={"threshold": mask.threshold})


def median() -> Rule:
    """The median of each entry over clients, unweighted.

    >>> median()({"w": np.array([[1.0], [2.0], [90.0]])}, [10, 10, 10]).update
    {'w': array([2.])}
    """
    return Rule("median", combine=partial(_middle, share=0.5))


def trimmed_mean(share: float = 0.1) -> Rule:
    """The mean of each entry without the `share` largest and the `share` smallest clients, unweighted.

    >>> trimmed_mean(0.25)({"w": np.array([[1.0], [2.0], [4.0], [90.0]])}, [10] * 4).update
    {'w': array([3.])}
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 0.5:
        raise ConfigError(f"share is the part cut off at each end, from 0 to below 0.5, got {share!r}")
    return Rule("trimmed_mean", combine=partial(_middle, share=float(share)), settings={"share": share})


def damped_mean(tau: float = 0.4) -> Rule:
    """Control: the plain mean, scaled per array to the norm that the masked mean would have."""
    mask = soft_mask(tau)
    return Rule("damped_mean", mask, change=_damped, settings={"tau": mask.tau})


def shuffled_mask(tau: float = 0.4, seed: int = 0) -> Rule:
    """Control: the masked mean with each array's mask values dealt to random entries of the array."""
    mask = soft_mask(tau)
    return Rule("shuffled_mask", mask, change=partial(_shuffled, seed=seed), settings={"tau": mask.tau, "seed": seed})


def clipped(rule: Rule, norm: float) -> Rule:
    """The same rule over updates scaled down to `norm` (over all trainable entries together) where longer."""
    if isinstance(norm, bool) or not isinstance(norm, int | float) or not 0 < norm < math.inf:
        raise ConfigError(f"norm is the greatest length of an update, above 0, got {norm!r}")
    inner = rule.prepare

    def prepare(update: Params, buffers: Collection[str] | None) -> Params:
        return clip(update if inner is None else inner(update, buffers), norm, buffers)

    settings = {**rule.settings, "norm": norm}
    return replace(rule, name=f"clipped_{rule.name}", prepare=prepare, settings=settings)


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


@dataclass(frozen=True)
class RuleRow:
    """A rule of the library: how to make it, and what to call it in a table and in a sentence."""

    make: Callable[..., Rule]
    label: str
    noun: str = ""

    @cached_property
    def settings(self) -> tuple[str, ...]:
        """The settings that the rule reads: the arguments of `make`."""
        return tuple(inspect.signature(self.make).parameters)

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """What the rule reads of a round; see `Rule.needs`."""
        given = inspect.signature(self.make).parameters.values()
        return self.make(**{one.name: 1 for one in given if one.default is one.empty}).needs


RULES: dict[str, RuleRow] = {
    "mean": RuleRow(mean, "mean", "the mean"),
    "gma": RuleRow(masked_mean, "GMA"),
    "and_mask": RuleRow(and_mask, "AND-mask", "the AND-mask"),
    "rlr": RuleRow(rlr, "RLR"),
    "median": RuleRow(median, "median", "the median"),
    "trimmed_mean": RuleRow(trimmed_mean, "trimmed mean", "the trimmed mean"),
    "damped_mean": RuleRow(damped_mean, "damped mean", "the damped mean"),
    "shuffled_mask": RuleRow(shuffled_mask, "shuffled mask", "the shuffled mask"),
}
BASELINE = "mean"  # what the others are compared with
AGGREGATORS: dict[str, Callable[..., Rule]] = {name: row.make for name, row in RULES.items()}


def _scaled(array: Array, factor: float) -> Array:
    return delivered(cast(native(array), "float64") * factor, spec(array), placement(array))


def _middle(stack: Array, share: float) -> Array:
    """Mean over the clients left when `share` of them is cut off at each end; at 0.5 the one or two in the middle."""
    clients = len(stack)
    cut = min(int(share * clients), (clients - 1) // 2)
    ordered = cast(stack, "float64")
    ordered = ordered.sort(0).values if is_torch(stack) else np.sort(ordered, axis=0)
    return ordered[cut : clients - cut].mean(0)


# -- changes of a mask: written once, for one run (flat arrays) and for many (run axis first) --------------------------


def _rescaled(name: str, mean: Array, mask: Array) -> Array:
    return mask / (mask.mean(-1)[..., None] + 1e-10) if mask.shape[-1] else mask


def _damped(name: str, mean: Array, mask: Array) -> Array:
    """One number for the whole array: the masked mean's length over the plain mean's."""
    if not mask.shape[-1]:
        return mask
    wide = cast(mean, "float64")
    scale = abs(wide).max(-1) if not is_torch(wide) else abs(wide).amax(-1)
    unit = wide / _positive(scale)[..., None]  # no square of it can overflow or vanish
    lengths = [(values * values).sum(-1) ** 0.5 for values in (unit * mask, unit)]
    share = lengths[0] / _positive(lengths[1]) + (lengths[1] == 0)
    return cast(mask * 0 + share[..., None], spec(mask).dtype)


def _positive(values: Array) -> Array:
    """The same numbers, with 1 in the place of zeros."""
    return values + (values == 0)


def _shuffled(name: str, mean: Array, mask: Array, seed: int) -> Array:
    return mask[..., _order_like(name, mask.shape[-1], seed, mask.device if is_torch(mask) else None)]


@lru_cache(maxsize=1024)  # drawn and shipped once, not once a round
def _order_like(name: str, size: int, seed: int, device: Any) -> Any:
    order = generator(seed, "shuffled mask", name).permutation(size)
    if device is None:
        return order
    import torch

    return torch.as_tensor(order, device=device)
