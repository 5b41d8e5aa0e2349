"""Local optimisers and rates that change: the loop is torch's own optimiser, and lanes and engine are its twins."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fedgma.errors import ConfigError
from fedgma.experiments.settings.local_training import SMOOTHED
from fedgma.training import lanes, loop
from fedgma.training.batches import effective_rates
from fedgma.training.choose import written_form
from fedgma.training.cuda_graphs import Engine
from fedgma.training.fast.written import form_gradients
from fedgma.training.gradients import lane_gradients, multiplied
from fedgma.training.lane_batch import Assignment
from fedgma.training.models import build
from fedgma.training.schedules import SCHEDULES, Schedule, factor, factors
from fedgma.training.task import mean_loss
from fedgma.training.tasks import CLASSIFICATION, TASKS, smoothed
from lane_twins import correction_like, distance, make_lane_batch, start_of
from plain_pools import DoublePool, make_federation

SHAPE, RAGGED = (1, 3, 3), [9, 3, 17, 1]
FALLING = [0.1, 0.07, 0.05, 0.02, 0.01]
OPTIMIZERS = [
    {"weight_decay": 0.1},
    {"momentum": 0.0, "weight_decay": 0.1},
    {"nesterov": 1.0, "weight_decay": 0.1},
    {"optimizer": "adamw", "beta2": 0.99},
    {"optimizer": "adamw", "weight_decay": 0.1, "mu": 0.3, "clip": 0.2, "epsilon": 1e-3},
]


def small(sizes=RAGGED):
    federation, model = make_federation(sizes, SHAPE), build("logistic", SHAPE, 10, seed=0).double()
    return federation, model, DoublePool(federation.train.x, federation.train.y, 10)


@pytest.mark.parametrize("lr", [0.1, FALLING], ids=["constant", "falling"])
@pytest.mark.parametrize("rates", OPTIMIZERS, ids=str)
def test_lanes_and_engine_equal_the_loop_round_after_round_on_one_station(rates, lr):
    federation, model, pool = small()
    (start, _), engine = start_of(model), Engine(lane_gradients(model), compile=False)
    for clients, scale in (([0, 1, 2, 3], 1.0), ([2, 0, 1], 0.5)):  # the second leaves a lane of the station idle
        lane_batch = make_lane_batch(federation, clients, lr=np.multiply(lr, scale), **rates)
        task = Assignment(model, lane_batch, [pool], start, {}, correction_like(start, len(clients)))
        wanted = loop.train(task)
        for train in (lanes.train, engine):
            assert distance(wanted.updates, train(task).updates) < 1e-9
    assert len(engine._stations) == 1  # other rates need no other tensors and no other graphs
    assert all(len(station.graphs) == len({key[1:3] for key in station.graphs}) for station in engine._stations)


def test_every_lane_has_its_own_decay_betas_and_rates():
    federation, model, pool = small()
    start, _ = start_of(model)
    for optimizer, columns in {
        "sgd": {"weight_decay": [0.0, 0.1, 0.5, 0.0], "nesterov": [1, 0, 1, 0], "momentum": [0.9, 0.0, 0.5, 0.9]},
        "adamw": {"weight_decay": [0.0, 0.1, 0.5, 0.0], "beta1": [0.9, 0.0, 0.5, 0.9], "epsilon": [1e-8, 1, 0.1, 0.01]},
    }.items():
        lane_batch = make_lane_batch(federation, range(4), optimizer=optimizer)
        for name, values in columns.items():
            lane_batch.rate(name)[:] = values
        lane_batch.lr[:] = np.random.default_rng(0).uniform(0.01, 0.1, lane_batch.lr.shape)
        first, second = (train(Assignment(model, lane_batch, [pool], start, {})) for train in (loop.train, lanes.train))
        assert distance(first.updates, second.updates) < 1e-9, optimizer


LITERAL = [
    ({"momentum": 0.9, "nesterov": 1.0, "weight_decay": 0.1}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    ({"optimizer": "adamw", "beta1": 0.8, "weight_decay": 0.1}, torch.optim.AdamW, {"betas": (0.8, 0.999)}),
]


@pytest.mark.parametrize(("rates", "kind", "words"), LITERAL, ids=["sgd", "adamw"])
def test_the_loop_is_torchs_own_optimiser_with_fresh_moments_in_every_round(rates, kind, words):
    federation, model, pool = small([17])
    for _ in range(2):
        start, _ = start_of(model)
        lane_batch = make_lane_batch(federation, [0], lr=FALLING, **rates)
        found = loop.train(Assignment(model, lane_batch, [pool], start, {}))
        optimizer = kind(model.parameters(), lr=1.0, weight_decay=0.1, **words)
        for index, count, lr in zip(lane_batch.index[0], lane_batch.counts[0], FALLING, strict=True):
            x, y = pool.batch(torch.from_numpy(index[:count]), torch.tensor(0))
            optimizer.param_groups[0]["lr"] = lr
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        for name, value in model.named_parameters():
            torch.testing.assert_close(start[name][0] + found.updates[name][0], value.detach(), rtol=1e-6, atol=1e-8)


def test_a_parameter_that_the_loss_does_not_reach_decays_in_every_trainer():
    federation, _, pool = small([9])
    model = build(lambda shape, classes: Idle(), SHAPE, 10, seed=0).double()
    start, _ = start_of(model)
    task = Assignment(model, make_lane_batch(federation, [0], weight_decay=0.5), [pool], start, {})
    first, second = loop.train(task), lanes.train(task)
    assert distance(first.updates, second.updates) < 1e-9
    assert (first.updates["idle"] < 0).all()


class Idle(torch.nn.Module):
    """A linear classifier with a parameter that it does not use."""

    def __init__(self):
        super().__init__()
        self.idle = torch.nn.Parameter(torch.ones(2))
        self.linear = torch.nn.Linear(9, 10)

    def forward(self, x):
        return self.linear(x.flatten(1))


@pytest.mark.parametrize("name", TASKS)
def test_labels_of_classes_are_smoothed_as_in_torch_and_others_are_refused(name):
    if name not in SMOOTHED:
        with pytest.raises(ConfigError, match=f"label_smoothing is for the tasks .*, got task '{name}'"):
            smoothed(TASKS[name], 0.1)
        return
    task, generator = smoothed(TASKS[name], 0.3), torch.Generator().manual_seed(0)
    logits = torch.randn(4, *([5] if name == "next_token" else []), 7, generator=generator)
    y = torch.randint(7, logits.shape[:-1], generator=generator)
    wanted = F.cross_entropy(logits.reshape(-1, 7), y.reshape(-1), label_smoothing=0.3)
    torch.testing.assert_close(task.loss(logits, y).mean(), wanted)
    torch.testing.assert_close(mean_loss(task, logits, y), wanted)
    assert smoothed(TASKS[name], 0.0) is TASKS[name]


def test_hand_written_gradients_smooth_labels_as_autograd_does():
    model = build("logistic", SHAPE, 10, seed=0).double()
    generator = torch.Generator().manual_seed(0)
    params = {n: torch.randn((3, *v.shape), generator=generator).double() for n, v in model.named_parameters()}
    x, y = torch.randn((3, 4, *SHAPE), generator=generator).double(), torch.arange(12).view(3, 4) % 10
    count = torch.tensor([4, 2, 0])
    expected = lane_gradients(model, task=smoothed(CLASSIFICATION, 0.3))(params, {}, x, y, count)
    actual = form_gradients(written_form(model), "fp32", 0.3)(params, {}, x, y, count)
    assert distance(expected[0], multiplied(actual[0])) < 1e-9
    torch.testing.assert_close(actual[2], expected[2])


@given(
    steps=st.integers(1, 6),
    rho=st.sampled_from([0.0, 0.5, 0.9]),
    nesterov=st.booleans(),
    rates=st.one_of(st.just([0.1] * 6), st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6)),
)
@settings(max_examples=40, deadline=None)
def test_the_effective_rate_is_how_far_a_constant_gradient_moves_torchs_sgd(steps, rho, nesterov, rates):
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=rho, nesterov=nesterov and rho > 0)
    for lr in rates[:steps]:
        weight.grad, optimizer.param_groups[0]["lr"] = torch.ones_like(weight), lr
        optimizer.step()
    found = effective_rates(np.array([rates]), np.array([steps]), np.array([rho]), np.array([float(nesterov)]))
    np.testing.assert_allclose(found, [-weight.item()], rtol=1e-9)


SOME = st.builds(
    Schedule,
    name=st.sampled_from(SCHEDULES),
    warm_up=st.integers(0, 5),
    decay=st.floats(0.01, 1.0),
    every=st.integers(1, 4),
    length=st.none() | st.integers(1, 30),
    floor=st.floats(0.0, 1.0),
)


@given(schedule=SOME, total=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_a_rate_rises_to_its_full_value_and_falls_to_its_floor_whenever_it_is_asked_for(schedule, total):
    share, end = factors(schedule, total), schedule.warm_up
    assert ((share >= 0) & (share <= 1)).all()
    assert (np.diff(share[: end + 1]) > 0).all()
    assert (np.diff(share[end:]) <= 1e-15).all()
    assert (share[end:] >= schedule.floor - 1e-15).all()
    assert share[end : end + 1].tolist() == [1.0][: len(share[end:])]
    assert [factor(schedule, position, total) for position in range(total)] == share.tolist()


def by_torch(make, total):
    """The factors of one of torch's schedulers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(total):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


TORCHS = {
    "exponential": (Schedule("exponential", decay=0.9), lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)),
    "step": (Schedule("step", decay=0.5, every=3), lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5)),
    "cosine": (
        Schedule("cosine", floor=0.1),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10, eta_min=0.1),
    ),
}


@pytest.mark.parametrize("name", TORCHS)
def test_schedules_are_those_of_torch(name):
    schedule, make = TORCHS[name]
    np.testing.assert_allclose(factors(schedule, 10), by_torch(make, 10), rtol=1e-9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"name": "linear"}, "unknown schedule 'linear'; known: constant"),
        ({"decay": 0.0}, "decay must be above 0"),
        ({"decay": 1.1}, "decay must be above 0 and at most 1"),
        ({"floor": -0.1}, "floor from 0 to 1"),
        ({"warm_up": -1}, "warm_up must be at least 0"),
        ({"every": 0}, "every and length at least 1"),
        ({"length": 0}, "every and length at least 1"),
    ],
    ids=str,
)
def test_a_schedule_that_makes_no_sense_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        Schedule(**words)
