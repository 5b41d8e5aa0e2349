"""Server optimisers at their edges: settings, limits, types, buffers and the state that they ask for."""

import math

import numpy as np
import pytest
import torch

import fedgma
from fedgma import Aggregate
from fedgma.aggregation.optimizers import OPTIMIZERS, server_optimizer

NAMES = ["sgd", "momentum", "adagrad", "adam", "yogi"]


@pytest.mark.parametrize("name", NAMES)
def test_an_optimiser_says_its_name_and_its_settings(name):
    server = OPTIMIZERS[name]()
    rate = 1.0 if name in ("sgd", "momentum") else 0.1
    assert server.name == name
    assert server.settings == {
        "learning_rate": rate,
        "beta1": 0.9,
        "beta2": 0.99,
        "epsilon": 1e-3,
        "mask_position": "after",
    }


def test_settings_go_where_their_names_say():
    assert fedgma.momentum(0.3, 0.5).settings["beta1"] == 0.5
    assert fedgma.adagrad(0.3, 0.2).settings["epsilon"] == 0.2
    for make in (fedgma.adam, fedgma.yogi):
        settings = make(0.3, 0.5, 0.6, 0.2, mask_position="before").settings
        assert list(settings.values()) == [0.3, 0.5, 0.6, 0.2, "before"]
    for make in (fedgma.sgd, fedgma.momentum, fedgma.adagrad):
        assert make(mask_position="before").settings["mask_position"] == "before"


def test_an_optimiser_that_is_not_known_is_refused():
    with pytest.raises(fedgma.ConfigError, match="unknown server optimiser 'rms'; known: adagrad, adam, momentum"):
        server_optimizer("rms", 0.1, "after")


def test_the_defaults_of_the_coefficients_are_those_of_the_functions():
    assert server_optimizer("adam", 0.1, "after").settings == fedgma.adam().settings


@pytest.mark.parametrize("value", [0, -1e-9, math.inf, math.nan, True, "1", None])
@pytest.mark.parametrize("name", ["learning_rate", "epsilon"])
def test_rates_are_numbers_above_zero(name, value):
    with pytest.raises(fedgma.ConfigError, match=f"{name} must be a number above 0"):
        fedgma.adam(**{name: value})


@pytest.mark.parametrize("value", [-1e-9, 1, 1.5, math.nan, True, False, "0", None])
@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_decays_are_at_least_zero_and_below_one(name, value):
    with pytest.raises(fedgma.ConfigError, match=f"{name} must be at least 0 and below 1"):
        fedgma.yogi(**{name: value})


def test_the_smallest_settings_are_accepted():
    assert fedgma.adam(5e-324, 0, 0, 5e-324).settings["beta1"] == 0
    assert fedgma.adam(1, 0.5, 0.5, 1).settings["epsilon"] == 1


# -- state -------------------------------------------------------------------------------------------------------------

MOMENTS = {"sgd": [], "momentum": ["z"], "adagrad": ["v"], "adam": ["z", "v"], "yogi": ["z", "v"]}
FIRST = {"z": 0.0, "v": 0.25}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("library", [np, torch])
def test_moments_start_at_zero_and_at_epsilon_squared(name, library):
    coefficients = {"epsilon": 0.5} if "v" in MOMENTS[name] else {}
    params = {
        "w": library.ones((2, 3), dtype=library.float64),
        "h": library.ones((1,), dtype=library.float16),
        "s": library.ones((), dtype=library.float32),
        "n": library.ones((4,), dtype=library.int64),
    }
    state = OPTIMIZERS[name](0.1, **coefficients).init(params)
    assert list(state) == MOMENTS[name]
    for moment, arrays in state.items():
        assert list(arrays) == ["w", "h", "s"]  # counters have no moments
        assert [tuple(array.shape) for array in arrays.values()] == [(2, 3), (1,), ()]
        assert [str(array.dtype).removeprefix("torch.") for array in arrays.values()] == [
            "float64",
            "float32",
            "float32",
        ]
        assert all(float(value) == FIRST[moment] for array in arrays.values() for value in array.reshape(-1))


@pytest.mark.parametrize("name", NAMES[1:])
def test_entries_that_no_client_sent_keep_their_values_and_moments(name):
    server = OPTIMIZERS[name](0.1)
    params = {"w": np.ones(2), "frozen": np.ones(1)}
    state = server.init(params)
    after, moments = server.step(Aggregate({"w": np.ones(2)}, None, {}), state, params)
    assert after["frozen"] is params["frozen"]
    assert list(after) == ["w", "frozen"]
    for moment in MOMENTS[name]:
        assert moments[moment]["frozen"] is state[moment]["frozen"]
        assert not np.array_equal(moments[moment]["w"], state[moment]["w"])


@pytest.mark.parametrize("missing", ["z", "v"])
def test_a_state_without_a_moment_or_without_an_entry_is_refused(missing):
    server, params = fedgma.adam(), {"w": np.ones(2), "b": np.ones(1)}
    merged = Aggregate({"w": np.ones(2), "b": np.ones(1)}, None, {})
    whole = server.init(params)
    without = {moment: arrays for moment, arrays in whole.items() if moment != missing}
    partly = {**whole, missing: {"w": whole[missing]["w"]}}
    for state in (without, partly):
        with pytest.raises(fedgma.DataError, match=f"the optimiser's state has no '{missing}'"):
            server.step(merged, state, params)


