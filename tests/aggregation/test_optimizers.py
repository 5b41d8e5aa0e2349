"""Server optimisers: three rounds worked by hand, two mask positions, laws over every row of the table."""

import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given

import fedgma
from fedgma import Aggregate
from strategies import same_bits, stacks
from tables import OPTIMIZERS

MEANS = [0.5, -0.25, 1.0]
MASKS = [1.0, 0.4, 0.2]


def play(server, means=MEANS, masks=MASKS):
    params, state = {"w": np.array([1.0])}, server.init({"w": np.array([1.0])})
    for mean, mask in zip(means, masks, strict=True):
        params, state = server.step(Aggregate({"w": np.array([mean])}, {"w": np.array([mask])}, {}), state, params)
    return params["w"][0], {moment: arrays["w"][0] for moment, arrays in state.items()}


def test_sgd_adds_the_masked_mean():
    value, state = play(fedgma.sgd(2.0))
    assert value == pytest.approx(1 + 2 * (0.5 * 1 - 0.25 * 0.4 + 1.0 * 0.2), rel=1e-15)
    assert state == {}


def test_momentum_by_hand():
    # z: 0.5, 0.9 * 0.5 - 0.25 = 0.2, 0.9 * 0.2 + 1 = 1.18; steps 0.5, 0.4 * 0.2, 0.2 * 1.18
    value, state = play(fedgma.momentum(1.0, beta=0.9))
    assert state["z"] == pytest.approx(1.18, rel=1e-14)
    assert value == pytest.approx(1 + 0.5 + 0.08 + 0.236, rel=1e-14)


def test_adam_by_hand():
    # z: 0.05, 0.02, 0.118; v from 1e-6: 0.00250099, 0.0031009801, 0.013069970299
    value, state = play(fedgma.adam(0.1))
    assert state["z"] == pytest.approx(0.118, rel=1e-13)
    assert state["v"] == pytest.approx(0.013069970299, rel=1e-12)
    steps = [
        1.0 * 0.05 / (math.sqrt(0.00250099) + 1e-3),
        0.4 * 0.02 / (math.sqrt(0.0031009801) + 1e-3),
        0.2 * 0.118 / (math.sqrt(0.013069970299) + 1e-3),
    ]
    assert value == pytest.approx(1 + 0.1 * sum(steps), rel=1e-13)


def test_yogi_by_hand():
    # v from 1e-6 is below mean^2 each time, so it rises by (1 - beta2) mean^2: 0.002501, 0.003126, 0.013126
    value, state = play(fedgma.yogi(0.1))
    assert state["z"] == pytest.approx(0.118, rel=1e-13)
    assert state["v"] == pytest.approx(0.013126, rel=1e-12)
    steps = [
        1.0 * 0.05 / (math.sqrt(0.002501) + 1e-3),
        0.4 * 0.02 / (math.sqrt(0.003126) + 1e-3),
        0.2 * 0.118 / (math.sqrt(0.013126) + 1e-3),
    ]
    assert value == pytest.approx(1 + 0.1 * sum(steps), rel=1e-13)


def test_yogi_falls_where_the_mean_is_small():
    # v = 1 - 0.01 * 0.25 * sign(1 - 0.25)
    server = fedgma.yogi(0.1)
    state = {"z": {"w": np.array([0.0])}, "v": {"w": np.array([1.0])}}
    _, state = server.step(Aggregate({"w": np.array([0.5])}, None, {}), state, {"w": np.array([1.0])})
    assert state["v"]["w"][0] == pytest.approx(1 - 0.0025, rel=1e-15)


def test_adagrad_by_hand():
    # v: 1e-6 + 0.25, + 0.0625, + 1
    value, state = play(fedgma.adagrad(0.1))
    assert state["v"] == pytest.approx(1.312501, rel=1e-14)
    steps = [
        0.5 / (math.sqrt(0.250001) + 1e-3),
        0.4 * -0.25 / (math.sqrt(0.312501) + 1e-3),
        0.2 * 1.0 / (math.sqrt(1.312501) + 1e-3),
    ]
    assert value == pytest.approx(1 + 0.1 * sum(steps), rel=1e-13)


def test_moments_start_at_zero_and_epsilon_squared():
    state = fedgma.adam(epsilon=0.01).init({"w": np.ones(2, np.float32)})
    assert state["z"]["w"].tolist() == [0, 0]
    np.testing.assert_allclose(state["v"]["w"], 1e-4)
    assert state["v"]["w"].dtype == np.float32


