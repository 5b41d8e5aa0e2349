"""The library's rules; each turns clients' updates into one `Aggregate`.

    masked_mean(tau)            gradient masked averaging, the paper's rule
    mean()                      the plain weighted mean
    and_mask(tau)               the mean where clients agree, zero elsewhere
    rlr(threshold)              robust learning rate: the mean, reversed where too few clients agree
    median(), trimmed_mean()    per entry, unweighted
    multi_krum(share)           the mean of the clients whose updates lie closest together, unweighted
    damped_mean(tau)            control: the server's unmasked step, as long per array as its masked step
    shuffled_mask(tau, seed)    control: the mask's values at random entries of the array, as long as the masked step
    stale_mask(tau)             control: the mask of the round before
    cross_fitted(tau, seed)     control: half of the clients votes on the other half's mean
    norm_kept(tau)              the masked mean, scaled per array to the norm of the plain mean
    masked_extra(tau)           the plain mean and, added to it, the masked mean
    ties, majority_sign, magnitude_agreement       elect a sign for each entry (in `elections`)
    voters_only(tau)            gradient masked averaging without the clients that do not move an entry (there too)
    wiener, james_stein, fedexp                    scale the mean by signal and noise (in `scales`)
    clipped(rule, norm)         any rule, over updates of bounded norm; other rules of rules are in `wrappers`

Call a rule with the updates and the clients' raw sample counts. Updates are a mapping of names to arrays with the
client axis first, a list of mappings (for each client a `state_dict` of differences, buffers and counters included), or
a list of lists of arrays (entries are then named "0", "1", ...).

`RULES` is the only list of rules; names, settings, labels and the simulator all read it.
"""

import difflib
import hashlib
import inspect
import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np

from fedgma.aggregation.elections import magnitude_agreement, majority_sign, ties, voters_only
from fedgma.aggregation.gate import Refused, entry_kind, norm, read_schema
from fedgma.aggregation.masks import VoteMask, hard_mask, reversing_mask, signs, soft_mask
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
    quotient,
    spec,
    to_native,
    to_user,
    zeros,
)
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
    """The weighted mean where agreement reaches tau, zero elsewhere (Parascandolo et al. 2020).

    `inverse_sparsity_scale` divides each array's mask by the share of entries that it keeps, an option of that paper's
    code.
    """
    mask = hard_mask(tau)
    settings = {"tau": mask.tau, "inverse_sparsity_scale": inverse_sparsity_scale}
    return Rule("and_mask", mask, compute=_rescale if inverse_sparsity_scale else None, settings=settings)


def rlr(threshold: int) -> Rule:
    """Robust learning rate (Ozdayi et al. 2021): the weighted mean, reversed where |votes| is below the threshold."""
    mask = reversing_mask(threshold)
    return Rule("rlr", mask, settings={"threshold": mask.threshold})


def median() -> Rule:
    """The median of each entry over clients, unweighted.

    >>> median()({"w": np.array([[1.0], [2.0], [90.0]])}, [10, 10, 10]).update
    {'w': array([2.])}
    """
    return Rule("median", combine=partial(_trim_and_average, share=0.5))


def trimmed_mean(share: float = 0.1) -> Rule:
    """The mean of each entry without the `share` largest and the `share` smallest clients, unweighted.

    >>> trimmed_mean(0.25)({"w": np.array([[1.0], [2.0], [4.0], [90.0]])}, [10] * 4).update
    {'w': array([3.])}
    """
    _check_share(share, "clients cut at each end")
    return Rule("trimmed_mean", combine=partial(_trim_and_average, share=float(share)), settings={"share": share})


def multi_krum(share: float = 0.1) -> Rule:
    """Multi-Krum (Blanchard et al. 2017): the mean without the `share` of clients that lie farthest from the others.

    A client's score is the sum of the squared distances to its n - f - 2 nearest neighbours, where f is the share of n
    clients. The n - f lowest scores are averaged, unweighted; clients with the same score stay or go together.

    >>> multi_krum(0.25)({"w": np.array([[1.0], [2.0], [3.0], [90.0]])}, [10] * 4).update
    {'w': array([2.])}
    """
    _check_share(share, "clients left out")
    select = partial(_closest_rows, share=float(share))
    return Rule("multi_krum", combine=partial(_trim_and_average, share=0.0), select=select, settings={"share": share})


def damped_mean(tau: float = 0.4) -> Rule:
    """Control: the step of a server without a mask, scaled per array to the length that its masked step would have."""
    mask = soft_mask(tau)
    return Rule("damped_mean", mask, compute=_no_mask, settings={"tau": mask.tau}, keep_length=True)


