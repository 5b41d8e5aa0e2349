"""Masked averaging for Flower apps that use `aggregate_fit`; it uses the same server as `Masked`.

    from fedgma.flower import MaskedFit
    strategy = MaskedFit(tau=0.4, optimizer=fedgma.yogi(0.01), min_fit_clients=5)   # was: FedYogi(...)

Arrays have no names in this API: entries are named "0", "1", ... in the order of the list, also in `buffers`. Flower
samples the clients. For seeded sampling, time limits and runs that can be resumed, use `Masked`.
"""

from collections.abc import Collection, Iterable, Iterator
from logging import WARNING
from typing import Any

import numpy as np
from flwr.common import FitIns, FitRes, Parameters, Scalar, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.logger import log
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg

from fedgma.aggregation.gate import Gate
from fedgma.aggregation.optimizers import ServerOptimizer, sgd
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.rules import masked_mean
from fedgma.aggregation.server import MaskedServer, Reply
from fedgma.aggregation.server_round import difference
from fedgma.arrays import Array

Result = tuple[ClientProxy, FitRes]


class MaskedFit(FedAvg):
    """`Masked` for `flwr.server.strategy`: FedAvg's options, with a rule (`aggregator`) and a server optimiser."""

    def __init__(
        self,
        *,
        tau: float = 0.4,
        aggregator: Rule | None = None,
        optimizer: ServerOptimizer | None = None,
        gate: Gate | None = None,
        buffers: Collection[str] | None = None,
        norm_factor: float | None = 10.0,
        quorum: int = 1,
        **flower_options: Any,
    ) -> None:
        super().__init__(**flower_options)
        rule = aggregator or masked_mean(tau)
        self.server = MaskedServer(rule, optimizer or sgd(), gate or Gate(), buffers, norm_factor, quorum)
        self._sent: dict[str, Array] = {}  # the global model of the current round

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Keep the global model, then sample as Flower does."""
        self._sent = name_arrays(parameters)
        return list(super().configure_fit(server_round, parameters, client_manager))

    def aggregate_fit(
        self, server_round: int, results: list[Result], failures: list[Result | BaseException]
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Aggregate the results and step; returns None, which keeps the model, if no result is valid."""
        if not results or (failures and not self.accept_failures):
            return None, {}
        step = self.server.step(self._sent, self._updates(results))
        for refusal in step.refused:
            log(WARNING, "aggregate_fit: client %s left out (%s): %s", *refusal)
        if step.params is None:
            log(WARNING, "aggregate_fit: round %s leaves the model unchanged: %s", server_round, step.error)
            return None, {}
        refused = {refusal.client for refusal in step.refused}
        metrics: dict[str, Scalar] = {}
        if self.fit_metrics_aggregation_fn is not None:
            counted = [(fit.num_examples, fit.metrics) for client, fit in results if client.cid not in refused]
            metrics = dict(self.fit_metrics_aggregation_fn(counted))
        parameters = ndarrays_to_parameters([np.asarray(array) for array in step.params.values()])
        return parameters, {**metrics, **step.statistics, "gma-failed": len(failures)}

    def _updates(self, results: Iterable[Result]) -> Iterator[Reply]:
        for client, fit in results:
            try:
                local: Any = name_arrays(fit.parameters)
            except (ValueError, TypeError, EOFError, OSError) as error:
                local = type(error).__name__  # for the gate to refuse
            yield difference(local, self._sent, cast=self.server.gate.cast), fit.num_examples, client.cid


def name_arrays(parameters: Parameters) -> dict[str, Array]:
    """A list of arrays as a mapping; entries are named by their position."""
    return {str(position): array for position, array in enumerate(parameters_to_ndarrays(parameters))}
