"""Lanes and the loop are twins: same batches, same steps, same weights up to rounding.

Networks with kinks are compared in double precision: in single, a ReLU or a maximum that is within rounding of a tie
moves a gradient, on one processor and not on another.
"""

import numpy as np
import pytest
import torch
from torch import nn

from fedgma.training import lanes, loop
from fedgma.training.batches import batch_order, effective_steps
from fedgma.training.gradients import mixes_samples, why_not_lanes
from fedgma.training.lane_batch import Assignment
from fedgma.training.models import build
from fedgma.training.task import Task
from lane_twins import (
    correction_like,
    distance,
    local_weights,
    make_lane_batch,
    make_model,
    mean_buffers,
    mean_weights,
    start_of,
)
from plain_pools import DoublePool, PlainPool, make_federation, make_pool

EVEN, RAGGED = [8, 8, 8], [9, 3, 17, 1]
SMALL = [("lenet", (1, 28, 28)), ("logistic", (1, 28, 28)), ("cnn", (3, 12, 12))]
ALGORITHMS = [{}, {"mu": 0.1}, {"clip": 0.5}, {"momentum": 0.0}]


def without_dropout(name, shape, classes=10):
    model = build(name, shape, classes, seed=0).double()
    if name == "cnn":
        model.dropout = (0.0, 0.0)
    return model


def doubled(pool):
    return DoublePool(pool.x, pool.y, pool.classes)


