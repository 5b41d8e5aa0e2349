"""On a GPU: the fused passes of the tally against plain ones, to the bit where they are exact."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import fedgma
import tally_cases
from fedgma.aggregation import kernels

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [1, 7, 1024, 5000]


def stack(clients, dtype):
    """A model of four arrays [client, entry]; half of the entries are zero."""
    return {f"w{size}": tally_cases.draw(clients, size, dtype, "cpu", seed=size)[0] for size in SIZES}


def on_gpu(params):
    return {name: array.cuda() for name, array in params.items()}


def assert_same_bits(actual, expected):
    """The same arrays wherever they lie, types included; zeros by value."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, check_device=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", [tally_cases.check_streams, tally_cases.check_runs, tally_cases.check_aggregates])
def test_every_pass_gives_the_sums_of_the_plain_one(check, dtype):
    check(kernels.load_gpu_kernels(), dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clients", [1, 2, 10, 200])
@pytest.mark.parametrize("make", [fedgma.mean, fedgma.masked_mean, fedgma.and_mask, lambda: fedgma.rlr(3)])
def test_the_fused_pass_gives_the_bits_of_the_cpu(dtype, clients, make):
    updates, weights = stack(clients, dtype), np.arange(1, clients + 1) * 37
    ours, theirs = make()(updates, weights), make()(on_gpu(updates), weights)
    assert (ours.mask is None) == (theirs.mask is None)
    if ours.mask is not None:
        assert_same_bits(theirs.mask, ours.mask)
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
    ours, theirs = (fedgma.pack(tally) for tally in tallies)
    assert ours.keys() == theirs.keys()
    for name in ours.keys() - {"header"}:
        np.testing.assert_array_equal(theirs[name], ours[name], strict=True)


def test_means_and_masks_of_a_tally_are_divided_there_as_on_the_cpu():
    """A product with the reciprocal of the weight would differ in a few of a million entries."""
    updates, weights = torch.randn(20, 1_000_000, generator=torch.Generator().manual_seed(0)), list(range(1, 21))
    tallies = fedgma.Tally(), fedgma.Tally()
    for tally, rows in zip(tallies, (updates, updates.cuda()), strict=True):
        tally.add_many({"w": rows}, weights)
    ours, theirs = (fedgma.finish(tally, 0.7) for tally in tallies)
    assert_same_bits(theirs.mean, ours.mean)
    assert_same_bits(theirs.mask, ours.mask)


def test_bad_clients_are_refused_there_too():
    updates = on_gpu(stack(5, torch.float32))
    updates["w1024"][3, 1000] = float("nan")
    others = {name: array[[0, 1, 2, 4]] for name, array in updates.items()}
    merged, expected = fedgma.masked_mean()(updates, [1, 2, 3, 4, 5]), fedgma.masked_mean()(others, [1, 2, 3, 5])
    assert [(refusal.client, refusal.reason) for refusal in merged.notes["refused"]] == [(3, "nonfinite")]
    assert_same_bits(merged.update, expected.update)
    with pytest.raises(fedgma.NotEnoughClients):
        fedgma.masked_mean()({"w": torch.full((3, 4), float("inf"), device="cuda")})


@pytest.mark.parametrize("shapes", [((5000,),), ((600,), (20, 30), ())])
def test_a_pass_that_is_launched_again_gives_the_bits_of_the_cpu(shapes):
    """With other arrays, arrays that are not aligned, other weights, and on another stream."""
    generator, step, kept = torch.Generator().manual_seed(0), fedgma.masked_mean(), []
    for call, begin in enumerate([0] * 4 + [1] * 2 + [0] * 4):  # entries before the first array, in memory
        flats = [torch.randn(begin + 10 * math.prod(shape), generator=generator) for shape in shapes]
        kept.append([flat.cuda() for flat in flats])  # so that the next ones lie elsewhere
        torch.cuda.synchronize()
        here, there = (
            {str(k): flat[begin:].view(10, *shape) for k, (flat, shape) in enumerate(zip(lying, shapes, strict=True))}
            for lying in (flats, kept[-1])
        )
        ours = step(here, np.arange(1, 11) + call // 2)
        with torch.cuda.stream(torch.cuda.Stream() if call % 2 else torch.cuda.current_stream()):
            theirs = step(there, np.arange(1, 11) + call // 2)
        assert_same_bits(theirs.mean, ours.mean)
        assert_same_bits(theirs.mask, ours.mask)
    layout = kernels.load_layouts().common_layout(list(there.values()))
    plan = kernels.load_gpu_kernels()._plan(layout, torch.float32, step.mask, there["0"].device)
    assert plan.launch.direct


def test_a_flag_tells_of_its_own_pass_among_threads():
    """Half of the passes hold a value that is not finite; their flags share memory one after the other."""
    bad, good = torch.randn(5, 2000, device="cuda"), torch.randn(5, 2000, device="cuda")
    bad[3, 1999] = float("nan")
    torch.cuda.synchronize()

    def refused(call):
        with torch.cuda.stream(torch.cuda.Stream()):
            return len(fedgma.masked_mean()({"w": bad if call % 2 else good}).notes["refused"])

    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(refused, range(40))] == [0, 1] * 20


def test_denormal_updates_have_a_sign_there_too():
    updates = torch.tensor([[1e-42], [1e-42], [-1e-42]], device="cuda")
    assert fedgma.masked_mean(1.0)({"w": updates}).mask["w"].item() == pytest.approx(1 / 3)


def test_a_state_dict_with_buffers_makes_the_round_trip_there():
    model = torch.nn.BatchNorm1d(3).cuda()
    clients = [{name: value + (name == "num_batches_tracked") + 1 for name, value in model.state_dict().items()}] * 3
    after = fedgma.server_round(model.state_dict(), clients, [1, 2, 3], optimizer=fedgma.yogi()).params
    assert all(value.device.type == "cuda" for value in after.values())
    model.load_state_dict(after)