def test_moments_use_the_unmasked_mean_also_where_the_mask_is_zero():
    after, state = play(fedgma.adam(0.1), masks=[0.0, 0.0, 0.0])
    assert after == 1.0
    assert state["z"] == pytest.approx(0.118, rel=1e-13)


@pytest.mark.parametrize("make", [fedgma.adam, fedgma.yogi, fedgma.adagrad])
def test_the_two_mask_positions_are_two_algorithms(make):
    after, after_state = play(make(0.1))
    before, before_state = play(make(0.1, mask_position="before"))
    assert abs(after - before) > 0.01
    assert after_state["v"] != before_state["v"]


def test_with_sgd_the_two_mask_positions_are_equal():
    assert play(fedgma.sgd(0.1))[0] == pytest.approx(play(fedgma.sgd(0.1, mask_position="before"))[0], rel=1e-15)


@given(stack=stacks(dtypes=("float64", "float32", "float16")))
def test_numpy_and_torch_take_the_same_step(stack):
    updates, weights = stack
    results = {name: [] for name in OPTIMIZERS}
    for convert in (np.asarray, lambda entry: torch.from_numpy(np.array(entry))):
        start = {key: convert(np.ones(entry.shape[1:], entry.dtype)) for key, entry in updates.items()}
        merged = fedgma.masked_mean()({key: convert(entry) for key, entry in updates.items()}, weights)
        for name, server in OPTIMIZERS.items():
            params, state = start, server.init(start)
            for _ in range(2):
                params, state = server.step(merged, state, params)
            results[name].append({key: np.asarray(entry) for key, entry in params.items()})
    for name, pair in results.items():
        assert same_bits(*pair), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_changes_neither_its_parameters_nor_its_state(name):
    server = OPTIMIZERS[name]
    params = {"w": np.ones(3)}
    state = server.init(params)
    kept = {moment: {key: array.copy() for key, array in arrays.items()} for moment, arrays in state.items()}
    server.step(fedgma.mean()({"w": np.ones((2, 3))}), state, params)
    assert params["w"].tolist() == [1, 1, 1]
    assert all(same_bits(kept[moment], state[moment]) for moment in kept)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_model_keeps_its_number_type(name, dtype):
    server, params = OPTIMIZERS[name], {"w": torch.ones(3, dtype=dtype)}
    merged = fedgma.masked_mean()({"w": torch.ones(2, 3, dtype=dtype)})
    after, state = server.step(merged, server.init(params), params)
    assert after["w"].dtype == dtype
    arrays = [arrays["w"] for arrays in state.values() if "w" in arrays]
    assert all(array.dtype in (torch.float32, torch.float64) for array in arrays)


def test_a_step_that_overflows_raises_and_commits_nothing():
    params = {"w": np.array([3e38], np.float32)}
    merged = fedgma.mean()({"w": np.array([[3e38], [3e38]], np.float32)})
    with np.errstate(over="ignore"), pytest.raises(fedgma.Diverged, match="'w' would not be finite"):
        fedgma.sgd().step(merged, {}, params)
    assert params["w"][0] == np.float32(3e38)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fedgma.sgd(0), "learning_rate must be a number above 0"),
        (lambda: fedgma.adam(float("nan")), "learning_rate must be a number above 0"),
        (lambda: fedgma.adam(beta2=1.0), "beta2 must be at least 0 and below 1"),
        (lambda: fedgma.yogi(epsilon=-1), "epsilon must be a number above 0"),
        (lambda: fedgma.momentum(beta="0.9"), "beta1 must be at least 0 and below 1"),
        (lambda: fedgma.sgd(mask_position="middle"), "mask_position must be 'after'"),
    ],
)
def test_invalid_settings_are_refused(make, message):
    with pytest.raises(fedgma.ConfigError, match=message):
        make()


def test_state_of_another_optimiser_is_refused():
    params = {"w": np.ones(2)}
    with pytest.raises(fedgma.DataError, match=r"make it with init\(params\)"):
        fedgma.adam().step(fedgma.mean()({"w": np.ones((2, 2))}), fedgma.sgd().init(params), params)


