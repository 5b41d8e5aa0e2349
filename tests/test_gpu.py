"""The fused GPU passes against the plain path on the CPU: votes and masks to the bit, means too."""

import numpy as np
import pytest
import torch

import fedgma
from fedgma import kernels
from strategies import same_bits

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(kernels.fused() is None, reason="triton is not installed"),
]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SIZES = [1, 7, 1024, 5000]


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
