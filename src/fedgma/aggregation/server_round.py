"""A server's round over whole models: client models in, the next global model out."""

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from fedgma.aggregation.gate import Gate, Refused, compare, read_schema
from fedgma.aggregation.optimizers import ServerOptimizer, State, sgd
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.rules import masked_mean
from fedgma.aggregation.stack import Weights, lined_up
from fedgma.aggregation.tally import Tally
from fedgma.arrays import Array, Params
from fedgma.errors import DataError


class ServerRound(NamedTuple):
    """What a round gives: the next global model, the optimiser's next state, and the aggregate's notes."""

    params: dict[str, Array]
    state: State
    notes: dict[str, Any]


def server_round(
    params: Params,
    client_params: Sequence[Params],
    weights: Weights = None,
    *,
    aggregator: Rule | None = None,
    optimizer: ServerOptimizer | None = None,
    state: State | None = None,
    clients: Sequence[Hashable] | None = None,
    buffers: Collection[str] | None = None,
    gate: Gate | None = None,
) -> ServerRound:
    """One round of a server that holds whole models (a torch `state_dict`, or any mapping of arrays).

    Defaults: gradient masked averaging at tau = 0.4 and FedAvg's server. Buffers are averaged, integer counters take
    the maximum. Bad clients are left out and named in the notes. Pass the returned `state` to the next round.

    >>> import numpy as np
    >>> clients = [{"w": np.array([2.0, 2.0])}, {"w": np.array([2.0, 0.0])}, {"w": np.array([2.0, 2.0])}]
    >>> server_round({"w": np.array([1.0, 1.0])}, clients, [10, 10, 10]).params["w"].round(3).tolist()
    [2.0, 1.111]
    """
    if not isinstance(params, Mapping):
        raise DataError(f"params: expected a mapping of names to arrays, got {type(params).__name__}")
    aggregator, optimizer = aggregator or masked_mean(), optimizer or sgd()
    counts, labels = lined_up(len(client_params), weights, clients, "models")
    tally = Tally(params, buffers=buffers, gate=gate)
    updates = (difference(local, params, cast=tally.gate.cast) for local in client_params)
    merged = aggregator.over(zip(updates, counts, labels, strict=True), tally, buffers)
    moved, after = optimizer.step(merged, optimizer.init(params) if state is None else state, params)
    return ServerRound(moved, after, merged.notes)


def difference(local: Params, params: Params, *, cast: bool = False) -> Params:
    """A client's update, `local - global`; what does not fit the model is passed on as it is for the gate to refuse.

    With `cast`, as in `Gate(cast=True)`, another floating type fits.
    """
    try:
        compare(read_schema(local), read_schema(params), cast)
    except Refused:
        return local
    return {name: local[name] - array for name, array in params.items()}
