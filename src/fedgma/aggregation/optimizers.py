"""Server optimisers turn an `Aggregate` into new parameters; the mask follows the preconditioner (Algorithm 2).

    sgd        FedAvg, FedProx   d = mean
    momentum   FedAvgM           z = beta z + mean;                           d = z
    adagrad    FedAdagrad        v = v + mean^2;                              d = mean / (sqrt(v) + epsilon)
    adam       FedAdam           v = beta2 v + (1 - beta2) mean^2;            d = z / (sqrt(v) + epsilon)
    yogi       FedYogi           v = v - (1 - beta2) mean^2 sign(v - mean^2); d = z / (sqrt(v) + epsilon)

    z = beta1 z + (1 - beta1) mean for adam and yogi;  params + learning_rate * mask * d for all.

Moments are computed from the unmasked mean, start at z = 0 and v = epsilon^2, and have no bias correction. An entry
with mask 0 does not move in the round, but its moments are updated. `mask_position="before"` computes the moments from
mask * mean instead: an ablation, not the paper's algorithm. Updates of buffers are added without learning rate or
moments.

State is a dict of arrays, passed in and out; nothing is changed in place. A step whose result is not finite raises
`Diverged` and leaves parameters and state unchanged.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedgma.aggregation.aggregate import Aggregate, to_length
from fedgma.arrays import FLOATS, Array, Params, cast, detach, is_torch, move_to, spec, to_native, working_type
from fedgma.errors import ConfigError, DataError, Diverged

State = dict[str, dict[str, Array]]  # {"z": {name: array}, "v": {name: array}}; empty for sgd
RULE = "rule."  # begins the names of a rule's arrays in a server's state
AVERAGED = "averaged"  # beside an average of models: how many models it amounts to, sum of beta^age


class Rates(NamedTuple):
    """Coefficients of the moments: numbers, or columns with one number per run."""

    keep1: Any  # beta1
    take1: Any  # 1 - beta1
    keep2: Any
    take2: Any
    epsilon: Any


class ServerOptimizer(NamedTuple):
    """`init(params) -> state` and `step(aggregate, state, params) -> (params, state)`."""

    name: str
    init: Callable[[Params], State]
    step: Callable[[Aggregate, State, Params], tuple[dict[str, Array], State]]
    settings: Mapping[str, Any]


def sgd(learning_rate: float = 1.0, *, mask_position: str = "after") -> ServerOptimizer:
    """FedAvg's server: add the masked mean.

    >>> from fedgma.aggregation.rules import masked_mean
    >>> server, params = sgd(), {"w": np.array([1.0, 1.0])}
    >>> merged = masked_mean(tau=1.0)({"w": np.array([[1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])})
    >>> server.step(merged, server.init(params), params)[0]["w"].round(3).tolist()
    [2.0, 1.111]
    """
    return server_optimizer("sgd", learning_rate, mask_position)


def momentum(learning_rate: float = 1.0, beta: float = 0.9, *, mask_position: str = "after") -> ServerOptimizer:
    """FedAvgM's server: a running sum of means."""
    return server_optimizer("momentum", learning_rate, mask_position, beta1=beta)


def adagrad(learning_rate: float = 0.1, epsilon: float = 1e-3, *, mask_position: str = "after") -> ServerOptimizer:
    """FedAdagrad's server (Reddi et al. 2021)."""
    return server_optimizer("adagrad", learning_rate, mask_position, epsilon=epsilon)


def adam(
    learning_rate: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    epsilon: float = 1e-3,
    *,
    mask_position: str = "after",
) -> ServerOptimizer:
    """FedAdam's server (Reddi et al. 2021)."""
    return server_optimizer("adam", learning_rate, mask_position, beta1=beta1, beta2=beta2, epsilon=epsilon)


def yogi(
    learning_rate: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    epsilon: float = 1e-3,
    *,
    mask_position: str = "after",
) -> ServerOptimizer:
    """FedYogi's server (Reddi et al. 2021)."""
    return server_optimizer("yogi", learning_rate, mask_position, beta1=beta1, beta2=beta2, epsilon=epsilon)


def averaged(optimizer: ServerOptimizer, beta: float = 0.9) -> ServerOptimizer:
    """The same optimiser, which also keeps an exponential average of its models: each counts beta times the next one.

    The average does not change training; it is the model to evaluate and to use, `state["average"]` (iterate averaging:
    Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992). It is of the models after each
    round alone: the model before the first round is no part of it, so it can be used after few rounds, too.

    >>> server, params = averaged(sgd(), beta=0.5), {"w": np.array([1.0])}
    >>> state, step = server.init(params), Aggregate({"w": np.array([3.0])}, None, {})
    >>> params, state = server.step(step, state, params)
    >>> params, state = server.step(step, state, params)
    >>> (params["w"].item(), state["average"]["w"].item())  # (2 * 7 + 4) / 3
    (7.0, 6.0)
    """
    _check_share(beta=beta)
    optimizer = as_optimizer(optimizer)

    def init(params: Params) -> State:
        floats = {key: detach(array) for key, array in params.items() if spec(array).dtype in FLOATS}
        average = {key: cast(array, working_type(spec(array).dtype)) for key, array in floats.items()}
        return {**optimizer.init(params), "average": average, AVERAGED: {"models": _like(0.0, params)}}

    def step(aggregate: Aggregate, state: State, params: Params) -> tuple[dict[str, Array], State]:
        if "average" not in state:
            raise DataError("the state holds no average of models: it is of an optimiser without one; begin with init")
        moments = {name: arrays for name, arrays in state.items() if name not in ("average", AVERAGED)}
        moved, moments = optimizer.step(aggregate, moments, params)
        before = float(state[AVERAGED]["models"]) if AVERAGED in state else settled(beta)
        models, rest, share = averaging_weights(beta, before)
        average = {
            key: rest * move_to(to_native(held), moved[key]) + share * cast(moved[key], spec(held).dtype)
            for key, held in state["average"].items()
        }
        return moved, {**moments, "average": average, AVERAGED: {"models": _like(models, params)}}

    return ServerOptimizer(optimizer.name, init, step, {**optimizer.settings, "average": beta})


def _like(number: float, params: Params) -> Array:
    """A number as an array of the model's library, so that a state is saved and loaded as the model is."""
    return move_to(np.array(number), next(iter(params.values()), np.empty(0)))


def averaging_weights(beta: Any, before: Any) -> tuple[Any, Any, Any]:
    """How many models an average amounts to with the next one, and the weights of the average before and of that one.

    Numbers, or float64 columns with one number per run.
    """
    models = beta * before + 1
    return models, 1 - 1 / models, 1 / models


def settled(beta: float) -> float:
    """How many models an average amounts to after many rounds; also of one whose state does not say how many."""
    return 1 / (1 - beta)


OPTIMIZERS: dict[str, Callable[..., ServerOptimizer]] = {
    "sgd": sgd,
    "momentum": momentum,
    "adagrad": adagrad,
    "adam": adam,
    "yogi": yogi,
}


# -- the formulas: (mean, z, v, rates) -> (step, z, v); moments that an optimiser does not use are passed through ------

Step = tuple[Array, Array, Array]
Formula = Callable[[Array, Array, Array, Rates], Step]


def _sgd(mean: Array, z: Array, v: Array, rates: Rates) -> Step:
    return mean, z, v


def _momentum(mean: Array, z: Array, v: Array, rates: Rates) -> Step:
    z = rates.keep1 * z + mean
    return z, z, v


def _adagrad(mean: Array, z: Array, v: Array, rates: Rates) -> Step:
    v = v + mean * mean
    return mean / (_sqrt(v) + rates.epsilon), z, v


def _adam(mean: Array, z: Array, v: Array, rates: Rates) -> Step:
    return _precondition(mean, z, rates.keep2 * v + rates.take2 * (mean * mean), rates)


def _yogi(mean: Array, z: Array, v: Array, rates: Rates) -> Step:
    square = mean * mean
    return _precondition(mean, z, v - rates.take2 * square * _sign(v - square), rates)


def _precondition(mean: Array, z: Array, v: Array, rates: Rates) -> Step:
    z = rates.keep1 * z + rates.take1 * mean
    return z / (_sqrt(v) + rates.epsilon), z, v


FORMULAS: dict[str, Formula] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "adam": _adam,
    "yogi": _yogi,
}
MOMENTS = {"sgd": (), "momentum": ("z",), "adagrad": ("v",), "adam": ("z", "v"), "yogi": ("z", "v")}


