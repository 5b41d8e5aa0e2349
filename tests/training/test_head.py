"""Dense layers with their loss, and steps of SGD from sums, over lanes; the GPU kernels by triton's interpreter."""

import pytest
import torch
from torch.nn import functional as F

from fedgma.training import loop
from fedgma.training.choose import written_form
from fedgma.training.cuda_graphs import Engine
from fedgma.training.fast import gpu, head, together
from fedgma.training.fast.written import form_gradients
from fedgma.training.gradients import lane_gradients, multiplied
from fedgma.training.lane_batch import Assignment
from fedgma.training.models import build
from head_cases import CASES, check_step, copied, draw, draw_step, inside, wanted
from interpreted import check_cases, needs_triton
from lane_twins import correction_like, distance, make_lane_batch, start_of
from plain_pools import DoublePool, make_federation


@pytest.fixture
def by_kernels(monkeypatch):
    """What goes to the kernels on a GPU goes to the same operators here."""
    monkeypatch.setattr(head, "by_kernels", lambda x, layers: True)
    monkeypatch.setattr(together, "by_kernel", lambda params: True)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_head_has_the_gradients_of_autograd(case):
    x, weights, biases, y, count = draw(case, dtype=torch.float64)
    found = torch.ops.fedgma.head(x, weights, biases, y, count, case.smoothing)
    for lane, size in enumerate(case.counts):
        own = x[lane].clone().requires_grad_()
        outputs = [own]
        for weight, bias in zip(weights, biases, strict=True):
            outputs.append(F.linear(outputs[-1] if len(outputs) == 1 else outputs[-1].relu(), weight[lane], bias[lane]))
        rest = {"label_smoothing": case.smoothing, "reduction": "sum"}
        loss = F.cross_entropy(outputs[-1][:size], y[lane, :size], **rest)
        grads = torch.autograd.grad(loss / max(size, 1), [*outputs[1:], own])
        for one, other in zip(found[2:6], grads, strict=True):
            torch.testing.assert_close(one[lane], other)
        torch.testing.assert_close(found[6][lane], loss.detach())
        assert found[7][lane] == (outputs[-1].argmax(1) == y[lane])[:size].sum()


