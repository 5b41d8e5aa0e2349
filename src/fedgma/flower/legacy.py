"""Masked averaging for Flower apps that still aggregate in `aggregate_fit`: thin, through the same server.

    from fedgma.flower import MaskedFit
    strategy = MaskedFit(tau=0.4, optimizer=fedgma.yogi(0.01), min_fit_clients=5)   # was: FedYogi(...)

Arrays have no names there: entries are "0", "1", ... in the order of the list; name buffers so. Sampling is Flower's
own. For seeded sampling, limits on waiting and runs that can be resumed, move to `Masked`.
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
    """`Masked` for `flwr.server.strategy`: the options of its FedAvg, and an aggregator and a server optimiser."""

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
        masked = aggregator or masked_mean(tau)
        self.server = MaskedServer(masked, optimizer or sgd(), gate or Gate(), buffers, norm_factor, quorum)
        self._sent: dict[str, Array] = {}  # the global model of the round that is on its way

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Note the global model, then sample as Flower does."""
        self._sent = _named(parameters)
        return list(super().configure_fit(server_round, parameters, client_manager))

    def aggregate_fit(
        self, server_round: int, results: list[Result], failures: list[Result | BaseException]
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Tally the results, mask, step; the model stays as it is where nothing valid came."""
        if not results or (failures and not self.accept_failures):
            return None, {}
        step = self.server.step(self._sent, self._updates(results))
        for refusal in step.refused:
            log(WARNING, "aggregate_fit: client %s left out (%s): %s", *refusal)
        if step.params is None:
            log(WARNING, "aggregate_fit: round %s leaves the model as it is: %s", server_round, step.error)
            return None, {}
        bad = {refusal.client for refusal in step.refused}
        metrics: dict[str, Scalar] = {}
        if self.fit_metrics_aggregation_fn is not None:
            good = [(fit.num_examples, fit.metrics) for client, fit in results if client.cid not in bad]
            metrics = dict(self.fit_metrics_aggregation_fn(good))
        after = ndarrays_to_parameters([np.asarray(array) for array in step.params.values()])
        return after, {**metrics, **step.statistics, "gma-failed": len(failures)}

    def _updates(self, results: Iterable[Result]) -> Iterator[Reply]:
        for client, fit in results:
            try:
                local: Any = _named(fit.parameters)
            except (ValueError, TypeError, EOFError, OSError) as error:
                local = type(error).__name__  # for the gate to refuse
            yield difference(local, self._sent, cast=self.server.gate.cast), fit.num_examples, client.cid


def _named(parameters: Parameters) -> dict[str, Array]:
    return {str(place): array for place, array in enumerate(parameters_to_ndarrays(parameters))}
