"""The Flower strategy on replies as Flower delivers them: a bad one costs its node, the rest is our own answer."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

import fedgma
from fake_grids import Nodes, failure, record, reply
from fedgma.flower import Masked, MaskedFit

START = {"w": np.zeros((2, 3), np.float32), "steps": np.array(4)}


def local(node, value, steps=5):
    return reply(node, {"w": np.full((2, 3), value, np.float32), "steps": np.array(steps)})


def played(strategy, replies, start=START, round_=1):
    strategy.configure_train(round_, record(start), ConfigRecord(), Nodes([1, 2, 3, 7, 9]))
    arrays, metrics = strategy.aggregate_train(round_, replies)
    return None if arrays is None else {name: array.numpy() for name, array in arrays.items()}, metrics


GOOD = [local(1, 1.0), local(2, 2.0, steps=9), local(3, -1.0)]
BAD = {
    "nan": reply(7, {"w": np.full((2, 3), np.nan, np.float32), "steps": np.array(5)}),
    "broadcastable shape": reply(7, {"w": np.ones(3, np.float32), "steps": np.array(5)}),
    "missing": reply(7, {"steps": np.array(5)}),
    "dtype": reply(7, {"w": np.ones((2, 3)), "steps": np.array(5)}),
    "negative weight": reply(7, {"w": np.ones((2, 3), np.float32), "steps": np.array(5)}, weight=-9),
    "huge weight": reply(7, {"w": np.ones((2, 3), np.float32), "steps": np.array(5)}, weight=10**18),
    "same node twice": local(1, 50.0),
}


def test_the_result_is_that_of_server_round():
    after, metrics = played(Masked(tau=0.4), GOOD)
    models = [{name: value.numpy() for name, value in message.content["arrays"].items()} for message in GOOD]
    expected = fedgma.server_round(START, models, [10, 10, 10]).params
    np.testing.assert_array_equal(after["w"], expected["w"])
    assert after["w"].dtype == np.float32
    assert after["steps"] == 9
    assert after["steps"].dtype == np.int64
    assert metrics["gma-clients"] == 3
    assert metrics["gma-mask-mean"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_reply_excludes_its_node_and_does_not_stop_the_run(fault):
    expected, _ = played(Masked(), GOOD)
    after, metrics = played(Masked(), [GOOD[0], BAD[fault], *GOOD[1:]])
    np.testing.assert_array_equal(after["w"], expected["w"])
    assert metrics["gma-refused"] == 1


def test_metrics_are_those_of_the_replies_that_count():
    loss = {1: 1.0, 2: 2.0, 3: 3.0, 7: 99.0}
    replies = [
        reply(node, {"w": np.ones((2, 3), np.float32), "steps": np.array(5)}, loss=loss[node]) for node in (1, 2, 3)
    ]
    bad = reply(7, {"w": np.full((2, 3), np.nan, np.float32), "steps": np.array(5)}, loss=99.0)
    again = reply(1, {"w": np.ones((2, 3), np.float32), "steps": np.array(5)}, loss=50.0)
    _, metrics = played(Masked(), [*replies, bad, again])
    assert metrics["loss"] == pytest.approx(2.0)


def test_a_failed_node_is_counted():
    _, metrics = played(Masked(), [*GOOD, failure(9)])
    assert metrics["gma-failed"] == 1
    assert metrics["gma-late"] == 1  # node 7 said nothing


def test_without_valid_updates_the_model_stays_unchanged():
    assert played(Masked(), [BAD["nan"]]) == (None, None)
    assert played(Masked(), []) == (None, None)


def test_nan_never_reaches_the_servers_moments():
    clean, poisoned = Masked(optimizer=fedgma.yogi(0.1)), Masked(optimizer=fedgma.yogi(0.1))
    for round_ in (1, 2):
        expected, _ = played(clean, GOOD, round_=round_)
        after, _ = played(poisoned, [BAD["nan"], *GOOD], round_=round_)
        np.testing.assert_array_equal(after["w"], expected["w"])


def test_the_mask_comes_after_the_preconditioner():
    after, _ = played(Masked(tau=1.0, optimizer=fedgma.adam(1.0)), GOOD)
    mean, mask = 2 / 3, 1 / 3
    step = mask * 0.1 * mean / (np.sqrt(0.99e-6 + 0.01 * mean**2) + 1e-3)
    np.testing.assert_allclose(after["w"], np.full((2, 3), step), rtol=1e-5)


def test_sampling_is_seeded_and_the_callers_config_is_left_alone():
    nodes, config = Nodes(range(20)), ConfigRecord({"lr": 0.1})

    def asked(seed, round_):
        strategy = Masked(seed=seed, fraction_train=0.3, min_available_nodes=2)
        return [m.metadata.dst_node_id for m in strategy.configure_train(round_, record(START), config, nodes)]

    assert asked(0, 1) == asked(0, 1)
    assert len(asked(0, 1)) == 6
    assert asked(0, 1) != asked(0, 2)
    assert asked(0, 1) != asked(1, 1)
    assert dict(config) == {"lr": 0.1}


def test_waiting_for_nodes_has_a_limit():
    with pytest.raises(fedgma.NotEnoughClients, match="round 1 needs 2 nodes, got 1 after 0 s"):
        Masked(wait=0).configure_train(1, record(START), ConfigRecord(), Nodes([1]))


def test_flowers_own_options_are_passed_on():
    strategy = Masked(
        fraction_evaluate=0.5,
        weighted_by_key="samples",
        train_metrics_aggr_fn=lambda contents, key: MetricRecord({"n": len(contents)}),
    )
    assert strategy.fraction_evaluate == 0.5
    assert strategy.weighted_by_key == "samples"


def test_noise_that_nodes_add_passes_the_gate():
    noisy = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=10.0, delta=1e-3)

    def answer(node, message):
        def train(message, context):
            arrays = {name: array.numpy() + 0.1 for name, array in message.content["arrays"].items()}
            return Message(content=reply(node, arrays).content, reply_to=message)

        return noisy(message, None, train)

    nodes = Nodes([1, 2, 3], answer)
    result = Masked(fraction_evaluate=0.0).start(nodes, record({"w": np.ones(50, np.float32)}), num_rounds=1)
    metrics = result.train_metrics_clientapp[1]
    assert (metrics["gma-clients"], metrics["gma-refused"]) == (3, 0)
    assert 0 < metrics["gma-share-unmasked"] < 1  # of three coins, a quarter agrees


def test_a_wrapper_of_flower_that_adds_noise_takes_the_mean_of_clipped_updates():
    wrapped = DifferentialPrivacyServerSideFixedClipping(
        Masked(aggregator=fedgma.mean(), share_cap=None), noise_multiplier=0, clipping_norm=1.0, num_sampled_clients=2
    )
    start = {"w": np.zeros(2, np.float32)}
    replies = [reply(1, {"w": np.array([3, 4], np.float32)}), reply(2, {"w": np.array([0, 0.5], np.float32)})]
    after, _ = played(wrapped, replies, start)
    np.testing.assert_allclose(after["w"], [0.3, 0.65], rtol=1e-6)


@pytest.mark.parametrize("strategy", [Masked, MaskedFit])
def test_tau_beside_an_aggregator_is_refused_since_it_would_have_no_effect(strategy):
    with pytest.raises(fedgma.ConfigError, match="tau has no effect beside an aggregator; give it there"):
        strategy(tau=0.2, aggregator=fedgma.and_mask(0.4))
    assert strategy().server.rule.settings == {"tau": 0.4}
    assert strategy(tau=0.2).server.rule.settings == {"tau": 0.2}


@pytest.mark.parametrize(
    ("strategy", "options", "said"),
    [
        (Masked, {"eta": 0.01}, r"eta belongs to the server optimiser; .* optimizer=fedgma\.yogi"),
        (MaskedFit, {"beta_1": 0.9}, "beta_1 belongs to the server optimiser"),
        (Masked, {"server_momentum": 0.9}, r"optimizer=fedgma\.momentum\(1\.0, beta=0\.9\)"),  # of FedAvgM
        (Masked, {"proximal_mu": 0.1}, r'train_config=ConfigRecord\(\{"proximal-mu": 0\.1\}\)'),  # of FedProx
        (MaskedFit, {"proximal_mu": 0.1}, r'on_fit_config_fn=lambda round: \{"proximal_mu": 0\.1\}'),
        (Masked, {"num_malicious_nodes": 1}, r"aggregator=fedgma\.multi_krum\(share=0\.2\)"),
        (Masked, {"beta": 0.2}, r"aggregator=fedgma\.trimmed_mean\(share=0\.2\)"),
        (Masked, {"fraction_fit": 0.1}, "unknown option 'fraction_fit' of Masked; did you mean 'fraction_train'"),
        (MaskedFit, {"fraction_train": 0.1}, "did you mean 'fraction_fit'"),
        (Masked, {"agregator": None}, "did you mean 'aggregator'"),
        (Masked, {"gate": {"max_norm": 1.0}}, "gate: expected fedgma.Gate"),
    ],
)
def test_options_of_another_strategy_are_refused_with_what_takes_their_place(strategy, options, said):
    with pytest.raises(fedgma.ConfigError, match=said):
        strategy(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"retries": -1}, "retries must be a whole number of at least 0, got -1"),
        ({"retries": "3"}, "retries must be a whole number of at least 0, got '3'"),
        ({"wait": "3"}, "wait must be a number, at least 0, got '3'"),
        ({"seed": "a"}, "seed must be a whole number, got 'a'"),
        ({"share_cap": "0.6"}, "share_cap must be at least 0.5 and below 1, or None for no cap, got '0.6'"),
        ({"fraction_train": "0.5"}, "fraction_train must be a number, from 0 to 1, got '0.5'"),
        ({"fraction_evaluate": 1.5}, "fraction_evaluate must be from 0 to 1, got 1.5"),
        ({"min_train_nodes": None}, "min_train_nodes must be a whole number of at least 0, got None"),
    ],
)
def test_an_option_of_another_kind_is_refused(options, said):
    with pytest.raises(fedgma.ConfigError) as refused:
        Masked(**options)
    assert str(refused.value) == said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"num_rounds": 0}, "num_rounds must be a whole number of at least 1, got 0"),
        ({"num_rounds": -1}, "num_rounds must be a whole number of at least 1, got -1"),
        ({"num_rounds": 2.0}, "num_rounds must be a whole number of at least 1, got 2.0"),
        ({"timeout": None}, "timeout must be a number of seconds, got None; for no limit pass math.inf"),
        ({"timeout": "9"}, "timeout must be a number, at least 0, got '9'"),
        ({"folder": 3}, "folder must be a path or None, got 3"),
    ],
)
def test_an_argument_of_another_kind_is_refused_before_anything_is_written(tmp_path, arguments, said):
    with pytest.raises(fedgma.ConfigError) as refused:
        Masked().start(Nodes([1, 2]), record(START), **{"folder": tmp_path / "run", **arguments})
    assert str(refused.value) == said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("below", ["", "run"])
def test_a_folder_that_is_a_file_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(fedgma.ConfigError, match=r"but '\S+file' is a file; give another path"):
        Masked().start(Nodes([1, 2]), record(START), folder=tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("returned", [None, {"loss": 1.0}, 0.5])
def test_a_metrics_function_that_returns_something_else_costs_no_round(returned, caplog):
    strategy = Masked(train_metrics_aggr_fn=lambda contents, key: returned)
    after, metrics = played(strategy, GOOD)
    np.testing.assert_array_equal(after["w"], played(Masked(), GOOD)[0]["w"])
    assert metrics["gma-clients"] == 3
    assert "loss" not in metrics
    assert f"must return a MetricRecord, got {type(returned).__name__}" in caplog.text
