"""Hostile replies to a Flower server: each one costs its node, with the right reason, and nothing else."""

import io
import json
import pickle
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedgma[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.common import Code, FitRes, Parameters, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server.client_manager import SimpleClientManager

import fedgma
from fake_grids import Clock, Nodes, record, reply
from fedgma.flower import Masked, MaskedFit, identify
from fedgma.flower import messages as messages_module
from fedgma.flower.messages import IDENTITY
from rows import row

START = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "steps": np.array(0)}
HOSTILE = 3  # the node


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(messages_module, "time", Clock())


# -- crafted arrays ----------------------------------------------------------------------------------------------------


def npy(header, data=b"", version=1, length=None):
    """An array file with this text as its header."""
    text = header.encode("latin-1") + b"\n"
    width = "<H" if version == 1 else "<I"
    size = struct.pack(width, len(text) if length is None else length)
    return b"\x93NUMPY" + bytes([version, 0]) + size + text + data


def described(descr="'<f4'", shape="(2, 3)", fortran="False"):
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}"


def saved(array, **options):
    np.save(stream := io.BytesIO(), array, **options)
    return stream.getvalue()


def zipped(name="w.npy"):
    with zipfile.ZipFile(stream := io.BytesIO(), "w") as archive:
        archive.writestr(name, saved(START["w"]))
    return stream.getvalue()


