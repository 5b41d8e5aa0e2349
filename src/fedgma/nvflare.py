"""Masked averaging on NVFlare: a streaming aggregator for its FedAvg recipe.

    from fedgma.nvflare import MaskedAggregator
    recipe = FedAvgRecipe(..., aggregator=MaskedAggregator(tau=0.4),
                          aggregator_data_kind=DataKind.WEIGHT_DIFF, params_transfer_type=TransferType.DIFF)

Each client's result is checked and added to a tally when it arrives, and is not kept. The mask follows the server's
preconditioner, as in the paper's Algorithm 2. Settings are plain values, because NVFlare writes them into the job's
configuration and constructs the aggregator again on the server.
"""

import math
import threading
from collections.abc import Sequence
from typing import Any

from nvflare.apis.dxo import DataKind
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

from fedgma.aggregation.gate import Gate
from fedgma.aggregation.optimizers import OPTIMIZERS, ServerOptimizer
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.rules import RULES
from fedgma.aggregation.server import MaskedServer
from fedgma.arrays import Params
from fedgma.errors import ConfigError


class MaskedAggregator(ModelAggregator):
    """Gradient masked averaging for NVFlare's FedAvg: any rule that streams, with any server optimiser, by name.

    Clients must send differences (`ParamsType.DIFF`); the recipe's `TransferType.DIFF` makes them do so. Weights are
    their `NUM_STEPS_CURRENT_ROUND`, or 1. `settings` are passed to the rule and `server` to the optimiser:
    `MaskedAggregator(optimizer="yogi", server={"learning_rate": 0.01})`. A round without a valid update, or with a step
    that is not finite, leaves the model unchanged. The first valid update of a job sets names, shapes and types.
    `max_norm`, `norm_factor` and `quorum` are the guards of `fedgma.aggregation.server.MaskedServer`.
    """

    expected_data_kind = DataKind.WEIGHT_DIFF  # the recipe compares its setting with this

    def __init__(
        self,
        tau: float = 0.4,
        aggregator: str = "gma",
        optimizer: str = "sgd",
        settings: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        max_norm: float | None = None,
        norm_factor: float | None = 10.0,
        quorum: int = 1,
        buffers: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.tau, self.aggregator, self.optimizer = tau, aggregator, optimizer
        self.settings, self.server, self.buffers = settings, server, buffers
        self.max_norm, self.norm_factor, self.quorum = max_norm, norm_factor, quorum
        gate = Gate(max_norm=math.inf if max_norm is None else max_norm)
        rule, step = _rule(aggregator, tau, settings or {}), _optimizer(optimizer, server or {})
        self._server = MaskedServer(rule, step, gate, buffers, norm_factor, quorum)
        self._like: Params | None = None  # zeros with the entries of earlier updates
        self._lock = threading.Lock()  # results arrive on several threads
        self.reset_stats()

    def accept_model(self, model: FLModel) -> None:
        """Count one client's update, or leave it out and log the reason."""
        meta = model.meta or {}
        client = meta.get("client_name", meta.get(FLMetaKey.SITE_NAME))
        if model.params_type != ParamsType.DIFF:
            with self._lock:
                self._full_models += 1
            detail = "expected a difference, got a full model; set params_transfer_type=TransferType.DIFF"
            self._log_refusal(client, "kind", detail)
            return
        weight = meta.get(FLMetaKey.NUM_STEPS_CURRENT_ROUND, 1)
        with self._lock:
            refusal = self._server.add(self._tally, model.params, weight, client)
        if refusal is not None:
            self._log_refusal(client, refusal.reason, refusal.detail)

    def aggregate_model(self) -> FLModel:
        """The masked, preconditioned step as a difference, with statistics of the mask as metrics."""
        with self._lock:
            step = self._server.close(self._tally)
            refused = len(step.refused) + self._full_models
            metrics: dict[str, float]
            if step.params is None:
                self.warning(f"the round leaves the model unchanged: {step.error}")
                metrics = {"gma-clients": self._tally.clients, "gma-refused": refused}
                return FLModel(params_type=ParamsType.DIFF, params={}, metrics=metrics)
            self._like = {name: array * 0 for name, array in step.params.items()}
            metrics = {**step.statistics, "gma-refused": refused}
            return FLModel(params_type=ParamsType.DIFF, params=dict(step.params), metrics=metrics)

    def reset_stats(self) -> None:
        """Start a new round; the server optimiser's moments stay."""
        self._tally, self._full_models = self._server.open(self._like), 0

    def _log_refusal(self, client: object, reason: str, detail: str) -> None:
        self.warning(f"client {client} left out ({reason}): {detail}")


def _rule(name: str, tau: float, settings: dict[str, Any]) -> Rule:
    if name not in RULES:
        raise ConfigError(f"unknown aggregator {name!r}; known: {', '.join(RULES)}")
    rule = RULES[name].make(**({"tau": tau} if "tau" in RULES[name].settings else {}), **settings)
    if not rule.streams:
        raise ConfigError(f"{name} needs all updates in memory together, but NVFlare delivers them one by one")
    return rule


def _optimizer(name: str, settings: dict[str, Any]) -> ServerOptimizer:
    if name not in OPTIMIZERS:
        raise ConfigError(f"unknown server optimiser {name!r}; known: {', '.join(sorted(OPTIMIZERS))}")
    return OPTIMIZERS[name](**settings)
