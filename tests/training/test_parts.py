"""Gradients of a part of a parameter: ResNet18 as for ImageNet on small images, where most taps meet zeros alone."""

import pytest
import torch

from fedgma.training import lanes, loop
from fedgma.training.choose import written_form
from fedgma.training.fast.written import form_gradients
from fedgma.training.features import features_of
from fedgma.training.gradients import Part
from fedgma.training.lane_batch import Assignment
from fedgma.training.workbench import lay_out
from lane_twins import correction_like, distance, make_lane_batch, make_model, mean_weights, start_of
from plain_pools import DoublePool, make_federation

NAME, SHAPE = "resnet18-gn-imagenet", (3, 32, 32)
# what a step consists of; entries without a gradient move by some of them
TERMS = {
    "plain": {"momentum": 0.0},
    "momentum": {},
    "nesterov": {"nesterov": 1.0},
    "clip": {"clip": 0.05},
    "rates": {"lr": [0.01, 0.02]},
    "decay": {"momentum": 0.0, "weight_decay": 0.1},
    "clip and decay": {"momentum": 0.0, "clip": 0.05, "weight_decay": 0.1},
    "momentum and decay": {"weight_decay": 0.1},
    "prox": {"mu": 0.5},
    "adamw": {"optimizer": "adamw", "lr": 0.001, "weight_decay": 0.1},
    "perturbed": {"rho": 0.05, "blend": 1.0},
}


def train_both(sizes, rounds=2, correction=False, **terms):
    """Weights after some rounds of the loop, and of lanes with hand-written gradients."""
    federation, model = make_federation(sizes, SHAPE), make_model(NAME, SHAPE).double()
    pool, slow = DoublePool(*vars(federation.train).values()), start_of(model)[0]
    fast, gradients = slow, form_gradients(written_form(model))
    extra = correction_like(slow, len(sizes)) if correction else None
    for round in range(1, rounds + 1):
        lane_batch = make_lane_batch(federation, range(len(sizes)), round=round, **{"lr": 0.01, **terms})
        slow = mean_weights(loop.train(Assignment(model, lane_batch, [pool], slow, {}, extra)), slow)
        task = Assignment(model, lane_batch, [pool], fast, {}, extra)
        fast = mean_weights(lanes.train(task, gradients=gradients, padding=True), fast)
    return slow, fast


@pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS)
def test_a_step_of_a_part_is_that_of_the_loop(terms):
    slow, fast = train_both([7, 3], **terms)
    assert distance(slow, fast) < 1e-9


def test_a_correction_moves_every_entry():
    slow, fast = train_both([4, 4], rounds=1, correction=True)
    assert distance(slow, fast) < 1e-9


def test_entries_that_no_image_meets_stay_to_the_bit_and_the_others_move():
    model = make_model(NAME, SHAPE).double()
    _, fast = train_both([7, 3])
    start, places = start_of(model)[0], written_form(model).met(torch.Size(SHAPE))
    assert set(places) == {f"layer4.{block}.conv{layer}.weight" for block in (0, 1) for layer in (1, 2)}
    for name, place in places.items():
        moved = fast[name] != start[name]
        assert moved[..., *place].any()
        moved[..., *place] = False
        assert not moved.any()


def test_a_part_is_the_whole_gradient_with_zeros_around():
    whole = torch.zeros(2, 1, 1, 3, 3)
    place = (slice(1, 3), slice(0, 2))
    whole[..., *place] = torch.arange(8.0).view(2, 1, 1, 2, 2)
    part = Part(whole[..., *place].clone(), place, whole.shape)
    assert torch.equal(part.tensor(), whole)
    weight, rates = torch.ones_like(whole), torch.tensor([2.0, 0.0])
    part.subtract_from(weight, rates)
    assert torch.equal(weight, 1 - rates.view(2, 1, 1, 1, 1) * whole)


def test_larger_images_meet_every_tap():
    assert written_form(make_model(NAME, (3, 64, 64))).met(torch.Size((64, 64))) == {}
    assert written_form(make_model("resnet18-gn", (3, 8, 8))).met is None


@pytest.mark.parametrize("terms", [{}, {"clip": 0.05, "weight_decay": 0.1}], ids=["momentum", "clip and decay"])
def test_a_step_of_parts_is_one_graph_for_the_compiler(terms):
    federation, model = make_federation([4, 4], SHAPE), make_model(NAME, SHAPE)
    task = Assignment(model, make_lane_batch(federation, range(2), **terms), [federation.train], start_of(model)[0], {})
    rows, features = torch.zeros(2, dtype=torch.int64), features_of(task)
    bench = lay_out(task.lane_batch, features, task.start, {}, rows)
    index, gradients = bench.index[0], form_gradients(written_form(model))
    x, y = federation.train.batch(index, bench.client[:, None])

    def step(x, y):
        lanes.learn(bench, x, y, bench.counts[0], torch.zeros(1, dtype=torch.int64), features, gradients, all_busy=True)

    assert torch._dynamo.explain(step)(x, y).graph_break_count == 0