@pytest.mark.parametrize(
    ("server", "before", "said"),
    [
        (fedgma.momentum(), fedgma.yogi(), "it holds 'v', which this one does not keep"),
        (fedgma.sgd(), fedgma.averaged(fedgma.sgd()), "it holds 'average', which this one does not keep"),
        (fedgma.averaged(fedgma.sgd()), fedgma.sgd(), "holds no average of models: it is of an optimiser without one"),
    ],
    ids=["moment", "average", "no average"],
)
def test_state_that_an_optimiser_would_not_carry_on_is_refused(server, before, said):
    model, clients = {"w": np.zeros(2)}, [{"w": np.ones(2)}] * 2
    state = fedgma.server_round(model, clients, optimizer=before).state
    with pytest.raises(fedgma.DataError, match=said):
        fedgma.server_round(model, clients, optimizer=server, state=state)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "averaged"])
def test_a_state_that_was_saved_as_numpy_goes_on_with_tensors(name):
    optimizer = fedgma.averaged(fedgma.adam()) if name == "averaged" else OPTIMIZERS[name]
    model, clients = {"w": torch.zeros(3)}, [{"w": torch.tensor([1.0, 2.0, value])} for value in (3.0, -4.0)]
    first = fedgma.server_round(model, clients, optimizer=optimizer)
    saved = {key: {name: np.asarray(array) for name, array in arrays.items()} for key, arrays in first.state.items()}
    wanted, got = (
        fedgma.server_round(first.params, clients, optimizer=optimizer, state=state) for state in (first.state, saved)
    )
    assert torch.equal(got.params["w"], wanted.params["w"])
    assert all(
        np.array_equal(arrays[name], array)
        for key, arrays in got.state.items()
        for name, array in wanted.state[key].items()
    )


def test_an_aggregate_of_another_model_is_refused():
    merged = fedgma.mean()({"w": np.ones((2, 3))})
    with pytest.raises(fedgma.DataError, match="which is not among the parameters"):
        fedgma.sgd().step(merged, {}, {"v": np.ones(3)})
    with pytest.raises(fedgma.DataError, match=r"shape \[3\] in the aggregate"):
        fedgma.sgd().step(merged, {}, {"w": np.ones((1, 3))})


def test_the_average_of_models_leaves_training_as_it_is():
    optimizers = fedgma.adam(0.1), fedgma.averaged(fedgma.adam(0.1), 0.75)
    params = {"w": np.zeros(2, np.float32), "steps": np.array(3)}
    states, models, total, weight = [one.init(params) for one in optimizers], [params, params], np.zeros(2), 0.0
    for round in range(3):
        merged = fedgma.mean()({"w": np.array([[1.0, round], [2.0, 1.0]], np.float32)})
        for place, optimizer in enumerate(optimizers):
            models[place], states[place] = optimizer.step(merged, states[place], models[place])
        total, weight = 0.75 * total + models[0]["w"], 0.75 * weight + 1
    assert np.array_equal(models[0]["w"], models[1]["w"])
    np.testing.assert_allclose(states[1]["average"]["w"], total / weight, rtol=1e-6)
    assert list(states[1]["average"]) == ["w"]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_of_torch_models_is_loaded_as_tensors_alone(name):
    optimizer = OPTIMIZERS[name]
    model = {"w": torch.zeros(2)}
    first = fedgma.server_round(model, [{"w": torch.ones(2)}], optimizer=optimizer)
    file = io.BytesIO()
    torch.save(first.state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    after = [
        fedgma.server_round(first.params, [{"w": torch.ones(2)}], optimizer=optimizer, state=state).params["w"]
        for state in (first.state, loaded)
    ]
    assert torch.equal(*after)


def test_an_average_holds_nothing_of_the_model_before_the_first_round():
    server, params = fedgma.averaged(fedgma.sgd(), 0.9), {"w": np.full(2, 1e6, np.float32)}
    step = fedgma.mean()({"w": np.array([[-1e6, -999_999.0]], np.float32)})
    model, state = server.step(step, server.init(params), params)
    assert state["average"]["w"].tolist() == model["w"].tolist() == [0.0, 1.0]


def test_an_average_whose_state_does_not_say_how_many_models_it_holds_goes_on_as_after_many_rounds():
    server, params = fedgma.averaged(fedgma.sgd(), 0.75), {"w": np.zeros(1)}
    step = fedgma.mean()({"w": np.array([[4.0]])})
    old = {"average": {"w": np.array([2.0])}}
    assert server.step(step, old, params)[1]["average"]["w"].tolist() == [0.75 * 2 + 0.25 * 4]