def test_a_moment_of_another_shape_is_refused():
    server, params = fedgma.adam(), {"w": np.ones(2)}
    state = {**server.init(params), "v": {"w": np.ones(1)}}
    with pytest.raises(fedgma.DataError, match="the optimiser's 'v' of 'w' has another shape"):
        server.step(Aggregate({"w": np.ones(2)}, None, {}), state, params)


# -- steps -------------------------------------------------------------------------------------------------------------


def test_sgd_and_momentum_and_adagrad_by_hand_for_two_rounds():
    merged = Aggregate({"w": np.array([0.5])}, {"w": np.array([0.5])}, {})
    expected = {
        "sgd": [1 + 0.5 * 0.25] * 2,
        "momentum": [1 + 0.5 * 0.25, 1 + 0.5 * 0.5 * (0.5 * 0.5 + 0.5)],
        "adagrad": [1 + 0.5 * 0.5 * 0.5 / (math.sqrt(v) + 0.1) for v in (0.26, 0.51)],
    }
    servers = [fedgma.sgd(0.5), fedgma.momentum(0.5, 0.5), fedgma.adagrad(0.5, 0.1)]
    for server in servers:
        params, state = {"w": np.array([1.0])}, server.init({"w": np.array([1.0])})
        for value in expected[server.name]:
            after, state = server.step(merged, state, params)
            assert after["w"][0] == pytest.approx(value, rel=1e-14), server.name


@pytest.mark.parametrize("library", [np, torch])
@pytest.mark.parametrize("position", ["after", "before"])
def test_buffers_are_added_without_rate_mask_or_moments(library, position):
    params = {"w": library.ones(1), "mean": library.ones(2), "count": library.ones(1, dtype=library.int64)}
    server = fedgma.momentum(0.5, mask_position=position)
    buffers = {"mean": 2 * library.ones(2), "count": 3 * library.ones(1, dtype=library.int64)}
    merged = Aggregate({"w": library.ones(1)}, {"w": 0 * library.ones(1)}, {}, buffers)
    after, state = server.step(merged, server.init(params), params)
    assert after["mean"].tolist() == [3.0, 3.0]
    assert after["count"].tolist() == [4]
    assert after["count"].dtype == params["count"].dtype
    assert after["w"].tolist() == [1.0]
    assert float(state["z"]["w"][0]) == (1.0 if position == "after" else 0.0)


def test_a_buffer_of_another_model_is_refused():
    params = {"w": np.ones(1)}
    with pytest.raises(fedgma.DataError, match="holds 'm', which is not among the parameters"):
        fedgma.sgd().step(Aggregate({"w": np.ones(1)}, None, {}, {"m": np.ones(1)}), {}, params)
    with pytest.raises(fedgma.DataError, match=r"'m' has shape \[2\] in the aggregate, but \[1\] in the model"):
        fedgma.sgd().step(Aggregate({}, None, {}, {"m": np.ones(2)}), {}, {"m": np.ones(1)})


@pytest.mark.parametrize("library", [np, torch])
def test_half_precision_is_computed_in_single_precision(library):
    # 2048 + 1 is not a float16: computed in float16 each step would round to nothing, and 2 * 0.5 would be lost
    params = {"w": library.full((1,), 2048.0, dtype=library.float16)}
    step = Aggregate({"w": library.full((1,), 0.75, dtype=library.float16)}, None, {})
    after, _ = fedgma.sgd(2.0).step(step, {}, params)
    assert after["w"].tolist() == [2050.0]  # 2049.5, rounded once
    assert after["w"].dtype == library.float16


@pytest.mark.parametrize("library", [np, torch])
@pytest.mark.parametrize("entry", ["w", "mean"])
def test_a_step_that_is_not_finite_names_its_entry(library, entry):
    params = {"w": library.full((1,), 3e38, dtype=library.float32), "mean": library.full((1,), 3e38)}
    if library is np:
        params["mean"] = params["mean"].astype(np.float32)
    change = {entry: params[entry]}
    merged = Aggregate(change, None, {}) if entry == "w" else Aggregate({}, None, {}, change)
    with np.errstate(over="ignore"), pytest.raises(fedgma.Diverged, match=f"'{entry}' would not be finite"):
        fedgma.sgd().step(merged, {}, params)


@pytest.mark.parametrize("library", [np, torch])
def test_yogis_second_moment_rises_stays_or_falls(library):
    # v - (1 - beta2) mean^2 sign(v - mean^2), for v below, at and above mean^2 = 4
    before = library.asarray([1.0, 4.0, 9.0], dtype=library.float64)
    server = fedgma.yogi(0.1, 0.9, 0.75)
    state = {"z": {"w": 0 * before}, "v": {"w": before}}
    merged = Aggregate({"w": library.full((3,), 2.0, dtype=library.float64)}, None, {})
    _, after = server.step(merged, state, {"w": before})
    assert after["v"]["w"].tolist() == [2.0, 4.0, 8.0]
