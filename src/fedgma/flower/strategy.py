"""Masked averaging on Flower: any rule with any server optimiser, as a strategy of the message API.

    from fedgma.flower import Masked
    strategy = Masked(tau=0.4)                                              # was: FedAvg()
    strategy = Masked(aggregator=fedgma.masked_mean(0.4), optimizer=fedgma.yogi(0.01))   # was: FedYogi(eta=0.01)

The mask follows the server's preconditioner, as in the paper's Algorithm 2. Replies are added to a tally one at a time.
A bad reply does not stop the run: it is left out, logged, and counted in the round's metrics. Nodes are sampled with a
seed, waiting has a time limit, and `start(..., folder=...)` resumes a stopped run. Other options (fractions, minimum
nodes, keys, metric functions) are those of Flower's FedAvg.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from fedgma.aggregation.gate import Gate, Refusal
from fedgma.aggregation.optimizers import ServerOptimizer, as_optimizer
from fedgma.aggregation.own import AnyRule
from fedgma.aggregation.server import MaskedServer, Reply, pack_state
from fedgma.arrays import Params
from fedgma.errors import FedgmaError
from fedgma.flower.arguments import check_start, check_strategy
from fedgma.flower.left_out import LeftOut
from fedgma.flower.messages import Roster, sample, send_and_receive
from fedgma.flower.options import check_options, rule_of
from fedgma.flower.replies import read_metrics, read_reply, shorten
from fedgma.flower.resume import BEFORE, SavedRun

FLOWER_SETTINGS = (
    "fraction_train",
    "fraction_evaluate",
    "min_train_nodes",
    "min_evaluate_nodes",
    "min_available_nodes",
    "weighted_by_key",
    "arrayrecord_key",
    "configrecord_key",
)
ROUNDING = 1e-9  # 100 * 0.29 is a little less than 29
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


class Masked(FedAvg):
    """A Flower strategy with a fedgma rule (`aggregator`) and a fedgma server optimiser.

    A rule is one of the library's or your own function of sums (docs/rules.md). The default rule is gradient masked
    averaging at `tau`, the default optimiser FedAvg's server. A round waits `wait`
    seconds for its nodes to connect and needs `quorum` valid replies; a failed round is repeated up to `retries` times
    before the run ends. `norm_factor`, `share_cap` and `lookahead` are those of `MaskedServer`, `identity` is that of
    `Roster`.
    """

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
        lookahead: bool = False,
        retries: int = 3,
        seed: int = 0,
        identity: str | None = None,
        wait: float = 600.0,
        **flower_options: Any,
    ) -> None:
        check_options(flower_options, Masked)
        check_strategy({**flower_options, "retries": retries, "seed": seed, "wait": wait})
        super().__init__(**flower_options)
        rule = rule_of(tau, aggregator)
        server = MaskedServer(rule, as_optimizer(optimizer), gate or Gate(), buffers, norm_factor, quorum, share_cap)
        self.server = replace(server, lookahead=lookahead)
        self.seed, self.wait, self.retries = seed, wait, retries
        self.roster = Roster(identity)
        self._model: Params = {}  # the global model of the current round
        self._sent: Params = {}  # what nodes start from: the same, or ahead of it
        self._sampled: tuple[int, ...] = ()
        self._error: FedgmaError | None = None  # why the latest round left the model unchanged
        self._left_out = LeftOut()  # of the latest round

    def summary(self) -> None:
        """Log the rule and the server optimiser, then Flower's summary."""
        server = self.server
        log(INFO, "\t├──> fedgma: %s %s", server.rule.name, dict(server.rule.settings))
        log(INFO, "\t├──> server: %s %s", server.optimizer.name, dict(server.optimizer.settings))
        super().summary()

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that must not change when a stopped run is resumed; `wait` may."""
        kept = {"seed": self.seed, "retries": self.retries, "identity": self.roster.identity}
        flower = {name: getattr(self, name) for name in FLOWER_SETTINGS}
        return {**self.server.settings, **_plain({**kept, **flower})}

    # -- the four hooks of a Flower strategy ---------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample this round's nodes and send them the global model."""
        self._model = _to_arrays(arrays)
        self._sent = self.server.sent(self._model)
        arrays = arrays if self._sent is self._model else to_record(self._sent)
        self._sampled = self._sample(grid, ("cohort", server_round), self.fraction_train, self.min_train_nodes)
        return self._messages(MessageType.TRAIN, server_round, arrays, config, self._sampled)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the nodes that evaluate the new model."""
        nodes = self._sample(grid, ("evaluate", server_round), self.fraction_evaluate, self.min_evaluate_nodes)
        return self._messages(MessageType.EVALUATE, server_round, arrays, config, nodes)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Aggregate the replies and step; returns None, which keeps the model, if the round failed."""
        contents: dict[int, RecordDict] = {}
        failed: dict[int, str] = {}
        unreadable: list[Refusal] = []
        updates = self._updates(replies, contents, failed, unreadable)
        step = self.server.step(self._model, updates, self._sampled)
        refused = (*unreadable, *step.refused)
        for refusal in refused:
            log(WARNING, "aggregate_train: node %s left out (%s): %s", *refusal)
        for capped in step.capped:
            log(WARNING, "aggregate_train: node %s has weight %g, which share_cap cuts to %g", *capped)
        left_out = {refusal.client for refusal in refused if refusal.reason != "duplicate"}
        counted = [content for node, content in contents.items() if node not in left_out]
        late = tuple(sorted(set(self._sampled) - contents.keys() - failed.keys() - left_out))
        self._left_out = LeftOut(refused, failed, late)
        if step.params is None:
            assert step.error is not None
            self._error = self._left_out.explain(step.error, len(counted), self.server.quorum)
            log(WARNING, "aggregate_train: round %s leaves the model unchanged: %s", server_round, self._error)
            return None, None
        metrics = self._combine_metrics(self.train_metrics_aggr_fn, counted)
        counts = {"gma-refused": len(refused), "gma-failed": len(failed), "gma-late": len(late)}
        counts["gma-capped"] = len(step.capped)
        metrics.update({**step.statistics, **counts})
        return to_record({name: step.params[name] for name in self._sent}), metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Combine the metrics of the valid replies."""
        contents: list[RecordDict] = []
        for message in replies:
            if message.has_error():
                log(
                    WARNING, "evaluate: node %s failed: %s", message.metadata.src_node_id, shorten(message.error.reason)
                )
                continue
            content = read_metrics(message, self.weighted_by_key)
            if isinstance(content, Refusal):
                log(WARNING, "evaluate: node %s left out (%s): %s", *content)
            else:
                contents.append(content)
        return self._combine_metrics(self.evaluate_metrics_aggr_fn, contents) if contents else None

    # -- the run -------------------------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        *,
        folder: str | Path | None = None,
    ) -> Result:
        """Run the rounds; with `folder`, save each one there and resume a stopped run from there.

        A round waits `timeout` seconds for replies. A resumed run gives the same bits as one without interruption. If
        the optimiser keeps an average of models (`fedgma.averaged`), nodes train the model, and the average is what is
        evaluated and returned.
        """
        check_start(num_rounds, timeout, folder)
        log(INFO, "Starting %s: %d rounds", type(self).__name__, num_rounds)
        self.summary()
        first = {name: array.numpy() for name, array in initial_arrays.items()}
        configs = {"train_config": dict(train_config or {}), "evaluate_config": dict(evaluate_config or {})}
        with SavedRun(folder, {**self.settings, **_plain(configs)}, first, self.server.rule) as saved:
            completed, params, result = saved.resume(self.server, num_rounds)
            arrays = initial_arrays if params is None else to_record(params)
            shown = self._evaluated(arrays)
            if completed == 0 and evaluate_fn is not None:
                _add_metrics(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, arrays))
            for server_round in range(completed + 1, num_rounds + 1):
                log(INFO, "[ROUND %d/%d]", server_round, num_rounds)
                began = time.monotonic()
                arrays, train_metrics = self._train(server_round, arrays, train_config, grid, timeout)
                shown = self._evaluated(arrays)
                evaluate_metrics = self._evaluate(server_round, shown, evaluate_config, grid, timeout)
                server_metrics = evaluate_fn(server_round, shown) if evaluate_fn is not None else None
                _add_metrics(result.train_metrics_clientapp, server_round, train_metrics)
                _add_metrics(result.evaluate_metrics_clientapp, server_round, evaluate_metrics)
                _add_metrics(result.evaluate_metrics_serverapp, server_round, server_metrics)
                metrics = {"train": train_metrics, "evaluate": evaluate_metrics, "server": server_metrics}
                if server_round == 1 and 0 in result.evaluate_metrics_serverapp:
                    metrics[BEFORE] = result.evaluate_metrics_serverapp[0]
                saved.save(server_round, pack_state(self.server, _to_arrays(arrays)), metrics, self._left_out)
                log(INFO, "round %d took %.1f s: %s", server_round, time.monotonic() - began, dict(train_metrics or {}))
            saved.finish(num_rounds, _to_arrays(shown))
        result.arrays = shown
        return result

    def _evaluated(self, arrays: ArrayRecord) -> ArrayRecord:
        model = _to_arrays(arrays)
        shown = self.server.evaluated(model)
        return arrays if shown is model else to_record(shown)

    def _train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord | None, grid: Grid, timeout: float
    ) -> tuple[ArrayRecord, MetricRecord | None]:
        for attempt in range(self.retries + 1):
            messages = list(self.configure_train(server_round, arrays, config or ConfigRecord(), grid))
            if not messages:
                return arrays, None
            next_arrays, metrics = self.aggregate_train(server_round, send_and_receive(grid, messages, timeout))
            if next_arrays is not None:
                return next_arrays, metrics
            log(WARNING, "round %d: attempt %d of %d failed", server_round, attempt + 1, self.retries + 1)
        assert self._error is not None
        raise self._error

    def _evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord | None, grid: Grid, timeout: float
    ) -> MetricRecord | None:
        messages = list(self.configure_evaluate(server_round, arrays, config or ConfigRecord(), grid))
        return self.aggregate_evaluate(server_round, send_and_receive(grid, messages, timeout)) if messages else None

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _updates(
        self,
        replies: Iterable[Message],
        contents: dict[int, RecordDict],
        failed: dict[int, str],
        unreadable: list[Refusal],
    ) -> Iterator[Reply]:
        """Yield replies for the tally; collects their other records, the failed nodes and the unreadable replies."""
        for message in replies:
            node = int(message.metadata.src_node_id)
            if message.has_error():
                failed[node] = shorten(message.error.reason)
                log(WARNING, "aggregate_train: node %s failed: %s", node, failed[node])
                continue
            answer = read_reply(message, self._sent, self.weighted_by_key, cast=self.server.gate.cast)
            if isinstance(answer, Refusal):
                unreadable.append(answer)
                continue
            contents.setdefault(node, answer.content)
            yield answer.update, answer.weight, node

    def _combine_metrics(self, combine: Callable[..., MetricRecord], contents: list[RecordDict]) -> MetricRecord:
        """Combine the nodes' metrics; those that differ in name or length from most nodes' are left out."""
        kinds = [_metric_kinds(content) for content in contents]
        usual = max(kinds, key=kinds.count, default=None)
        alike = [content for content, kind in zip(contents, kinds, strict=True) if kind == usual]
        try:
            combined = combine(alike, self.weighted_by_key) if alike else MetricRecord()
            if not isinstance(combined, MetricRecord):
                raise TypeError(f"their function must return a MetricRecord, got {type(combined).__name__}")
            return combined
        except Exception as error:  # the user's function, or a node's numbers in Flower's
            log(WARNING, "the nodes' metrics cannot be combined and are left out: %s", shorten(error))
            return MetricRecord()

    def _sample(self, grid: Grid, draw: tuple[str, int], fraction: float, minimum: int) -> tuple[int, ...]:
        if fraction == 0.0:
            return ()

        def wanted(nodes: int) -> int:
            return max(math.floor(nodes * fraction + ROUNDING), minimum)

        available = self.min_available_nodes
        nodes = sample(self.roster, grid, draw=(self.seed, *draw), wanted=wanted, available=available, wait=self.wait)
        return tuple(nodes)

    def _messages(
        self, kind: str, server_round: int, arrays: ArrayRecord, config: ConfigRecord, nodes: Iterable[int]
    ) -> list[Message]:
        settings = ConfigRecord({**config, "server-round": server_round})
        record = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: settings})
        return [Message(content=record, message_type=kind, dst_node_id=node) for node in nodes]


def to_record(params: Params) -> ArrayRecord:
    """Named arrays as Flower's record."""
    return ArrayRecord({name: FlowerArray(np.asarray(array)) for name, array in params.items()})


def _plain(settings: Any) -> Any:
    """Settings as JSON has them: bytes as hexadecimal digits, numpy's numbers as Python's."""
    if isinstance(settings, dict):
        return {name: _plain(value) for name, value in settings.items()}
    if isinstance(settings, list | tuple):
        return [_plain(value) for value in settings]
    return settings.hex() if isinstance(settings, bytes) else getattr(settings, "item", lambda: settings)()


def _to_arrays(arrays: ArrayRecord) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in arrays.items()}


def _metric_kinds(content: RecordDict) -> tuple[tuple[str, int], ...]:
    """Names of a reply's metrics, with the lengths of lists (-1: a number)."""
    records = content.metric_records.values()
    sizes = (
        (name, len(value) if isinstance(value, list) else -1) for metrics in records for name, value in metrics.items()
    )
    return tuple(sorted(sizes))


def _add_metrics(history: dict[int, MetricRecord], server_round: int, metrics: MetricRecord | None) -> None:
    if metrics is not None:
        history[server_round] = metrics
