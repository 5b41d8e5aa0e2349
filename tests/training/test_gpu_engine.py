"""On a GPU: lanes that are compiled and captured against the loop, and compiled scores against the module."""

import gc
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedgma.training import loop
from fedgma.training.choose import choose, choose_scorer, written_form
from fedgma.training.cuda_graphs import Engine, float32_precision
from fedgma.training.fast import gpu
from fedgma.training.fast.written import form_gradients
from fedgma.training.lane_batch import Assignment
from fedgma.training.models import build
from fedgma.training.replay import capturing
from gpu_steps import ALL_BUT_HINTS, assert_compiled_and_captured
from lane_twins import distance, make_lane_batch, start_of
from plain_pools import make_federation
from task_cases import TASKS, case

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings(*ALL_BUT_HINTS)]


def residual_lanes(name, sizes):
    """A round of three lanes with batches of four, on the device."""
    shape = (3, 32, 32) if name.endswith("imagenet") else (3, 16, 16)
    federation, model = make_federation(sizes, shape), build(name, shape, 10, seed=0).cuda()
    return Assignment(
        model, make_lane_batch(federation, range(3), lr=0.001), [federation.train.to("cuda")], *start_of(model)
    )


@pytest.mark.parametrize("sizes", [[8, 8, 8], [8, 3, 7]], ids=["even", "ragged"])
@pytest.mark.parametrize(
    ("name", "bound"), [("resnet18-gn", 0.05), ("resnet18-gn-imagenet", 0.05), ("resnet18-bn", 0.2)]
)
def test_the_engine_equals_the_loop_on_a_resnet(name, bound, sizes, caplog):
    task = residual_lanes(name, sizes)
    engine = choose("engine", task.model, task.pools)
    with float32_precision("fp32"):
        expected = loop.train(task)
    actual = engine(task)
    # a ReLU that stands at zero within rounding moves a gradient by a hundredth, and a batch of four by more
    assert distance(expected.updates, actual.updates) < bound
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-3, atol=1e-3)
    assert len(engine._stations[0].graphs) == 1
    if name == "resnet18-bn":
        assert distance(expected.buffers, actual.buffers) < 5e-3
        assert torch.equal(actual.buffers["norm1.num_batches_tracked"], expected.buffers["norm1.num_batches_tracked"])
    assert_compiled_and_captured(caplog)


