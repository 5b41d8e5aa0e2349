"""The GPU engine's bookkeeping, on whatever device there is, and the hand-written gradients behind it.

Networks with kinks are compared in double precision: in single, a ReLU or a maximum that is within rounding of a tie
moves a gradient, on one processor and not on another.
"""

import numpy as np
import pytest
import torch
from torch import nn

from fedgma.training import loop
from fedgma.training.choose import choose, written_form
from fedgma.training.cuda_graphs import Engine, float32_precision
from fedgma.training.fast.normalisations import Norm, normalise, running
from fedgma.training.fast.written import form_gradients
from fedgma.training.gradients import lane_gradients, multiplied
from fedgma.training.lane_batch import Assignment
from fedgma.training.memory import measure
from fedgma.training.models import ResNet18, build
from fedgma.training.same_pools import distinct
from lane_twins import correction_like, distance, make_lane_batch, make_model, start_of
from plain_pools import DoublePool, make_federation, make_pool

FORMS = [
    ("logistic", (1, 28, 28)),
    ("lenet", (1, 28, 28)),
    ("lenet", (3, 28, 28)),
    ("lenet", (1, 30, 26)),  # pooling drops a row and a column
    ("cnn", (3, 12, 12)),
    ("cnn", (3, 13, 12)),
]


def written_gradients(model, precision="fp32"):
    return form_gradients(written_form(model), precision)