GOOD = saved(START["w"])
BYTES = {  # name -> (bytes of the array, reason)
    "a length of 1e13": (npy(described(shape="(10000000000000,)")), "unreadable"),
    "a length beyond 64 bits": (npy(described(shape=f"({'9' * 30},)")), "unreadable"),
    "a product beyond 64 bits": (npy(described(shape=f"({'9' * 18}, {'9' * 18})")), "unreadable"),
    "a negative length": (npy(described(shape="(-2, 3)")), "unreadable"),
    "an empty axis beside a huge one": (npy(described(shape=f"(0, {'9' * 18})")), "shape"),
    "an unfinished header": (npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3"), "unreadable"),
    "9,000 unary minuses": (npy(described(shape=f"({'-' * 9000}1,)")), "unreadable"),
    "unbalanced brackets": (npy(described(shape="(" * 9000)), "unreadable"),
    "balanced brackets, deep": (npy(described(shape="(" * 200 + ")" * 200)), "unreadable"),
    "a void type of 2 GiB": (npy(described("'|V2147483647'", "(1,)")), "dtype"),
    "a type of 999,999,999 bytes": (npy(described("'<f999999999'")), "dtype"),
    "a broken zip": (b"PK\x03\x04" + bytes(60), "unreadable"),
    "a zip of arrays": (zipped(), "unreadable"),
    "objects": (npy(described("'|O'", "(1,)"), pickle.dumps([1])), "dtype"),
    "a pickle": (pickle.dumps(START["w"]), "unreadable"),
    "no bytes": (b"", "unreadable"),
    "magic alone": (b"\x93NUMPY", "unreadable"),
    "cut short": (GOOD[:-1], "unreadable"),
    "bytes too many": (GOOD + b"\x00", "unreadable"),
    "an unknown version": (b"\x93NUMPY\x09\x00" + GOOD[8:], "unreadable"),
    "a header longer than the file": (npy(described(), length=60000), "unreadable"),
    "a header of 4 GiB": (npy(described(), version=2, length=2**32 - 1), "unreadable"),
    "a header of 12,000 spaces": (npy(described() + " " * 12000, GOOD[-24:], version=2), "unreadable"),
    "records": (npy(described("[('a', '<f4'), ('b', '<f4')]")), "unreadable"),
    "a call": (npy(described(shape="__import__('os').abort()")), "unreadable"),
    "an entry twice": (npy("{'shape': (6,), 'shape': (2, 3), 'descr': '<f4'}", GOOD[-24:]), "unreadable"),
    "an entry missing": (npy("{'descr': '<f4', 'shape': (2, 3)}", GOOD[-24:]), "unreadable"),
    "100 axes": (npy(described(shape=f"({'1, ' * 100})"), bytes(4)), "unreadable"),
    "booleans": (saved(np.ones((2, 3), bool)), "dtype"),
    "complex numbers": (saved(np.ones((2, 3), complex)), "dtype"),
    "text": (saved(np.full((2, 3), "1.0")), "dtype"),
    "dates": (saved(np.zeros((2, 3), "datetime64[s]")), "unreadable"),
    "float64": (saved(np.ones((2, 3))), "dtype"),
    "integers": (saved(np.ones((2, 3), np.int32)), "dtype"),
    "another shape": (saved(np.ones(3, np.float32)), "shape"),
    "a NaN": (saved(np.full((2, 3), np.nan, np.float32)), "nonfinite"),
    "an infinity": (saved(np.full((2, 3), -np.inf, np.float32)), "nonfinite"),
    "a difference that overflows": (saved(np.full((2, 3), -3.4e38, np.float32)), "norm"),
    "far too many bytes": (saved(np.ones((1000, 1000), np.float32)), "size"),
}


def stored(data, stype="numpy.ndarray"):
    return Array(dtype="float32", shape=(2, 3), stype=stype, data=data)


def holding(*arrays, metrics=({"num-examples": 10},), **others):
    """A reply with these records."""
    content = {f"arrays{place}": ArrayRecord(one) for place, one in enumerate(arrays)}
    content |= {f"metrics{place}": MetricRecord(one) for place, one in enumerate(metrics)}
    return RecordDict({**content, **others})


STEPS = Array(np.array(1))
FINE = {"w": Array(START["w"]), "steps": STEPS}
CONTENTS = {  # name -> (content of the reply, reason)
    **{name: (holding({"w": stored(data), "steps": STEPS}), reason) for name, (data, reason) in BYTES.items()},
    "another serialisation": (holding({"w": stored(GOOD, "torch.save"), "steps": STEPS}), "unreadable"),
    "an entry too few": (holding({"w": FINE["w"]}), "schema"),
    "an entry too many": (holding({**FINE, "v": FINE["w"]}), "schema"),
    "no entries": (holding({}), "schema"),
    "a name of a million letters": (holding({**FINE, "v" * 10**6: FINE["w"]}), "schema"),
    "no arrays": (holding(), "schema"),
    "arrays twice": (holding(FINE, FINE), "schema"),
    "no metrics": (holding(FINE, metrics=()), "schema"),
    "metrics twice": (holding(FINE, metrics=({"num-examples": 1}, {"num-examples": 2})), "schema"),
    "no weight": (holding(FINE, metrics=({"loss": 1.0},)), "weight"),
    "a list of weights": (holding(FINE, metrics=({"num-examples": [1, 2]},)), "weight"),
    "a weight that is no number": (holding(FINE, metrics=({"num-examples": float("nan")},)), "weight"),
    "an infinite weight": (holding(FINE, metrics=({"num-examples": float("inf")},)), "weight"),
    "a negative weight": (holding(FINE, metrics=({"num-examples": -10},)), "weight"),
    "a weight of 1e18": (holding(FINE, metrics=({"num-examples": 10**18},)), "weight"),
    "a weight of zero": (holding(FINE, metrics=({"num-examples": 0},)), "empty"),
    "megabytes of metrics": (holding(FINE, metrics=({"num-examples": 10, "x": [0.0] * 300_000},)), "size"),
    "megabytes of settings": (holding(FINE, more=ConfigRecord({"x": b"x" * 2**21})), "size"),
}


# -- a federation of three nodes, one of them hostile ------------------------------------------------------------------


def trained(node, message):
    arrays = message.content["arrays"]
    local = {"w": arrays["w"].numpy() + np.float32(node), "steps": arrays["steps"].numpy() + 1}
    return Message(content=reply(node, local).content, reply_to=message)


def play(hostile, folder=None, **options):
    """Two rounds; `hostile` answers in the place of the hostile node."""

    def answer(node, message):
        return hostile(message) if node == HOSTILE else trained(node, message)

    strategy = Masked(fraction_evaluate=0.0, min_available_nodes=3, **options)
    return strategy.start(Nodes((1, 2, HOSTILE), answer), record(START), 2, timeout=1.0, folder=folder)


def absent(message):
    return None


def assert_same_model(first, second):
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array.numpy(), second.arrays[name].numpy())


