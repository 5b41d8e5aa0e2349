"""A server's round on full models: from client models to the next global model."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedgma.aggregation import kernels
from fedgma.aggregation.gate import Gate, Refused, check_buffers, check_schema, read_array, read_mapping, read_schema
from fedgma.aggregation.optimizers import ServerOptimizer, State, as_optimizer, join_states, split_state
from fedgma.aggregation.own import AnyRule, as_rule
from fedgma.aggregation.rules import masked_mean
from fedgma.aggregation.stack import Weights, align_clients
from fedgma.aggregation.wrappers import check_patterns
from fedgma.arrays import FLOATS, Array, Params, Spec, flatten, is_torch, move_to, spec, to_native
from fedgma.errors import DataError, NotEnoughClients


class ServerRound(NamedTuple):
    """The result of a round: the next global model, the next state of optimiser and rule, and the aggregate's notes."""

    params: dict[str, Array]
    state: State
    notes: dict[str, Any]


def server_round(
    params: Params,
    client_params: Sequence[Params],
    weights: Weights = None,
    *,
    aggregator: AnyRule | None = None,
    optimizer: ServerOptimizer | None = None,
    state: State | None = None,
    clients: Sequence[Hashable] | None = None,
    buffers: Collection[str] | None = None,
    gate: Gate | None = None,
) -> ServerRound:
    """Run one round of a server on full models (a torch `state_dict`, or any mapping of arrays).

    Defaults: gradient masked averaging at tau = 0.4 and FedAvg's server. Buffers are averaged, integer counters take
    the maximum. Refused clients are left out and listed in the notes. Pass the returned `state` to the next round.
    `aggregator` is a rule, or your own function of sums (docs/rules.md).

    >>> import numpy as np
    >>> clients = [{"w": np.array([2.0, 2.0])}, {"w": np.array([2.0, 0.0])}, {"w": np.array([2.0, 2.0])}]
    >>> server_round({"w": np.array([1.0, 1.0])}, clients, [10, 10, 10]).params["w"].round(3).tolist()
    [2.0, 1.111]
    """
    if not isinstance(params, Mapping):
        hint = "; pass its state_dict()" if hasattr(params, "state_dict") else ""
        raise DataError(f"params: expected a mapping of names to arrays, got {type(params).__name__}{hint}")
    if isinstance(client_params, Mapping | str | bytes) or not isinstance(client_params, Sequence):
        raise DataError(
            f"client_params: expected a list with a model for each client, got {type(client_params).__name__}"
        )
    rule, optimizer = masked_mean() if aggregator is None else as_rule(aggregator), as_optimizer(optimizer)
    counts, labels = align_clients(len(client_params), weights, clients, "models")
    check_buffers(buffers, params)
    model = rule.lift(params)
    check_patterns(rule, model)
    tally = rule.open(model, buffers=buffers, gate=gate)
    cast = tally.gate.cast
    updates = (rule.lift_update(difference(client, params, cast=cast), params, cast=cast) for client in client_params)
    moments, before = split_state(state)
    try:
        merged = rule.over(zip(updates, counts, labels, strict=True), tally, buffers, before)
    except NotEnoughClients:
        _check_model(params)
        raise
    after, moments = optimizer.step(merged, optimizer.init(model) if moments is None else moments, model)
    return ServerRound(rule.lower(after, model, params), join_states(moments, merged.state), merged.notes)


def _check_model(params: Params) -> None:
    """Raise `DataError` for a model that is not finite: then no update is, and the clients are not to blame."""
    for name, array in params.items():
        if spec(array).dtype in FLOATS and kernels.first_nonfinite([flatten(to_native(array))]) is not None:
            raise DataError(f"the model: {name!r} holds a NaN or an infinity, so no update of it can be finite")


def difference(local: Params, params: Params, *, cast: bool = False) -> Params | Refused:
    """A client's update, `local - global`, or why there is none, for the gate to refuse.

    `cast` accepts other floating types, as in `Gate(cast=True)`. Counters are subtracted in int64, so that unsigned
    ones do not wrap around.
    """
    try:
        entries, model = read_mapping(local), read_mapping(params)
        check_schema(read_schema(entries), read_schema(model), cast)
        return {name: _subtract(name, entries[name], array) for name, array in model.items()}
    except Refused as refused:
        return refused


def _subtract(name: str, local: Array, array: Array) -> Array:
    if spec(array).dtype not in FLOATS:
        return _subtract_counters(name, local, array)
    if is_torch(local) and is_torch(array):
        return local.detach().to(array.device) - array.detach()
    native = to_native(array)
    with np.errstate(over="ignore", invalid="ignore"):  # the gate refuses what is not finite
        return move_to(to_native(local), native) - native


def _subtract_counters(name: str, local: Array, array: Array) -> Array:
    entry = Spec((), "int64")
    before = read_array(name, array, entry, entry)
    after = move_to(read_array(name, local, entry, entry), before)
    with np.errstate(over="ignore"):
        change = after - before
    if bool((((after ^ before) & (after ^ change)) < 0).any()):  # the sign bit, where the difference overflows
        raise Refused("dtype", f"{name!r} is too far from the server's counter for an int64")
    return change
