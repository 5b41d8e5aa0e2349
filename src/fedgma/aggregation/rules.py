"""The library's rules; each turns clients' updates into one `Aggregate`.

    masked_mean(tau)            gradient masked averaging, the paper's rule
    mean()                      the plain weighted mean
    and_mask(tau)               the mean where clients agree, zero elsewhere
    sign_test(level)            the mean, scaled down where the votes may be an accident
    rlr(threshold)              robust learning rate: the mean, reversed where too few clients agree
    median(), trimmed_mean()    per entry, unweighted
    multi_krum(share)           the mean of the clients whose updates lie closest together, unweighted
    norm_kept(tau)              the masked mean, scaled per array to the norm of the plain mean
    masked_extra(tau)           the plain mean and, added to it, the masked mean
    damped_mean, shuffled_mask, stale_mask, cross_fitted    tell why a mask helps or costs (in `controls`)
    ties, majority_sign, magnitude_agreement       elect a sign for each entry (in `elections`)
    voters_only(tau)            gradient masked averaging without the clients that do not move an entry (there too)
    wiener, james_stein, fedexp                    scale the mean by signal and noise (in `scales`)
    clipped(rule, norm)         any rule, over updates of bounded norm; other rules of rules are in `wrappers`

Call a rule with the updates and the clients' raw sample counts. Updates are a mapping of names to arrays with the
client axis first, a list of mappings (for each client a `state_dict` of differences, buffers and counters included), or
a list of lists of arrays (entries are then named "0", "1", ...).

`RULES` is the only list of rules; names, settings, labels and the simulator all read it.
"""

import inspect
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from fedgma.aggregation.controls import cross_fitted, damped_mean, shuffled_mask, stale_mask
from fedgma.aggregation.elections import magnitude_agreement, majority_sign, ties, voters_only
from fedgma.aggregation.gate import Refused, entry_kind, read_schema
from fedgma.aggregation.masks import hard_mask, reversing_mask, sign_test_mask, soft_mask
from fedgma.aggregation.norms import norm
from fedgma.aggregation.own import AnyRule, as_rule
from fedgma.aggregation.rule import Prepare, Rule
from fedgma.aggregation.scales import fedexp, james_stein, wiener
from fedgma.aggregation.wrappers import to_norm
from fedgma.arrays import (
    Array,
    Params,
    cast,
    flatten,
    is_torch,
    move_to,
    placement,
    spec,
    to_native,
    to_user,
    zeros,
)
from fedgma.errors import ConfigError, did_you_mean, nearest


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
    """The weighted mean where agreement reaches tau, zero elsewhere (Parascandolo et al. 2020).

    `inverse_sparsity_scale` divides each array's mask by the share of entries that it keeps, an option of that paper's
    code.
    """
    mask = hard_mask(tau)
    settings = {"tau": mask.tau, "inverse_sparsity_scale": inverse_sparsity_scale}
    return Rule("and_mask", mask, compute=_rescale if inverse_sparsity_scale else None, settings=settings)


def sign_test(level: float = 0.05) -> Rule:
    """Masked averaging with a significance level in place of tau: 1 where a two-sided sign test rejects fair coins.

    So the agreement that is asked for falls as the number of clients grows, and few clients never reach it. Elsewhere
    the mean is scaled by the agreement. The test is that of Arbuthnot (1710): votes are sums of fair coins, and a
    client that does not move an entry is counted as one.

    >>> sign_test(0.3)({"w": np.array([[3.0, 3.0], [3.0, 3.0], [3.0, -3.0]])}).update
    {'w': array([3.        , 0.33333333])}
    """
    mask = sign_test_mask(level)
    return Rule("sign_test", mask, settings={"level": mask.level})


def rlr(threshold: int) -> Rule:
    """Robust learning rate (Ozdayi et al. 2021): the weighted mean, reversed where |votes| is below the threshold."""
    mask = reversing_mask(threshold)
    return Rule("rlr", mask, settings={"threshold": mask.threshold})


def median() -> Rule:
    """The median of each entry over clients, unweighted.

    >>> median()({"w": np.array([[1.0], [2.0], [90.0]])}, [10, 10, 10]).update
    {'w': array([2.])}
    """
    return Rule("median", combine=partial(_trim_and_average, share=0.5), entrywise=True)


def trimmed_mean(share: float = 0.1) -> Rule:
    """The mean of each entry without the `share` largest and the `share` smallest clients, unweighted.

    >>> trimmed_mean(0.25)({"w": np.array([[1.0], [2.0], [4.0], [90.0]])}, [10] * 4).update
    {'w': array([3.])}
    """
    _check_share(share, "clients cut at each end")
    combine = partial(_trim_and_average, share=float(share))
    return Rule("trimmed_mean", combine=combine, settings={"share": share}, entrywise=True)