class Tied(nn.Module):
    """Two inner layers with one weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.back, self.out = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
        self.back.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.back(torch.tanh(self.embed(x)))))


def test_tied_weights_train_in_the_engine_as_in_the_loop(caplog):
    torch.manual_seed(0)
    federation, model = make_federation([8, 8, 8], (4,), classes=3), Tied().cuda()
    pools = [federation.train.to("cuda")]
    task = Assignment(model, make_lane_batch(federation, range(3)), pools, *start_of(model))
    with float32_precision("fp32"):
        expected = loop.train(task)
    actual = choose("engine", model, pools)(task)
    assert actual.updates.keys() == {"embed.weight", "embed.bias", "out.weight", "out.bias"}
    assert distance(expected.updates, actual.updates) < 1e-3
    assert_compiled_and_captured(caplog)


@pytest.mark.parametrize("name", ["resnet18-gn", "resnet18-gn-imagenet", "resnet18-bn"])
def test_a_resnet_in_half_precision_learns_as_in_single(name, caplog):
    task = residual_lanes(name, [8, 8, 8])
    with float32_precision("fp32"):
        wanted = loop.train(task)
    half = choose("engine", task.model, task.pools, precision="bf16")(task)
    assert torch.isfinite(half.flat).all()
    torch.testing.assert_close(half.loss, wanted.loss, rtol=0.05, atol=0.05)
    assert_compiled_and_captured(caplog)


@pytest.mark.parametrize("sizes", [[8, 8, 8], [8, 3, 7]], ids=["even", "ragged"])
@pytest.mark.parametrize("name", TASKS)
def test_the_engine_equals_the_loop_on_every_task(name, sizes, caplog):
    federation, model, task = case(name, sizes)
    model = model.cuda()
    pools = [federation.train.to("cuda")]
    assignment = Assignment(model, make_lane_batch(federation, range(3)), pools, *start_of(model))
    with float32_precision("fp32"):
        expected = loop.train(assignment, task=task)
    engine = choose("engine", model, pools, task=task)
    for actual in (engine(assignment), engine(assignment)):  # the second round replays the graph alone
        assert distance(expected.updates, actual.updates) < 1e-4
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(actual.measures.double(), expected.measures.double(), rtol=1e-3, atol=1e-3)
    assert_compiled_and_captured(caplog)


@pytest.mark.parametrize("name", ["resnet18-gn", "resnet18-gn-imagenet", "resnet18-bn"])
def test_the_compiled_scores_are_those_of_the_module(name):
    task = residual_lanes(name, [8, 8, 8])
    model, (pool,), params = task.model, task.pools, task.start
    buffers = {n: v - 0.3 if v.is_floating_point() else v for n, v in task.buffers.items()}
    index = torch.arange(24, device="cuda")
    with float32_precision("fp32"), torch.no_grad():
        scores = [
            choose_scorer("engine", model, pool, form=form)(params, buffers, pool, index) for form in (True, False)
        ]
    torch.testing.assert_close(scores[0][0], scores[1][0], rtol=1e-3, atol=1e-3)


# a tie in pooling that rounding breaks the other way costs some thousandths
BOUNDS = {"fp32": 1e-2, "tf32": 0.2}


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize(("name", "shape"), [("lenet", (1, 28, 28)), ("lenet", (3, 28, 28)), ("cnn", (3, 32, 32))])
def test_the_engine_equals_the_loop_there(name, shape, precision, caplog):
    federation, model = make_federation([9, 3, 17, 8], shape), build(name, shape, 10, seed=0).cuda()
    if name == "cnn":
        model.dropout = (0.0, 0.0)
    (start, _), pool = start_of(model), federation.train.to("cuda")
    task = Assignment(model, make_lane_batch(federation, range(4)), [pool], start, {})
    with float32_precision("fp32"):
        slow = loop.train(task)
    fast = Engine(form_gradients(written_form(model)), precision=precision, compile=False)(task)
    assert distance(slow.updates, fast.updates) < BOUNDS[precision]
    assert_compiled_and_captured(caplog)


@pytest.mark.parametrize(("name", "shape"), [("lenet", (1, 28, 28)), ("cnn", (3, 32, 32))])
def test_kernels_that_are_compiled_together_and_graphs_of_several_steps_change_no_bit(name, shape, caplog):
    federation, model = make_federation([29, 33, 17, 28], shape), build(name, shape, 10, seed=0).cuda()
    (start, _), pool = start_of(model), federation.train.to("cuda")
    task = Assignment(model, make_lane_batch(federation, range(4), lr=0.01), [pool], start, {})
    plain = Engine(form_gradients(written_form(model)), padding=True, compile=False, graphs=False)
    engine = Engine(form_gradients(written_form(model)), padding=True, compile=False, rehearse=gpu.rehearse)
    wanted = (plain if name == "lenet" else engine)(task).flat  # the small CNN draws random numbers
    for _ in range(4):
        assert torch.equal(engine(task).flat, wanted)
    assert any(len(steps.graphs) > 1 for steps in engine._stations[0].graphs.values())
    assert_compiled_and_captured(caplog)


@pytest.mark.parametrize("dropout", [(0.0, 0.0), (0.25, 0.5)])
def test_the_small_cnn_is_compiled_in_half_precision(dropout, caplog):
    federation, model = make_federation([20, 15, 10], (3, 32, 32)), build("cnn", (3, 32, 32), 10, seed=0).cuda()
    model.dropout, pool = dropout, federation.train.to("cuda")
    lane_batch = make_lane_batch(federation, range(3), batch=10, lr=0.01, momentum=0.0)
    task = Assignment(model, lane_batch, [pool], start_of(model)[0], {})
    with float32_precision("fp32"):
        expected = loop.train(task)
    actual = choose("engine", model, [pool], precision="bf16")(task)
    assert distance(expected.updates, actual.updates) < (1.5 if any(dropout) else 0.2)  # other draws than the loop's
    assert_compiled_and_captured(caplog)


def test_a_cohort_that_outgrows_its_station_is_captured_too(caplog):
    federation, model = make_federation([9, 3, 17, 8], (1, 28, 28)), build("lenet", (1, 28, 28), 10, seed=0).cuda()
    (start, _), pool = start_of(model), federation.train.to("cuda")
    engine = Engine(form_gradients(written_form(model)), compile=False)
    for epochs in (1, 9, 30):  # at a rate at which a hundred steps do not blow rounding up
        lane_batch = make_lane_batch(federation, range(4), epochs=epochs, lr=0.002, momentum=0.0)
        task = Assignment(model, lane_batch, [pool], start, {})
        with float32_precision("fp32"):
            slow = loop.train(task)
        assert distance(slow.updates, engine(task).updates) < 2e-2
    assert len(engine._stations) == 1
    assert_compiled_and_captured(caplog)


@pytest.mark.parametrize("rates", [{"nesterov": 1.0, "weight_decay": 0.1}, {"optimizer": "adamw", "weight_decay": 0.1}])
def test_rates_that_change_by_step_and_by_round_need_no_other_graph(rates, caplog):
    federation, model = make_federation([9, 3, 17, 8], (1, 28, 28)), build("lenet", (1, 28, 28), 10, seed=0).cuda()
    (start, _), pool = start_of(model), federation.train.to("cuda")
    engine, captured = choose("engine", model, [pool]), None
    for scale in (1.0, 0.5):
        lr = [scale * rate for rate in (0.002, 0.001, 0.004, 0.002, 0.001)]
        task = Assignment(model, make_lane_batch(federation, range(4), lr=lr, **rates), [pool], start, {})
        with float32_precision("fp32"):
            wanted = loop.train(task)
        assert distance(wanted.updates, engine(task).updates) < 2e-2
        (station,) = engine._stations
        assert captured in (None, {key: id(graph) for key, graph in station.graphs.items()})
        captured = {key: id(graph) for key, graph in station.graphs.items()}
    assert_compiled_and_captured(caplog)


def test_graphs_that_nobody_holds_do_not_break_a_capture_off():
    x = torch.ones(8, device="cuda")

    def leave_a_graph_in_a_cycle():
        held = {"graph": torch.cuda.CUDAGraph()}
        with capturing(held["graph"]):
            x.add(1)
        held["itself"] = held

    before = gc.get_threshold()
    gc.set_threshold(2_000, 2, 2)
    try:
        for _ in range(5):
            leave_a_graph_in_a_cycle()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            kept = [[number] for number in range(50_000)]  # would start the collector many times
            doubled = x * 2
    finally:
        gc.set_threshold(*before)
    graph.replay()
    assert len(kept) == 50_000
    assert doubled.tolist() == [2.0] * 8


@pytest.mark.parametrize("dropout", [(0.0, 0.0), (0.25, 0.5)])
def test_only_captured_steps_without_draws_are_replayed_alone(dropout, caplog):
    federation, model = make_federation([40, 40, 40], (3, 12, 12)), build("cnn", (3, 12, 12), 10, seed=0).cuda()
    model.dropout, pool = dropout, federation.train.to("cuda")
    engine, batch = choose("engine", model, [pool]), make_lane_batch(federation, range(3))
    task = Assignment(model, batch, [pool], *start_of(model))
    other = task._replace(lane_batch=replace(batch, seeds=batch.seeds + 5))
    first, *again = [engine(task).flat for _ in range(5)]
    assert all(torch.equal(first, flat) for flat in again)
    assert torch.equal(engine(other).flat, first) is not any(dropout)
    assert [steps.alone for steps in engine._stations[0].graphs.values()] == [not any(dropout)]
    before = torch.cuda.get_rng_state()
    engine(task)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert_compiled_and_captured(caplog)


def test_captured_ends_change_no_bit_there(caplog):
    federation, model = make_federation([40, 8, 40, 23], (1, 28, 28)), build("lenet", (1, 28, 28), 10, seed=0).cuda()
    pools, (start, _) = [federation.train.to("cuda")], start_of(model)
    engines = [choose("engine", model, pools) for _ in range(2)]
    for number, clients in enumerate([[0, 1, 2, 3]] * 4 + [[3, 0, 1]] * 4):
        moved = {name: value + 0.01 * number for name, value in start.items()}
        task = Assignment(model, make_lane_batch(federation, clients, round=number), pools, moved, {})
        captured = engines[0](task)
        for station in engines[1]._stations:
            station.small = False
        plain = engines[1](task)
        assert torch.equal(captured.flat, plain.flat)
        assert torch.equal(captured.loss, plain.loss)
        assert torch.equal(captured.measures, plain.measures)
    assert len(engines[0]._stations[0].ends) == 2
    assert_compiled_and_captured(caplog)
