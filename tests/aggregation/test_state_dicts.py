"""Whole models in, whole models out: torch modules with buffers and counters, lists of arrays, mixed number types."""

import numpy as np
import pytest
import torch

import fedgma
from strategies import same_bits
from tables import AGGREGATORS, OPTIMIZERS


def batchnorm_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))


def trained(state, seed):
    """The state after a client's few steps on its own data."""
    model = batchnorm_model()
    model.load_state_dict(state)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(1 + seed % 3):
        loss = model(torch.randn(8, 3, generator=generator) * (seed + 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.state_dict()


def test_a_batchnorm_model_makes_the_round_trip():
    state = batchnorm_model().state_dict()
    clients = [trained(state, seed) for seed in range(4)]
    counts = [10, 20, 30, 40]
    after = fedgma.server_round(state, clients, counts).params
    batchnorm_model().load_state_dict(after)
    assert after["1.num_batches_tracked"].dtype == torch.int64
    assert after["1.num_batches_tracked"] == max(client["1.num_batches_tracked"] for client in clients)
    for name in ("1.running_mean", "1.running_var"):
        mean = sum(count * client[name].double() for count, client in zip(counts, clients, strict=True)) / sum(counts)
        torch.testing.assert_close(after[name].double(), mean, rtol=1e-6, atol=1e-7)
    deltas = torch.stack([client["0.weight"] - state["0.weight"] for client in clients])
    score = deltas.sign().sum(0).abs() / 4
    mean = (deltas.double() * torch.tensor(counts)[:, None, None]).sum(0) / 100
    expected = state["0.weight"] + (torch.where(score >= 0.4, 1.0, score) * mean).float()
    torch.testing.assert_close(after["0.weight"], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_variances_stay_non_negative_and_counters_whole_over_many_rounds(name):
    state, moments = batchnorm_model().state_dict(), None
    for round_ in range(15):
        clients = [trained(state, 3 * round_ + client) for client in range(3)]
        state, moments, _ = fedgma.server_round(state, clients, [10, 20, 30], optimizer=OPTIMIZERS[name], state=moments)
        assert (state["1.running_var"] >= 0).all()
        assert all(array.isfinite().all() for array in state.values())
    assert state["1.num_batches_tracked"].dtype == torch.int64


def test_buffers_can_be_named():
    params = {"w": np.zeros(1), "ema": np.zeros(1)}
    clients = [{"w": np.ones(1), "ema": np.ones(1)}, {"w": -np.ones(1), "ema": -3 * np.ones(1)}]
    masked = fedgma.server_round(params, clients).params
    kept = fedgma.server_round(params, clients, buffers=["ema"]).params
    assert masked["ema"].tolist() == [0.0]
    assert kept["ema"].tolist() == [-1.0]
    assert kept["w"].tolist() == [0.0]


def test_named_buffers_come_beside_running_statistics():
    params = {"w": np.zeros(1), "ema": np.zeros(1), "bn.running_var": np.ones(1)}
    clients = [{"w": np.ones(1), "ema": np.ones(1), "bn.running_var": np.array([value])} for value in (3.0, 0.5, 0.1)]
    after = fedgma.server_round(params, clients, buffers=["ema"], optimizer=fedgma.adam(1.0)).params
    assert after["bn.running_var"].tolist() == pytest.approx([1.2])
    assert after["ema"].tolist() == pytest.approx([1.0])


def test_buffers_use_no_learning_rate_and_no_moments():
    params = {"bn.running_mean": np.zeros(1), "w": np.zeros(1)}
    clients = [{"bn.running_mean": np.ones(1), "w": np.ones(1)}]
    after, state, _ = fedgma.server_round(params, clients, optimizer=fedgma.adam(0.01))
    assert after["bn.running_mean"].tolist() == [1.0]
    assert state["z"]["bn.running_mean"].tolist() == [0.0]


def test_a_list_of_arrays_per_client_is_named_by_position():
    clients = [[np.ones((2, 2)), np.ones(2)], [-np.ones((2, 2)), np.ones(2)]]
    merged = fedgma.masked_mean()(clients, [10, 10])
    assert list(merged.update) == ["0", "1"]
    assert merged.update["1"].tolist() == [1.0, 1.0]
    assert not merged.update["0"].any()


@pytest.mark.parametrize("name", AGGREGATORS)
def test_every_aggregator_takes_state_dicts_with_buffers_and_counters(name):
    state = batchnorm_model().state_dict()
    clients = [trained(state, seed) for seed in range(3)]
    updates = [{key: client[key] - state[key] for key in state} for client in clients]
    merged = AGGREGATORS[name](updates, [10, 10, 20])
    assert merged.update.keys() == state.keys()
    assert merged.update["1.num_batches_tracked"].dtype == torch.int64
    assert set(merged.buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    assert all(merged.update[key].shape == state[key].shape for key in state)


def test_a_stack_may_hold_buffers_and_counters_too():
    stack = {"w": np.ones((3, 2)), "bn.running_mean": np.array([[1.0], [-1.0], [3.0]]), "steps": np.array([4, 9, 2])}
    merged = fedgma.masked_mean()(stack, [10, 10, 20])
    assert merged.update["bn.running_mean"].tolist() == [1.5]
    assert merged.update["steps"].tolist() == 9
    assert merged.update["steps"].dtype == np.int64
    tally = fedgma.Tally()
    tally.add_many(stack, [10, 10, 20])
    tally.add_many({name: entry[:1] for name, entry in stack.items()}, [40])
    assert fedgma.finish(tally).update["bn.running_mean"].tolist() == [1.25]
    assert fedgma.finish(tally).update["steps"].tolist() == 9


def test_a_model_may_mix_number_types():
    update = {"half": torch.ones(2, dtype=torch.bfloat16), "single": torch.ones(2), "double": torch.ones(2).double()}
    merged = fedgma.masked_mean()([update, update])
    assert {name: entry.dtype for name, entry in merged.update.items()} == {
        name: entry.dtype for name, entry in update.items()
    }


def test_the_global_model_and_a_bad_client_model_are_left_alone():
    params = {"w": np.zeros(2)}
    clients = [{"w": np.ones(2)}, {"w": np.array([np.inf, 1.0])}, {"other": np.ones(2)}]
    after, _, notes = fedgma.server_round(params, clients, [1, 1, 1], clients=["a", "b", "c"])
    assert [(refusal.client, refusal.reason) for refusal in notes["refused"]] == [("b", "nonfinite"), ("c", "schema")]
    assert same_bits(after, {"w": np.ones(2)})
    assert params["w"].tolist() == [0.0, 0.0]


def test_gradients_are_not_tracked():
    parameter = torch.nn.Parameter(torch.ones(2))
    merged = fedgma.masked_mean()([{"w": parameter}, {"w": parameter * 2}])
    assert not merged.update["w"].requires_grad


def test_a_model_in_another_floating_type_counts_by_its_difference():
    params = {"w": np.full(2, 5.0, np.float32)}
    clients = [{"w": np.full(2, 6.0)}, {"w": np.full(2, 6.0, np.float32)}]
    after = fedgma.server_round(params, clients, [10, 10], gate=fedgma.Gate(cast=True)).params["w"]
    assert after.tolist() == [6.0, 6.0]