def multi_krum(share: float = 0.1) -> Rule:
    """Multi-Krum (Blanchard et al. 2017): the mean without the `share` of clients that lie farthest from the others.

    A client's score is the sum of the squared distances to its n - f - 2 nearest neighbours, where f is the share of n
    clients. The n - f lowest scores are averaged, unweighted; clients with the same score stay or go together.

    >>> multi_krum(0.25)({"w": np.array([[1.0], [2.0], [3.0], [90.0]])}, [10] * 4).update
    {'w': array([2.])}
    """
    _check_share(share, "clients left out")
    select, combine = partial(_closest_rows, share=float(share)), partial(_trim_and_average, share=0.0)
    return Rule("multi_krum", combine=combine, select=select, settings={"share": share}, entrywise=True)


def norm_kept(tau: float = 0.4) -> Rule:
    """The masked mean, scaled per array to the norm of the plain mean: the mask turns the step but does not shorten it.

    >>> updates = {"w": np.array([[4.0, 3.0], [4.0, -9.0], [4.0, -3.0]])}
    >>> norm_kept(tau=0.5)(updates, [10, 10, 10]).update
    {'w': array([ 4.8507125 , -1.21267813])}
    """
    mask = soft_mask(tau)
    return Rule("norm_kept", mask, compute=_keep_norm, settings={"tau": mask.tau})


def masked_extra(tau: float = 0.4) -> Rule:
    """The plain mean and, added to it, the masked mean: a step that is up to twice as long where clients agree.

    >>> updates = {"w": np.array([[3.0, 3.0], [3.0, 3.0], [3.0, -3.0]])}
    >>> masked_extra(tau=0.5)(updates, [10, 10, 10]).update
    {'w': array([6.        , 1.33333333])}
    """
    mask = soft_mask(tau)
    return Rule("masked_extra", mask, compute=_add_one, settings={"tau": mask.tau})


def clipped(rule: AnyRule, norm: float) -> Rule:
    """The same rule over updates that are scaled down to at most `norm`, taken over all trainable entries together."""
    if isinstance(norm, bool) or not isinstance(norm, int | float) or not 0 < norm < math.inf:
        raise ConfigError(f"norm (the largest norm of an update) must be a number above 0, got {norm!r}")
    rule = as_rule(rule)
    settings = {**rule.settings, "norm": norm}
    return replace(rule, name=f"clipped_{rule.name}", prepare=Clip(norm, rule.prepare), settings=settings)


@dataclass(frozen=True)
class Clip:
    """The `prepare` of a clipped rule; a fleet clips all updates at once."""

    norm: float
    inner: Prepare | None = None

    def __call__(self, update: Params, buffers: Collection[str] | None) -> Params:
        """The update, scaled down to the largest norm."""
        return clip(update if self.inner is None else self.inner(update, buffers), self.norm, buffers)


def clip(update: Params, limit: float, buffers: Collection[str] | None = None) -> Params:
    """Scale one client's update down to norm `limit` if it is longer; updates that the gate refuses stay unchanged.

    >>> clip({"w": np.array([3.0, 4.0])}, 1.0)["w"].round(6).tolist()
    [0.6, 0.8]
    """
    try:
        voters = [name for name, entry in read_schema(update).items() if entry_kind(name, entry, buffers) == "masked"]
    except Refused:
        return update
    arrays = [flatten(to_native(update[name])) for name in voters]
    length, scale = norm(arrays), 1.0
    if length == math.inf:  # finite entries whose norm overflows float64, or an infinite one, which the gate refuses
        scale = 2.0**-64
        length = norm(cast(array, "float64") * scale for array in arrays)
    if not limit < length / scale or length == math.inf:  # also for NaN
        return update
    factor = limit / length * scale
    return {name: _scale(array, factor) if name in voters else array for name, array in update.items()}


@dataclass(frozen=True)
class RuleRow:
    """A rule of the library: the function that makes it, its label in tables, and its noun in sentences."""

    make: Callable[..., Rule]
    label: str
    noun: str = ""

    @cached_property
    def settings(self) -> tuple[str, ...]:
        """Names of the rule's settings: the arguments of `make`."""
        return tuple(inspect.signature(self.make).parameters)

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """What the rule reads of a round; see `Rule.needs`."""
        return self._usual.needs

    @property
    def may_mask(self) -> bool:
        """Whether the rule's aggregates can have a mask."""
        return self._usual.mask is not None or self._usual.compute is not None

    @cached_property
    def _usual(self) -> Rule:
        parameters = inspect.signature(self.make).parameters
        required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
        return self.make(**dict.fromkeys(required, 1))


