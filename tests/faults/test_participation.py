"""Nodes and clients that are too few, leave, come late, fail or are many; and messages between runs and versions."""

import ast
import json
import threading
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedgma[flower]'")
pytest.importorskip("torch", reason="the simulator is not installed: pip install 'fedgma[sim]'")

from flwr.app import ConfigRecord, Error, Message

import fedgma
from fake_grids import Clock, Nodes, record, reply
from fedgma.aggregation.server import MaskedServer
from fedgma.flower import Masked
from fedgma.flower import messages as messages_module
from fedgma.flower import resume as resume_module
from fedgma.simulation.fleet import assemble, play
from fedgma.simulation.sampling import sample_clients
from fedgma.simulation.state import export
from plain_pools import make_federation
from rows import does_not_apply, row
from run_specs import make_spec

START = {"w": np.linspace(-1, 1, 6, dtype=np.float32)}
NODES = (1, 2, 3)
UNAVAILABLE = Error(code=5, reason="Node unavailable")  # what the SuperLink replies for a node that is gone


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(messages_module, "time", Clock())


def trained(node, message):
    arrays = message.content["arrays"]
    change = np.sin(np.arange(6) * node + message.content["config"]["server-round"]).astype(np.float32)
    return Message(content=reply(node, {"w": arrays["w"].numpy() + change}).content, reply_to=message)


def round_of(message):
    return int(message.content["config"]["server-round"])


def run(rounds, answer=trained, ids=NODES, folder=None, **options):
    options = {"fraction_evaluate": 0.0, "min_available_nodes": 3, "optimizer": fedgma.yogi(0.1), **options}
    grid = ids if isinstance(ids, Nodes) else Nodes(ids, answer)
    return Masked(**options).start(grid, record(START), rounds, timeout=2.0, folder=folder)


def assert_same_model(first, second):
    np.testing.assert_array_equal(first.arrays["w"].numpy(), second.arrays["w"].numpy())


def metrics(result, round_):
    return {name.removeprefix("gma-"): value for name, value in result.train_metrics_clientapp[round_].items()}


@row(
    "B1",
    "permanently fewer nodes than a round needs",
    happens="the wait has a limit (`wait`, 600 s), then the run ends with exit code 4; a later start goes on",
    seen="`round 1 needs 3 nodes, got 2 after 600 s`, also in the file `failed`",
)
def test_b1_waiting_for_nodes_ends_and_says_how_many_there_are(tmp_path):
    with pytest.raises(fedgma.NotEnoughClients, match="round 1 needs 3 nodes, got 2 after 600 s"):
        run(2, ids=(1, 2), folder=tmp_path)
    assert json.loads((tmp_path / "failed").read_text())["exit_code"] == 4
    assert_same_model(run(2, folder=tmp_path), run(2))


@row(
    "B2",
    "a node drops out in the middle of a round",
    happens="the round goes on with the replies of the others, if they are a quorum",
    seen="the node in the log, `gma-failed` in the metrics of the round",
)
def test_b2_a_node_that_drops_out_is_left_out_of_its_round():
    def answer(node, message):
        gone = node == 3 and round_of(message) == 2
        return Message(error=UNAVAILABLE, reply_to=message) if gone else trained(node, message)

    result = run(3, answer)
    assert [metrics(result, round_)["clients"] for round_ in (1, 2, 3)] == [3, 2, 3]
    assert metrics(result, 2)["failed"] == 1
    assert metrics(result, 2)["late"] == 0


@row(
    "B3",
    "all nodes drop out",
    happens="the round changes nothing and is repeated `retries` times; then the run ends with exit code 4, and a "
    "later start goes on from the last complete round with the same bits",
    seen="`round 2: attempt 1 of 4 failed` in the log, the reason in the file `failed`",
)
def test_b3_when_all_nodes_drop_out_the_last_round_is_kept(tmp_path, caplog):
    attempts = []

    def answer(node, message):
        if round_of(message) == 1:
            return trained(node, message)
        attempts.append(node)
        return Message(error=UNAVAILABLE, reply_to=message)

    with pytest.raises(fedgma.NotEnoughClients):
        run(3, answer, folder=tmp_path)
    assert len(attempts) == 3 * 4
    assert "round 2: attempt 1 of 4 failed" in caplog.text
    assert json.loads((tmp_path / "failed").read_text())["exit_code"] == 4
    assert_same_model(run(3, folder=tmp_path), run(3))


@row(
    "B4",
    "a node is slower than the time limit",
    happens="the round goes on without it; its late reply is not counted, neither then nor later",
    seen="`1 replies did not arrive within ... s` in the log, `gma-late` in the metrics",
)
def test_b4_a_late_reply_is_not_counted_in_any_round():
    class Slow(Nodes):
        """The reply of node 3 to round 1 arrives when round 2 is under way."""

        def pull_messages(self, ids):
            (one,) = ids
            message = self.pushed[one]
            if message.metadata.dst_node_id == 3 and round_of(message) == 1 and not self.later():
                return []
            return super().pull_messages(ids)

        def later(self):
            return any(round_of(message) == 2 for message in self.pushed.values())

    result = run(2, ids=Slow(NODES, trained))
    assert metrics(result, 1)["late"] == 1
    assert metrics(result, 2)["clients"] == 3

    def absent_once(node, message):
        return None if node == 3 and round_of(message) == 1 else trained(node, message)

    assert_same_model(result, run(2, absent_once))