def refusals(folder):
    return [json.loads(line)["refused"] for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_the_table_is_long_enough():
    assert len(CONTENTS) >= 34


@pytest.mark.parametrize("name", CONTENTS)
def test_a_hostile_reply_costs_its_node_and_names_it(name, tmp_path):
    content, reason = CONTENTS[name]
    result = play(lambda message: Message(content=content, reply_to=message), tmp_path)
    assert_same_model(result, play(absent))
    for round_ in refusals(tmp_path):
        assert [(one["client"], one["reason"]) for one in round_] == [(HOSTILE, reason)]
        assert len(round_[0]["detail"]) <= 300
    assert result.train_metrics_clientapp[2]["gma-refused"] == 1
    assert result.train_metrics_clientapp[2]["gma-late"] == 0


@pytest.mark.parametrize("name", BYTES)
def test_a_hostile_result_costs_its_client_under_aggregate_fit(name):
    def fitted(cid, tensors):
        return type("Proxy", (), {"cid": cid})(), FitRes(Status(Code.OK, ""), Parameters(tensors, ""), 10, {})

    def played(results):
        strategy = MaskedFit()
        strategy.min_fit_clients = strategy.min_available_clients = 0
        strategy.configure_fit(1, ndarrays_to_parameters(list(START.values())), SimpleClientManager())
        parameters, metrics = strategy.aggregate_fit(1, results, [])
        return parameters_to_ndarrays(parameters)[0], metrics["gma-refused"]

    one = fitted("a", [saved(START["w"] + np.float32(1)), saved(np.array(1))])
    expected, _ = played([one])
    after, refused = played([fitted("x", [BYTES[name][0], saved(np.array(1))]), one])
    np.testing.assert_array_equal(after, expected)
    assert refused == 1


def test_metrics_that_cannot_be_combined_do_not_end_a_fit():
    def fails(results):
        raise KeyError("accuracy")

    strategy = MaskedFit(fit_metrics_aggregation_fn=fails)
    strategy.min_fit_clients = strategy.min_available_clients = 0
    strategy.configure_fit(1, ndarrays_to_parameters(list(START.values())), SimpleClientManager())
    fit = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(list(START.values())), 10, {})
    parameters, metrics = strategy.aggregate_fit(1, [(type("Proxy", (), {"cid": "a"})(), fit)], [])
    assert parameters is not None
    assert metrics["gma-clients"] == 1


ODD_METRICS = {
    "a list for a number": {"num-examples": 10, "loss": [1.0, 2.0]},
    "another name": {"num-examples": 10, "accuracy": 1.0},
    "none at all": {"num-examples": 10},
}


@pytest.mark.parametrize("name", ODD_METRICS)
def test_odd_metrics_of_one_node_do_not_hide_those_of_the_others(name):
    def answer(node, message):
        content = trained(node, message).content
        metrics = ODD_METRICS[name] if node == HOSTILE else {"num-examples": 10, "loss": float(node)}
        return Message(content=RecordDict({**content, "metrics": MetricRecord(metrics)}), reply_to=message)

    strategy = Masked(fraction_evaluate=0.0, min_available_nodes=3)
    result = strategy.start(Nodes((1, 2, HOSTILE), answer), record(START), 1, timeout=1.0)
    assert result.train_metrics_clientapp[1]["gma-clients"] == 3
    assert result.train_metrics_clientapp[1]["loss"] == pytest.approx(1.5)


