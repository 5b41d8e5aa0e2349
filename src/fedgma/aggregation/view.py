"""What a rule's function reads: for one array of the model, sums over the round's clients under fixed names.

A function asks for a value by the name of its argument, and only the sums that it names are kept (docs/rules.md). The
same function serves one round ([entry]) and many runs at once ([run, entry]): arrays have the entries on their last
axis, and numbers of a round are columns that broadcast against them. Sums are float64.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fedgma.aggregation.kernels.plain import FURTHER, Sums
from fedgma.aggregation.masks import Mask
from fedgma.arrays import Array, cast, is_torch
from fedgma.errors import ConfigError

Compute = Callable[..., Any]

# the values that a function can ask for, and the further sums that they are made of
READABLE: dict[str, tuple[str, ...]] = {
    "name": (),  # of the array
    "mean": (),  # the weighted mean, in the array's number type
    "mask": (),  # the mask of the votes, for a `Rule` that has one
    "total": (),  # weighted sum of updates
    "votes": (),  # sum of signs
    "agreement": (),  # |votes| / clients
    "positive": ("parts",),  # weighted sum of positive values
    "negative": ("parts",),  # the same of negative values, without their sign
    "magnitude": ("parts",),  # the sum of both
    "positives": ("counts",),  # clients with a positive value
    "negatives": ("counts",),
    "positive_weight": ("weights",),  # the weight of these clients
    "negative_weight": ("weights",),
    "squares": ("squares",),  # weighted sum of squares
    "clients": (),  # how many were counted
    "weight": (),  # their total weight
    "measured": (),  # what the rule's `measure` returned, summed over the arrays of the model
    "xp": (),  # the library of the arrays: numpy or torch
    "view": (),  # all of this as one object
}
FUSED = {"name", "mean", "mask", "clients", "weight", "xp"}  # values that are known without a tally


class Step(NamedTuple):
    """What a rule's function returns: the mean that replaces the weighted one, a mask (None: ones), and next state."""

    mean: Array
    mask: Array | None = None
    state: Mapping[str, Array] = {}


@dataclass
class View:
    """The values of one array; `sums` are those of a tally, or of many."""

    name: str
    mean: Array
    mask: Array | None
    clients: Array  # float64 [1], or [run, 1]
    weight: Array
    sums: Sums | None
    vote_mask: Callable[[Mask], Array]  # the mask that another function makes of the votes
    state: Mapping[str, Array] = field(default_factory=dict)
    measured: Mapping[str, Array] = field(default_factory=dict)

    @property
    def kept(self) -> Sums:
        """The sums; a rule that reads none is not given any."""
        assert self.sums is not None
        return self.sums

    @property
    def total(self) -> Array:
        """Weighted sum of updates."""
        return self.kept.total + self.kept.rest

    @property
    def votes(self) -> Array:
        """Sum of signs."""
        return cast(self.kept.votes, "float64")

    @property
    def agreement(self) -> Array:
        """Share by which one sign outvotes the other."""
        return abs(self.votes) / self.clients

    @property
    def positive(self) -> Array:
        """Weighted sum of positive values."""
        return self.kept.positive + self.kept.positive_rest

    @property
    def negative(self) -> Array:
        """Weighted sum of negative values, without their sign."""
        sums = self.kept
        difference = (sums.positive - sums.total) + (cast(sums.positive_rest, "float64") - sums.rest)
        return difference * (difference > 0)  # rounding can make a sum that is almost zero negative

    @property
    def magnitude(self) -> Array:
        """Weighted sum of absolute values."""
        return self.positive + self.negative

    @property
    def positives(self) -> Array:
        """Number of clients with a positive value."""
        return cast(self.kept.positives, "float64")

    @property
    def negatives(self) -> Array:
        """Number of clients with a negative value."""
        return self.positives - self.votes

    @property
    def positive_weight(self) -> Array:
        """Weight of the clients with a positive value."""
        return read_only(self.kept.positive_weight)

    @property
    def negative_weight(self) -> Array:
        """Weight of the clients with a negative value."""
        return read_only(self.kept.negative_weight)

    @property
    def squares(self) -> Array:
        """Weighted sum of squares."""
        return self.kept.squares + self.kept.squares_rest

    @property
    def xp(self) -> Any:
        """The library of the arrays."""
        if not is_torch(self.mean):
            return np
        import torch

        return torch

    @property
    def view(self) -> "View":
        """The view itself."""
        return self

    def call(self, function: Compute, arguments: tuple[str, ...]) -> Any:
        """Call a function with the values that it asks for."""
        values = {name: self.state[name] if name in self.state else getattr(self, name) for name in arguments}
        with np.errstate(all="ignore"):  # what is not finite is found afterwards
            return function(**values)


def read_only(array: Array) -> Array:
    """A view that a rule's function cannot write to by mistake; tensors of other devices stay as they are."""
    if not isinstance(array, np.ndarray):
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def own_memory(array: Array) -> Array:
    """What a rule's function returned, as an array that can be written to."""
    return array.copy() if isinstance(array, np.ndarray) and not array.flags.writeable else array


def arguments_of(function: Compute, state: Mapping[str, float], rule: str) -> tuple[str, ...]:
    """The values that a function asks for; raises `ConfigError` for one that there is not."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(f"rule {rule!r}: expected a function of sums, got {function!r:.60}") from None
    known = {*READABLE, *state}
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        if parameter.name not in known and needed:
            names = ", ".join(sorted(known))
            raise ConfigError(
                f"rule {rule!r} asks for {parameter.name!r}, which is not a sum of a round; known: {names}"
            )
    return tuple(p.name for p in parameters if p.name in known and not is_bound(function, p.name))


def is_bound(function: Compute, name: str) -> bool:
    """Whether a `functools.partial` has given this argument already."""
    return isinstance(function, functools.partial) and name in function.keywords


def further_of(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The further sums that these values are made of."""
    wanted = {group for name in arguments for group in READABLE.get(name, ())}
    return tuple(group for group in FURTHER if group in wanted)


def read_step(result: Any, view: View, rule: str) -> Step:
    """A function's result as a step: the mean alone, (mean, mask) or (mean, mask, state)."""
    step = Step(*result) if isinstance(result, tuple) and 2 <= len(result) <= 3 else Step(result)
    if step.state is not None and not isinstance(step.state, Mapping):
        raise ConfigError(
            f"rule {rule!r} must return the mean, (mean, mask) or (mean, mask, state) with the state as a dict of "
            f"arrays, got a {type(step.state).__name__} as its state"
        )
    parts = {"mean": step.mean, "mask": step.mask, **(step.state or {})}
    for part, array in parts.items():
        if part == "mask" and array is None:
            continue
        if tuple(getattr(array, "shape", ())) != tuple(view.mean.shape):
            shape = list(getattr(array, "shape", ())) if hasattr(array, "shape") else type(array).__name__
            raise ConfigError(
                f"rule {rule!r} must return arrays of the mean's shape {list(view.mean.shape)} for {view.name!r}, "
                f"got {shape} as its {part}"
            )
    return step._replace(state=step.state or {})


def total_measures(measured: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Measures of all arrays of a model, summed in their order, as columns [..., 1]."""
    totals: dict[str, Array] = {}
    for numbers in measured:
        for name, value in numbers.items():
            totals[name] = totals[name] + value if name in totals else value
    return {name: value[..., None] for name, value in totals.items()}
