"""Evaluation by the CPU kernels against the module itself."""

import numpy as np
import pytest
import torch

from fedgma.data.federation import federate
from fedgma.data.files import from_arrays
from fedgma.data.partitions import iid
from fedgma.simulation.fleet import assemble, play
from run_specs import make_spec

pytest.importorskip("numba", reason="numba is not installed")


def small_federation():
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (120, 1, 28, 28), dtype=np.uint8), rng.integers(0, 10, 120)
    data = from_arrays(x, y, test=(x[:70], y[:70]))
    return federate(data, iid(data.train.y, 4, seed=0))


@pytest.mark.parametrize("model", ["lenet", "logistic"])
def test_scores_are_those_of_the_module(model):
    federation = small_federation()
    specs = [make_spec(federation, model=model, seed=seed, rounds=2, clients_per_round=2, lr=0.01) for seed in range(2)]
    fleet = assemble(specs, trainer="auto")
    reference = assemble(specs, trainer="loop")
    *_, played = play(specs, trainer="auto")
    params = {name: value.clone() for name, value in _named(fleet, played.state.params).items()}
    index = torch.arange(5, 65)
    ours = fleet.score(params, {}, federation.test, index)
    theirs = reference.score(params, {}, federation.test, index)
    torch.testing.assert_close(ours[0], theirs[0].detach(), rtol=1e-4, atol=1e-5)
    assert torch.equal(ours[1], theirs[1])


def _named(fleet, flat):
    from fedgma.training.stacked import unflatten

    return unflatten(flat, fleet.shapes)