@pytest.mark.parametrize("settings", ALGORITHMS, ids=str)
@pytest.mark.parametrize("sizes", [EVEN, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize(("name", "shape"), SMALL)
def test_lanes_equal_the_loop_after_three_rounds(name, shape, sizes, settings):
    federation, model = make_federation(sizes, shape), without_dropout(name, shape)
    pool, slow = doubled(federation.train), start_of(model)[0]
    fast = slow
    for round in (1, 2, 3):
        lane_batch = make_lane_batch(federation, range(len(sizes)), round=round, **settings)
        slow = mean_weights(loop.train(Assignment(model, lane_batch, [pool], slow, {})), slow)
        fast = mean_weights(lanes.train(Assignment(model, lane_batch, [pool], fast, {})), fast)
    assert distance(slow, fast) < 1e-9


@pytest.mark.parametrize("sizes", [[4, 4], [7, 3]], ids=["even", "ragged"])
@pytest.mark.parametrize("name", ["resnet18-gn", "resnet18-bn"])
def test_a_resnet_in_lanes_equals_the_loop_after_two_rounds(name, sizes):
    federation, model = make_federation(sizes, (3, 8, 8)), make_model(name, (3, 8, 8)).double()
    pool, slow = doubled(federation.train), start_of(model)
    fast = slow
    for round in (1, 2):
        lane_batch = make_lane_batch(federation, range(len(sizes)), round=round, lr=0.001)
        first, second = (
            loop.train(Assignment(model, lane_batch, [pool], *slow)),
            lanes.train(Assignment(model, lane_batch, [pool], *fast)),
        )
        slow, fast = ((mean_weights(t, w[0]), mean_buffers(t)) for t, w in ((first, slow), (second, fast)))
    assert distance(slow[0], fast[0]) < 1e-9
    assert name == "resnet18-gn" or distance(slow[1], fast[1]) < 1e-9


@pytest.mark.parametrize(("name", "shape"), SMALL)
def test_a_correction_is_added_to_every_gradient(name, shape):
    federation, model = make_federation(RAGGED, shape), without_dropout(name, shape)
    pool, (start, _) = doubled(federation.train), start_of(model)
    lane_batch, extra = make_lane_batch(federation, range(4)), correction_like(start, 4)
    first = loop.train(Assignment(model, lane_batch, [pool], start, {}, extra))
    second = lanes.train(Assignment(model, lane_batch, [pool], start, {}, extra))
    plain = lanes.train(Assignment(model, lane_batch, [pool], start, {}))
    assert distance(local_weights(first, start, 4), local_weights(second, start, 4)) < 1e-9
    assert distance(plain.updates, second.updates) > 1e-3


def test_every_lane_has_its_own_hyper_parameters():
    federation, model = make_federation(RAGGED, (1, 28, 28)), build("logistic", (1, 28, 28), 10, seed=0)
    start, _ = start_of(model)
    columns = {
        "momentum": [0.9, 0.0, 0.5, 0.9],
        "mu": [0.0, 1.0, 0.1, 0.0],
        "clip": [1.0, np.inf, 0.1, np.inf],
    }
    lane_batch = make_lane_batch(federation, range(4))
    lane_batch.lr[:] = [[0.1], [0.01], [0.2], [0.05]]
    for name, values in columns.items():
        lane_batch.rate(name)[:] = values
    first, second = (t.train(Assignment(model, lane_batch, [federation.train], start, {})) for t in (loop, lanes))
    assert distance(first.updates, second.updates) < 1e-5
    np.testing.assert_allclose(first.loss, second.loss, rtol=1e-5)
    np.testing.assert_array_equal(first.measures, second.measures)


def test_a_finished_lane_keeps_its_weights_to_the_bit():
    federation, model = make_federation([3, 40, 39, 38, 37], (1, 28, 28)), without_dropout("lenet", (1, 28, 28))
    pool, (start, _) = doubled(federation.train), start_of(model)
    settings = {"mu": 0.3, "momentum": 0.9}
    short = lanes.train(Assignment(model, make_lane_batch(federation, [0], **settings), [pool], start, {}))
    beside = make_lane_batch(federation, range(5), **settings)
    # four of five lanes go on, so the finished one stays in the work and must be held still
    held = [work for work in lanes.schedule(np.sort(beside.counts, 0)[::-1], exact=False, batch=4) if not work.all_busy]
    assert held
    company = lanes.train(Assignment(model, beside, [pool], start, {}))
    first = {name: value[:1] for name, value in company.updates.items()}
    assert distance(short.updates, first) < 1e-9
    stop = beside.take(slice(None))
    stop.counts[0, 1:] = 0
    again = lanes.train(Assignment(model, stop, [pool], start, {}))
    for name, value in again.updates.items():
        assert torch.equal(value[0], company.updates[name][0])


def test_work_shrinks_when_half_of_the_lanes_have_finished():
    counts = np.zeros((8, 10), int)
    for lane, steps in enumerate([10, 2, 2, 2, 2, 1, 1, 1]):
        counts[lane, :steps] = 4
    assert [work.lanes for work in lanes.schedule(counts, exact=False, batch=4)] == [8, 8, *[1] * 8]


def test_padding_never_reaches_a_batch_that_is_normalised():
    works = lanes.schedule(np.array([[4, 3], [4, 1], [2, 0]]), exact=True, batch=4)
    assert [(work.step, work.lanes, work.batch) for work in works] == [
        (0, (2,), 2),
        (0, (0, 1), 4),
        (1, (1,), 1),
        (1, (0,), 3),
    ]


def test_lanes_of_several_pools_see_their_own_samples():
    federation = make_federation(RAGGED, (1, 28, 28))
    other, model = make_pool(30, (1, 28, 28), seed=8), build("logistic", (1, 28, 28), 10, seed=0)
    start, _ = start_of(model)
    lane_batch = make_lane_batch(federation, range(4))
    lane_batch.pool[:] = [1, 0, 1, 0]
    first, second = (
        t.train(Assignment(model, lane_batch, [federation.train, other], start, {})) for t in (loop, lanes)
    )
    assert distance(first.updates, second.updates) < 1e-5


class Reader(nn.Module):
    """A user's own module: embedding, layer normalisation, dropout."""

    def __init__(self, dropout):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(8, 3)

    def forward(self, words):
        return self.out(self.dropout(self.norm(self.embedding(words))).mean(1))


def words_federation():
    rng = np.random.default_rng(3)
    federation = make_federation(RAGGED, (6,), classes=3)
    words = torch.from_numpy(rng.integers(11, size=(30, 6)))
    return federation, PlainPool(words, federation.train.y, 3)


def test_a_users_own_module_trains_the_same_in_lanes_and_loop():
    (federation, pool), model = words_federation(), Reader(0.0)
    start, _ = start_of(model)
    first, second = (
        t.train(Assignment(model, make_lane_batch(federation, range(4)), [pool], start, {})) for t in (loop, lanes)
    )
    assert distance(first.updates, second.updates) < 1e-5


def test_dropout_differs_from_lane_to_lane_and_repeats_with_its_seed():
    (federation, pool), model = words_federation(), Reader(0.5)
    start, _ = start_of(model)
    lane_batch = make_lane_batch(federation, [2, 2])
    before = torch.get_rng_state()
    first, second = (
        lanes.train(Assignment(model, lane_batch, [pool], start, {})).updates["out.weight"] for _ in range(2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


class Chooser(nn.Module):
    """Branches on a value, which no vectorised model can."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


def test_a_model_that_cannot_be_vectorised_is_named_with_the_reason():
    reason = why_not_lanes(Chooser(), make_pool(4, (6,), 3))
    assert reason is not None
    assert reason.startswith("Chooser cannot be vectorised over lanes: vmap")


def test_a_task_that_cannot_be_vectorised_is_named_in_place_of_the_model():
    def hits(output, y):
        shares = nn.functional.one_hot(output.argmax(1), 3) * nn.functional.one_hot(y, 3)
        return {"hits": shares.sum(1).float()}

    task = Task(
        "macro", lambda output, y: nn.functional.cross_entropy(output, y, reduction="none"), hits, {"hits": "higher"}
    )
    reason = why_not_lanes(nn.Linear(6, 3), make_pool(4, (6,), 3), task)
    assert reason is not None
    assert reason.startswith("the loss or the metrics of task macro cannot be vectorised over lanes: vmap")
    assert reason.endswith("...")
    assert len(reason) < 400


def test_padding_is_kept_from_models_with_batch_normalisation_only():
    assert mixes_samples(build("resnet18-bn", (3, 8, 8), 10, seed=0))
    assert not mixes_samples(build("resnet18-gn", (3, 8, 8), 10, seed=0))


def test_a_frozen_parameter_does_not_move():
    federation, model = make_federation(EVEN, (1, 28, 28)), build("lenet", (1, 28, 28), 10, seed=0)
    model.conv1.weight.requires_grad_(False)
    start, frozen = start_of(model)
    for trainer in (loop, lanes):
        trained = trainer.train(
            Assignment(model, make_lane_batch(federation, range(3)), [federation.train], start, frozen)
        )
        assert "conv1.weight" not in trained.updates
        assert torch.equal(trained.buffers["conv1.weight"][1], frozen["conv1.weight"][0])


def test_an_epoch_shows_each_sample_once_and_the_next_in_another_order():
    index, counts = batch_order(np.arange(10, 17), seed=0, round=1, client=2, epochs=2, batch=3)
    real = [row[:count].tolist() for row, count in zip(index, counts, strict=True)]
    first, second = ([one for row in part for one in row] for part in (real[:3], real[3:]))
    assert counts.tolist() == [3, 3, 1, 3, 3, 1]
    assert sorted(first) == sorted(second) == list(range(10, 17))
    assert first != second


def test_momentum_counts_as_more_steps():
    # rho 0.5, three steps: the gradients act 1.75, 1.5 and 1 times
    assert effective_steps(np.array([3]), np.array([0.5]))[0] == pytest.approx(4.25)
