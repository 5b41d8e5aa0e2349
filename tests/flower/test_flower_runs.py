"""Whole runs on a grid in this process: resumed, retried, late, sampled by who a node is."""

import json
import shutil

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

import fedgma
from commands import call
from fake_grids import Clock, Nodes, failure, record, reply
from fedgma.aggregation.adapters import in_products
from fedgma.aggregation.own import as_rule
from fedgma.flower import Masked, identify
from fedgma.flower import messages as messages_module
from fedgma.flower.resume import SavedRun
from fedgma.records.lookup import check_removable

START = {"w": np.linspace(-1, 1, 6, dtype=np.float32), "steps": np.array(0)}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(messages_module, "time", Clock())


def trained(node, message):
    """A client whose update depends on the model, the round and who it is."""
    arrays = message.content["arrays"]
    round_ = message.content["config"]["server-round"]
    change = np.sin(np.arange(6) * node + round_).astype(np.float32)
    local = {"w": arrays["w"].numpy() * np.float32(0.9) + change, "steps": arrays["steps"].numpy() + 1}
    content = reply(node, local, weight=10 * node, loss=float(abs(change).mean())).content
    return Message(content=content, reply_to=message)


def strategy(**options):
    usual = {"optimizer": fedgma.yogi(0.1), "fraction_evaluate": 0.0, "min_available_nodes": 3}
    return Masked(**{**usual, **options})


def play(rounds, folder=None, answer=trained, ids=(1, 2, 3), **options):
    grid = Nodes(ids, answer)
    return strategy(**options).start(grid, record(START), rounds, timeout=1.0, folder=folder)


def model(result):
    return {name: array.numpy() for name, array in result.arrays.items()}


def assert_same(first, second):
    for name, value in model(first).items():
        np.testing.assert_array_equal(value, model(second)[name])
        assert value.dtype == model(second)[name].dtype


def dying(after):
    """Clients of a federation that stops for good after so many replies."""
    count = iter(range(10**6))

    def answer(node, message):
        if next(count) == after:
            raise KeyboardInterrupt
        return trained(node, message)

    return answer


