"""Masked averaging on Flower: any aggregator with any server optimiser, as one strategy of the message API.

    from fedgma.flower import Masked
    strategy = Masked(tau=0.4)                                              # was: FedAvg()
    strategy = Masked(aggregator=fedgma.masked_mean(0.4), optimizer=fedgma.yogi(0.01))   # was: FedYogi(eta=0.01)

The mask sits after the server's preconditioner, as in the paper's Algorithm 2, and replies go one by one through the
same tally as everywhere else. A bad reply costs its node and not the run: it is left out, logged, and counted in the
round's metrics. Nodes are sampled from a seed, and waiting for them has a limit. Flower's own options (fractions,
minimum nodes, keys, metric functions) are those of its FedAvg.
"""

import time
from collections.abc import Collection, Iterable
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedgma.aggregates import Aggregate
from fedgma.aggregators import Aggregator, masked_mean
from fedgma.arrays import Array
from fedgma.errors import Diverged, NotEnoughClients
from fedgma.gate import Gate
from fedgma.optimizers import ServerOptimizer, State, sgd
from fedgma.seeds import generator
from fedgma.server import difference
from fedgma.tally import Tally

Reply = tuple[Any, object, int]  # update, weight, node


class Masked(FedAvg):
    """A Flower strategy whose aggregation is an fedgma aggregator and whose server step is an fedgma optimiser.

    Without `aggregator` it is gradient masked averaging at `tau`; without `optimizer` FedAvg's server. `wait` is how
    many seconds a round waits for its nodes before it gives up.
    """

    def __init__(
        self,
        *,
        tau: float = 0.4,
        aggregator: Aggregator | None = None,
        optimizer: ServerOptimizer | None = None,
        gate: Gate | None = None,
        buffers: Collection[str] | None = None,
        seed: int = 0,
        wait: float = 600.0,
        **flower_options: Any,
    ) -> None:
        super().__init__(**flower_options)
        self.aggregator = aggregator or masked_mean(tau)
        self.optimizer = optimizer or sgd()
        self.gate, self.buffers = gate or Gate(), buffers
        self.seed, self.wait = seed, wait
        self.state: State | None = None
        self._sent: dict[str, Array] = {}  # the global model of the round that is on its way

    def summary(self) -> None:
        """Log what is aggregated how."""
        log(INFO, "\t├──> fedgma: %s %s", self.aggregator.name, dict(self.aggregator.settings))
        log(INFO, "\t├──> server: %s %s", self.optimizer.name, dict(self.optimizer.settings))
        super().summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample this round's nodes and send them the global model."""
        self._sent = {name: array.numpy() for name, array in arrays.items()}
        if self.fraction_train == 0.0:
            return []
        nodes = self._sample(grid, server_round, "train", self.fraction_train, self.min_train_nodes)
        return self._messages(MessageType.TRAIN, server_round, arrays, config, nodes)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the nodes that evaluate the new model."""
        if self.fraction_evaluate == 0.0:
            return []
        nodes = self._sample(grid, server_round, "evaluate", self.fraction_evaluate, self.min_evaluate_nodes)
        return self._messages(MessageType.EVALUATE, server_round, arrays, config, nodes)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Tally the replies, mask, step; the model stays as it is where nothing valid came or a step would diverge."""
        replies = list(replies)
        answers = [message for message in replies if not message.has_error()]
        for message in replies:
            if message.has_error():
                log(WARNING, "aggregate_train: node %s failed: %s", message.metadata.src_node_id, message.error.reason)
        tally = Tally(self._sent, buffers=self.buffers, gate=self.gate)
        try:
            merged = self.aggregator.over((self._read(message) for message in answers), tally, self.buffers)
            state = self.optimizer.init(self._sent) if self.state is None else self.state
            params, self.state = self.optimizer.step(merged, state, self._sent)
        except (NotEnoughClients, Diverged) as error:
            log(WARNING, "aggregate_train: round %s leaves the model as it is: %s", server_round, error)
            return None, None
        for refusal in merged.notes["refused"]:
            log(WARNING, "aggregate_train: node %s left out (%s): %s", *refusal)
        bad = {refusal.client for refusal in merged.notes["refused"] if refusal.reason != "duplicate"}
        first = {message.metadata.src_node_id: message.content for message in reversed(answers)}
        good = [content for node, content in first.items() if node not in bad]
        metrics = self.train_metrics_aggr_fn(good, self.weighted_by_key) if good else MetricRecord()
        metrics.update(statistics(merged, len(replies) - len(answers)))
        return ArrayRecord({name: FlowerArray(np.asarray(array)) for name, array in params.items()}), metrics

    def _read(self, message: Message) -> Reply:
        """A reply's update, weight and node; what cannot be read is passed on for the gate to refuse."""
        node = int(message.metadata.src_node_id)
        try:
            (arrays,) = message.content.array_records.values()
            (metrics,) = message.content.metric_records.values()
            local = {name: array.numpy() for name, array in arrays.items()}
        except (ValueError, TypeError, KeyError, EOFError) as error:
            return type(error).__name__, None, node
        return difference(local, self._sent), metrics.get(self.weighted_by_key), node

    def _sample(self, grid: Grid, server_round: int, purpose: str, fraction: float, least: int) -> list[int]:
        deadline = time.monotonic() + self.wait
        while True:
            nodes = sorted(grid.get_node_ids())
            wanted = max(int(len(nodes) * fraction), least)
            if len(nodes) >= max(self.min_available_nodes, wanted):
                break
            if time.monotonic() > deadline:
                needed = max(self.min_available_nodes, wanted)
                raise NotEnoughClients(f"{len(nodes)} nodes after {self.wait:g} s, round {server_round} needs {needed}")
            log(INFO, "waiting for nodes: %d of %d", len(nodes), max(self.min_available_nodes, wanted))
            time.sleep(1)
        rng = generator(self.seed, purpose, server_round)
        return [nodes[place] for place in sorted(rng.choice(len(nodes), wanted, replace=False))]

    def _messages(
        self, kind: str, server_round: int, arrays: ArrayRecord, config: ConfigRecord, nodes: list[int]
    ) -> list[Message]:
        settings = ConfigRecord({**config, "server-round": server_round})
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: settings})
        return [Message(content=record, message_type=kind, dst_node_id=node) for node in nodes]


def statistics(merged: Aggregate, failed: int = 0) -> dict[str, float]:
    """A round's mask in numbers, for a MetricRecord."""
    masks = [np.asarray(mask) for mask in (merged.mask or {}).values()]
    entries = sum(mask.size for mask in masks)
    kept = sum(float(mask.sum(dtype=np.float64)) for mask in masks) / entries if entries else 1.0
    whole = sum(int((mask == 1).sum()) for mask in masks) / entries if entries else 1.0
    return {
        "gma-clients": int(merged.notes["clients"]),
        "gma-refused": len(merged.notes["refused"]),
        "gma-failed": failed,
        "gma-mask-mean": kept,
        "gma-share-unmasked": whole,
    }