@row(
    "B5",
    "30 % of the nodes drop out in every round",
    happens="sample more nodes than the quorum: a round with fewer valid replies is repeated and never averaged",
    seen="`gma-failed` in the metrics; `the round needs 20 valid replies, got 19` in the log",
)
def test_b5_more_nodes_than_the_quorum_keep_rounds_going():
    server, model = MaskedServer(quorum=20, norm_factor=None), {"w": np.zeros(4)}
    lucky = np.random.default_rng(0)
    ended = []
    for _ in range(500):
        there = [node for node in range(40) if lucky.random() > 0.3]
        step = server.step(model, [({"w": np.ones(4)}, 10, node) for node in there])
        assert (step.params is None) == (len(there) < 20)
        ended.append(step.params is not None)
    assert np.mean(ended) >= 0.99


@row(
    "B6",
    "a node joins late",
    happens="it can be sampled from the next round on; the rounds before are the same, bit for bit",
    seen="nothing",
)
def test_b6_a_node_that_joins_late_changes_no_earlier_round(tmp_path):
    class Growing(Nodes):
        def get_nodes(self):
            rounds = [round_of(message) for message in self.pushed.values()]
            self.ids = [1, 2, 3, 4] if rounds and max(rounds) >= 2 else [1, 2, 3]
            return super().get_nodes()

    grid = Growing(NODES, trained)
    joined = run(3, ids=grid, folder=tmp_path / "joined")
    run(3, folder=tmp_path / "without")
    first, second = ((tmp_path / name / "rounds.jsonl").read_text().splitlines() for name in ("joined", "without"))
    assert first[:2] == second[:2]
    assert metrics(joined, 3)["clients"] == 4


does_not_apply(
    "B7",
    "a node returns with an old control variate (SCAFFOLD)",
    why="nodes keep no state of fedgma's; SCAFFOLD runs in the simulator, whose checkpoints hold the variates",
)


@row(
    "B8",
    "a client raises an exception",
    happens="its node is left out of the round; Flower sends the class and the text of the exception to the server, "
    "and the traceback stays in the node's log",
    seen="the node with the text, cut to one line, in the server's log; `gma-failed` in the metrics",
)
def test_b8_an_exception_of_a_client_costs_its_node(tmp_path, caplog):
    reason = "<class 'ValueError'>:<'bad\nbatch'>"

    def answer(node, message):
        failed = Message(error=Error(code=2, reason=reason), reply_to=message)
        return failed if node == 3 else trained(node, message)

    result = run(1, answer, folder=tmp_path)
    assert metrics(result, 1)["failed"] == 1
    assert "node 3 failed: <class 'ValueError'>:<'bad batch'>" in caplog.text
    assert "ValueError" not in (tmp_path / "rounds.jsonl").read_text()


does_not_apply(
    "B9",
    "the process of a simulated client dies",
    why="simulated clients are lanes of one process; if it dies, the same command resumes (rows C1 to C4)",
)


@row(
    "B10",
    "a fraction of the nodes that rounds to none, or is above one",
    happens="the number of sampled nodes is rounded down and is at least `min_train_nodes`; one above 1 is refused, "
    "and so is `clients_per_round` above the number of clients in the simulator",
    seen="`fraction_train must be from 0 to 1`, exit code 2",
)
def test_b10_the_number_of_sampled_clients_is_at_least_one_and_at_most_all():
    def count(nodes, fraction, minimum=1):
        strategy = Masked(fraction_train=fraction, min_train_nodes=minimum, min_available_nodes=1)
        return len(list(strategy.configure_train(1, record(START), ConfigRecord(), Nodes(range(1, nodes + 1)))))

    assert [count(10, 0.01), count(10, 0.01, minimum=3), count(10, 0.39), count(10, 1.0)] == [1, 3, 3, 10]
    assert all(count(nodes, part / nodes) == part for nodes in (7, 49, 100) for part in range(1, nodes + 1))
    with pytest.raises(fedgma.ConfigError, match=r"fraction_train must be from 0 to 1, got 1\.5"):
        count(10, 1.5)
    federation = make_federation([4] * 5, (3,))
    for clients in (0, 6):
        with pytest.raises(fedgma.ConfigError, match="clients_per_round must be from 1 to the federation's 5 clients"):
            make_spec(federation, model="logistic", clients_per_round=clients)


