"""The result of a round, and `finish`, which computes it from a tally."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedgma.aggregation import kernels
from fedgma.aggregation.kernels.plain import Sums
from fedgma.aggregation.masks import MASKS, Mask, VoteMask
from fedgma.aggregation.tally import Tally
from fedgma.arrays import (
    Array,
    Spec,
    cast,
    copy,
    flatten,
    is_torch,
    move_to,
    placement,
    spec,
    to_native,
    to_user,
    working_type,
)
from fedgma.errors import ConfigError, DataError, Diverged


class Aggregate(NamedTuple):
    """The result of a round: weighted mean, mask (None: all ones), buffers, and notes.

    `mean` and `mask` are separate because the mask applies after the server optimiser's preconditioner. `notes` holds
    the number of `clients` counted, their total `weight`, and the `refused` clients with reasons.
    """

    mean: dict[str, Array]
    mask: dict[str, Array] | None
    notes: dict[str, Any]
    buffers: dict[str, Array] = {}  # noqa: RUF012  updates of buffers (mean) and counters (maximum), never masked
    length: dict[str, Array] | None = None  # mask of the step whose length, per array, this step takes; None: its own
    state: dict[str, dict[str, Array]] = {}  # noqa: RUF012  what the rule hands to the next round, by name and array

    @property
    def update(self) -> dict[str, Array]:
        """What a server without an optimiser adds to its parameters: mask times mean, and the buffers' updates."""
        masked = {name: self.masked(name, value) for name, value in self.mean.items()}
        return {**masked, **self.buffers}

    def masked(self, name: str, step: Array) -> Array:
        """One entry's step times its mask, in the number type of the step; a control keeps the masked step's length."""
        if self.mask is None:
            return step
        product = _times(step, self.mask[name])
        return product if self.length is None else to_length(product, _times(step, self.length[name]))

    @property
    def reference(self) -> "Aggregate":
        """The aggregate whose step has the length that this one takes."""
        return self._replace(mask=self.length, length=None)


def to_length(step: Array, reference: Array) -> Array:
    """One entry's step, scaled to the norm of another.

    >>> to_length(np.array([3.0, 4.0]), np.array([0.0, 1.0])).round(6).tolist()
    [0.6, 0.8]
    """
    flat = rows_to_length(flatten(to_native(step)), flatten(to_native(reference)))
    return to_user(flat, spec(step), placement(step))


def rows_to_length(steps: Array, references: Array) -> Array:
    """Steps [..., entry], each scaled to the norm of its reference; a step of zeros stays zero."""
    if not steps.shape[-1]:
        return steps
    ratio = row_norms(references) / or_one(row_norms(steps))
    return cast(cast(steps, "float64") * ratio[..., None], spec(steps).dtype)


def row_norms(rows: Array) -> Array:
    """The norm of each row, in float64; squares cannot overflow, and the largest cannot underflow."""
    wide = cast(rows, "float64")
    scale = abs(wide).amax(-1) if is_torch(wide) else abs(wide).max(-1)
    unit = wide / or_one(scale)[..., None]
    return scale * (unit * unit).sum(-1) ** 0.5


def or_one(values: Array) -> Array:
    """The same numbers, with zeros replaced by 1."""
    return values + (values == 0)


def _times(step: Array, mask: Array) -> Array:
    with np.errstate(over="ignore"):  # a step that is not finite is found before it is committed
        product = step * move_to(mask, step)
    return product.to(step.dtype) if is_torch(step) else np.asarray(product, dtype=step.dtype)


def finish(tally: Tally, tau: float = 0.4, mask: str | Mask = "soft", *, release: bool = False) -> Aggregate:
    """Compute the mean of a tally, and the mask of its votes at `tau`.

    `mask` is "soft" (the paper's), "hard" (AND-mask), "none" (plain mean), or your own function of (votes, clients,
    dtype). A tally can be finished several times, for instance at several tau; `release=True` saves memory and empties
    the tally.
    """
    if not isinstance(tally, Tally):
        raise DataError(f"expected a tally, got {type(tally).__name__}")
    if hasattr(tau, "conclude"):
        raise ConfigError("finish computes the mask of votes at `tau`; for another rule: rule.conclude(tally)")
    function = _mask_function(mask, tau)
    with tally.turns.use():
        tally.check_round()
        schema = tally.schema or {}
        if not release:
            return _aggregate(tally, schema, function, release)
        tally.turns.begin()
        merged = _aggregate(tally, schema, function, release)
        tally.clear()
        tally.turns.end()
        return merged


def _aggregate(tally: Tally, schema: Mapping[str, Spec], function: Mask | None, release: bool) -> Aggregate:
    means: dict[str, Array] = {}
    masks: dict[str, Array] = {}
    buffers: dict[str, Array] = {}
    for name, entry in schema.items():
        if name not in tally.sums:
            buffers[name] = to_user(copy(tally.maxima[name]), entry, tally.placement)
            continue
        sums = tally.sums.pop(name) if release else tally.sums[name]
        votes, target = sums.votes, buffers if sums.votes is None else means
        target[name] = to_user(_compute_mean(name, sums, tally, entry, release), entry, tally.placement)
        del sums  # frees the memory for the mask
        if function is not None and votes is not None:
            dtype = working_type(entry.dtype)
            mask = _compute_mask(function, votes, tally.clients, dtype)
            masks[name] = to_user(mask, Spec(entry.shape, dtype), tally.placement)
    return Aggregate(means, None if function is None else masks, tally.notes, buffers)


def _mask_function(mask: str | Mask, tau: float) -> Mask | None:
    if callable(mask):
        return mask
    if mask == "none":
        return None
    if mask not in MASKS:
        raise ConfigError(
            f"unknown mask {mask!r}; known: {', '.join(sorted([*MASKS, 'none']))}, or a function of votes"
        )
    return MASKS[mask](tau)


def _compute_mask(function: Mask, votes: Array, clients: int, kind: str) -> Array:
    if not isinstance(function, VoteMask):  # a user's function may need all of the array
        return function(copy(votes), clients, kind)  # and may write to it
    return kernels.mask(function, votes, clients, kind)


def _compute_mean(name: str, sums: Sums, tally: Tally, entry: Spec, reuse: bool) -> Array:
    native_type = "float32" if entry.dtype == "bfloat16" else entry.dtype
    value = kernels.mean(sums, tally.weight, native_type, reuse=reuse)
    # sums of float32 or smaller types cannot overflow float64, and their rounding errors float32 for great weights only
    may_overflow = entry.dtype == "float64" or tally.heaviest * tally.clients**2 > 2**51
    if may_overflow and kernels.first_nonfinite([value]) is not None:
        raise Diverged(f"the weighted sum of {name!r} overflows float64; nothing was changed, scale the updates down")
    return value