def server_optimizer(
    name: str,
    learning_rate: float,
    mask_position: str,
    *,
    beta1: float = 0.9,
    beta2: float = 0.99,
    epsilon: float = 1e-3,
) -> ServerOptimizer:
    """The server optimiser of that name; optimisers differ in their formula and moments only."""
    if name not in FORMULAS:
        raise ConfigError(f"unknown server optimiser {name!r}; known: {', '.join(sorted(FORMULAS))}")
    _check_settings(learning_rate, beta1, beta2, epsilon, mask_position)
    rates = Rates(beta1, 1 - beta1, beta2, 1 - beta2, epsilon)
    stepper = _Stepper(FORMULAS[name], MOMENTS[name], rates, learning_rate, mask_position == "after")
    coefficients = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    settings = {"learning_rate": learning_rate, **coefficients, "mask_position": mask_position}
    return ServerOptimizer(name, stepper.init, stepper.step, settings)


class _Stepper(NamedTuple):
    """A formula with its settings: the two functions of a server optimiser."""

    formula: Formula
    used: tuple[str, ...]  # moments that it keeps
    rates: Rates
    learning_rate: float
    after: bool  # whether the mask comes after the preconditioner

    def init(self, params: Params) -> State:
        """The moments before the first round."""
        first = {"z": 0.0, "v": self.rates.epsilon**2}
        trainable = {key: array for key, array in params.items() if spec(array).dtype in FLOATS}
        return {moment: {key: _fill(first[moment], array) for key, array in trainable.items()} for moment in self.used}

    def step(self, aggregate: Aggregate, state: State, params: Params) -> tuple[dict[str, Array], State]:
        """The parameters and moments after a round; raises `Diverged` if they are not finite."""
        params = {key: detach(array) for key, array in params.items()}
        _check_entries(aggregate, state, params, self.used)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # the check of the result raises instead
            moved, moments = self._move(aggregate, state, params)
        _check_finite(moved)
        _check_finite(moments.get("v", {}))  # an infinite v divides the step to zero; an infinite z shows in the step
        return {**params, **moved}, moments

    def _move(self, aggregate: Aggregate, state: State, params: Params) -> tuple[dict[str, Array], State]:
        moved: dict[str, Array] = {}
        moments: State = {moment: dict(arrays) for moment, arrays in state.items()}
        for key, mean in aggregate.mean.items():
            held, dtype = params[key], working_type(spec(params[key]).dtype)
            before = {moment: move_to(to_native(state[moment][key]), held) for moment in self.used}
            change, after = self._change(aggregate, key, cast(move_to(mean, held), dtype), before)
            moved[key] = cast(cast(held, dtype) + self.learning_rate * change, spec(held).dtype)
            for moment in self.used:
                moments[moment][key] = after[moment]
        for key, update in aggregate.buffers.items():
            moved[key] = _add_buffer(key, params[key], move_to(update, params[key]))
        return moved, moments

    def _change(
        self, aggregate: Aggregate, key: str, mean: Array, before: dict[str, Array]
    ) -> tuple[Array, dict[str, Array]]:
        """One entry's masked step, before the learning rate, and its new moments."""
        z, v = before.get("z"), before.get("v")
        change, *after = self.formula(mean if self.after else aggregate.masked(key, mean), z, v, self.rates)
        if self.after:
            change = aggregate.masked(key, change)
        elif aggregate.length is not None:
            change = to_length(change, self.formula(aggregate.reference.masked(key, mean), z, v, self.rates)[0])
        return change, dict(zip(("z", "v"), after, strict=True))


