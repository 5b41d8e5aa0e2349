"""Masked averaging through Flower's own SecAgg+: its shares, masks and quantisation, driven in one process."""

import copy
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedgma[flower]'")

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.client import ClientApp, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.common import bytes_to_ndarray, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.common.recorddict_compat import arrayrecord_to_parameters, parameters_to_arrayrecord
from flwr.server import LegacyContext, ServerConfig, SimpleClientManager
from flwr.server.compat.grid_client_proxy import GridClientProxy
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.supercore.task_identity import TaskIdentity

import fedgma
from fedgma.aggregation.own import as_rule
from fedgma.aggregation.secure import Encoding, encode
from fedgma.flower import secagg
from fedgma.flower.secagg import SecureMasked, encoding_mod, secure_workflow

START = [np.ones((2, 3), np.float32), np.array([1.0, -1.0]), np.array(4)]
ENCODING = Encoding(clip=0.5, max_weight=256)
rng = np.random.default_rng(5)
UPDATES = {node: [rng.normal(0, 0.1, (2, 3)).astype(np.float32), rng.normal(0, 0.1, 2)] for node in range(1, 8)}
COUNTS = {node: 10 * node for node in UPDATES}


class Trained(NumPyClient):
    """A client as any Flower app has it: returns the local model and the number of samples."""

    def __init__(self, node):
        self.node = node

    def fit(self, parameters, config):
        moved = [array + step for array, step in zip(parameters, UPDATES[self.node], strict=False)]
        return [*moved, parameters[2] + 1], COUNTS[self.node], {}


class Federation:
    """A grid whose nodes answer at once, in this process; remembers what the server was sent."""

    def __init__(self, app, silent=()):
        self.app, self.silent = app, silent
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}, 0) for node in UPDATES}
        self.seen, self.stage = [], 0

    def send_and_receive(self, messages, *, timeout=None):
        self.stage += 1
        return [self.answer(copy.deepcopy(message)) for message in messages]

    def answer(self, message):
        node = message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = f"{self.stage}-{node}"
        if node in self.silent and self.stage == 3:  # drops out after the keys were shared
            return Message(error=Error(code=0, reason="gone"), reply_to=message)
        try:
            reply = self.app(message, self.contexts[node])
        except fedgma.DataError as error:
            reply = Message(error=Error(code=0, reason=str(error)), reply_to=message)
        self.seen.append((node, reply))
        return reply


def played(strategy, silent=(), encoding=ENCODING):
    for name, value in (("run_id", 1), ("node_id", 1), ("task_id", 1)):
        setattr(TaskIdentity, name, value)  # messages are made in the name of a running task
    mods = [secaggplus_mod, encoding_mod(encoding, further=strategy.aggregator.further)]
    app = ClientApp(lambda context: Trained(context.node_id).to_client(), mods=mods)
    grid, manager = Federation(app, silent), SimpleClientManager()
    for node in UPDATES:
        manager.register(GridClientProxy(node, grid, 1))
    context = LegacyContext(Context(1, 1, {}, RecordDict(), {}, 0), ServerConfig(1), strategy, manager)
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({"current_round": 1})
    context.state.array_records[MAIN_PARAMS_RECORD] = parameters_to_arrayrecord(ndarrays_to_parameters(START), False)
    secure_workflow(encoding, num_shares=5, reconstruction_threshold=3)(grid, context)
    after = arrayrecord_to_parameters(context.state.array_records[MAIN_PARAMS_RECORD], True)
    return parameters_to_ndarrays(after), grid


def expected(nodes, aggregator):
    updates = [{"0": UPDATES[node][0], "1": UPDATES[node][1]} for node in nodes]
    return aggregator(updates, [COUNTS[node] for node in nodes])


@pytest.mark.parametrize(
    "aggregator", [fedgma.masked_mean(0.4), fedgma.and_mask(0.4), fedgma.mean()], ids=lambda a: a.name
)
def test_the_new_model_is_the_masked_mean_within_the_bound(aggregator):
    after, _ = played(SecureMasked(ENCODING, aggregator=aggregator, min_fit_clients=7))
    update = expected(UPDATES, aggregator).update
    bound = ENCODING.error(7, sum(COUNTS.values())) + 2e-7  # and float32's own
    np.testing.assert_allclose(after[0] - START[0], update["0"], rtol=0, atol=bound)
    np.testing.assert_allclose(after[1] - START[1], update["1"], rtol=0, atol=bound)
    assert [array.dtype for array in after] == [array.dtype for array in START]
    assert after[2] == 4


