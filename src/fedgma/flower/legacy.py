"""Masked averaging for Flower apps that use `aggregate_fit`; it uses the same server as `Masked`.

    from fedgma.flower import MaskedFit
    strategy = MaskedFit(tau=0.4, optimizer=fedgma.yogi(0.01), min_fit_clients=5)   # was: FedYogi(...)

Arrays have no names in this API: entries are named "0", "1", ... in the order of the list, also in `buffers`. Running
statistics of batch normalisation are found by the counter that follows them in torch's `state_dict`; name others.
Flower samples the clients. For seeded sampling, time limits and runs that can be resumed, use `Masked`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.common import EvaluateRes, FitIns, FitRes, Parameters, Scalar, ndarrays_to_parameters
from flwr.common.logger import log
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg

from fedgma.aggregation.gate import Gate, Refusal, Refused, read_weight
from fedgma.aggregation.optimizers import ServerOptimizer, as_optimizer
from fedgma.aggregation.own import AnyRule
from fedgma.aggregation.server import MaskedServer, Reply
from fedgma.arrays import FLOATS, Array, spec
from fedgma.errors import ConfigError, DataError
from fedgma.flower.npy import read_array, read_header
from fedgma.flower.options import check_options, rule_of
from fedgma.flower.replies import read_arrays, shorten, subtract

Result = tuple[ClientProxy, FitRes]


class MaskedFit(FedAvg):
    """`Masked` for `flwr.server.strategy`: FedAvg's options, with a rule (`aggregator`) and a server optimiser."""

    def __init__(
        self,
        *,
        tau: float | None = None,
        aggregator: AnyRule | None = None,
        optimizer: ServerOptimizer | None = None,
        gate: Gate | None = None,
        buffers: Collection[str] | None = None,
        norm_factor: float | None = 10.0,
        quorum: int = 1,
        share_cap: float | None = 0.5,
        **flower_options: Any,
    ) -> None:
        check_options(flower_options, MaskedFit)
        super().__init__(**flower_options)
        rule, step = rule_of(tau, aggregator), as_optimizer(optimizer)
        if "average" in step.settings:
            raise ConfigError("MaskedFit has one model to train and to evaluate; for fedgma.averaged use Masked")
        self.server = MaskedServer(rule, step, gate or Gate(), buffers, norm_factor, quorum, share_cap)
        self._sent: dict[str, Array] = {}  # the global model of the current round

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Keep the global model, then sample as Flower does."""
        self._sent = name_arrays(parameters)
        if self.server.buffers is None and (found := running_statistics(self._sent)):
            log(INFO, "arrays %s are running statistics: they are averaged and not masked", ", ".join(found))
            self.server.buffers = found
        return list(super().configure_fit(server_round, parameters, client_manager))

    def aggregate_fit(
        self, server_round: int, results: list[Result], failures: list[Result | BaseException]
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Aggregate the results and step; returns None, which keeps the model, if no result is valid."""
        if not results or (failures and not self.accept_failures):
            return None, {}
        unreadable: list[Refusal] = []
        step = self.server.step(self._sent, self._updates(results, unreadable))
        refusals = (*unreadable, *step.refused)
        for refusal in refusals:
            log(WARNING, "aggregate_fit: client %s left out (%s): %s", *refusal)
        for capped in step.capped:
            log(WARNING, "aggregate_fit: client %s has weight %g, which share_cap cuts to %g", *capped)
        if step.params is None:
            log(WARNING, "aggregate_fit: round %s leaves the model unchanged: %s", server_round, step.error)
            return None, {}
        refused = {refusal.client for refusal in refusals}
        counted = [(fit.num_examples, fit.metrics) for client, fit in results if client.cid not in refused]
        counts: dict[str, Scalar] = {"gma-refused": len(refusals), "gma-failed": len(failures)}
        counts["gma-capped"] = len(step.capped)
        parameters = ndarrays_to_parameters([np.asarray(step.params[name]) for name in self._sent])
        return parameters, {**self._combine_metrics(counted), **step.statistics, **counts}

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Flower's weighted mean over the results with a valid weight."""
        valid = []
        for client, result in results:
            try:
                read_weight(result.num_examples, float("inf"))
                valid.append((client, result))
            except Refused as refused:
                log(WARNING, "evaluate: client %s left out (%s): %s", client.cid, refused.reason, refused.detail)
        try:
            loss, metrics = super().aggregate_evaluate(server_round, valid, failures)
        except Exception as error:  # the user's function, or a client's numbers in Flower's
            log(WARNING, "the clients' metrics cannot be combined and are left out: %s", shorten(error))
            return None, {}
        return loss, metrics

    def _combine_metrics(self, counted: list[tuple[int, dict[str, Scalar]]]) -> dict[str, Scalar]:
        if self.fit_metrics_aggregation_fn is None:
            return {}
        try:
            return dict(self.fit_metrics_aggregation_fn(counted))
        except Exception as error:  # the user's function, on a client's numbers
            log(WARNING, "the clients' metrics cannot be combined and are left out: %s", shorten(error))
            return {}

    def _updates(self, results: Iterable[Result], unreadable: list[Refusal]) -> Iterator[Reply]:
        cast = self.server.gate.cast
        for client, fit in results:
            try:
                stored = {str(number): data for number, data in enumerate(fit.parameters.tensors)}
                local = read_arrays(stored, self._sent, cast=cast)
                update = subtract(local, self._sent, cast=cast)
            except Refused as refused:
                unreadable.append(Refusal(client.cid, refused.reason, shorten(refused.detail)))
            except Exception as error:  # untrusted bytes may raise anything
                unreadable.append(Refusal(client.cid, "unreadable", shorten(f"{type(error).__name__}: {error}")))
            else:
                yield update, fit.num_examples, client.cid


def name_arrays(parameters: Parameters) -> dict[str, Array]:
    """A list of arrays as a mapping; entries are named by their position."""
    try:
        return {str(number): read_array(data, read_header(data)) for number, data in enumerate(parameters.tensors)}
    except Refused as refused:
        raise DataError(f"the model's arrays cannot be read: {refused.detail}") from None


def running_statistics(arrays: Mapping[str, Array]) -> list[str]:
    """Mean and variance of batch normalisation in a list of arrays: two vectors of one length before a counter.

    >>> scale, counter = np.ones(3), np.array(5)
    >>> running_statistics({"0": scale, "1": scale, "2": scale, "3": scale, "4": counter, "5": np.ones(2)})
    ['2', '3']
    """
    entries = [(name, spec(array)) for name, array in arrays.items()]
    found: list[str] = []
    for (mean, first), (variance, second), (_, counter) in zip(entries, entries[1:], entries[2:], strict=False):
        vectors = len(first.shape) == 1 and first == second and first.dtype in FLOATS
        found += [mean, variance] if vectors and counter.shape == () and counter.dtype not in FLOATS else []
    return found
