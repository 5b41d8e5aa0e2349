"""Stations: what is sent to them arrives, and ends that are captured give the bits of those that are not."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from fedgma.training import cuda_graphs
from fedgma.training.choose import written_form
from fedgma.training.cuda_graphs import Engine
from fedgma.training.fast.written import form_gradients
from fedgma.training.features import features_of
from fedgma.training.lane_batch import Assignment, random_states
from fedgma.training.replay import WARM_UP, Fixed
from fedgma.training.stacked import Parcel, copies, copy_all
from fedgma.training.stations import build_station, filled, send
from lane_twins import correction_like, make_lane_batch, make_model, start_of
from plain_pools import make_federation, make_pool

CPU = torch.device("cpu")


def engine_of(model, **settings):
    return Engine(form_gradients(written_form(model)), compile=False, **settings)


def test_a_parcel_brings_arrays_of_any_type_and_layout_to_the_same_place():
    parcel = Parcel([((3,), "float64"), ((2, 5), "int64"), ((4, 2), "float32")], CPU)
    addresses = [tensor.data_ptr() for tensor in parcel.tensors]
    for number in (1, 2):
        whole = [np.arange(3.0), number * np.arange(10, dtype=np.int32).reshape(5, 2).T, np.full((4, 2), number)]
        parcel.send(whole)
        for tensor, array in zip(parcel.tensors, whole, strict=True):
            assert tensor.tolist() == array.tolist()
    parcel.send([*whole[:2], np.zeros((1, 2))])
    assert parcel.tensors[2].tolist() == [[0, 0], [2, 2], [2, 2], [2, 2]]
    assert [tensor.dtype for tensor in parcel.tensors] == [torch.float64, torch.int64, torch.float32]
    assert [tensor.data_ptr() for tensor in parcel.tensors] == addresses
    with pytest.raises(ValueError, match="broadcast"):
        parcel.send([*whole[:2], np.zeros((1, 3))])
    with pytest.raises(ValueError, match="broadcast"):
        parcel.send([np.zeros(2), *whole[1:]])


def test_tensors_of_several_types_are_copied_together():
    given = [torch.rand(3), torch.arange(4), torch.rand(2, 2).double(), torch.tensor([True, False]), torch.rand(1)]
    made = copies(given)
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(made, given, strict=True))
    copy_all(made, [torch.zeros_like(value) for value in given])
    assert not any(value.any() for value in made)
    assert given[1].tolist() == [0, 1, 2, 3]


def test_a_fixed_function_follows_its_tensors():
    x, seen = torch.zeros(2), []
    double = Fixed(lambda: [x * 2], CPU)
    for number in range(WARM_UP + 3):
        x.fill_(number)
        (result,) = double()
        assert result.tolist() == [2.0 * number] * 2
        seen.append(result.data_ptr())
    assert len(set(seen[WARM_UP:])) == 1


def test_a_station_holds_what_a_round_sent():
    federation, model = make_federation([9, 3, 17, 1, 8], (1, 8, 8)), make_model("logistic", (1, 8, 8))
    task = Assignment(model, make_lane_batch(federation, range(5)), [federation.train], *start_of(model))
    station = build_station(task, features_of(task), 1, None)
    for clients in ([0, 1, 2, 3, 4], [2, 4, 0]):
        lane_batch = make_lane_batch(federation, clients, lr=[0.5] * 5)
        order = np.argsort(-lane_batch.steps, kind="stable")
        ready = lane_batch.take(order)
        send(station, filled(ready, station), order)
        lanes, steps = ready.counts.shape
        assert station.bench.index[:steps, :lanes].tolist() == ready.index.swapaxes(0, 1).tolist()
        assert station.bench.counts[:steps, :lanes].tolist() == ready.counts.T.tolist()
        assert not station.bench.counts[steps:].any()
        assert not station.bench.counts[:, lanes:].any()
        assert station.bench.client[:lanes].tolist() == ready.client.tolist()
        assert station.bench.rates[:, :lanes].tolist() == ready.rates.T.tolist()
        assert station.bench.lr[0, :lanes].tolist() == [0.5] * lanes
        assert order[station.back[:lanes].numpy()].tolist() == list(range(lanes))


ROUNDS = ([0, 1, 2, 3, 4], [2, 4, 0], [2, 4, 0], [4, 3, 2, 1], [2, 4, 0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4])


@pytest.mark.parametrize("runs", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"mu": 0.1}, {"momentum": 0.0}], ids=str)
def test_captured_ends_change_no_bit(settings, runs):
    federation, model = make_federation([9, 3, 17, 1, 8], (1, 28, 28)), make_model("lenet", (1, 28, 28))
    engines = [engine_of(model, graphs=graphs) for graphs in (True, False)]
    results = []
    for number, clients in enumerate(ROUNDS):
        start = {name: torch.cat([value + 0.01 * number] * runs) for name, value in start_of(model)[0].items()}
        lane_batch = make_lane_batch(federation, clients, round=number, **settings)
        lane_batch.run[:] = np.arange(len(clients)) % runs
        correction = correction_like(start, len(clients)) if number % 2 else None
        task = Assignment(model, lane_batch, [federation.train], start, {}, correction)
        pair = [engine(task) for engine in engines]
        for part in ("flat", "loss", "measures"):
            assert torch.equal(*(getattr(trained, part) for trained in pair)), (number, part)
        results.append((pair[0].flat, pair[1].flat.clone()))
    assert all(torch.equal(*pair) for pair in results)  # no later round wrote over an earlier one
    assert any(station.ends for station in engines[0]._stations)
    assert not any(station.ends for station in engines[1]._stations)


def test_captured_ends_keep_the_statistics_of_every_lane():
    federation, model = make_federation([6, 4, 7], (3, 8, 8)), make_model("resnet18-bn", (3, 8, 8))
    pools = [federation.train, make_pool(17, (3, 8, 8), seed=4)]
    lane_batch = make_lane_batch(federation, range(3), lr=0.001)
    lane_batch.pool[:] = [1, 0, 1]
    task = Assignment(model, lane_batch, pools, *start_of(model))
    kept, plain = (engine_of(model, padding=True, graphs=graphs) for graphs in (True, False))
    expected = plain(task)
    for _ in range(WARM_UP + 2):
        actual = kept(task)
        assert torch.equal(actual.flat, expected.flat)
        assert all(torch.equal(actual.buffers[name], value) for name, value in expected.buffers.items())


def test_steps_that_are_replayed_alone_need_nothing_around_them(monkeypatch):
    federation, model = make_federation([9, 9], (1, 8, 8)), make_model("logistic", (1, 8, 8))
    engine, entered = engine_of(model), []
    task = Assignment(model, make_lane_batch(federation, range(2)), [federation.train], *start_of(model))
    plain = cuda_graphs.float32_precision

    @contextmanager
    def counted(precision):
        entered.append(precision)
        with plain(precision):
            yield

    monkeypatch.setattr(cuda_graphs, "float32_precision", counted)
    expected = [engine(task) for _ in range(4)]
    assert len(entered) == 4  # without a graph, steps are never alone
    (steps,) = engine._stations[0].graphs.values()
    steps.alone = True
    assert torch.equal(engine(task).flat, expected[0].flat)
    assert len(entered) == 4
    del steps.graphs[2]  # is to be captured again
    assert torch.equal(engine(task).flat, expected[0].flat)
    assert len(entered) == 5


def test_random_states_tell_whether_numbers_were_drawn():
    before = random_states(CPU)
    torch.ones(3).cumsum(0)
    assert all(map(torch.equal, before, random_states(CPU)))
    torch.nn.functional.dropout(torch.ones(3), 0.5)
    assert not all(map(torch.equal, before, random_states(CPU)))