PULLS = [ValueError("no such child"), KeyError("x"), RecursionError("deep"), MemoryError(), IndexError(), TypeError()]


@pytest.mark.parametrize("error", PULLS, ids=lambda error: type(error).__name__)
def test_a_reply_that_flower_cannot_build_costs_its_node(error, caplog):
    def hostile(message):
        raise error

    assert_same_model(play(hostile), play(absent))
    assert "node 3 failed: the reply cannot be read" in caplog.text


def test_a_lost_superlink_is_no_fault_of_a_node():
    def hostile(message):
        raise ConnectionError("the SuperLink is gone")

    with pytest.raises(ConnectionError):
        play(hostile)


def test_a_long_error_message_is_cut(caplog):
    play(lambda message: Message(error=Error(code=0, reason="x\n" * 10**6), reply_to=message))
    assert max(map(len, caplog.text.splitlines())) < 1000


def forged(message, **claims):
    answer = trained(HOSTILE, message)
    answer.metadata.__dict__.update({f"_{name}": value for name, value in claims.items()})
    return answer


@row(
    "F9",
    "a node replies under the number of another node",
    happens="a reply counts for the node that was asked, so it is refused, and the other node's own reply counts",
    seen="`the reply claims to come from node ...` in the log; the node counts as failed",
)
def test_f9_a_reply_in_another_nodes_name_is_refused(caplog):
    result = play(lambda message: forged(message, src_node_id=1))
    assert_same_model(result, play(absent))
    assert result.train_metrics_clientapp[1]["gma-clients"] == 2
    assert "node 3 failed: the reply claims to come from node 1" in caplog.text


@row(
    "F10",
    "an old reply is sent again",
    happens="a reply counts once, and only for the run, the round and the node that it answers",
    seen="`the reply is to another message` in the log; the node counts as failed",
)
def test_f10_a_replayed_reply_is_refused(caplog):
    kept = []

    def hostile(message):
        kept.append(trained(HOSTILE, message))
        return kept[0]  # that of round 1, again and again

    def once(message):
        return trained(HOSTILE, message) if message.content["config"]["server-round"] == 1 else None

    result = play(hostile)
    assert_same_model(result, play(once))
    assert result.train_metrics_clientapp[1]["gma-clients"] == 3
    assert "node 3 failed: the reply is to another message" in caplog.text


@row("F10")
def test_f10_a_reply_of_another_run_is_refused(caplog):
    assert_same_model(play(lambda message: forged(message, run_id=77)), play(absent))
    assert "node 3 failed: the reply is to another message" in caplog.text


@row("F10")
def test_f10_a_reply_that_arrives_twice_counts_once():
    class Twice(Nodes):
        def pull_messages(self, ids):
            return super().pull_messages(ids) * 2

    strategy = Masked(fraction_evaluate=0.0, min_available_nodes=3)
    doubled = strategy.start(Twice((1, 2, 3), trained), record(START), 2)
    assert doubled.train_metrics_clientapp[2]["gma-clients"] == 3
    assert_same_model(doubled, play(lambda message: trained(HOSTILE, message)))


@row(
    "F11",
    "a reply that is too large, has too many arrays or claims a huge size",
    happens="its size is checked before its numbers are read, and nothing of the claimed size is allocated",
    seen="`size`, `schema` or `unreadable` beside the node's name",
)
@pytest.mark.parametrize("name", ["a length of 1e13", "a void type of 2 GiB", "far too many bytes", "100,000 arrays"])
def test_f11_a_reply_takes_no_more_memory_than_it_has_bytes(name):
    many = {f"w{place}": Array("float32", (2, 3), "numpy.ndarray", GOOD) for place in range(100_000)}
    content = holding(many) if name == "100,000 arrays" else CONTENTS[name][0]
    tracemalloc.start()
    try:
        result = play(lambda message: Message(content=content, reply_to=message))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64e6
    assert_same_model(result, play(absent))


