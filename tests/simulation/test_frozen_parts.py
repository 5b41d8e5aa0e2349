"""Frozen parts and adapters in the simulator: what travels, votes and counts, and products of adapters."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedgma
from fedgma.aggregation.adapters import in_products
from fedgma.aggregation.optimizers import server_optimizer
from fedgma.errors import ConfigError
from fedgma.simulation.algorithms import scaffold
from fedgma.simulation.batched import tallies
from fedgma.simulation.fleet import assemble, play, play_round, restore, start
from fedgma.simulation.spec import RunSpec
from fedgma.simulation.state import export
from fedgma.training.adapters import with_adapters
from fedgma.training.lane_batch import Trained
from fedgma.training.stacked import flatten, shapes_of, unflatten
from plain_pools import make_federation

SIZES = [8, 3, 12, 6]
A, B, PRODUCT = "0.lora_A", "0.lora_B", "0.lora_BA"


def network(adapted: bool = True) -> nn.Module:
    """Two layers and a batch normalisation, with an adapter on the first layer, or plain."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3))
    return with_adapters(plain, "0", rank=2) if adapted else plain


MODEL = network()


def spec_of(rule: fedgma.Rule, *, optimizer: str = "sgd", **words) -> RunSpec:
    given = {"model": MODEL, "rounds": 2, "clients_per_round": 4, "batch_size": 4, "client_learning_rate": 0.5, **words}
    rate = 1.0 if optimizer == "sgd" else 0.1
    return RunSpec(
        make_federation(SIZES, (6,), 3), rule=rule, optimizer=server_optimizer(optimizer, rate, "after"), **given
    )


def model_of(state, fleet, run=0):
    return {name: value[run].numpy().copy() for name, value in unflatten(state.params, fleet.shapes).items()}


@pytest.mark.parametrize("trainer", ["loop", "lanes", "engine"])
def test_only_trainable_parameters_travel_vote_and_count(trainer):
    fleet = assemble([spec_of(fedgma.masked_mean())], trainer=trainer)
    assert [name for name, _ in fleet.shapes] == [A, B]
    frozen = {name: value.clone() for name, value in MODEL.named_parameters() if not value.requires_grad}
    state, _ = play_round(fleet, start(fleet))
    for name, value in frozen.items():
        assert torch.equal(state.buffers[name][0], value)
    assert not torch.equal(state.buffers["1.running_mean"][0], MODEL[1].running_mean)  # a buffer does travel
    assert state.params.shape[1] == sum(value.numel() for value in MODEL.parameters() if value.requires_grad)


def test_frozen_parameters_are_not_summed(monkeypatch):
    seen = []
    real = tallies.empty
    monkeypatch.setattr(
        tallies, "empty", lambda params, buffers, *rest: seen.append(set(buffers)) or real(params, buffers, *rest)
    )
    list(play([spec_of(fedgma.mean(), rounds=1)], trainer="loop"))
    assert seen == [{"1.running_mean", "1.running_var", "1.num_batches_tracked"}]


def test_loop_lanes_and_engine_train_adapters_alike():
    specs = [spec_of(in_products(fedgma.masked_mean()), seed=seed) for seed in range(2)]
    ends = [list(play(specs, trainer=trainer))[-1].state.params for trainer in ("loop", "lanes", "engine")]
    for other in ends[1:]:
        torch.testing.assert_close(ends[0], other, rtol=1e-3, atol=1e-4)


def test_frozen_parts_are_as_short_as_the_others_in_bfloat16():
    first, _, last = network(adapted=False)
    plain = nn.Sequential(first, nn.ReLU(), last)
    spec = spec_of(fedgma.mean(), rounds=1, model=with_adapters(plain, "0", rank=2))
    short, full = (list(play([spec], trainer="lanes", precision=p))[-1].state.params for p in ("bf16", "fp32"))
    assert not torch.equal(short, full)
    torch.testing.assert_close(short, full, rtol=0.2, atol=0.1)


def sent(updates, measures=1):
    """A trainer that sends these updates."""

    def train(assignment):
        lanes = assignment.lane_batch
        rows = {name: torch.from_numpy(value[lanes.client]) for name, value in updates.items()}
        buffers = {name: value[lanes.run] for name, value in assignment.buffers.items()}
        zeros = torch.zeros(lanes.size)
        return Trained(flatten(rows), shapes_of(rows), buffers, zeros, zeros[:, None].expand(-1, measures), None)

    return train


@pytest.mark.parametrize("optimizer", ["sgd", "yogi"])
@pytest.mark.parametrize("rule", [fedgma.mean(), fedgma.masked_mean(0.6), fedgma.median(), fedgma.stale_mask(0.6)])
def test_a_run_alone_and_in_a_fleet_steps_as_server_round_to_the_bit(rule, optimizer):
    rule, rng = in_products(rule), np.random.default_rng(0)
    specs = [spec_of(in_products(fedgma.mean())), spec_of(rule, optimizer=optimizer)]
    ends = []
    for chosen in (specs[1:], specs):
        fleet = assemble(chosen, trainer="loop")
        state, rng = start(fleet), np.random.default_rng(0)
        params, kept = model_of(state, fleet, -1), None
        for _ in range(2):
            updates = {name: rng.normal(size=(4, *shape)).astype(np.float32) for name, shape in fleet.shapes}
            locals_ = [{name: params[name] + updates[name][client] for name in params} for client in range(4)]
            # what server_round reads of them
            updates = {name: np.stack([one[name] - params[name] for one in locals_]) for name in params}
            state, _ = play_round(replace(fleet, train=sent(updates)), state)
            result = fedgma.server_round(
                params, locals_, SIZES, aggregator=rule, optimizer=chosen[-1].optimizer, state=kept
            )
            params, kept = result.params, result.state
        ends.append(model_of(state, fleet, -1))
        for name, value in params.items():
            np.testing.assert_array_equal(ends[-1][name], value)


def test_a_run_that_stops_and_resumes_ends_with_the_same_bits():
    spec = spec_of(in_products(fedgma.stale_mask(0.6)), optimizer="adam", rounds=3, mask_every=1, norm_factor=10.0)
    fleet = assemble([spec], trainer="loop")
    middle, _ = play_round(fleet, start(fleet))
    plain = export(fleet, middle, 0)
    assert plain[f"z/{PRODUCT}"].shape == (5, 6)
    assert plain[f"params/{A}"].shape == (2, 6)
    ends = []
    for state in (middle, restore(fleet, [plain])):
        for _ in range(2):
            state, played = play_round(fleet, state)
        ends.append((state, played))
    assert torch.equal(ends[0][0].params, ends[1][0].params)


def test_what_products_cannot_do_is_said():
    with pytest.raises(ConfigError, match="carry arrays"):
        assemble([spec_of(in_products(fedgma.mean()), algorithm=scaffold())])
    with pytest.raises(ConfigError, match="server_average"):
        assemble([replace(spec_of(in_products(fedgma.mean())), optimizer=fedgma.averaged(fedgma.sgd()))])
    with pytest.raises(ConfigError, match="no pair"):
        assemble([spec_of(in_products(fedgma.mean()), model=network(adapted=False))])
    with pytest.raises(ConfigError, match="adapters"):
        assemble([spec_of(fedgma.mean()), spec_of(in_products(fedgma.mean()))])
