"""The GPU engine's bookkeeping, on whatever device there is, and the hand-written gradients behind it."""

import numpy as np
import pytest
import torch

from fedgma.models import build
from fedgma.trainers import loop
from fedgma.trainers.choose import written_gradients
from fedgma.trainers.cohorts import Task
from fedgma.trainers.engine import Engine, float32_precision
from fedgma.trainers.forms import Blocks, form_gradients, form_of
from fedgma.trainers.gradients import lane_gradients, multiplied
from fedgma.trainers.memory import measure
from fedgma.trainers.pools import distinct
from lane_twins import correction_like, distance, make_cohort, start_of
from plain_pools import make_federation, make_pool

FORMS = [
    ("logistic", (1, 28, 28), None),
    ("lenet", (1, 28, 28), None),
    ("lenet", (1, 28, 28), Blocks(1, 1)),
    ("lenet", (3, 28, 28), Blocks(28, 10)),
    ("lenet", (1, 28, 28), Blocks(7, 5)),
    ("cnn", (3, 12, 12), None),
    ("cnn", (3, 12, 12), Blocks(5, 4)),
]


def some_lanes(name, shape, lanes=3, batch=6):
    model = build(name, shape, 10, seed=0)
    if name == "cnn":
        model.dropout = (0.0, 0.0)
    generator = torch.Generator().manual_seed(1)
    draw = lambda *size: torch.randn(size, generator=generator)  # noqa: E731
    params = {n: v.detach() + 0.05 * draw(lanes, *v.shape) for n, v in model.named_parameters()}
    x, y = draw(lanes, batch, *shape), torch.arange(lanes * batch).view(lanes, batch) % 10
    x[0, 0] = 0.3  # a flat image: its pooling windows are all ties
    return model, params, x, y, torch.tensor([batch, batch // 2, 0])


@pytest.mark.parametrize(("name", "shape", "blocks"), FORMS)
def test_hand_written_gradients_are_those_of_autograd(name, shape, blocks):
    model, params, x, y, count = some_lanes(name, shape)
    form = form_of(model, blocks)
    assert form is not None
    wanted, found = lane_gradients(model)(params, {}, x, y, count), form_gradients(form)(params, {}, x, y, count)
    grads = multiplied(found[0])
    for entry in params:
        torch.testing.assert_close(grads[entry], wanted[0][entry], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[2], wanted[2])
    assert torch.equal(found[3], wanted[3])


def test_the_residual_form_has_the_gradients_of_autograd():
    model, params, x, y, count = some_lanes("resnet18-gn", (3, 16, 16), batch=2)
    count[1] = 1
    wanted = lane_gradients(model)(params, {}, x, y, count)
    found = written_gradients(model)(params, {}, x, y, count)
    assert distance(wanted[0], multiplied(found[0])) < 1e-5
    torch.testing.assert_close(found[2], wanted[2])
    assert torch.equal(found[3], wanted[3])


def test_only_the_group_normalised_resnet_has_written_gradients():
    assert written_gradients(build("resnet18-gn", (3, 8, 8), 10, seed=0)) is not None
    assert written_gradients(build("resnet18-bn", (3, 8, 8), 10, seed=0)) is None


@pytest.mark.parametrize(("name", "shape"), [("lenet", (1, 28, 28)), ("cnn", (3, 12, 12))])
def test_half_precision_stays_near_single(name, shape):
    model, params, x, y, count = some_lanes(name, shape)
    form = form_of(model)
    functions = [form_gradients(form, precision) for precision in ("fp32", "bf16")]
    exact, half, generic = (
        multiplied(find(params, {}, x, y, count)[0]) for find in (*functions, lane_gradients(model, "bf16"))
    )
    for entry in params:
        assert half[entry].dtype == torch.float32
        for found in (half, generic):
            assert (found[entry] - exact[entry]).norm() < 0.25 * exact[entry].norm() + 1e-3


def test_the_small_cnn_drops_units_while_training_and_only_then():
    model, params, x, _, _ = some_lanes("cnn", (3, 12, 12))
    model.dropout = (0.25, 0.5)
    form = form_of(model)
    torch.manual_seed(0)
    assert not torch.equal(form.forward(params, x, True)[0], form.forward(params, x, True)[0])
    assert torch.equal(form.forward(params, x, False)[0], form.forward(params, x, False)[0])


def test_images_that_pooling_would_crop_have_no_form():
    assert form_of(build("lenet", (1, 30, 30), 10, seed=0)) is None


def engine_of(model):
    return Engine(form_gradients(form_of(model)), compile=False)


@pytest.mark.parametrize("settings", [{}, {"mu": 0.1}, {"clip": 0.5}, {"momentum": 0.0}], ids=str)
def test_the_engine_equals_the_loop_round_after_round_on_one_station(settings):
    federation, model = make_federation([9, 3, 17, 1, 8], (1, 28, 28)), build("lenet", (1, 28, 28), 10, seed=0)
    (start, _), engine = start_of(model), engine_of(model)
    for clients in ([0, 1, 2, 3, 4], [2, 4, 0], [4, 3, 2, 1]):
        cohort = make_cohort(federation, clients, **settings)
        wanted = loop.train(Task(model, cohort, [federation.train], start, {}))
        found = engine(Task(model, cohort, [federation.train], start, {}))
        assert distance(wanted.updates, found.updates) < 1e-5
        np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-4)
    assert len(engine._stations) == 1


def test_the_engine_takes_corrections_in_the_order_of_the_lanes():
    federation, model = make_federation([3, 17, 8], (1, 28, 28)), build("lenet", (1, 28, 28), 10, seed=0)
    start, _ = start_of(model)
    cohort, extra = make_cohort(federation, range(3)), correction_like(start, 3)
    wanted = loop.train(Task(model, cohort, [federation.train], start, {}, extra))
    assert (
        distance(wanted.updates, engine_of(model)(Task(model, cohort, [federation.train], start, {}, extra)).updates)
        < 1e-5
    )


def test_the_engine_trains_batch_normalisation_and_lanes_of_several_pools():
    federation, model = make_federation([7, 3], (3, 16, 16)), build("resnet18-bn", (3, 16, 16), 10, seed=0)
    engine = Engine(lane_gradients(model), compile=False)
    cohort, pools = make_cohort(federation, range(2), lr=0.001), [federation.train, make_pool(10, (3, 16, 16), seed=4)]
    cohort.pool[:] = [1, 0]
    wanted, found = (t(Task(model, cohort, pools, *start_of(model))) for t in (loop.train, engine))
    assert distance(wanted.buffers, found.buffers) < 1e-5


def test_a_step_that_cannot_be_compiled_runs_as_it_is(caplog):
    federation, model = make_federation([5, 3], (1, 28, 28)), build("logistic", (1, 28, 28), 10, seed=0)
    start, _ = start_of(model)
    engine, cohort = engine_of(model), make_cohort(federation, range(2))

    def broken(bench, *rest):
        bench.params["linear.weight"].zero_()
        raise RuntimeError("no compiler here\nand a long story")

    engine.learn = broken
    found = engine(Task(model, cohort, [federation.train], start, {}))
    assert distance(loop.train(Task(model, cohort, [federation.train], start, {})).updates, found.updates) < 1e-5
    assert caplog.messages == ["the step could not be compiled and runs as it is: no compiler here"]


def test_precision_is_set_inside_and_put_back():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with float32_precision("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    with float32_precision("fp32"):
        assert not torch.backends.cudnn.allow_tf32
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_more_memory_fits_more_lanes_and_measuring_moves_nothing():
    federation, model = make_federation([8, 8], (3, 8, 8)), build("resnet18-bn", (3, 8, 8), 10, seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    small, large = (measure(model, federation.train, 4, budget=size * 2**30) for size in (1, 4))
    assert 1 <= small.lanes < large.lanes <= 4 * small.lanes + 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert measure(model, federation.train, 4, budget=1).lanes == 1


def test_equal_pools_are_made_one():
    one, two, other = make_pool(5, (4,)), make_pool(5, (4,)), make_pool(5, (4,), seed=2)
    pools, place = distinct([one, two, other, one])
    assert len(pools) == 2
    assert place.tolist() == [0, 0, 1, 0]