@row(
    "B11",
    "sampling that is biased, or differs after a resume",
    happens="clients are drawn uniformly, by seed and round alone, in the simulator and on Flower alike",
    seen="nothing",
)
def test_b11_clients_are_drawn_uniformly_and_by_the_round_alone():
    spec = SimpleNamespace(sizes=np.ones(50, np.int64), seed=3, clients_per_round=10, smallest_batch=1)
    drawn = [sample_clients(spec, round_) for round_ in range(1, 2001)]
    counts = np.bincount(np.concatenate(drawn), minlength=50)
    expected = 2000 * 10 / 50
    chi_square = float(((counts - expected) ** 2 / (expected * (1 - 10 / 50))).sum()) * 49 / 50
    assert 20 < chi_square < 85.4  # 99.9 % quantile for 49 degrees of freedom; far below 20 would be no chance either
    np.testing.assert_array_equal(sample_clients(spec, 1234), drawn[1233])  # whatever was drawn before


@row("B11")
def test_b11_a_resumed_federation_samples_the_same_nodes(tmp_path):
    asked = []

    def watched(node, message):
        asked.append((round_of(message), node))
        return trained(node, message)

    nodes, options = range(1, 13), {"fraction_train": 0.5, "min_available_nodes": 12}
    run(6, watched, ids=nodes, **options)
    whole = asked.copy()
    asked.clear()
    for rounds in (2, 3, 6):
        run(rounds, watched, ids=nodes, folder=tmp_path, **options)
    assert asked == whole


@row(
    "B12",
    "10,000 clients of which a round samples 100",
    happens="the state of a run and the memory of a server do not grow with the clients that are registered",
    seen="nothing",
)
def test_b12_the_state_of_a_run_does_not_grow_with_its_clients():
    def state(clients):
        spec = make_spec(make_federation([1] * clients, (4,)), model="logistic", clients_per_round=100, rounds=2)
        fleet = assemble([spec])
        return export(fleet, list(play([spec], trainer="loop"))[-1].state, 0)

    many, few = state(10_000), state(100)
    assert {name: array.nbytes for name, array in many.items()} == {name: array.nbytes for name, array in few.items()}


@row("B12")
def test_b12_a_server_takes_the_memory_of_its_round():
    big = {"w": np.zeros(100_000, np.float32)}  # 0.4 MB; 100 replies together take 40 MB

    def answer(node, message):
        return Message(content=reply(node, big).content, reply_to=message)

    grid = Nodes(range(1, 10_001), answer)
    strategy = Masked(fraction_train=0.01, fraction_evaluate=0.0, min_available_nodes=10_000)
    tracemalloc.start()
    try:
        result = strategy.start(grid, record(big), 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.train_metrics_clientapp[2]["gma-clients"] == 100
    assert peak < 20e6


@row(
    "F8",
    "a node is revoked while it trains",
    happens="the SuperLink refuses its requests; what it has not delivered is not counted, and it is sampled no more",
    seen="the node in the log, `gma-failed` in the metrics of that round",
)
def test_f8_a_revoked_node_counts_no_more():
    def answer(node, message):
        if node == 3 and round_of(message) == 2:
            grid.ids.remove(3)
            return Message(error=UNAVAILABLE, reply_to=message)
        return trained(node, message)

    grid = Nodes((1, 2, 3, 4), answer)
    result = run(3, ids=grid)
    assert [metrics(result, round_)["clients"] for round_ in (1, 2, 3)] == [4, 3, 3]
    assert metrics(result, 3)["failed"] == 0


@row(
    "F12",
    "server and node with different versions of Flower",
    happens="Flower refuses the connection, unless major and minor version are the same",
    seen="both versions in the log of the node",
)
def test_f12_another_version_of_flower_is_refused_by_name():
    compatibility = pytest.importorskip("flwr.supercore.runtime_version_compatibility")
    make = compatibility.RuntimeVersionMetadata.from_local_component
    server = make("SuperLink", package_name_value="flwr", package_version_value="1.41.0")
    node = make("SuperNode", package_name_value="flwr", package_version_value="1.29.0")
    assert (
        server.check_compatibility(make("SuperNode", package_name_value="flwr", package_version_value="1.41.3")) is None
    )
    message = server.check_compatibility(node)
    assert "1.41.0" in message
    assert "1.29.0" in message


@row(
    "F19",
    "two runs at once on one federation",
    happens="each has its own folder, and a reply counts for the run that asked; a second run on one folder is refused",
    seen="`another process is writing ...`, exit code 2",
)
def test_f19_two_runs_at_once_do_not_touch_each_other(tmp_path, monkeypatch):
    grid, results, turn, parse = Nodes(NODES, trained), {}, threading.Lock(), ast.literal_eval

    def parse_alone(text):
        with turn:
            return parse(text)

    # numpy reads headers by it; CPython 3.11.7 may raise SystemError where two threads parse at once
    monkeypatch.setattr(ast, "literal_eval", parse_alone)

    def go(seed):
        results[seed] = run(4, ids=grid, folder=tmp_path / str(seed), seed=seed)

    threads = [threading.Thread(target=go, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (1, 2):
        assert_same_model(results[seed], run(4, seed=seed))


@row("F19")
def test_f19_a_second_run_on_one_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(resume_module, "PATIENCE", 0.0)

    def answer(node, message):
        with pytest.raises(fedgma.ConfigError, match="another process is writing"):
            run(1, folder=tmp_path)
        return trained(node, message)

    assert_same_model(run(1, answer, folder=tmp_path), run(1))
