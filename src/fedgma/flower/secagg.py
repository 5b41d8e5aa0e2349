"""Masked averaging under Flower's SecAgg+: the server only sees the sum of the clients' votes and updates.

SecAgg+ is part of Flower's legacy workflows, so this is a legacy strategy, with a mod for the clients:

    encoding = Encoding(clip=0.5, max_weight=1024)                                          # the same on both sides
    client_app = ClientApp(client_fn, mods=[secaggplus_mod, encoding_mod(encoding)])        # in this order
    workflow = secure_workflow(encoding, num_shares=5, reconstruction_threshold=3)
    DefaultWorkflow(fit_workflow=workflow)(grid, LegacyContext(context, strategy=SecureMasked(encoding, tau=0.4)))

Clients need no change (`NumPyClient.fit` returns the local model and the number of samples). The mod sends the vector
of `fedgma.aggregation.secure`, scaled so that Flower's stochastic quantisation only gets integers, which it does not
change. If the gate would refuse an update, its client raises and counts as dropped out.
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

from fedgma.aggregation.optimizers import ServerOptimizer, State, as_optimizer, join_states, split_state
from fedgma.aggregation.own import AnyRule, as_rule
from fedgma.aggregation.rules import masked_mean
from fedgma.aggregation.secure import Encoding, Vector, decode, encode
from fedgma.aggregation.server_round import difference
from fedgma.arrays import FLOATS, Array, spec
from fedgma.errors import ConfigError, DataError, Diverged
from fedgma.flower.legacy import name_arrays

ClientCall = Callable[[Message, Context], Message]
ClientMod = Callable[[Message, Context, ClientCall], Message]


def secure_workflow(encoding: Encoding, num_shares: float, reconstruction_threshold: float, **options: Any) -> Any:
    """Flower's SecAgg+ with ranges that transmit this encoding exactly; `options` are passed to Flower."""
    return SecAggPlusWorkflow(
        num_shares,
        reconstruction_threshold,
        max_weight=1.0,  # every vector counts once: it contains the weight
        clipping_range=1.0,
        quantization_range=1 << encoding.bits,
        **options,
    )


def encoding_mod(
    encoding: Encoding, buffers: Collection[str] | None = None, further: Collection[str] = ()
) -> ClientMod:
    """The client's mod: replaces the trained local model by the encoded update for SecAgg+.

    `further` are the sums that the server's rule reads beside updates and votes: `rule.further`.
    """

    def mod(message: Message, context: Context, call_next: ClientCall) -> Message:
        if message.metadata.message_type != MessageType.TRAIN:
            return call_next(message, context)
        sent = name_arrays(recorddict_to_fitins(message.content, keep_input=True).parameters)
        reply = call_next(message, context)
        result = recorddict_to_fitres(reply.content, keep_input=True)
        update = difference(name_arrays(result.parameters), sent)
        vector = encode(update, result.num_examples, encoding, like=sent, buffers=buffers, further=further)
        result.parameters = ndarrays_to_parameters([vector / encoding.half])  # exact: half is a power of two
        result.num_examples = 1
        reply.content = fitres_to_recorddict(result, keep_input=False)
        return reply

    return mod


class SecureMasked(FedAvg):
    """A legacy Flower strategy for SecAgg+ with fedgma's rules and server optimisers.

    The rule (`aggregator`) must work on a tally, without squares: the library's most, or your own. Entries are
    named "0", "1", ... in the order of the client's arrays.
    """

    def __init__(
        self,
        encoding: Encoding,
        *,
        tau: float = 0.4,
        aggregator: AnyRule | None = None,
        optimizer: ServerOptimizer | None = None,
        buffers: Collection[str] | None = None,
        **flower_options: Any,
    ) -> None:
        super().__init__(**flower_options)
        self.encoding, self.buffers = encoding, buffers
        self.aggregator = masked_mean(tau) if aggregator is None else as_rule(aggregator)
        self.optimizer = as_optimizer(optimizer)
        single = self.aggregator.prepare is not None or self.aggregator.space is not None
        if single or not self.aggregator.streams:
            raise ConfigError(f"{self.aggregator.name} needs single updates, but a secure sum only gives their total")
        if "squares" in self.aggregator.further:
            raise ConfigError(f"{self.aggregator.name} reads squares, which a secure sum does not carry")
        self.state: State | None = None
        self._sent: dict[str, Array] = {}

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: Any) -> list[tuple[Any, FitIns]]:
        """Sample this round's clients; raises if there are too many for the encoding."""
        self._sent = name_arrays(parameters)
        sampled: list[tuple[Any, FitIns]] = super().configure_fit(server_round, parameters, client_manager)
        if len(sampled) > self.encoding.capacity():
            limit = f"at most {self.encoding.capacity()} clients per round with {self.encoding.bits} bits"
            raise ConfigError(f"SecAgg+ sums modulo 2**32: expected {limit}, got {len(sampled)}; use fewer bits")
        return sampled

    def aggregate_fit(
        self, server_round: int, results: list[tuple[Any, FitRes]], failures: list[Any]
    ) -> tuple[Parameters | None, dict[str, Any]]:
        """Decode the sum and step; the model stays unchanged if the sum is invalid or the step is not finite."""
        if not results:
            return None, {}
        params = {name: array for name, array in self._sent.items() if spec(array).dtype in FLOATS}
        try:
            total = read_sum(results, self.encoding)
            further = self.aggregator.further
            tally, cut, error = decode(total, params, self.encoding, buffers=self.buffers, further=further)
            if tally.clients != len(results):
                raise DataError(f"the sum must hold the {len(results)} clients that replied, got {tally.clients}")
            moments, before = split_state(self.state)
            merged = self.aggregator.conclude(tally, before)
            moments = self.optimizer.init(params) if moments is None else moments
            next_params, moments = self.optimizer.step(merged, moments, params)
            self.state = join_states(moments, merged.state)
        except (DataError, Diverged) as problem:
            log(WARNING, "aggregate_fit: round %s leaves the model unchanged: %s", server_round, problem)
            return None, {}
        log(INFO, "aggregate_fit: %s clients, %s clipped, error of the mean <= %.3g", tally.clients, cut, error)
        model = [np.asarray(next_params.get(name, array)) for name, array in self._sent.items()]
        return ndarrays_to_parameters(model), {"gma-clients": tally.clients, "gma-cut": cut, "gma-error": error}


def read_sum(results: list[tuple[Any, FitRes]], encoding: Encoding) -> Vector:
    """The sum of the vectors, computed from their mean, which SecAgg+ puts into every result.

    The mean is rounded to float64: its relative error is at most 2**-51, and the error of the sum is below 2**-20, so
    rounding restores the integers.
    """
    arrays = parameters_to_ndarrays(results[0][1].parameters)
    total = arrays[0] * (float(len(results)) * encoding.half)
    if len(arrays) != 1 or not math.isfinite(float(abs(total).max(initial=0.0))):
        raise DataError(
            f"expected one array of finite numbers from SecAgg+, got {len(arrays)} arrays or values that are not finite"
        )
    return np.rint(total).astype(np.int64)