def as_optimizer(given: Any) -> ServerOptimizer:
    """The server optimiser that a user gave, by default FedAvg's; an error for what cannot be one, such as its name."""
    if given is None:
        return sgd()
    if not (hasattr(given, "init") and hasattr(given, "step")):
        raise ConfigError(
            f"optimizer: expected a server optimiser, got {given!r:.60}; "
            "one of the library is made by a call, such as fedgma.adam(0.01)"
        )
    return given  # type: ignore[no-any-return]


def split_state(state: State | None) -> tuple[State | None, State]:
    """A server's state as that of its optimiser (None: before the first round) and that of its rule."""
    if state is not None and not isinstance(state, Mapping):
        raise DataError(f"state: expected `.state` of the round before, or None, got {type(state).__name__}")
    held = state or {}
    rule = {name.removeprefix(RULE): arrays for name, arrays in held.items() if name.startswith(RULE)}
    moments = {name: arrays for name, arrays in held.items() if not name.startswith(RULE)}
    return None if state is None else moments, rule


def join_states(moments: State, rule: Mapping[str, dict[str, Array]]) -> State:
    """A server's state: that of its optimiser, and that of its rule under names of their own."""
    return {**moments, **{f"{RULE}{name}": arrays for name, arrays in rule.items()}}


def _check_settings(learning_rate: float, beta1: float, beta2: float, epsilon: float, mask_position: str) -> None:
    """Raise `ConfigError` for invalid settings."""
    _check_positive(learning_rate=learning_rate, epsilon=epsilon)
    _check_share(beta1=beta1, beta2=beta2)
    if mask_position not in ("after", "before"):
        raise ConfigError(f"mask_position must be 'after' (the paper's) or 'before' the moments, got {mask_position!r}")


