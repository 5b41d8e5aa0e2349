"""Masked averaging on NVFlare: a streaming aggregator for its FedAvg recipe.

    from fedgma.nvflare import MaskedAggregator
    recipe = FedAvgRecipe(..., aggregator=MaskedAggregator(tau=0.4),
                          aggregator_data_kind=DataKind.WEIGHT_DIFF, params_transfer_type=TransferType.DIFF)

Each client's result goes through the gate into a tally as it arrives and is forgotten. The mask sits after the server's
preconditioner, as in the paper's Algorithm 2. Settings are plain values, because NVFlare writes them into a job's
configuration and builds the aggregator again on the server.
"""

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from nvflare.apis.dxo import DataKind
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

from fedgma.aggregation.gate import Gate
from fedgma.aggregation.optimizers import OPTIMIZERS, ServerOptimizer, State
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.rules import AGGREGATORS
from fedgma.aggregation.tally import Tally
from fedgma.arrays import Params, is_torch
from fedgma.errors import ConfigError, Diverged, NotEnoughClients


class MaskedAggregator(ModelAggregator):
    """Gradient masked averaging for NVFlare's FedAvg: any aggregator that streams, with any server optimiser, by name.

    Clients must send differences (`ParamsType.DIFF`), which the recipe's `TransferType.DIFF` does for them; weights are
    their `NUM_STEPS_CURRENT_ROUND`, or 1. `settings` go to the aggregator and `server` to the optimiser by name:
    `MaskedAggregator(optimizer="yogi", server={"learning_rate": 0.01})`. A round without a valid update, or whose step
    would not be finite, leaves the model as it is. The first valid update of a job says what updates look like.
    """

    expected_data_kind = DataKind.WEIGHT_DIFF  # the recipe compares this with its own setting

    def __init__(
        self,
        tau: float = 0.4,
        aggregator: str = "gma",
        optimizer: str = "sgd",
        settings: dict[str, Any] | None = None,
        server: dict[str, Any] | None = None,
        max_norm: float | None = None,
        buffers: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.tau, self.aggregator, self.optimizer = tau, aggregator, optimizer
        self.settings, self.server, self.max_norm, self.buffers = settings, server, max_norm, buffers
        self._rule = _aggregator(aggregator, tau, settings or {})
        self._step = _optimizer(optimizer, server or {})
        self._state: State | None = None
        self._like: Params | None = None  # what updates looked like in the rounds before
        self._lock = threading.Lock()  # results arrive on threads of their own
        self.reset_stats()

    def accept_model(self, model: FLModel) -> None:
        """Count one client's update, or leave it out and say why."""
        meta = model.meta or {}
        client = meta.get("client_name", meta.get(FLMetaKey.SITE_NAME))
        if model.params_type != ParamsType.DIFF:
            self._left_out(client, "kind", "it sent a whole model; set params_transfer_type=TransferType.DIFF")
            return
        weight = meta.get(FLMetaKey.NUM_STEPS_CURRENT_ROUND, 1)
        with self._lock:
            refusal = self._tally.add(model.params, weight, client=client)
        if refusal is not None:
            self._left_out(client, refusal.reason, refusal.detail)

    def aggregate_model(self) -> FLModel:
        """The masked, preconditioned step as a difference, with the mask's figures as metrics."""
        with self._lock:
            try:
                merged = self._rule.conclude(self._tally)
                self._like = {name: array * 0 for name, array in {**merged.mean, **merged.buffers}.items()}
                state = self._step.init(self._like) if self._state is None else self._state
                step, self._state = self._step.step(merged, state, self._like)  # from zero: the step itself
            except (NotEnoughClients, Diverged) as error:
                self.warning(f"the round leaves the model as it is: {error}")
                return FLModel(params_type=ParamsType.DIFF, params={}, metrics=self._figures(None))
            return FLModel(params_type=ParamsType.DIFF, params=dict(step), metrics=self._figures(merged.mask))

    def reset_stats(self) -> None:
        """Forget the round; the server optimiser's moments stay."""
        gate = Gate(max_norm=math.inf if self.max_norm is None else self.max_norm)
        self._tally, self._others = Tally(self._like, buffers=self.buffers, gate=gate), 0

    def _left_out(self, client: object, reason: str, detail: str) -> None:
        self._others += reason == "kind"
        self.warning(f"client {client} left out ({reason}): {detail}")

    def _figures(self, mask: Params | None) -> dict[str, float]:
        parts = [np.asarray(part.cpu() if is_torch(part) else part) for part in (mask or {}).values()]
        entries = sum(part.size for part in parts)
        kept = sum(float(part.sum(dtype=np.float64)) for part in parts) / entries if entries else 1.0
        refused = len(self._tally.refused) + self._others
        return {"gma_clients": self._tally.clients, "gma_refused": refused, "gma_mask_mean": kept}


def _aggregator(name: str, tau: float, settings: dict[str, Any]) -> Rule:
    if name not in AGGREGATORS:
        raise ConfigError(f"unknown aggregator {name!r}; known: {', '.join(sorted(AGGREGATORS))}")
    takes_tau = name in ("gma", "and_mask", "damped_mean", "shuffled_mask")
    made = AGGREGATORS[name](**({"tau": tau} if takes_tau else {}), **settings)
    if not made.streams:
        raise ConfigError(f"{name} needs all updates in memory together; NVFlare hands them over one by one")
    return made


def _optimizer(name: str, settings: dict[str, Any]) -> ServerOptimizer:
    if name not in OPTIMIZERS:
        raise ConfigError(f"unknown server optimiser {name!r}; known: {', '.join(sorted(OPTIMIZERS))}")
    return OPTIMIZERS[name](**settings)
