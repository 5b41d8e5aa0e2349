"""Server optimisers: an `Aggregate` in, new parameters out; the mask sits after the preconditioner (SPEC 2.3).

    sgd        FedAvg, FedProx   d = mean
    momentum   FedAvgM           z = beta z + mean;                           d = z
    adagrad    FedAdagrad        v = v + mean^2;                              d = mean / (sqrt(v) + epsilon)
    adam       FedAdam           v = beta2 v + (1 - beta2) mean^2;            d = z / (sqrt(v) + epsilon)
    yogi       FedYogi           v = v - (1 - beta2) mean^2 sign(v - mean^2); d = z / (sqrt(v) + epsilon)

    z = beta1 z + (1 - beta1) mean for adam and yogi;  params + learning_rate * mask * d for all.

Moments see the unmasked mean, start at z = 0 and v = epsilon^2, and are not corrected for bias. An entry on which
nobody agrees is frozen for the round while its moments go on. `mask_position="before"` feeds mask * mean to the moments
instead: an ablation, not the paper's algorithm. Buffers are added as they are: no learning rate, no moments.

State is a dict of plain arrays, passed in and out; nothing is changed in place, and a step whose result would not be
finite raises `Diverged` with parameters and state as they were.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedgma.aggregates import Aggregate
from fedgma.arrays import FLOATS, Array, Params, cast, is_torch, spec
from fedgma.errors import ConfigError, DataError, Diverged

State = dict[str, dict[str, Array]]  # {"z": {name: array}, "v": {name: array}}; empty for sgd
Direction = Callable[[Array, dict[str, Array]], tuple[Array, dict[str, Array]]]


class ServerOptimizer(NamedTuple):
    """`init(params) -> state` and `step(aggregate, state, params) -> (params, state)`."""

    name: str
    init: Callable[[Params], State]
    step: Callable[[Aggregate, State, Params], tuple[dict[str, Array], State]]
    settings: Mapping[str, Any]


def sgd(learning_rate: float = 1.0, *, mask_position: str = "after") -> ServerOptimizer:
    """FedAvg's server: add the masked mean.

    >>> from fedgma.aggregators import masked_mean
    >>> server, params = sgd(), {"w": np.array([1.0, 1.0])}
    >>> merged = masked_mean(tau=1.0)({"w": np.array([[1.0, 1.0], [1.0, -1.0], [1.0, 1.0]])})
    >>> server.step(merged, server.init(params), params)[0]["w"].round(3).tolist()
    [2.0, 1.111]
    """

    def direction(mean: Array, moments: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        return mean, moments

    return _optimizer("sgd", direction, {}, learning_rate, mask_position)


def momentum(learning_rate: float = 1.0, beta: float = 0.9, *, mask_position: str = "after") -> ServerOptimizer:
    """FedAvgM's server: a running sum of means."""
    _check_share(beta=beta)

    def direction(mean: Array, moments: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        z = beta * moments["z"] + mean
        return z, {"z": z}

    return _optimizer("momentum", direction, {"z": 0.0}, learning_rate, mask_position, beta=beta)


def adagrad(learning_rate: float = 0.1, epsilon: float = 1e-3, *, mask_position: str = "after") -> ServerOptimizer:
    """FedAdagrad's server (Reddi et al. 2021)."""
    _check_positive(epsilon=epsilon)

    def direction(mean: Array, moments: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        v = moments["v"] + mean * mean
        return mean / (_root(v) + epsilon), {"v": v}

    return _optimizer("adagrad", direction, {"v": epsilon**2}, learning_rate, mask_position, epsilon=epsilon)


def adam(
    learning_rate: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    epsilon: float = 1e-3,
    *,
    mask_position: str = "after",
) -> ServerOptimizer:
    """FedAdam's server (Reddi et al. 2021)."""

    def second(v: Array, square: Array) -> Array:
        return beta2 * v + (1 - beta2) * square

    return _adaptive("adam", second, learning_rate, beta1, beta2, epsilon, mask_position)


def yogi(
    learning_rate: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    epsilon: float = 1e-3,
    *,
    mask_position: str = "after",
) -> ServerOptimizer:
    """FedYogi's server (Reddi et al. 2021)."""

    def second(v: Array, square: Array) -> Array:
        return v - (1 - beta2) * square * _sign(v - square)

    return _adaptive("yogi", second, learning_rate, beta1, beta2, epsilon, mask_position)


OPTIMIZERS: dict[str, Callable[..., ServerOptimizer]] = {
    "sgd": sgd,
    "momentum": momentum,
    "adagrad": adagrad,
    "adam": adam,
    "yogi": yogi,
}


def _adaptive(
    name: str,
    second: Callable[[Array, Array], Array],
    learning_rate: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    mask_position: str,
) -> ServerOptimizer:
    _check_share(beta1=beta1, beta2=beta2)
    _check_positive(epsilon=epsilon)

    def direction(mean: Array, moments: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        z = beta1 * moments["z"] + (1 - beta1) * mean
        v = second(moments["v"], mean * mean)
        return z / (_root(v) + epsilon), {"z": z, "v": v}

    start = {"z": 0.0, "v": epsilon**2}
    settings = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon}
    return _optimizer(name, direction, start, learning_rate, mask_position, **settings)


def _optimizer(
    name: str,
    direction: Direction,
    start: Mapping[str, float],
    learning_rate: float,
    mask_position: str,
    **settings: float,
) -> ServerOptimizer:
    """The one server step; `direction` is all that tells one optimiser from another."""
    _check_positive(learning_rate=learning_rate)
    if mask_position not in ("after", "before"):
        raise ConfigError(f"mask_position is 'after' (the paper's) or 'before' the moments, got {mask_position!r}")
    after = mask_position == "after"

    def init(params: Params) -> State:
        trainable = {key: array for key, array in params.items() if spec(array).dtype in FLOATS}
        return {
            moment: {key: _filled(value, array) for key, array in trainable.items()} for moment, value in start.items()
        }

    def step(aggregate: Aggregate, state: State, params: Params) -> tuple[dict[str, Array], State]:
        _check_entries(aggregate, state, params, start)
        moved: dict[str, Array] = {}
        moments: State = {moment: dict(arrays) for moment, arrays in state.items()}
        for key, mean in aggregate.mean.items():
            wide = cast(mean, _working(params[key]))
            if not after:
                wide = aggregate.masked(key, wide)
            step, new = direction(wide, {moment: state[moment][key] for moment in start})
            step = aggregate.masked(key, step) if after else step
            moved[key] = cast(cast(params[key], _working(params[key])) + learning_rate * step, spec(params[key]).dtype)
            for moment, array in new.items():
                moments[moment][key] = array
        for key, change in aggregate.buffers.items():
            moved[key] = cast(params[key] + change, spec(params[key]).dtype)
        _check_finite(moved)
        return {**params, **moved}, moments

    known = {"learning_rate": learning_rate, **settings, "mask_position": mask_position}
    return ServerOptimizer(name, init, step, known)


def _working(array: Array) -> str:
    """The number type a server computes in: float64 for float64, float32 for it and everything smaller."""
    return "float64" if spec(array).dtype == "float64" else "float32"


def _filled(value: float, like: Array) -> Array:
    kind = _working(like)
    if is_torch(like):
        import torch

        return torch.full(like.shape, value, dtype=getattr(torch, kind), device=like.device)
    return np.full(np.shape(like), value, kind)


def _root(array: Array) -> Array:
    if is_torch(array) and array.device.type == "cpu":  # torch's own CPU root can be off in the last bit
        import torch

        return torch.from_numpy(np.asarray(np.sqrt(array.numpy())))
    return array.sqrt() if is_torch(array) else np.sqrt(array)


def _sign(array: Array) -> Array:
    return array.sign() if is_torch(array) else np.sign(array)


def _check_entries(aggregate: Aggregate, state: State, params: Params, start: Mapping[str, float]) -> None:
    for key, change in (*aggregate.mean.items(), *aggregate.buffers.items()):
        if key not in params:
            raise DataError(f"the aggregate holds {key!r}, which the parameters lack")
        if tuple(change.shape) != tuple(params[key].shape):
            raise DataError(
                f"{key!r} has shape {list(change.shape)} in the aggregate, {list(params[key].shape)} in the model"
            )
    for moment in start:
        if moment not in state or not aggregate.mean.keys() <= state[moment].keys():
            raise DataError(f"the optimiser's state lacks {moment!r} of some entries; make it with init(params)")


def _check_finite(params: Mapping[str, Array]) -> None:
    for key, array in params.items():
        finite = array.isfinite().all() if is_torch(array) else np.isfinite(array).all()
        if not bool(finite):
            raise Diverged(f"{key!r} would not be finite after this step; parameters and state are unchanged")


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"{name} is a number above 0, got {value!r}")


def _check_share(**values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ConfigError(f"{name} is a number from 0 to below 1, got {value!r}")