def test_a_rule_of_further_sums_goes_through_and_one_of_squares_says_why_not():
    def larger_half(positive, negative, positive_weight, negative_weight):
        more = positive > negative
        return more * positive / (positive_weight + 1) - (more == 0) * negative / (negative_weight + 1)

    after, _ = played(SecureMasked(ENCODING, aggregator=larger_half, min_fit_clients=7))
    update = expected(UPDATES, as_rule(larger_half)).update
    bound = ENCODING.error(7, min(COUNTS.values())) + 2e-7  # a side can be one client
    np.testing.assert_allclose(after[0] - START[0], update["0"], rtol=0, atol=bound)
    with pytest.raises(fedgma.ConfigError, match="wiener reads squares, which a secure sum does not carry"):
        SecureMasked(ENCODING, aggregator=fedgma.wiener())
    with pytest.raises(fedgma.ConfigError, match="ties needs single updates"):
        SecureMasked(ENCODING, aggregator=fedgma.ties(0.2))


def totals(monkeypatch):
    """The sums that reach the server's decoding, as they come."""
    seen, decode = [], secagg.decode
    monkeypatch.setattr(
        secagg, "decode", lambda total, *rest, **more: (seen.append(total), decode(total, *rest, **more))[1]
    )
    return seen


def vectors(nodes):
    like = {str(place): array for place, array in enumerate(START)}
    return {
        node: encode(
            {"0": UPDATES[node][0], "1": UPDATES[node][1], "2": np.array(1)}, COUNTS[node], ENCODING, like=like
        )
        for node in nodes
    }


def test_the_sum_is_exact(monkeypatch):
    seen = totals(monkeypatch)
    played(SecureMasked(ENCODING, min_fit_clients=7))
    local = {node: [START[k] + UPDATES[node][k] - START[k] for k in (0, 1)] for node in UPDATES}  # as a client's model
    monkeypatch.setitem(globals(), "UPDATES", local)
    np.testing.assert_array_equal(seen[0], sum(vectors(local).values()))


def test_a_client_that_drops_out_after_sharing_keys_excludes_only_itself(monkeypatch):
    seen = totals(monkeypatch)
    after, _ = played(SecureMasked(ENCODING, min_fit_clients=7), silent=(3,))
    rest = [node for node in UPDATES if node != 3]
    update = expected(rest, fedgma.masked_mean(0.4)).update
    assert seen[0][:3].tolist() == [6, 0, sum(COUNTS[node] for node in rest)]
    np.testing.assert_allclose(after[1] - START[1], update["1"], rtol=0, atol=ENCODING.error(6, 250))


def test_an_update_that_the_gate_would_refuse_is_not_sent(monkeypatch):
    seen = totals(monkeypatch)
    monkeypatch.setitem(UPDATES, 3, [np.full((2, 3), np.nan, np.float32), np.zeros(2)])
    after, grid = played(SecureMasked(ENCODING, min_fit_clients=7))
    assert seen[0][0] == 6
    assert all(np.isfinite(array).all() for array in after)
    assert any("nonfinite" in reply.error.reason for _, reply in grid.seen if reply.has_error())


def test_the_server_is_sent_no_update_no_vote_and_no_weight():
    _, grid = played(SecureMasked(ENCODING, min_fit_clients=7))
    plain, hidden = vectors(UPDATES), 0
    for node, reply in grid.seen:
        assert not any(len(record) for record in reply.content.array_records.values())
        assert all(value == 1 for record in reply.content.metric_records.values() for value in record.values())
        for record in reply.content.config_records.values():
            if "masked_params" in record:
                sent = bytes_to_ndarray(record["masked_params"][1])
                assert (sent != plain[node] + ENCODING.half).all()
                hidden += 1
    assert hidden == 7


def test_too_many_clients_for_the_encoding_are_refused_before_training():
    with pytest.raises(fedgma.ConfigError, match="at most 3 clients per round with 30 bits, got 7"):
        played(SecureMasked(Encoding(bits=30), min_fit_clients=7), encoding=Encoding(bits=30))


def test_a_rule_that_needs_single_updates_is_refused():
    for aggregator in (fedgma.median(), fedgma.clipped(fedgma.mean(), 1.0)):
        with pytest.raises(fedgma.ConfigError, match="single updates"):
            SecureMasked(ENCODING, aggregator=aggregator)


@pytest.mark.slow
def test_the_example_runs_in_flowers_simulation_and_agrees_with_the_run_without_secagg(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed: pip install 'flwr[simulation]'")
    example = Path(__file__).parents[2] / "examples" / "secure_flower.py"
    source = str(Path(fedgma.__file__).parents[1])
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(example)],
        env={**os.environ, **quiet, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    apart = re.search(r"differ by at most (\S+) after", done.stdout)
    assert apart is not None, done.stdout
    assert float(apart[1]) < 1e-6
