"""Masked averaging under Flower's SecAgg+: the server sees the sum of the clients' votes and updates, and no client's.

SecAgg+ lives in Flower's legacy workflows, so this is a legacy strategy, with a mod for the clients:

    encoding = Encoding(clip=0.5, max_weight=1024)                                          # the same on both sides
    client_app = ClientApp(client_fn, mods=[secaggplus_mod, encoding_mod(encoding)])        # in this order
    workflow = secure_workflow(encoding, num_shares=5, reconstruction_threshold=3)
    DefaultWorkflow(fit_workflow=workflow)(grid, LegacyContext(context, strategy=SecureMasked(encoding, tau=0.4)))

Clients are as they were (`NumPyClient.fit` returns the local model and the number of samples). What they send is the
vector of `fedgma.aggregation.secure`, scaled so that Flower's quantisation, which rounds at random, meets whole numbers
only and changes nothing. An update that the gate would refuse stops at its client, which then counts as dropped out.
"""

import math
from collections.abc import Callable, Collection
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Context, Message, MessageType
from flwr.common import FitIns, FitRes, Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.logger import log
from flwr.compat.common.recorddict_compat import fitres_to_recorddict, recorddict_to_fitins, recorddict_to_fitres
from flwr.server.strategy import FedAvg
from flwr.server.workflow import SecAggPlusWorkflow

from fedgma.aggregation.optimizers import ServerOptimizer, State, sgd
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.rules import masked_mean
from fedgma.aggregation.secure import Encoding, Vector, decode, encode
from fedgma.aggregation.server_round import difference
from fedgma.arrays import FLOATS, Array, spec
from fedgma.errors import ConfigError, DataError, Diverged

ClientCall = Callable[[Message, Context], Message]
ClientMod = Callable[[Message, Context, ClientCall], Message]


def secure_workflow(encoding: Encoding, num_shares: float, reconstruction_threshold: float, **options: Any) -> Any:
    """Flower's SecAgg+ with the ranges that carry this encoding exactly; `options` are Flower's own."""
    return SecAggPlusWorkflow(
        num_shares,
        reconstruction_threshold,
        max_weight=1.0,  # every vector counts once: weights are inside
        clipping_range=1.0,
        quantization_range=1 << encoding.bits,
        **options,
    )


def encoding_mod(encoding: Encoding, buffers: Collection[str] | None = None) -> ClientMod:
    """The client's part: takes the local model that training gives and passes the encoded update on to SecAgg+."""

    def mod(message: Message, context: Context, call_next: ClientCall) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return call_next(message, context)
        sent = named(recorddict_to_fitins(message.content, keep_input=True).parameters)
        reply = call_next(message, context)
        fitted = recorddict_to_fitres(reply.content, keep_input=True)
        update = difference(named(fitted.parameters), sent)
        vector = encode(update, fitted.num_examples, encoding, like=sent, buffers=buffers)
        fitted.parameters = ndarrays_to_parameters([vector / encoding.half])  # exact: half is a power of two
        fitted.num_examples = 1
        reply.content = fitres_to_recorddict(fitted, keep_input=False)
        return reply

    return mod


class SecureMasked(FedAvg):
    """A legacy Flower strategy for SecAgg+ whose aggregation and server step are fedgma's.

    The aggregator must be one that reads a tally: `masked_mean`, `mean`, `and_mask`, `rlr` and the controls. Entries
    are named "0", "1", ... in the order of the client's arrays.
    """

    def __init__(
        self,
        encoding: Encoding,
        *,
        tau: float = 0.4,
        aggregator: Rule | None = None,
        optimizer: ServerOptimizer | None = None,
        buffers: Collection[str] | None = None,
        **flower_options: Any,
    ) -> None:
        super().__init__(**flower_options)
        self.encoding, self.buffers = encoding, buffers
        self.aggregator = aggregator or masked_mean(tau)
        self.optimizer = optimizer or sgd()
        if not self.aggregator.streams or self.aggregator.prepare is not None:
            raise ConfigError(f"{self.aggregator.name} looks at single updates, which a secure sum does not show")
        self.state: State | None = None
        self._sent: dict[str, Array] = {}

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: Any) -> list[tuple[Any, FitIns]]:
        """Sample this round's clients; refuses more of them than a sum can hold."""
        self._sent = named(parameters)
        asked: list[tuple[Any, FitIns]] = super().configure_fit(server_round, parameters, client_manager)
        if len(asked) > self.encoding.capacity():
            limit = f"at most {self.encoding.capacity()} clients a round with {self.encoding.bits} bits"
            raise ConfigError(f"SecAgg+ sums modulo 2**32: {limit}, {len(asked)} were asked; use fewer bits")
        return asked

    def aggregate_fit(
        self, server_round: int, results: list[tuple[Any, FitRes]], failures: list[Any]
    ) -> tuple[Parameters | None, dict[str, Any]]:
        """Read the sum, mask, step; the model stays as it is where the sum cannot be read or a step would diverge."""
        if not results:
            return None, {}
        params = {name: array for name, array in self._sent.items() if spec(array).dtype in FLOATS}
        try:
            tally, cut, error = decode(summed(results, self.encoding), params, self.encoding, buffers=self.buffers)
            if tally.clients != len(results):
                raise DataError(f"{len(results)} clients replied, the sum holds {tally.clients}")
            merged = self.aggregator.conclude(tally)
            state = self.optimizer.init(params) if self.state is None else self.state
            moved, self.state = self.optimizer.step(merged, state, params)
        except (DataError, Diverged) as problem:
            log(WARNING, "aggregate_fit: round %s leaves the model as it is: %s", server_round, problem)
            return None, {}
        log(INFO, "aggregate_fit: %s clients, %s cut at the clip, mean within %.3g", tally.clients, cut, error)
        whole = [np.asarray(moved.get(name, array)) for name, array in self._sent.items()]
        return ndarrays_to_parameters(whole), {"gma-clients": tally.clients, "gma-cut": cut, "gma-error": error}


def named(parameters: Parameters) -> dict[str, Array]:
    """A legacy list of arrays as a mapping: entries are named by their place."""
    return {str(place): array for place, array in enumerate(parameters_to_ndarrays(parameters))}


def summed(results: list[tuple[Any, FitRes]], encoding: Encoding) -> Vector:
    """The sum of the vectors, from the mean of them that SecAgg+ puts into every result.

    The mean was divided by the number of clients in float64: it is off by at most 2**-51 of itself, and its sum by less
    than 2**-20, so rounding finds the integer.
    """
    arrays = parameters_to_ndarrays(results[0][1].parameters)
    total = arrays[0] * (float(len(results)) * encoding.half)
    if len(arrays) != 1 or not math.isfinite(float(abs(total).max(initial=0.0))):
        raise DataError(f"SecAgg+ gave {len(arrays)} arrays, one of finite numbers was expected")
    return np.rint(total).astype(np.int64)
