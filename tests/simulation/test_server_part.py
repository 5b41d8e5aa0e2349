"""The server's part of a round as on a GPU, where only the device knows the runs of lanes, computed on a CPU."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import fedgma
from fedgma.aggregation import kernels
from fedgma.aggregation.kernels.plain import select
from fedgma.aggregation.optimizers import server_optimizer
from fedgma.simulation.batched import optimizers, rules
from fedgma.simulation.server_part import ServerPart
from fedgma.training.lane_batch import Trained
from fedgma.training.tasks import CLASSIFICATION

CPU = torch.device("cpu")
RUNS, CLIENTS, ENTRIES = 2, 4, 7
SHAPES = [("w", torch.Size([ENTRIES]))]


class PassesOfAGpu:
    """The pass that adds lanes, with the arguments that a GPU's has, by the loops of a CPU."""

    calls = 0

    @classmethod
    def add_runs(cls, sums, updates, weights, keep, edges):
        cls.calls += 1
        assert len(keep) == len(updates) == len(weights)
        for run, (first, last) in enumerate(pairwise(edges)):
            lanes = [lane for lane in range(first, last) if keep[lane]]
            kernels.plain_add_rows(select(sums, run), updates[lanes], weights[lanes].numpy())


def trained(seed, broken=()):
    rng = torch.Generator().manual_seed(seed)
    lanes = RUNS * CLIENTS
    updates = torch.randn(lanes, ENTRIES, generator=rng)
    updates[list(broken)] = torch.nan
    buffers = {"seen": torch.arange(lanes), "average": torch.randn(lanes, 3, generator=rng)}
    return Trained(updates, SHAPES, buffers, torch.rand(lanes, generator=rng), torch.rand(lanes, 1, generator=rng))


@pytest.mark.parametrize("buffers", [(), ("seen", "average")])
@pytest.mark.parametrize("server", ["sgd", "adam", "yogi"])
@pytest.mark.parametrize("rule", [fedgma.mean, lambda: fedgma.masked_mean(0.4), lambda: fedgma.and_mask(0.5)])
@pytest.mark.parametrize("broken", [(), (1, 6)])
def test_a_gpu_that_alone_knows_the_runs_computes_what_the_cpu_does(rule, server, buffers, broken, monkeypatch):
    laid = rules.lay_out([rule()] * RUNS, CLIENTS + 1, SHAPES, CPU)
    step = optimizers.lay_out([server_optimizer(server, 0.1, "after")] * RUNS, SHAPES, CPU)
    parts = [ServerPart(laid, step, CLASSIFICATION, CLASSIFICATION.columns, buffers, replay=on) for on in (False, True)]
    sizes = [CLIENTS, CLIENTS] if buffers else [CLIENTS - 1, CLIENTS + 1]
    run, weights = np.repeat(np.arange(RUNS), sizes), np.arange(1.0, 1 + RUNS * CLIENTS)
    held = {"seen": torch.zeros(RUNS, dtype=torch.int64), "average": torch.ones(RUNS, 3)}
    params = torch.linspace(-1, 1, RUNS * ENTRIES).view(RUNS, ENTRIES)
    given = (run, weights, trained(0, broken), params, optimizers.init_moments(step, params), held)
    expected = parts[0](*given)
    monkeypatch.setattr(kernels, "gpu_kernels_for", lambda _: PassesOfAGpu)
    for _ in range(4):  # the first calls are warm-up, the others are replayed
        PassesOfAGpu.calls = 0
        actual = parts[1](*given)
        assert PassesOfAGpu.calls > 0
        for name in ("params", "table", "counted"):
            torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(actual.buffers, expected.buffers, rtol=0, atol=0)
        torch.testing.assert_close([actual.moments.z, actual.moments.v], [expected.moments.z, expected.moments.v])