def test_what_the_kernels_fill_has_the_shapes_that_a_compiler_is_told():
    x, weights, biases, y, count = draw(CASES[1])
    told = torch.ops.fedgma.head(
        x.to("meta"),
        [v.to("meta") for v in weights],
        [v.to("meta") for v in biases],
        y.to("meta"),
        count.to("meta"),
        0.0,
    )
    for one, other in zip(told, torch.ops.fedgma.head(x, weights, biases, y, count, 0.0), strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


def test_padding_moves_nothing_but_its_own_outputs():
    case = CASES[1]
    given = draw(case, dtype=torch.float64)
    x, *rest = given
    results = wanted(case, *given), wanted(case, torch.where(x == 1e4, -7.0, x), *rest)
    for place, (one, other) in enumerate(zip(*results, strict=True)):
        assert torch.equal(*([inside(case, one), inside(case, other)] if place < 2 else [one, other]))


def test_the_kernels_take_small_float32_batches_on_a_gpu(monkeypatch):
    class Here:
        def __init__(self, *shape, device="cuda", dtype=torch.float32):
            self.shape, self.device, self.dtype = torch.Size(shape), torch.device(device), dtype

        def numel(self):
            return self.shape.numel()

        def __len__(self):
            return self.shape[0]

    def taken(samples, classes, **kind):
        return head.by_kernels(Here(2, samples, 400, **kind), head.Layers((), (None, None, Here(2, classes))))

    def steps(*shape, **kind):
        return together.by_kernel({"weight": Here(*shape, **kind)})

    monkeypatch.setattr(gpu, "KERNELS", ("dense_head", "sgd_step"))
    assert taken(64, 62)
    assert not taken(65, 10)
    assert not taken(32, 65)
    assert not taken(32, 10, device="cpu")
    assert not taken(32, 10, dtype=torch.bfloat16)
    assert steps(640, 120, 400)
    assert not steps(2, 128, 12544)
    assert not steps(2, 120, 400, device="cpu")
    assert not steps(2, 120, 400, dtype=torch.float64)
    monkeypatch.setattr(gpu, "KERNELS", ())
    assert not taken(32, 10)
    assert not steps(640, 120, 400)


@pytest.mark.parametrize("moving", [True, False])
def test_a_step_from_sums_leaves_idle_lanes_as_they_are(moving):
    check_step(torch.ops.fedgma.sgd_step, 3, (4, 0, 1), moving)


def test_a_step_of_weights_that_lie_otherwise_in_memory_is_the_same(monkeypatch):
    given, count = draw_step(2, True), torch.tensor([1, 1])
    turned = copied(given)
    turned.weights[3] = turned.weights[3].transpose(1, 2).contiguous().transpose(1, 2)
    monkeypatch.setattr(gpu, "kernels", lambda name: object())  # which would not know what to do
    together._fused(*turned, count)
    together._plain(*given, count)
    assert torch.equal(turned.weights[3], given.weights[3])


SETTINGS = [
    {},
    {"momentum": 0.0},
    {"lr": [0.02, 0.01, 0.03, 0.02, 0.01]},
    {"mu": 0.1},
    {"nesterov": 1.0},
    {"clip": 0.5},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_engine_steps_from_sums_as_the_loop_does(settings, by_kernels):
    shape = (1, 28, 28)
    federation, model = make_federation([9, 3, 17, 1, 8], shape), build("lenet", shape, 10, seed=0).double()
    pool, (start, _) = DoublePool(federation.train.x, federation.train.y, 10), start_of(model)
    engine = Engine(form_gradients(written_form(model)), padding=True, compile=False)
    for clients in ([0, 1, 2, 3, 4], [2, 4, 0]):  # the second leaves lanes of the station idle
        task = Assignment(model, make_lane_batch(federation, clients, **settings), [pool], start, {})
        expected, actual = loop.train(task), engine(task)
        assert distance(expected.updates, actual.updates) < 1e-9
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(actual.measures, expected.measures)


def test_terms_that_need_the_gradient_get_it(by_kernels):
    federation, model = make_federation([3, 17, 8], (1, 28, 28)), build("lenet", (1, 28, 28), 10, seed=0).double()
    pool, (start, _) = DoublePool(federation.train.x, federation.train.y, 10), start_of(model)
    task = Assignment(model, make_lane_batch(federation, range(3)), [pool], start, {}, correction_like(start, 3))
    engine = Engine(form_gradients(written_form(model)), padding=True, compile=False)
    assert distance(loop.train(task).updates, engine(task).updates) < 1e-9


@pytest.mark.parametrize(("shape", "classes"), [((1, 28, 28), 10), ((3, 32, 32), 62)])
def test_gradients_kept_as_sums_are_those_of_autograd(shape, classes, by_kernels):
    model, generator = build("lenet", shape, classes, seed=0).double(), torch.Generator().manual_seed(1)
    params = {
        n: v.detach() + 0.05 * torch.randn((3, *v.shape), generator=generator) for n, v in model.named_parameters()
    }
    x = torch.randn((3, 6, *shape), generator=generator, dtype=torch.float64)
    y, count = torch.arange(18).view(3, 6) % classes, torch.tensor([6, 3, 0])
    expected, actual = (
        f(params, {}, x, y, count) for f in (lane_gradients(model), form_gradients(written_form(model)))
    )
    found = multiplied(actual[0])
    assert found.keys() == expected[0].keys()
    for name, value in expected[0].items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(actual[2], expected[2])
    assert torch.equal(actual[3], expected[3])


def test_a_compiler_takes_a_whole_step_as_it_is(by_kernels):
    federation, model = make_federation([9, 3, 8], (1, 28, 28)), build("lenet", (1, 28, 28), 10, seed=0)
    task = Assignment(model, make_lane_batch(federation, range(3), lr=0.01), [federation.train], start_of(model)[0], {})
    engine = Engine(form_gradients(written_form(model)), padding=True, compile=False)
    wanted_flat = Engine(form_gradients(written_form(model)), padding=True, compile=False)(task).flat
    engine.learn = torch.compile(engine.learn, backend="aot_eager", fullgraph=True, dynamic=False)
    assert torch.equal(engine(task).flat, wanted_flat)


@needs_triton
def test_the_gpu_kernels_give_the_same_in_the_interpreter():
    check_cases("head_cases")