def shuffled_mask(tau: float = 0.4, seed: int = 0) -> Rule:
    """Control: each array's mask values moved to random entries of the array; the step is as long as the masked one."""
    mask, settings = soft_mask(tau), {"seed": seed}
    return Rule("shuffled_mask", mask, Shuffle(seed), settings={"tau": mask.tau, **settings}, keep_length=True)


def stale_mask(tau: float = 0.4) -> Rule:
    """Control: masked averaging with the mask of the round before, which knows nothing of this round's noise.

    The first round is not masked. The mask is the rule's state.
    """
    mask = soft_mask(tau)
    return Rule("stale_mask", mask, compute=_one_round_late, settings={"tau": mask.tau}, state={"before": 1.0})


def cross_fitted(tau: float = 0.4, seed: int = 0) -> Rule:
    """Control: the mask of one half of the clients applied to the other half's mean, and the other way round.

    The halves are drawn by the clients' names, so the order of arrival makes no difference. The result is a mean:
    moments of a server optimiser see it, as with `mask_position="before"`.

    >>> cross_fitted(tau=1.0)({"w": np.array([[2.0], [4.0], [-1.0], [3.0]])}, [1, 1, 1, 1]).update["w"].shape
    (1,)
    """
    mask = soft_mask(tau)
    combine = partial(_cross_fit, mask=mask, seed=seed)
    return Rule("cross_fitted", combine=combine, settings={"tau": mask.tau, "seed": seed}, weighted=True)


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


def clipped(rule: Rule, norm: float) -> Rule:
    """The same rule over updates that are scaled down to at most `norm`, taken over all trainable entries together."""
    if isinstance(norm, bool) or not isinstance(norm, int | float) or not 0 < norm < math.inf:
        raise ConfigError(f"norm (the largest norm of an update) must be a number above 0, got {norm!r}")
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
    near = difflib.get_close_matches(name, RULES, 1, 0.6)
    hint = f"; did you mean {near[0]!r}?" if near else ""
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


def _cross_fit(
    stack: Array, weights: Sequence[float], clients: Sequence[Hashable], *, mask: VoteMask, seed: int
) -> Array:
    """The weighted mean of two halves, each masked by the votes of the other; a client alone is not masked."""
    drawn = sorted(range(len(clients)), key=lambda place: _draw(seed, clients[place]))
    flat = stack.reshape(len(stack), -1)
    total: Any = 0.0
    for own, others in ((drawn[0::2], drawn[1::2]), (drawn[1::2], drawn[0::2])):
        summed: Any = sum(weights[place] * cast(flat[place], "float64") for place in own)
        votes: Any = sum(cast(signs(flat[place]), "int64") for place in others)
        total = total + (summed * mask(votes, len(others), "float64") if others else summed)
    return quotient(total, math.fsum(weights)).reshape(stack.shape[1:])


def _draw(seed: int, client: Hashable) -> bytes:
    return hashlib.sha256(f"cross-fit {seed} {client}".encode()).digest()


def _trim_and_average(stack: Array, share: float) -> Array:
    """Mean per entry without the lowest and highest `share` of clients; at 0.5 the median."""
    clients = len(stack)
    cut = min(int(share * clients), (clients - 1) // 2)
    ordered = _sorted(cast(stack, "float64"))
    return ordered[cut : clients - cut].mean(0)


# -- functions of sums (`view`), for one run and for many ------------------------------------------------------------


def _rescale(mean: Array, mask: Array) -> tuple[Array, Array]:
    return mean, mask / (mask.mean(-1)[..., None] + 1e-10)


def _no_mask(mean: Array, mask: Array) -> tuple[Array, Array]:
    return mean, mask * 0 + 1


def _keep_norm(mean: Array, mask: Array) -> tuple[Array, Array]:
    return mean, to_norm(mean, mask)


def _add_one(mean: Array, mask: Array) -> tuple[Array, Array]:
    return mean, mask + 1


def _one_round_late(mean: Array, mask: Array, before: Array) -> tuple[Array, Array, dict[str, Array]]:
    return mean, before, {"before": mask}


@dataclass(frozen=True)
class Shuffle:
    """Moves each array's mask values to random entries of the array."""

    seed: int

    def __call__(self, name: str, mean: Array, mask: Array) -> tuple[Array, Array]:
        """The mean, and the shuffled mask."""
        return mean, mask[..., _permutation(name, mask.shape[-1], self.seed, mask.device if is_torch(mask) else None)]


@lru_cache(maxsize=1024)  # drawn and copied to the device once, not every round
def _permutation(name: str, size: int, seed: int, device: Any) -> Any:
    order = generator(seed, "shuffled mask", name).permutation(size)
    if device is None:
        return order
    import torch

    return torch.as_tensor(order, device=device)