def _add_buffer(key: str, before: Array, change: Array) -> Array:
    """A buffer or counter after its change; raises `Diverged` if a counter does not fit its type."""
    dtype = spec(before).dtype
    if dtype in FLOATS:
        return cast(before + change, dtype)
    wide = cast(before, "int64")
    total = wide + change
    after = cast(total, dtype)
    overflow = ((wide ^ total) & (change ^ total)) < 0  # the sign bit, where the sum overflows
    if bool((overflow | (cast(after, "int64") != total)).any()):
        raise Diverged(f"the counter {key!r} would not fit {dtype} after this step; parameters and state are unchanged")
    return after


def _fill(value: float, like: Array) -> Array:
    dtype = working_type(spec(like).dtype)
    if is_torch(like):
        import torch

        return torch.full(like.shape, value, dtype=getattr(torch, dtype), device=like.device)
    return np.full(np.shape(like), value, dtype)


def _sqrt(array: Array) -> Array:
    if is_torch(array) and array.device.type == "cpu":  # torch's root on the CPU can be wrong in the last bit
        import torch

        return torch.from_numpy(np.asarray(np.sqrt(array.numpy())))
    return array.sqrt() if is_torch(array) else np.sqrt(array)


def _sign(array: Array) -> Array:
    return array.sign() if is_torch(array) else np.sign(array)


def _check_entries(aggregate: Aggregate, state: State, params: Params, used: tuple[str, ...]) -> None:
    for key, change in (*aggregate.mean.items(), *aggregate.buffers.items()):
        if key not in params:
            raise DataError(f"the aggregate holds {key!r}, which is not among the parameters")
        if tuple(change.shape) != tuple(params[key].shape):
            raise DataError(
                f"{key!r} has shape {list(change.shape)} in the aggregate, but {list(params[key].shape)} in the model"
            )
    if others := sorted(set(state) - set(used)):
        raise DataError(f"the state is of another optimiser: it holds {others[0]!r}, which this one does not keep")
    for moment in used:
        for key in aggregate.mean:
            if key not in state.get(moment, {}):
                raise DataError(f"the optimiser's state has no {moment!r} for some entries; make it with init(params)")
            if tuple(state[moment][key].shape) != tuple(params[key].shape):
                raise DataError(f"the optimiser's {moment!r} of {key!r} has another shape than the model's entry")


def _check_finite(params: Mapping[str, Array]) -> None:
    for key, array in params.items():
        finite = array.isfinite().all() if is_torch(array) else np.isfinite(array).all()
        if not bool(finite):
            raise Diverged(f"{key!r} would not be finite after this step; parameters and state are unchanged")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"{name} must be a number above 0, got {value!r}")


def _check_share(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ConfigError(f"{name} must be at least 0 and below 1, got {value!r}")
