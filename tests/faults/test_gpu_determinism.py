"""Determinism, row E6: on a GPU, aggregation gives the bits of the CPU, and training stays close to it."""

import numpy as np
import pytest

import fedgma
from gpu_steps import ALL_BUT_HINTS
from rows import row

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings(*ALL_BUT_HINTS)]


def updates(clients=10, entries=200_000):
    """Updates with ties, zeros and a range of sizes."""
    rng = np.random.default_rng(6)
    made = rng.normal(size=(clients, entries)) * 10.0 ** rng.integers(-4, 2, entries)
    made[rng.random(made.shape) < 0.05] = 0
    return {"w": made.astype(np.float32)}, rng.integers(1, 600, clients)


@row(
    "E6",
    "a GPU in place of the CPU",
    happens="masks are equal in every entry, aggregates within 1e-5; training differs in the last bits, and a resumed "
    "run warns of another device",
    seen="the device in `run.json`",
)
@pytest.mark.parametrize("tau", [0.2, 0.4, 0.6])
def test_e6_masks_are_equal_and_aggregates_close_on_cpu_and_gpu(tau):
    import torch

    arrays, weights = updates()
    rule = fedgma.masked_mean(tau)
    on_cpu = rule(arrays, weights)
    on_gpu = rule({name: torch.from_numpy(array).cuda() for name, array in arrays.items()}, weights)
    for part in ("mean", "mask", "update"):
        cpu, gpu = getattr(on_cpu, part)["w"], getattr(on_gpu, part)["w"].cpu().numpy()
        if part == "mask":
            np.testing.assert_array_equal(gpu, cpu)
        np.testing.assert_allclose(gpu, cpu, rtol=1e-5, atol=0)


@row("E6")
def test_e6_a_round_trained_on_cpu_and_gpu_is_close():
    import torch

    from fedgma.simulation.fleet import play
    from plain_pools import make_federation
    from run_specs import make_spec

    settings = {
        "model": "logistic",
        "rounds": 3,
        "clients_per_round": 3,
        "batch_size": 8,
        "evaluate_every": 0,
        "tau": 0.4,
    }
    pools = make_federation([20, 13, 30, 8], (1, 28, 28))
    cpu, gpu = (
        [*play([make_spec(pool, seed=0, **settings)])][-1].state.params.cpu() for pool in (pools, pools.to("cuda"))
    )
    assert torch.linalg.norm(cpu - gpu) < 1e-4 * torch.linalg.norm(cpu)
