"""On a GPU: a fleet that the engine trains, and a round that is sent without waiting for the device."""

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedgma.aggregation.adapters import in_products
from fedgma.aggregation.own import as_rule
from fedgma.aggregation.rules import masked_mean
from fedgma.data.federation import federate
from fedgma.data.files import load
from fedgma.data.partitions import iid
from fedgma.errors import ConfigError
from fedgma.simulation.algorithms import Algorithm, fedsmoo, fedspeed, mofedsam
from fedgma.simulation.batched import adapters, rules, tallies
from fedgma.simulation.clock import Clock, Delays
from fedgma.simulation.fleet import assemble, play, play_round, restore, start
from fedgma.simulation.rule_trial import try_rule
from fedgma.simulation.spec import RunSpec
from fedgma.simulation.state import export
from fedgma.training.adapters import with_adapters
from fedgma.training.cuda_graphs import Engine
from fedgma.training.lane_batch import Trained
from fedgma.training.stacked import ship_many
from gpu_steps import ALL_BUT_HINTS, assert_compiled_and_captured
from plain_pools import make_federation
from run_specs import Normalised, make_spec
from scripts import load_script
from tables import AGGREGATORS

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings(*ALL_BUT_HINTS)]


def test_the_engine_crops_and_flips_as_the_loop_does(caplog):
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
    ways = [{"trainer": "loop"}, {"trainer": "engine", "compile_after": 0}, {"trainer": "engine", "compile_after": 1}]
    first, second, three = ([*play([make_spec(federation, **settings)], **way)][-1].state.params for way in ways)
    assert (first - second).norm() < 1e-3 * first.norm()
    assert (first - three).norm() < 1e-3 * first.norm()  # the second round goes on with the compiled step
    assert_compiled_and_captured(caplog)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"mask_every": 1, "evaluate_every": 1},
        {"aggregator": "wiener"},
        {"aggregator": "ties"},
        {"scaffold": True},
        {"algorithm": mofedsam()},
        {"algorithm": fedspeed()},
        {"algorithm": fedsmoo()},
    ],
    ids=str,
)
@pytest.mark.parametrize("compile_after", [0, 9])
def test_a_round_of_a_fleet_is_begun_and_sent_without_waiting_for_the_device(compile_after, more, caplog):
    federation = make_federation([20, 13, 30, 8], (1, 28, 28)).to("cuda")
    base = {"model": "logistic", "rounds": 9, "clients_per_round": 3, "batch_size": 8, "evaluate_every": 0}
    settings = {**base, **more}
    specs = [make_spec(federation, seed=run // 2, tau=0.4 * (run % 2), **settings) for run in range(4)]
    fleet = assemble(specs, compile_after=compile_after)
    assert isinstance(fleet.train, Engine)
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
    assert_compiled_and_captured(caplog)


def test_the_kernels_of_a_first_round_are_compiled_with_the_fleet(monkeypatch):
    triton, heard = pytest.importorskip("triton"), []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda **told: heard.append(told["src"].name))
    federation = make_federation([20, 13, 30, 8], (1, 22, 22)).to("cuda")  # a shape of its own
    spec = make_spec(federation, model="lenet", rounds=2, clients_per_round=3, batch_size=8)
    fleet = assemble([spec])
    compiled = len(heard)
    play_round(fleet, start(fleet))[1].sent()
    assert compiled >= 5  # two forward and three backward passes
    assert not {"_forward", "_backward_inputs", "_backward_weights"}.intersection(heard[compiled:])


def test_a_run_that_starts_uncompiled_repeats_and_resumes_to_the_bit(caplog):
    federation = make_federation([20, 13, 30, 8], (1, 28, 28)).to("cuda")
    words = {"model": "lenet", "rounds": 4, "clients_per_round": 3, "batch_size": 8, "lr": 0.01}
    specs = [make_spec(federation, seed=seed, **words) for seed in range(2)]
    ends = [[*play(specs, compile_after=2)][-1].state.params for _ in range(2)]
    assert torch.equal(*ends)
    for stop in (1, 2, 3):  # before, at and after the border
        fleet = assemble(specs, compile_after=2)
        state = start(fleet)
        for _ in range(stop):
            state, _ = play_round(fleet, state)
        again = assemble(specs, compile_after=2)
        state = restore(again, [export(fleet, state, run) for run in range(2)])
        for _ in range(stop, 4):
            state, _ = play_round(again, state)
        assert torch.equal(state.params, ends[0])
    assert_compiled_and_captured(caplog)


@pytest.mark.parametrize("model", ["lenet", Normalised])
def test_the_captured_part_of_the_server_gives_the_bits_of_its_launches(model, caplog):
    federation = make_federation([20, 13, 30, 8, 11], (1, 28, 28)).to("cuda")
    servers = [("sgd", 1.0), ("adam", 0.01), ("yogi", 0.01), ("momentum", 0.5)]
    words = {"model": model, "rounds": 9, "clients_per_round": 3, "batch_size": 8, "lr": 0.01, "mask_every": 8}
    specs = [make_spec(federation, seed=i, server=n, server_lr=r, **words) for i, (n, r) in enumerate(servers)]
    fleet = assemble(
        [*specs, make_spec(federation, **{**words, "rounds": 6})], compile_after=99
    )  # rounds 2 to 5 are alike
    launched = replace(fleet, server=None)
    one, two = start(fleet), start(fleet)
    for _ in range(9):
        (one, first), (two, second) = play_round(fleet, one), play_round(launched, two)
        assert torch.equal(one.params, two.params)
        assert torch.equal(one.moments.z, two.moments.z)
        assert torch.equal(one.moments.v, two.moments.v)
        assert all(torch.equal(value, two.buffers[name]) for name, value in one.buffers.items())
        assert repr(first.sent().records) == repr(second.sent().records)
    assert any(captured is not None for captured in fleet.server._replayed._captured.values())
    assert_compiled_and_captured(caplog)


def test_arrays_that_are_sent_together_arrive_as_they_are():
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3).T, np.array([True, False]), np.arange(3.0), np.zeros((0, 2))]
    for array, tensor in zip(arrays, ship_many(arrays, "cuda"), strict=True):
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)


