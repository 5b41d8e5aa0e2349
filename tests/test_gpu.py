"""On a GPU: the fused passes against plain ones, to the bit where they are exact, and the engine against the loop."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

import convolution_3x3_cases as squares
import fedgma
import group_norm_cases as norms
from convolution_cases import Case, by_kernels, draw, wanted
from fedgma.aggregation import kernels
from fedgma.data.federation import federate
from fedgma.data.files import load
from fedgma.data.partitions import iid
from fedgma.simulation.fleet import assemble, play, play_round, start
from fedgma.training import loop
from fedgma.training.choose import choose, choose_scorer
from fedgma.training.cuda_graphs import Engine, float32_precision
from fedgma.training.fast import gpu
from fedgma.training.fast.torch_ops import OWN, OWN_WEIGHTS, convolve, convolve_inputs, convolve_weights
from fedgma.training.fast.written import form_gradients, form_of
from fedgma.training.lane_batch import Assignment
from fedgma.training.models import build
from lane_twins import distance, make_lane_batch, start_of
from plain_pools import PlainPool, make_federation
from run_specs import make_spec
from strategies import same_bits

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(kernels.load_gpu_kernels() is None, reason="triton is not installed"),
]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [1, 7, 1024, 5000]
LAYERS = [
    Case(3, 4, 1, 28, 28, 6, 5, 2, True),
    Case(3, 4, 6, 14, 14, 16, 5, 0, True, last=True),
    Case(2, 3, 3, 32, 32, 32, 3, 0, False),
    Case(2, 3, 32, 30, 30, 64, 3, 0, True, last=True),
]


def stack(clients, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        f"w{size}": (
            torch.randn(clients, size, generator=generator) * torch.randint(0, 2, (clients, size), generator=generator)
        ).to(dtype)
        for size in SIZES
    }


def on_gpu(params):
    return {name: array.cuda() for name, array in params.items()}


def numbers(params):
    return {name: array.cpu().double().numpy() for name, array in params.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clients", [1, 2, 10, 200])
@pytest.mark.parametrize("make", [fedgma.mean, fedgma.masked_mean, fedgma.and_mask, lambda: fedgma.rlr(3)])
def test_the_fused_pass_gives_the_bits_of_the_cpu(dtype, clients, make):
    updates, weights = stack(clients, dtype), np.arange(1, clients + 1) * 37
    ours, theirs = make()(updates, weights), make()(on_gpu(updates), weights)
    assert (ours.mask is None) == (theirs.mask is None)
    if ours.mask is not None:
        assert same_bits(numbers(ours.mask), numbers(theirs.mask))
    exact = dtype in (torch.float32, torch.float64)  # halves are rounded through float32 on the way
    for name in updates:
        assert theirs.mean[name].dtype == dtype
        assert theirs.mean[name].device.type == "cuda"
        tolerance = 0 if exact else torch.finfo(dtype).eps
        torch.testing.assert_close(theirs.mean[name].cpu(), ours.mean[name], rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_streamed_tally_is_the_same_on_both_devices(dtype):
    updates = stack(150, dtype)
    tallies = fedgma.Tally(), fedgma.Tally()
    for client in range(150):
        update = {name: array[client] for name, array in updates.items()}
        tallies[0].add(update, client + 1)
        tallies[1].add(on_gpu(update), client + 1)
    packed = [fedgma.pack(tally) for tally in tallies]
    assert same_bits(*[{key: array for key, array in arrays.items() if key != "header"} for arrays in packed])


def test_bad_clients_are_refused_there_too():
    updates = on_gpu(stack(5, torch.float32))
    updates["w1024"][3, 1000] = float("nan")
    others = {name: array[[0, 1, 2, 4]] for name, array in updates.items()}
    merged, expected = fedgma.masked_mean()(updates, [1, 2, 3, 4, 5]), fedgma.masked_mean()(others, [1, 2, 3, 5])
    assert [(refusal.client, refusal.reason) for refusal in merged.notes["refused"]] == [(3, "nonfinite")]
    assert same_bits(numbers(merged.update), numbers(expected.update))
    with pytest.raises(fedgma.NotEnoughClients):
        fedgma.masked_mean()({"w": torch.full((3, 4), float("inf"), device="cuda")})


def test_denormal_updates_have_a_sign_there_too():
    updates = torch.tensor([[1e-42], [1e-42], [-1e-42]], device="cuda")
    assert fedgma.masked_mean(1.0)({"w": updates}).mask["w"].item() == pytest.approx(1 / 3)


def test_a_state_dict_with_buffers_makes_the_round_trip_there():
    model = torch.nn.BatchNorm1d(3).cuda()
    clients = [{name: value + (name == "num_batches_tracked") + 1 for name, value in model.state_dict().items()}] * 3
    after = fedgma.server_round(model.state_dict(), clients, [1, 2, 3], optimizer=fedgma.yogi()).params
    assert all(value.device.type == "cuda" for value in after.values())
    model.load_state_dict(after)


def residual_lanes(name, sizes):
    """A round of three lanes with batches of four, on the device."""
    federation, model = make_federation(sizes, (3, 16, 16)), build(name, (3, 16, 16), 10, seed=0).cuda()
    pool = PlainPool(federation.train.x.cuda(), federation.train.y.cuda(), 10)
    return Assignment(model, make_lane_batch(federation, range(3), lr=0.001), [pool], *start_of(model))


@pytest.mark.parametrize("sizes", [[8, 8, 8], [8, 3, 7]], ids=["even", "ragged"])
@pytest.mark.parametrize("name", ["resnet18-gn", "resnet18-bn"])
def test_the_engine_equals_the_loop_on_a_resnet(name, sizes):
    task = residual_lanes(name, sizes)
    engine = choose("engine", task.model, task.pools)
    with float32_precision("fp32"):
        wanted = loop.train(task)
    found = engine(task)
    # batches of four blow rounding up, and a ReLU that stands at zero within it moves a gradient by a hundredth
    assert distance(wanted.updates, found.updates) < 0.05
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-3, atol=1e-4)
    assert len(engine._stations[0].graphs) == 1
    if name == "resnet18-bn":
        assert distance(wanted.buffers, found.buffers) < 1e-3
        assert torch.equal(found.buffers["norm1.num_batches_tracked"], wanted.buffers["norm1.num_batches_tracked"])
    half = choose("engine", task.model, task.pools, precision="bf16")(task)
    assert torch.isfinite(half.flat).all()
    torch.testing.assert_close(half.loss, wanted.loss, rtol=0.05, atol=0.05)


def test_the_engine_crops_and_flips_as_the_loop_does():
    mini = load("fmnist-mini")
    federation = federate(mini, iid(mini.train.y, 30), device="cuda")
    settings = {
        "model": "lenet",
        "rounds": 2,
        "clients_per_round": 3,
        "lr": 0.01,
        "augment": "crop_flip",
        "evaluate_every": 0,
    }
    one, two = ([*play([make_spec(federation, **settings)], trainer=t)][-1].state.params for t in ("loop", "engine"))
    assert (one - two).norm() < 1e-4 * one.norm()


@pytest.mark.parametrize("name", ["resnet18-gn", "resnet18-bn"])
def test_the_compiled_scores_are_those_of_the_module(name):
    model, _, (pool,), params, buffers, _ = residual_lanes(name, [8, 8, 8])
    buffers = {n: v + 0.3 if v.is_floating_point() else v for n, v in buffers.items()}
    index = torch.arange(24, device="cuda")
    with float32_precision("fp32"), torch.no_grad():
        scores = [
            choose_scorer("engine", model, pool, form=form)(params, buffers, pool, index) for form in (True, False)
        ]
    torch.testing.assert_close(scores[0][0], scores[1][0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("more", [{}, {"mask_every": 1, "evaluate_every": 1}, {"scaffold": True}])
def test_a_round_of_a_fleet_is_begun_and_sent_without_waiting_for_the_device(more):
    federation = make_federation([20, 13, 30, 8], (1, 28, 28))
    train, test = (replace(pool, x=pool.x.cuda(), y=pool.y.cuda()) for pool in (federation.train, federation.test))
    federation = replace(federation, train=train, test=test)
    base = {"model": "logistic", "rounds": 9, "clients_per_round": 3, "batch_size": 8, "evaluate_every": 0}
    fleet = assemble(
        [make_spec(federation, seed=run // 2, tau=0.4 * (run % 2), **{**base, **more}) for run in range(4)]
    )
    state = start(fleet)
    for _ in range(3):  # shapes are compiled, and memory is kept for the next time
        state, played = play_round(fleet, state)
        played.sent()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode itself warns that it is new
        torch.cuda.set_sync_debug_mode("error")
        try:
            _, played = play_round(fleet, state)
            sent = played.sent()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert sent.records == played.records


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("case", "family"),
    [(LAYERS[0], "thread"), (LAYERS[1], "thread"), *((layer, "matrix") for layer in LAYERS[1:])],
)
def test_the_fused_convolutions_have_the_gradients_of_autograd(case, family, dtype):
    given = draw(case, "cuda", dtype)
    with float32_precision("tf32"):  # whole numbers this small are exact in it
        fused = gpu.kernels(f"conv_{family}")
        found = by_kernels(fused, case, *given, pieces=1 if case.samples % 2 else 2)
    for one, other in zip(found, wanted(case, *given), strict=True):
        assert torch.equal(one, other.to(one.dtype))


@pytest.mark.parametrize(("case", "family"), [(LAYERS[1], "thread"), (LAYERS[2], "matrix"), (LAYERS[3], "matrix")])
def test_the_fused_convolutions_keep_float32_where_it_is_asked_for(case, family):
    generator, given = torch.Generator("cuda").manual_seed(0), draw(case, "cuda")
    for value in (given[0], given[3]):  # bits that TF32 drops; sums with them are exact, so the same corners win
        value += torch.randint(0, 9, value.shape, generator=generator, device="cuda") / 4096
    with float32_precision("fp32"):
        found = by_kernels(gpu.kernels(f"conv_{family}"), case, *given)
    for one, other in zip(found, wanted(case, *given), strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize(("name", "shape"), [("lenet", (1, 28, 28)), ("lenet", (3, 28, 28)), ("cnn", (3, 32, 32))])
def test_the_engine_equals_the_loop_there(name, shape, precision):
    federation, model = make_federation([9, 3, 17, 8], shape), build(name, shape, 10, seed=0).cuda()
    if name == "cnn":
        model.dropout = (0.0, 0.0)
    (start, _), pool = start_of(model), federation.train.to("cuda")
    task = Assignment(model, make_lane_batch(federation, range(4)), [pool], start, {})
    with float32_precision("fp32"):
        slow = loop.train(task)
    fast = Engine(form_gradients(form_of(model)), precision=precision, compile=False)(task)
    assert distance(slow.updates, fast.updates) < {"fp32": 1e-3, "tf32": 5e-2}[precision]


def test_a_cohort_that_outgrows_its_station_is_captured_too(caplog):
    federation, model = make_federation([9, 3, 17, 8], (1, 28, 28)), build("lenet", (1, 28, 28), 10, seed=0).cuda()
    (start, _), pool = start_of(model), federation.train.to("cuda")
    engine = Engine(form_gradients(form_of(model)), compile=False)
    for epochs in (1, 9, 30):
        task = Assignment(model, make_lane_batch(federation, range(4), epochs=epochs), [pool], start, {})
        with float32_precision("fp32"):
            slow = loop.train(task)
        assert distance(slow.updates, engine(task).updates) < 2e-2
    assert len(engine._stations) == 1
    assert not caplog.records


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("side", "channels"), [(32, 64), (16, 128), (8, 256), (4, 512), (7, 12)])
def test_fused_group_normalisation_has_the_gradients_of_autograd(side, channels, dtype, bound):
    for relu, beside, parts in ((False, False, 1), (True, False, 1), (True, True, 1), (True, True, 2)):
        case = norms.Case(2, 3, side, channels, 2, relu, beside, parts)
        drawn = norms.draw(case, "cuda", dtype)
        off = norms.distances(norms.wanted(case, *drawn), norms.found_by_form(case, *drawn))
        assert max(off.values()) < bound, (case, off)


@pytest.mark.parametrize(("side", "channels"), sorted({*OWN, *OWN_WEIGHTS}))
def test_our_own_convolutions_of_resnets_are_exact_there(side, channels):
    x, weight, grads = squares.draw(squares.Case(2, 8, side, side, channels, channels), "cuda", torch.bfloat16)
    found = [convolve(x, weight), convolve_inputs(grads, weight, side, side), convolve_weights(grads, x)]
    for one, other in zip(squares.wanted(x, weight, grads), found, strict=True):
        assert torch.equal(one.to(torch.bfloat16), other)  # sums of whole numbers, rounded once
