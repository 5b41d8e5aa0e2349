"""Gradients at a perturbed point: lanes and engine equal the loop, lane by lane, and idle lanes hold still."""

import numpy as np
import pytest
import torch

from fedgma.training import lanes, loop
from fedgma.training.cuda_graphs import Engine
from fedgma.training.fast.written import form_gradients, lenet_form
from fedgma.training.features import features_of
from fedgma.training.lane_batch import Assignment, Tilt
from fedgma.training.models import build
from lane_twins import correction_like, distance, make_lane_batch, start_of
from plain_pools import DoublePool, make_federation, make_pool

SIZES = [9, 3, 17, 1, 8]
# a plain lane, FedSAM, FedSpeed, FedSMOO, FedCM
COLUMNS = {
    "rho": [0.0, 0.3, 0.1, 0.2, 0.0],
    "unit": [1, 1, 0, 1, 1],
    "blend": [0.0, 1.0, 0.4, 1.0, 0.0],
    "tilted": [0, 0, 0, 1, 0],
    "scale": [1.0, 1.0, 1.0, 1.0, 0.3],
    "mu": [0.0, 0.0, 0.5, 0.5, 0.0],
}


def tilt_like(start, tilted):
    """Random tilts, zero for lanes without."""
    rows = torch.tensor(tilted, dtype=torch.float64)
    parts = [correction_like(start, len(tilted), seed=seed) for seed in (1, 2)]
    kept = [{n: v * rows.view(-1, *(1,) * (v.dim() - 1)) for n, v in part.items()} for part in parts]
    return Tilt(*kept, {n: torch.zeros_like(v) for n, v in kept[0].items()})


def make_task(order, *, pools=1):
    federation, model = make_federation(SIZES, (1, 12, 12)), build("lenet", (1, 12, 12), 10, seed=0).double()
    lane_batch = make_lane_batch(federation, order, lr=0.02)
    for name, values in COLUMNS.items():
        lane_batch.rate(name)[:] = np.array(values)[: len(order)]
    lane_batch.pool[:] = np.arange(len(order)) % pools
    plain = [federation.train, make_pool(sum(SIZES), (1, 12, 12), seed=8)][:pools]
    start, _ = start_of(model)
    tilt = tilt_like(start, COLUMNS["tilted"][: len(order)])
    correction = correction_like(start, len(order))
    return Assignment(model, lane_batch, [DoublePool(p.x, p.y, 10) for p in plain], start, {}, correction, tilt)


def assert_same(expected, actual):
    assert distance(expected.updates, actual.updates) < 1e-9
    for first, second in zip(expected.tilt, actual.tilt, strict=True):
        assert distance(first, second) < 1e-9


@pytest.mark.parametrize("pools", [1, 2])
def test_lanes_and_engine_equal_the_loop(pools):
    engine = Engine(form_gradients(lenet_form()), compile=False)
    for order in (range(5), [2, 4, 0, 1]):  # the second round pads the station of the first with an idle lane
        task = make_task(order, pools=pools)
        before = {name: value.clone() for name, value in task.tilt.own.items()}
        wanted = loop.train(task)
        assert_same(wanted, lanes.train(task))
        assert_same(wanted, engine(task))
        assert distance(before, task.tilt.own) == 0  # what is given is not changed


def test_a_tilt_moves_by_the_perturbations_minus_what_is_shared():
    task = make_task(range(5))
    steps, trained = int(task.lane_batch.steps[3]), loop.train(task)
    assert steps == 1  # the fourth client has one sample
    for name, own in trained.tilt.own.items():
        moved = task.tilt.own[name][3] + trained.tilt.last[name][3] - task.tilt.shared[name][3]
        torch.testing.assert_close(own[3], moved)
        for lane in (0, 1, 2, 4):
            assert not own[lane].any()
    length = torch.stack([value[3].square().sum() for value in trained.tilt.last.values()]).sum().sqrt()
    assert length.item() == pytest.approx(0.2)


def test_terms_that_no_lane_needs_are_left_out_of_the_step():
    task = make_task([0, 4])  # the columns of a plain lane and of FedSAM's
    task.lane_batch.rate("blend")[:] = 0
    features = features_of(task._replace(tilt=None, correction=None))
    assert not any((features.second, features.tilt, features.scale, features.correction))
    assert features_of(make_task(range(5)))[:7] == (True, True, False, True, True, True, True)
    calls = []

    def counted(*arguments):
        calls.append(1)
        return form_gradients(lenet_form())(*arguments)

    lanes.train(task._replace(tilt=None), gradients=counted, padding=True)
    assert len(calls) == task.lane_batch.counts.shape[1]
    calls.clear()
    task.lane_batch.rate("blend")[1] = 1
    lanes.train(task._replace(tilt=None), gradients=counted, padding=True)
    assert len(calls) == 2 * task.lane_batch.counts.shape[1]