# -- who a node says it is ---------------------------------------------------------------------------------------------


def answered(value):
    return RecordDict({IDENTITY: ConfigRecord({"value": value})})


IDENTITIES = {
    "no record": RecordDict(),
    "another record": RecordDict({"other": ConfigRecord({"value": 3})}),
    "metrics": RecordDict({IDENTITY: MetricRecord({"loss": 3})}),
    "no value": RecordDict({IDENTITY: ConfigRecord({"key": 3})}),
    "arrays": RecordDict({IDENTITY: record(START)}),
    "a list": answered([3, 4]),
    "bytes": answered(b"\x03"),
    "a truth value": answered(True),
    "not a number": answered(float("nan")),
    "an infinity": answered(float("inf")),
    "nothing": answered(""),
    "a million letters": answered("x" * 10**6),
}


def sampled(claims, strategy=None, nodes=None):
    """The nodes that are asked to train; `claims` maps each node to the content of its answer, or to its value."""

    def answer(node, message):
        claim = claims[node]
        if isinstance(claim, RecordDict):
            return Message(content=claim, reply_to=message)
        return identify(message, Context(1, node, {"partition-id": claim}, RecordDict(), {}))

    strategy = strategy or Masked(identity="partition-id")
    messages = strategy.configure_train(1, record(START), ConfigRecord(), Nodes(nodes or claims, answer))
    return [message.metadata.dst_node_id for message in messages]


@pytest.mark.parametrize("name", IDENTITIES)
def test_a_node_without_a_valid_identity_is_left_out(name, caplog):
    assert sampled({1: 1, 2: 2, HOSTILE: IDENTITIES[name]}) == [1, 2]
    assert "node 3 has no valid 'partition-id'" in caplog.text


def test_a_false_identity_is_not_accepted(caplog):
    strategy = Masked(identity="partition-id")
    assert sampled({1: 0, 2: 1}, strategy) == [1, 2]
    assert sampled({1: 0, 2: 1, HOSTILE: 1}, strategy) == [1, 2]  # node 2 had it first
    assert "nodes [2, 3] claim the same 'partition-id'; [3] are not sampled" in caplog.text


def test_of_two_new_nodes_that_claim_the_same_identity_none_gets_it(caplog):
    assert sampled({1: 0, 2: 1, HOSTILE: 1, 4: 2}) == [1, 4]
    assert "nodes [2, 3] claim the same 'partition-id'" in caplog.text


def test_a_node_that_connects_anew_gets_its_identity_back():
    strategy = Masked(identity="partition-id")
    assert sampled({1: 0, 2: 1, 3: 2}, strategy) == [1, 2, 3]
    assert sampled({1: 0, 2: 1, 9: 2}, strategy) == [1, 2, 9]  # node 3 is gone, and came back as node 9


def test_a_node_that_keeps_silent_holds_up_one_round_only():
    asked = []

    def answer(node, message):
        asked.append(node)
        if node == HOSTILE:
            return None
        return identify(message, Context(1, node, {"partition-id": node}, RecordDict(), {}))

    strategy, clock = Masked(identity="partition-id"), messages_module.time
    for round_ in range(1, 6):
        sent = strategy.configure_train(round_, record(START), ConfigRecord(), Nodes((1, 2, HOSTILE), answer))
        assert [message.metadata.dst_node_id for message in sent] == [1, 2]
    assert clock.now <= messages_module.INTRODUCTION + 1
    clock.now += messages_module.SILENCE
    asked.clear()
    strategy.configure_train(6, record(START), ConfigRecord(), Nodes((1, 2, HOSTILE), answer))
    assert HOSTILE in asked  # it may have something to say by now


def test_too_few_nodes_with_an_identity_end_the_wait():
    with pytest.raises(fedgma.NotEnoughClients, match="needs 3 nodes, got 2"):
        sampled({1: 0, 2: 1, 3: 1, 4: 2}, Masked(identity="partition-id", min_available_nodes=3, wait=5))