def test_the_first_round_imports_no_compiler():
    code = """
import sys, torch
from fedgma.simulation.fleet import assemble, play_round, start
from plain_pools import make_federation
from run_specs import make_spec
federation = make_federation([20, 13, 30, 8], (1, 28, 28)).to("cuda")
fleet = assemble([make_spec(federation, model="lenet", rounds=9, clients_per_round=3, batch_size=8)])
play_round(fleet, start(fleet))[1].records
assert "torch._inductor.compile_fx" not in sys.modules
"""
    helpers = str(Path(__file__).parents[1] / "helpers")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([helpers, *filter(None, sys.path)])}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)


def test_the_engine_takes_second_gradients_and_tilts_as_the_loop_does(caplog):
    federation = make_federation([20, 13, 30, 8], (1, 28, 28)).to("cuda")
    settings = {"model": "logistic", "rounds": 3, "clients_per_round": 3, "batch_size": 8, "evaluate_every": 0}
    chosen = [Algorithm(), mofedsam(), fedspeed(), fedsmoo()]
    specs = [make_spec(federation, algorithm=first, lr=0.01, seed=3, **settings) for first in chosen]
    first, second = (
        [*play(specs, trainer=trainer, compile_after=0)][-1].state.params for trainer in ("loop", "engine")
    )
    assert ((first - second).norm(dim=1) < 1e-3 * first.norm(dim=1)).all()
    assert_compiled_and_captured(caplog)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_every_rule_takes_the_step_of_the_cpu_there(name):
    rng, rounds = np.random.default_rng(1), []
    for device in ("cpu", "cuda"):
        shapes = [("conv.weight", torch.Size([5, 7])), ("conv.bias", torch.Size([9]))]
        laid = rules.lay_out([AGGREGATORS[name], AGGREGATORS["mean"]], 6, shapes, torch.device(device))
        params, none = torch.zeros(2, 44, device=device), torch.zeros(12, device=device)
        state, run = rules.first_state(laid, params), np.repeat([0, 1], 6)
        for round in range(2):
            drawn = np.random.default_rng(round).standard_normal((12, 44), dtype=np.float32)
            trained = Trained(torch.from_numpy(drawn).to(device), shapes, {}, none, none[:, None])
            sums, kept = tallies.empty(params, {}, further=laid.further), {}
            rules.add(laid, sums, kept, run, rng.integers(5, 6, 12), trained)
            merged = rules.merge(laid, sums, kept, {}, state)
            state = merged.state
            rounds.append((merged.mean * (1 if merged.mask is None else merged.mask)).cpu())
    for cpu, gpu in zip(rounds[:2], rounds[2:], strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=1e-5, atol=1e-7)