RULES: dict[str, RuleRow] = {
    "mean": RuleRow(mean, "mean", "the mean"),
    "gma": RuleRow(masked_mean, "GMA"),
    "and_mask": RuleRow(and_mask, "AND-mask", "the AND-mask"),
    "sign_test": RuleRow(sign_test, "sign test", "the sign test"),
    "rlr": RuleRow(rlr, "RLR"),
    "median": RuleRow(median, "median", "the median"),
    "trimmed_mean": RuleRow(trimmed_mean, "trimmed mean", "the trimmed mean"),
    "multi_krum": RuleRow(multi_krum, "multi-Krum"),
    "damped_mean": RuleRow(damped_mean, "damped mean", "the damped mean"),
    "shuffled_mask": RuleRow(shuffled_mask, "shuffled mask", "the shuffled mask"),
    "norm_kept": RuleRow(norm_kept, "GMA, norm kept", "GMA with its norm kept"),
    "masked_extra": RuleRow(masked_extra, "mean + GMA", "the mean with a masked step added"),
    "stale_mask": RuleRow(stale_mask, "stale mask", "the stale mask"),
    "cross_fitted": RuleRow(cross_fitted, "cross-fitted mask", "the cross-fitted mask"),
    "ties": RuleRow(ties, "TIES"),
    "majority_sign": RuleRow(majority_sign, "majority sign", "the majority sign"),
    "magnitude_agreement": RuleRow(magnitude_agreement, "magnitude agreement"),
    "voters_only": RuleRow(voters_only, "GMA, voters only", "GMA among those who vote"),
    "wiener": RuleRow(wiener, "Wiener"),
    "james_stein": RuleRow(james_stein, "James-Stein"),
    "fedexp": RuleRow(fedexp, "FedExP"),
}
OF_THE_RUN = ("seed", "population")  # settings of rules that a run gives: its seed, its number of clients
RULE_SETTINGS = tuple(dict.fromkeys(n for row in RULES.values() for n in row.settings if n not in OF_THE_RUN))
BASELINE = "mean"  # the rule that others are compared with
AGGREGATORS: dict[str, Callable[..., Rule]] = {name: row.make for name, row in RULES.items()}


def unknown_rule(name: str) -> str | None:
    """A sentence if this is neither the name of a rule nor a user's own, such as `file.py:name`; else None."""
    if name in RULES or ":" in name:
        return None
    hint = did_you_mean(nearest(name, RULES))
    return f"expected {', '.join(RULES)} or your own as 'file.py:name', got {name!r}{hint}"


def _scale(array: Array, factor: float) -> Array:
    return to_user(cast(to_native(array), "float64") * factor, spec(array), placement(array))


def _check_share(share: float, what: str) -> None:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 0.5:
        raise ConfigError(f"share (of {what}) must be at least 0 and below 0.5, got {share!r}")


def _closest_rows(stack: Array, share: float) -> Array:
    """The rows that multi-Krum averages, rising."""
    wide, clients = cast(stack, "float64"), len(stack)
    nearest = max(1, clients - int(share * clients) - 2)
    distances = zeros((clients, clients), "float64", wide)
    for row in range(clients):
        distances[row] = ((wide - wide[row]) ** 2).sum(-1)
    scores = move_to(_sorted(distances)[1 : 1 + nearest].sum(0), np.empty(0))  # [0] is the distance to itself
    return np.flatnonzero(scores <= np.sort(scores)[clients - int(share * clients) - 1])


def _sorted(values: Array) -> Array:
    return values.sort(0).values if is_torch(values) else np.sort(values, axis=0)


def _trim_and_average(stack: Array, share: float) -> Array:
    """Mean per entry without the lowest and highest `share` of clients; at 0.5 the median."""
    clients = len(stack)
    cut = min(int(share * clients), (clients - 1) // 2)
    ordered = _sorted(cast(stack, "float64"))
    return ordered[cut : clients - cut].mean(0)


# -- functions of sums (`view`), for one run and for many ------------------------------------------------------------


def _rescale(mean: Array, mask: Array) -> tuple[Array, Array]:
    return mean, mask / (mask.mean(-1)[..., None] + 1e-10)


def _keep_norm(mean: Array, mask: Array) -> tuple[Array, Array]:
    return mean, to_norm(mean, mask)


def _add_one(mean: Array, mask: Array) -> tuple[Array, Array]:
    return mean, mask + 1