@pytest.mark.parametrize("after", [0, 1, 4, 6, 8, 14])
def test_a_stopped_run_resumes_bit_for_bit(tmp_path, after):
    whole = play(5, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        play(5, tmp_path / "cut", dying(after))
    resumed = play(5, tmp_path / "cut")
    assert_same(resumed, whole)
    assert resumed.train_metrics_clientapp == whole.train_metrics_clientapp
    for file in ("done", "rounds.jsonl"):
        assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_a_resumed_run_returns_the_metrics_of_the_initial_model_and_those_that_are_not_finite(tmp_path):
    def evaluate(round_, arrays):
        worst = [np.inf, float(round_)]
        return MetricRecord({"accuracy": 0.1 * round_, "worst": np.inf, "least": -np.inf, "all": worst})

    def start(rounds, answer):
        options = {"evaluate_fn": evaluate, "folder": tmp_path}
        return strategy().start(Nodes((1, 2, 3), answer), record(START), rounds, **options)

    first = start(2, trained).evaluate_metrics_serverapp
    assert sorted(first) == [0, 1, 2]
    assert start(2, None).evaluate_metrics_serverapp == first  # nobody is asked
    assert {round_: start(3, trained).evaluate_metrics_serverapp[round_] for round_ in first} == first


def test_without_a_folder_the_same_rounds_are_run(tmp_path):
    assert_same(play(3), play(3, tmp_path))


def test_a_strategy_that_is_started_again_with_another_folder_begins_anew(tmp_path):
    again = strategy()
    first, second = (
        again.start(Nodes((1, 2, 3), trained), record(START), 3, timeout=1.0, folder=tmp_path / name)
        for name in ("one", "two")
    )
    assert_same(first, second)


def test_a_finished_run_is_not_run_again(tmp_path):
    whole = play(3, tmp_path)
    again = play(3, tmp_path, answer=None)  # nobody is asked
    assert_same(again, whole)


def test_a_finished_run_can_be_given_more_rounds(tmp_path):
    play(2, tmp_path)
    assert_same(play(5, tmp_path), play(5))
    assert json.loads((tmp_path / "done").read_text())["rounds"] == 5


def test_other_settings_are_refused_and_the_reason_is_written_to_the_folder(tmp_path):
    play(2, tmp_path)
    with pytest.raises(fedgma.ConfigError, match="aggregator"):
        play(3, tmp_path, tau=0.9)
    assert json.loads((tmp_path / "failed").read_text())["exit_code"] == 2
    assert_same(play(3, tmp_path), play(3))
    assert not (tmp_path / "failed").exists()


ORDERED = {name: np.full(3, float(name), np.float32) for name in ("9", "1", "0", "11")} | {"10": np.array(0)}


def by_position(node, message):
    """A client that goes by position, as Keras and numpy clients do."""
    record_ = message.content["arrays"]
    arrays = [array.numpy() for array in record_.values()]
    arrays = [array + (place + node if array.dtype.kind == "f" else 1) for place, array in enumerate(arrays)]
    local = {name: array.astype(record_[name].dtype) for name, array in zip(record_, arrays, strict=True)}
    return Message(content=reply(node, local).content, reply_to=message)


def test_a_resumed_run_sends_the_arrays_in_the_order_of_the_model(tmp_path):
    seen = []

    def watched(node, message):
        seen.append(list(message.content["arrays"]))
        return by_position(node, message)

    for rounds in (1, 2, 3):  # two resumes
        strategy().start(Nodes((1, 2, 3), watched), record(ORDERED), rounds, folder=tmp_path)
    assert seen == [list(ORDERED)] * 9
    whole = strategy().start(Nodes((1, 2, 3), by_position), record(ORDERED), 3)
    last = strategy().start(Nodes((1, 2, 3)), record(ORDERED), 3, folder=tmp_path)
    assert list(last.arrays) == list(ORDERED)
    assert_same(last, whole)


def test_a_model_with_its_arrays_in_another_order_is_refused(tmp_path):
    strategy().start(Nodes((1, 2, 3), by_position), record(ORDERED), 1, folder=tmp_path)
    turned = dict(reversed(ORDERED.items()))
    with pytest.raises(fedgma.ConfigError, match="arrays of the model in another order"):
        strategy().start(Nodes((1, 2, 3), by_position), record(turned), 2, folder=tmp_path)


CHANGES = {
    "fraction_train": {"fraction_train": 0.5},
    "buffers": {"buffers": ["w"]},
    "gate": {"gate": fedgma.Gate(max_weight=1e6)},
    "retries": {"retries": 1},
    "quorum": {"quorum": 2},
    "norm_factor": {"norm_factor": None},
    "identity": {"identity": "partition-id"},
    "seed": {"seed": 1},
    "weighted_by_key": {"weighted_by_key": "samples"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_is_refused_by_its_name(tmp_path, name):
    play(2, tmp_path)
    files = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and file.name != "lock"}
    with pytest.raises(fedgma.ConfigError, match=rf"\(differing: {name}\)"):
        play(3, tmp_path, **CHANGES[name])
    assert {file: file.read_bytes() for file in files} == files


def test_a_changed_train_config_is_refused(tmp_path):
    def start(rate):
        config = ConfigRecord({"lr": rate, "key": b"\x00"})
        return strategy().start(Nodes((1, 2, 3), trained), record(START), 2, train_config=config, folder=tmp_path)

    start(0.1)
    start(0.1)
    with pytest.raises(fedgma.ConfigError, match=r"\(differing: train_config\)"):
        start(0.2)


def own_rule(factor):
    def shrunk(mean, votes, clients):
        return mean * factor  # another factor is other code: the rule keeps its name

    return shrunk


@pytest.mark.parametrize("wrap", [lambda rule: rule, lambda rule: fedgma.keep_norm(as_rule(rule))])
def test_other_code_of_ones_own_rule_is_refused(tmp_path, wrap):
    play(1, tmp_path, aggregator=wrap(own_rule(0.5)))
    play(2, tmp_path, aggregator=wrap(own_rule(0.5)))
    with pytest.raises(fedgma.ConfigError, match="began with other code of the rule; use another folder, or restore"):
        play(3, tmp_path, aggregator=wrap(own_rule(0.25)))
    (tmp_path / "rule").write_bytes(b"0" * 64 + b" python3.1\n")  # what another Python compiles is not comparable
    play(3, tmp_path, aggregator=wrap(own_rule(0.25)))
    check_removable(tmp_path)


def test_the_folder_of_a_flower_run_on_the_command_line(tmp_path):
    play(2, tmp_path / "run")
    code, _, said = call("ls", tmp_path)
    assert (code, "holds a run of a Flower app, which belongs to no arm; `fedgma watch` shows its rounds" in said) == (
        0,
        True,
    )
    (row,) = json.loads(call("watch", tmp_path, "--once", "--json")[1])
    assert (row["arm"], row["state"], row["round"]) == ("GMA (Flower)", "done", "2")
    assert call("export", tmp_path / "run", "--out", tmp_path / "net.safetensors")[0] == 0
    assert call("rm", tmp_path / "run", "--yes")[0] == 0


def test_a_rule_of_the_library_has_no_code_of_ones_own(tmp_path):
    play(1, tmp_path, aggregator=fedgma.smoothed(fedgma.masked_mean(0.3), 0.9))
    assert not (tmp_path / "rule").exists()


def test_the_time_to_wait_may_change(tmp_path):
    play(1, tmp_path)
    assert_same(play(2, tmp_path, wait=5.0), play(2))


def test_the_folder_of_another_run_is_refused(tmp_path):
    play(2, tmp_path)
    other = {**START, "w": START["w"] + 1}
    with pytest.raises(fedgma.ConfigError, match="began with another initial model"):
        strategy().start(Nodes((1, 2, 3), trained), record(other), 3, folder=tmp_path)
    (tmp_path / "initial").unlink()  # as the message says
    assert_same(strategy().start(Nodes((1, 2, 3), trained), record(other), 3, folder=tmp_path), play(3))


def test_fewer_rounds_than_the_folder_has_are_refused(tmp_path):
    play(4, tmp_path)
    done = (tmp_path / "done").read_bytes()
    with pytest.raises(fedgma.ConfigError, match="has 4 rounds, but this run asks for 2"):
        play(2, tmp_path)
    assert (tmp_path / "done").read_bytes() == done


def newest_lines(folder):
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def flip(file, place, bit):
    raw = bytearray(file.read_bytes())
    raw[place] ^= 1 << bit
    file.write_bytes(raw)


@pytest.mark.parametrize("place", [0, 3, "newline", "middle", "gone", "empty"])
def test_a_damaged_record_of_rounds_costs_no_round(tmp_path, caplog, place):
    whole = play(5)
    with pytest.raises(KeyboardInterrupt):
        play(5, tmp_path, dying(12))  # in round 5
    file = tmp_path / "rounds.jsonl"
    content = file.read_bytes()
    if place == "gone":
        file.unlink()
    elif place == "empty":
        file.write_bytes(b"")
    else:
        where = {"newline": content.index(b"\n"), "middle": len(content) // 2}.get(place, place)
        flip(file, where, 2)
    asked = []
    resumed = play(5, tmp_path, lambda node, message: asked.append(node) or trained(node, message))
    assert_same(resumed, whole)
    assert len(asked) == 3  # round 5 alone
    assert [line["round"] for line in newest_lines(tmp_path)] == [1, 2, 3, 4, 5]
    if any("lost" in line for line in newest_lines(tmp_path)):
        assert "rounds.jsonl is damaged" in caplog.text
        assert (tmp_path / "rounds.damaged").exists()


def test_no_flipped_bit_of_the_record_restarts_a_run(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        play(4, tmp_path / "run", dying(10))  # in round 4
    content = (tmp_path / "run" / "rounds.jsonl").read_bytes()
    for place in range(0, len(content), 37):
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        flip(tmp_path / "copy" / "rounds.jsonl", place, place % 8)
        with SavedRun(tmp_path / "copy", *saved_as()) as saved:
            assert saved.resume(strategy().server, 4)[0] == 3
        shutil.rmtree(tmp_path / "copy")


def saved_as():
    return {**strategy().settings, "train_config": {}, "evaluate_config": {}}, START


@pytest.mark.parametrize("lost", ["checkpoints", "run.json"])
def test_a_folder_without_its_checkpoints_or_settings_is_refused(tmp_path, lost):
    play(3, tmp_path)
    gone = tmp_path / lost
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with pytest.raises(fedgma.DataError, match="restore it"):
        play(4, tmp_path)


def test_a_resumed_run_remembers_the_usual_norm(tmp_path):
    """After the first round the limit is ten times the usual norm, and no longer ten times that of the model."""
    heavy = {"w": np.full(6, 1e6, np.float32), "steps": np.array(0)}  # its own norm would let anything through

    def start(rounds, answer, folder=None):
        return strategy().start(Nodes((1, 2, 3), answer), record(heavy), rounds, folder=folder)

    def moved(by, node, message):
        arrays = message.content["arrays"]
        local = {"w": arrays["w"].numpy() + np.float32(by), "steps": arrays["steps"].numpy() + 1}
        return Message(content=reply(node, local).content, reply_to=message)

    def small(node, message):
        return moved(node, node, message)

    def far(node, message):
        return moved(1000 if node == 3 else node, node, message)

    start(1, small, tmp_path)
    resumed = start(2, far, tmp_path)
    assert resumed.train_metrics_clientapp[2]["gma-refused"] == 1
    (refused,) = newest_lines(tmp_path)[-1]["refused"]
    assert (refused["client"], refused["reason"]) == (3, "norm")


def test_a_damaged_checkpoint_is_skipped(tmp_path):
    whole = play(4)
    with pytest.raises(KeyboardInterrupt):
        play(4, tmp_path, dying(9))
    newest = max((tmp_path / "checkpoints").iterdir()) / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert_same(play(4, tmp_path), whole)


def test_replies_are_fetched_one_at_a_time():
    grid = Nodes((1, 2, 3), trained)
    strategy().start(grid, record(START), 2)
    assert grid.most_held == 1


def test_a_straggler_is_not_waited_for_and_is_counted():
    result = play(2, answer=lambda node, message: None if node == 3 else trained(node, message))
    expected = play(2, answer=lambda node, message: failure(3) if node == 3 else trained(node, message))
    assert_same(result, expected)
    assert result.train_metrics_clientapp[1]["gma-late"] == 1
    assert expected.train_metrics_clientapp[1]["gma-late"] == 0


def test_a_failed_round_is_repeated():
    lost = iter([True, True, True])  # the first attempt of round 1

    def answer(node, message):
        return Message(error=failure(node).error, reply_to=message) if next(lost, False) else trained(node, message)

    assert_same(play(3, answer=answer), play(3))


def test_a_run_whose_rounds_all_fail_ends_with_the_reason(tmp_path):
    def broken(node, message):
        return Message(error=failure(node).error, reply_to=message)

    with pytest.raises(fedgma.NotEnoughClients, match="no valid update"):
        play(2, tmp_path, broken, retries=1)
    assert json.loads((tmp_path / "failed").read_text())["exit_code"] == 4


def wrong(node, message):
    """A reply that cannot be read, one that the gate refuses, one that failed, and none."""
    arrays = {"w": np.full(6, np.nan, np.float32), "steps": np.array(1)}
    if node == 1:
        arrays["w"] = np.ones(6)
    if node == 3:
        return Message(error=failure(node, "disk gone").error, reply_to=message)
    return None if node == 4 else Message(content=reply(node, arrays).content, reply_to=message)


def test_the_reasons_for_a_round_without_valid_replies_are_said(tmp_path):
    with pytest.raises(fedgma.NotEnoughClients) as end:
        play(1, tmp_path, wrong, ids=(1, 2, 3, 4), retries=0, min_available_nodes=4)
    assert str(end.value) == (
        "no valid update to average: 2 refused (dtype, nonfinite), the first, of node 1: 'w' must be float32, "
        "got float64; Gate(cast=True) accepts it; 1 failed, the first, node 3: disk gone; "
        "1 late (no reply in time): node 4"
    )
    assert json.loads((tmp_path / "failed").read_text())["message"] == str(end.value)


def test_failed_and_late_nodes_are_named(tmp_path, caplog):
    def answer(node, message):
        return trained(node, message) if node < 3 else wrong(node, message)

    play(1, tmp_path, answer, ids=(1, 2, 3, 4), min_available_nodes=4)
    line = newest_lines(tmp_path)[0]
    assert (line["refused"], line["failed"], line["late"]) == ([], [3], [4])
    assert "1 replies did not arrive within 1 s; continuing without node 4" in caplog.text


def test_every_round_needs_a_quorum():
    def one_of_three(node, message):
        return trained(node, message) if node == 1 else Message(error=failure(node).error, reply_to=message)

    assert play(1, answer=one_of_three, quorum=1).train_metrics_clientapp[1]["gma-clients"] == 1
    with pytest.raises(fedgma.NotEnoughClients, match="the round needs 2 valid replies, got 1"):
        play(1, answer=one_of_three, quorum=2, retries=0)


def too_long(node, message, by=100.0):
    """Node 3 sends an update that points the right way and is much too long."""
    answer = trained(node, message)
    if node != 3:
        return answer
    before = {name: array.numpy() for name, array in message.content["arrays"].items()}
    after = {name: array.numpy() for name, array in answer.content["arrays"].items()}
    longer = {"w": before["w"] + np.float32(by) * (after["w"] - before["w"]), "steps": after["steps"]}
    return Message(content=reply(node, longer, weight=30).content, reply_to=message)


@pytest.mark.parametrize("rounds", [1, 3])
def test_an_update_with_an_unusual_norm_is_refused(rounds, tmp_path):
    expected = play(rounds, answer=lambda node, message: None if node == 3 else trained(node, message))
    result = play(rounds, tmp_path, answer=too_long)
    (refused,) = json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[-1])["refused"]
    assert (refused["client"], refused["reason"]) == (3, "norm")
    assert_same(result, expected)
    assert result.train_metrics_clientapp[rounds]["gma-refused"] == 1


def test_the_limit_on_norms_can_be_switched_off():
    assert play(1, answer=too_long, norm_factor=None).train_metrics_clientapp[1]["gma-refused"] == 0


def test_norms_that_grow_for_all_nodes_are_accepted_after_a_few_attempts():
    def growing(node, message):
        if message.content["config"]["server-round"] == 1:
            return trained(node, message)
        return too_long(3, message, by=1000.0)

    def all_long(node, message):
        content = growing(node, message).content
        return Message(content=content, reply_to=message)

    result = play(2, answer=all_long)
    assert result.train_metrics_clientapp[2]["gma-clients"] == 3


def test_nodes_are_sampled_by_identity_and_not_by_node_id():
    def partitions_of(numbers, seed):
        held = dict(zip(numbers, range(6), strict=True))

        def answer(node, message):
            if message.metadata.message_type == "query":
                return identify(message, Context(1, node, {"partition-id": held[node]}, RecordDict(), {}))
            return None

        grid = Nodes(numbers, answer)
        strategy = Masked(identity="partition-id", fraction_train=0.5, seed=seed)
        messages = strategy.configure_train(1, record(START), MetricRecord(), grid)
        return [held[message.metadata.dst_node_id] for message in messages]

    drawn = partitions_of([11, 22, 33, 44, 55, 66], 0)
    assert partitions_of([903, 13, 88, 7, 500, 1], 0) == drawn
    expected = fedgma.seeds.generator(0, "cohort", 1).choice(6, 3, replace=False)
    assert drawn == sorted(expected.tolist())  # the simulator's draw


def test_a_node_without_an_identity_is_not_sampled():
    def answer(node, message):
        if node == 2:
            return Message(error=failure(node, "no query function").error, reply_to=message)
        return identify(message, Context(1, node, {"partition-id": node}, RecordDict(), {}))

    messages = Masked(identity="partition-id").configure_train(
        1, record(START), MetricRecord(), Nodes((1, 2, 3), answer)
    )
    assert [message.metadata.dst_node_id for message in messages] == [1, 3]


def test_without_an_identity_nodes_are_ordered_by_public_key():
    def sampled(keys):
        grid = Nodes(keys, keys=keys)
        strategy = Masked(fraction_train=0.5)
        messages = strategy.configure_train(1, record(START), MetricRecord(), grid)
        return {keys[message.metadata.dst_node_id] for message in messages}

    keys = [b"a", b"b", b"c", b"d", b"e", b"f"]
    first = dict(zip([5, 4, 3, 2, 1, 6], keys, strict=True))
    second = dict(zip([71, 72, 73, 74, 75, 76], keys, strict=True))
    assert sampled(first) == sampled(second)


def test_evaluation_metrics_of_bad_replies_are_left_out():
    def answer(node, message):
        if message.metadata.message_type == "train":
            return trained(node, message)
        metrics = {1: {"num-examples": 10, "accuracy": 0.5}, 2: {"accuracy": 0.9}, 3: {"num-examples": -1}}[node]
        return Message(content=RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    grid = Nodes((1, 2, 3), answer)
    result = Masked(min_available_nodes=3).start(grid, record(START), 1)
    assert dict(result.evaluate_metrics_clientapp[1]) == {"accuracy": 0.5}


def test_the_servers_own_evaluation_is_called_as_flower_calls_it(tmp_path):
    def evaluate(round_, arrays):
        assert isinstance(arrays, ArrayRecord)
        return MetricRecord({"round": round_})

    grid = Nodes((1, 2, 3), trained)
    result = strategy().start(grid, record(START), 2, evaluate_fn=evaluate, folder=tmp_path)
    assert {key: value["round"] for key, value in result.evaluate_metrics_serverapp.items()} == {0: 0, 1: 1, 2: 2}


def test_nodes_train_the_model_and_its_average_is_evaluated_and_returned(tmp_path):
    sent, evaluated = [], []

    def answer(node, message):
        sent.append(message.content["arrays"]["w"].numpy())
        return trained(node, message)

    def evaluate(round_, arrays):
        evaluated.append(arrays["w"].numpy())
        return MetricRecord({"round": round_})

    def played(rounds):
        made = strategy(optimizer=fedgma.averaged(fedgma.sgd(0.5), 0.75), norm_factor=None)
        return made.start(Nodes((1, 2, 3), answer), record(START), rounds, evaluate_fn=evaluate, folder=tmp_path / "a")

    played(3)
    result = played(4)  # goes on with the model and its average
    plain = strategy(optimizer=fedgma.sgd(0.5), norm_factor=None)
    models = [START["w"]]
    plain.start(
        Nodes((1, 2, 3), trained), record(START), 4, evaluate_fn=lambda _, arrays: models.append(arrays["w"].numpy())
    )
    models = [START["w"], *models[2:]]  # the first evaluation is that of the start
    np.testing.assert_array_equal(sent[::3], models[:4])
    total, weight, expected = np.zeros_like(START["w"], np.float64), 0.0, [START["w"]]
    for model_ in models[1:]:
        total, weight = 0.75 * total + model_, 0.75 * weight + 1
        expected.append(total / weight)
    np.testing.assert_allclose(evaluated, expected, rtol=1e-6)
    np.testing.assert_array_equal(model(result)["w"], evaluated[-1])
    assert model(result)["w"].dtype == np.float32
    assert model(result)["steps"] == 4


def test_an_average_of_models_refuses_a_rule_in_products():
    with pytest.raises(fedgma.ConfigError, match="the model's own arrays"):
        strategy(optimizer=fedgma.averaged(fedgma.sgd()), aggregator=in_products(fedgma.masked_mean()))