def test_the_example_of_an_own_rule_takes_the_same_step_there():
    example = load_script("examples/own_rule.py")
    assert example.distance(example.in_a_fleet("cuda"), list(example.stacked())) <= 1e-6


def test_products_of_adapters_on_the_gpu_are_those_of_the_cpu():
    base = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    model, rule = with_adapters(base, rank=2), in_products(masked_mean())
    ends = []
    for device in ("cpu", "cuda"):
        federation = make_federation([20, 13, 30, 8], (1, 28, 28)).to(device)
        words = {"model": model, "rounds": 2, "clients_per_round": 3, "batch_size": 8, "client_learning_rate": 0.01}
        specs = [RunSpec(federation, rule=rule, seed=seed, **words) for seed in range(2)]
        fleet = assemble(specs, trainer="loop" if device == "cpu" else "engine")
        state = start(fleet)
        for _ in range(2):
            state, _ = play_round(fleet, state)
        ends.append(adapters.lift(fleet.space, state.params).cpu())  # pairs may turn where singular values are close
    assert (ends[0] - ends[1]).norm() < 1e-3 * ends[0].norm()


def test_clients_of_several_versions_train_as_on_the_cpu():
    """Asynchronous runs, one with votes of fresh updates alone: the engine beside the loop, stopped and resumed."""
    made = make_federation([20, 13, 30, 8, 25, 40], (1, 12, 12))
    slow = Clock(compute=Delays("lognormal", 0.1, 1.0), concurrency=5)
    words = {"rounds": 5, "clients_per_round": 3, "batch_size": 8, "evaluate_every": 0, "model": "logistic"}
    clocks = [slow, replace(slow, voters="fresh"), None]
    states = {}
    for device, options in (("cpu", {"trainer": "loop"}), ("cuda", {"trainer": "engine", "compile_after": 10})):
        fleet = assemble([make_spec(made.to(device), clock=clock, **words) for clock in clocks], **options)
        state = start(fleet)
        for _ in range(5):
            state, _ = play_round(fleet, state)
            state = restore(fleet, [export(fleet, state, run) for run in range(3)])
        states[device] = state
    assert states["cuda"].versions.keys() == states["cpu"].versions.keys() != set()
    moved = states["cuda"].params.cpu() - states["cpu"].params
    assert moved.norm() < 1e-3 * states["cpu"].params.norm()


def test_a_rule_is_tried_on_the_tensors_that_it_will_be_given():
    shapes = (("w", torch.Size([4, 3])),)
    try_rule(as_rule(lambda mean: mean.clamp(-1, 1)), shapes, "cuda")
    with pytest.raises(ConfigError, match="mixes runs that train together"):
        try_rule(as_rule(lambda mean: mean / mean.abs().max()), shapes, "cuda")