def some_lanes(name, shape, lanes=3, batch=6):
    model = make_model(name, shape)
    if name == "cnn":
        model.dropout = (0.0, 0.0)
    generator = torch.Generator().manual_seed(1)
    draw = lambda *size: torch.randn(size, generator=generator)  # noqa: E731
    params = {n: v.detach() + 0.05 * draw(lanes, *v.shape) for n, v in model.named_parameters()}
    x, y = draw(lanes, batch, *shape), torch.arange(lanes * batch).view(lanes, batch) % 10
    x[0, 0] = 0.3  # a flat image: its pooling windows are all ties
    return model, params, x, y, torch.tensor([batch, batch // 2, 0])


@pytest.mark.parametrize(("name", "shape"), FORMS)
def test_hand_written_gradients_are_those_of_autograd(name, shape):
    model, params, x, y, count = some_lanes(name, shape)
    model, params, x = model.double(), {n: v.double() for n, v in params.items()}, x.double()
    form = written_form(model)
    assert form is not None
    expected, actual = lane_gradients(model)(params, {}, x, y, count), form_gradients(form)(params, {}, x, y, count)
    grads = multiplied(actual[0])
    for entry in params:
        torch.testing.assert_close(grads[entry], expected[0][entry], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(actual[2], expected[2])
    assert torch.equal(actual[3], expected[3])


RESIDUAL = {"resnet18-gn": (3, 16, 16), "resnet18-bn": (3, 16, 16), "resnet18-gn-imagenet": (3, 32, 64)}


def some_residual_lanes(name, batch):
    model, params, x, y, _ = some_lanes(name, RESIDUAL[name], batch=batch)
    model, params, x = model.double(), {n: v.double() for n, v in params.items()}, x.double()
    generator = torch.Generator().manual_seed(2)
    buffers = {n: torch.stack([v] * 3) for n, v in model.named_buffers()}
    moved = {n: v + 0.1 * torch.rand(v.shape, generator=generator).to(v) for n, v in buffers.items() if "running" in n}
    return model, params, {**buffers, **moved}, x, y


@pytest.mark.parametrize("name", RESIDUAL)
def test_the_residual_form_has_the_gradients_of_autograd(name):
    model, params, buffers, x, y = some_residual_lanes(name, batch=4)
    count = torch.tensor([4, 4, 4])
    expected = lane_gradients(model)(params, buffers, x, y, count)
    actual = written_gradients(model)(params, buffers, x, y, count)
    assert distance(expected[0], multiplied(actual[0])) < 1e-9
    assert actual[1].keys() == expected[1].keys()
    for entry, value in expected[1].items():
        torch.testing.assert_close(actual[1][entry], value)
    torch.testing.assert_close(actual[2], expected[2])
    assert torch.equal(actual[3], expected[3])


@pytest.mark.parametrize("name", RESIDUAL)
def test_padding_reaches_neither_gradients_nor_statistics(name):
    model, params, buffers, x, y = some_residual_lanes(name, batch=5)
    x[1, 3:] = 1e4  # padding that nobody could overlook
    actual = written_gradients(model)(params, buffers, x, y, torch.tensor([5, 3, 0]))
    grads = multiplied(actual[0])
    for lane, count in ((0, 5), (1, 3)):
        one, own, rest = ({n: v[lane : lane + 1] for n, v in part.items()} for part in (params, grads, buffers))
        expected = lane_gradients(model)(one, rest, x[lane, :count][None], y[lane, :count][None], torch.tensor([count]))
        assert distance(expected[0], own) < 1e-9
        for entry, value in expected[1].items():
            torch.testing.assert_close(actual[1][entry][lane : lane + 1], value)
        torch.testing.assert_close(actual[2][lane : lane + 1], expected[2])
    assert all((value[2] == 0).all() for value in grads.values())
    assert all(value[2].isfinite().all() for value in actual[1].values())


def test_one_value_a_channel_is_normalised_to_the_offset():
    norm, ones = Norm(None, 1e-5, 0.1), torch.ones(1, 3)
    state = {"n.weight": ones, "n.bias": 2 * ones, "n.running_mean": ones, "n.running_var": ones}
    state["n.num_batches_tracked"] = torch.tensor([4])
    out, kept = normalise(norm, torch.full((1, 1, 1, 1, 3), 5.0), state, "n", torch.tensor([1]))
    assert out.flatten().tolist() == [2.0, 2.0, 2.0]
    after = running(norm, kept, state, "n", torch.tensor([1]))
    torch.testing.assert_close(after["n.running_mean"], 1.4 * ones)
    torch.testing.assert_close(after["n.running_var"], 0.9 * ones)
    assert after["n.num_batches_tracked"].tolist() == [5]


def test_a_residual_form_needs_one_normalisation_that_is_written_out_and_whole_images():
    resnet = lambda shape, norm: ResNet18(shape, 10, norm)  # noqa: E731
    for name in ("resnet18-gn", "resnet18-bn"):
        assert written_form(build(name, (3, 8, 8), 10, seed=0)) is not None
        assert written_form(build(name, (3, 12, 12), 10, seed=0)) is None
    assert written_form(make_model("resnet18-gn-imagenet", (3, 32, 32))) is not None
    assert written_form(make_model("resnet18-gn-imagenet", (3, 32, 48))) is None
    assert written_form(resnet((3, 8, 8), lambda c: nn.BatchNorm2d(c, momentum=None))) is None
    assert written_form(resnet((3, 8, 8), lambda c: nn.GroupNorm(2 if c < 512 else 4, c))) is None
    assert written_form(resnet((3, 8, 8), nn.InstanceNorm2d)) is None


def test_a_model_with_a_frozen_part_has_no_form():
    model = build("lenet", (1, 28, 28), 10, seed=0)
    model.conv1.weight.requires_grad_(False)
    assert written_form(model) is None


@pytest.mark.parametrize("name", RESIDUAL)
def test_the_residual_form_in_half_precision_stays_near_single(name):
    model, params, buffers, x, y = some_residual_lanes(name, batch=4)
    params = {n: v.float() for n, v in params.items()}
    buffers = {n: v.float() if v.is_floating_point() else v for n, v in buffers.items()}
    exact, half = (
        written_gradients(model, precision)(params, buffers, x.float(), y, torch.tensor([4, 4, 0]))
        for precision in ("fp32", "bf16")
    )
    assert distance(multiplied(exact[0]), multiplied(half[0])) < 0.5  # a batch of four blows rounding up
    for entry, value in exact[1].items():
        assert half[1][entry].dtype == value.dtype
        torch.testing.assert_close(half[1][entry], value, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("name", "shape"), [("lenet", (1, 28, 28)), ("cnn", (3, 12, 12))])
def test_half_precision_stays_near_single(name, shape):
    model, params, x, y, count = some_lanes(name, shape)
    form = written_form(model)
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
    form = written_form(model)
    torch.manual_seed(0)
    full = torch.full((3,), x.shape[1])
    assert not torch.equal(form.forward(params, x, full).logits, form.forward(params, x, full).logits)
    assert torch.equal(form.forward(params, x, None).logits, form.forward(params, x, None).logits)


def engine_of(model):
    return Engine(form_gradients(written_form(model)), compile=False)


@pytest.mark.parametrize("settings", [{}, {"mu": 0.1}, {"clip": 0.5}, {"momentum": 0.0}], ids=str)
def test_the_engine_equals_the_loop_round_after_round_on_one_station(settings):
    federation, model = make_federation([9, 3, 17, 1, 8], (1, 28, 28)), build("lenet", (1, 28, 28), 10, seed=0).double()
    pool = DoublePool(federation.train.x, federation.train.y, 10)
    (start, _), engine = start_of(model), engine_of(model)
    for clients in ([0, 1, 2, 3, 4], [2, 4, 0], [4, 3, 2, 1]):
        lane_batch = make_lane_batch(federation, clients, **settings)
        expected = loop.train(Assignment(model, lane_batch, [pool], start, {}))
        actual = engine(Assignment(model, lane_batch, [pool], start, {}))
        assert distance(expected.updates, actual.updates) < 1e-9
        np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-4)
    assert len(engine._stations) == 1


def test_memory_of_graphs_is_let_go_with_the_last_of_them():
    federation, model = make_federation([9, 3, 17], (1, 8, 8)), build("logistic", (1, 8, 8), 10, seed=0)
    engine, (start, _) = Engine(form_gradients(written_form(model)), compile=False), start_of(model)

    def train(epochs):
        engine(Assignment(model, make_lane_batch(federation, range(3), epochs=epochs), [federation.train], start, {}))

    train(1)
    engine._memory = memory = object()  # of graphs, which a CPU has none of
    train(1)
    assert engine._memory is memory
    train(9)  # more steps than the station has room for: a new one takes its place
    assert len(engine._stations) == 1
    assert engine._memory is None


def test_the_engine_takes_corrections_in_the_order_of_the_lanes():
    federation, model = make_federation([3, 17, 8], (1, 28, 28)), build("lenet", (1, 28, 28), 10, seed=0).double()
    pool, (start, _) = DoublePool(federation.train.x, federation.train.y, 10), start_of(model)
    task = Assignment(model, make_lane_batch(federation, range(3)), [pool], start, {}, correction_like(start, 3))
    assert distance(loop.train(task).updates, engine_of(model)(task).updates) < 1e-9


@pytest.mark.parametrize("runs", [1, 2])
def test_another_order_of_the_weights_in_memory_changes_no_result(runs):
    federation, model = make_federation([3, 17, 8], (1, 28, 28)), build("lenet", (1, 28, 28), 10, seed=0).double()
    pool, (start, _) = DoublePool(federation.train.x, federation.train.y, 10), start_of(model)
    start = {name: torch.cat([value] * runs) for name, value in start.items()}
    batch = make_lane_batch(federation, range(3), momentum=0.9, mu=0.1, clip=0.5)
    batch.run[:] = [0, runs - 1, 0]
    seen = []

    def order(params):
        turned = {n: v.movedim(2, -1).contiguous().movedim(-1, 2) for n, v in params.items() if v.dim() == 5}
        seen.append(not turned["conv2.weight"].is_contiguous())
        return {**params, **turned}

    task = Assignment(model, batch, [pool], start, {}, correction_like(start, 3))
    given = {"padding": True, "compile": False}
    expected, actual = (Engine(written_gradients(model), order=by, **given)(task) for by in (None, order))
    assert seen == [True]
    torch.testing.assert_close(actual.flat, expected.flat, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("written", [False, True])
def test_the_engine_trains_batch_normalisation_and_lanes_of_several_pools(written):
    federation, model = make_federation([7, 3], (3, 16, 16)), make_model("resnet18-bn", (3, 16, 16))
    gradients = written_gradients(model) if written else lane_gradients(model)
    engine = Engine(gradients, padding=written, compile=False)
    lane_batch, pools = (
        make_lane_batch(federation, range(2), lr=0.001),
        [federation.train, make_pool(10, (3, 16, 16), seed=4)],
    )
    lane_batch.pool[:] = [1, 0]
    expected, actual = (t(Assignment(model, lane_batch, pools, *start_of(model))) for t in (loop.train, engine))
    assert distance(expected.buffers, actual.buffers) < 1e-4


@pytest.mark.parametrize("trainer", ["lanes", "engine"])
def test_written_batch_normalisation_equals_the_loop_on_ragged_lanes_in_one_shape(trainer):
    federation, model = make_federation([6, 4, 7], (3, 8, 8)), make_model("resnet18-bn", (3, 8, 8)).double()
    pool = DoublePool(federation.train.x, federation.train.y, 10)
    train, (start, buffers) = choose(trainer, model, [pool]), start_of(model)
    rounds = {"lanes": ([0, 1, 2],), "engine": ([0, 1, 2], [2, 0])}  # the second leaves a lane of the station idle
    for clients in rounds[trainer]:
        lane_batch = make_lane_batch(federation, clients, lr=0.001, batch=4)
        expected, actual = (t(Assignment(model, lane_batch, [pool], start, buffers)) for t in (loop.train, train))
        assert distance(expected.updates, actual.updates) < 1e-9
        assert distance(expected.buffers, actual.buffers) < 1e-9
        assert actual.buffers["norm1.num_batches_tracked"].tolist() == lane_batch.steps.tolist()
        np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-5)
    if trainer == "engine":
        assert {(lanes, batch) for _, lanes, batch, *_ in train._stations[0].graphs} == {(3, 4)}


def test_a_step_that_cannot_be_compiled_runs_as_it_is(caplog):
    federation, model = make_federation([5, 3], (1, 28, 28)), build("logistic", (1, 28, 28), 10, seed=0)
    start, _ = start_of(model)
    engine, lane_batch = engine_of(model), make_lane_batch(federation, range(2))

    def broken(bench, *rest):
        bench.params["linear.weight"].zero_()
        raise RuntimeError("no compiler here\nand a long story")

    engine.learn = broken
    found = engine(Assignment(model, lane_batch, [federation.train], start, {}))
    assert (
        distance(loop.train(Assignment(model, lane_batch, [federation.train], start, {})).updates, found.updates) < 1e-5
    )
    assert caplog.messages == ["the step could not be compiled and runs uncompiled: no compiler here"]


def test_the_first_rounds_never_call_the_compiler_and_their_graphs_are_let_go():
    federation, model = make_federation([5, 3], (1, 28, 28)), build("logistic", (1, 28, 28), 10, seed=0)
    start, _ = start_of(model)
    engine, task = (
        engine_of(model),
        Assignment(model, make_lane_batch(federation, range(2)), [federation.train], start, {}),
    )
    plain, called = engine.learn, []

    def compiled(*arguments):
        called.append(1)
        plain(*arguments)

    engine.learn = compiled
    early = engine(task, early=True)
    assert not called
    assert {key[-1] for key in engine._stations[0].graphs} == {True}
    late = engine(task)
    assert called
    assert {key[-1] for key in engine._stations[0].graphs} == {False}
    assert torch.equal(early.flat, late.flat)  # the same tensors, with the same steps


def test_equal_steps_are_taken_together_after_the_first_rounds():
    federation, model = make_federation([27, 25], (1, 8, 8)), build("logistic", (1, 8, 8), 10, seed=0)
    engine, (start, _) = engine_of(model), start_of(model)
    task = Assignment(model, make_lane_batch(federation, range(2)), [federation.train], start, {})
    first, *later = [engine(task) for _ in range(4)]
    assert all(torch.equal(first.flat, again.flat) and torch.equal(first.loss, again.loss) for again in later)
    (steps,) = engine._stations[0].graphs.values()
    assert sorted(steps.graphs) == [1, 2, 4]  # of seven
    assert distance(loop.train(task).updates, first.updates) < 1e-5


def test_precision_is_set_inside_and_put_back():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with float32_precision("tf32"):
        assert torch.get_float32_matmul_precision() == "high"
    with float32_precision("fp32"):
        assert not torch.backends.cudnn.allow_tf32
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before


def test_more_memory_fits_more_lanes_and_measuring_moves_nothing():
    federation, model = make_federation([8, 8], (3, 8, 8)), make_model("resnet18-bn", (3, 8, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    small, large = (measure(model, federation.train, 4, budget=size * 2**30) for size in (1, 4))
    assert 1 <= small.lanes < large.lanes <= 4 * small.lanes + 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert measure(model, federation.train, 4, budget=1).lanes == 1


def test_equal_pools_are_made_one():
    first, second, other = make_pool(5, (4,)), make_pool(5, (4,)), make_pool(5, (4,), seed=2)
    pools, place = distinct([first, second, other, first])
    assert len(pools) == 2
    assert place.tolist() == [0, 0, 1, 0]
