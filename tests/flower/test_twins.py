"""The example app on Flower's messages trains the simulator's model, bit for bit."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from fake_grids import Nodes, running

pytest.importorskip("pydantic", reason="the simulator is not installed: pip install 'fedgma[sim]'")

from flwr.app import ArrayRecord
from flwr.common.config import flatten_dict
from fmnist_gma import client_app, server_app, task

from fedgma.errors import ConfigError
from fedgma.records.checkpoints import digest
from fedgma.simulation import assembly
from fedgma.simulation import fleet as fleet_module
from fedgma.simulation.fleet import play
from fedgma.simulation.state import export
from fedgma.training import models

APP = Path(task.__file__).parents[1]
SMALL = {"run.rounds": 2, "run.local_steps": 2, "run.batch_size": 8}
ALGORITHMS = {"fedavg": {}, "fedprox": {"run.mu": 0.1}, "fedadam": {}, "fedyogi": {}, "fedsam": {"run.rho": 0.2}}
ALGORITHMS["fedacg"] = {
    "run.lambda_": 0.7,
    "run.rounds": 3,
}  # clients start ahead of the model from the second round on


def config_of(**changes):
    shipped = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    return {**flatten_dict(shipped), **SMALL, **changes}


def simulated(config):
    """SHA-256 of the model that the simulator trains, on the reference trainer."""
    words = task.words_of(config)
    fleet = task.fleet_of(words)
    unscored = replace(task.spec_of(words), evaluate_every=0)  # scoring would take most of the time
    last = list(play([unscored], trainer="loop"))[-1]
    plain = export(fleet, last.state, 0)
    return digest({key.removeprefix("params/"): value for key, value in plain.items() if key.startswith("params/")})


def federated(config, numbers):
    """SHA-256 of the model that the app trains on nodes of these numbers."""
    words = task.words_of(config)
    spec = task.spec_of(words)
    partitions = dict(zip(numbers, range(len(numbers)), strict=True))
    strategy = server_app.masked(spec, wait=1.0)
    initial = ArrayRecord(task.initial_model(words))
    result = strategy.start(Nodes(numbers, running(client_app.app, config, partitions)), initial, spec.rounds)
    return digest({name: array.numpy() for name, array in result.arrays.items()})


@pytest.mark.parametrize("aggregator", ["mean", "gma"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_simulator_and_flower_train_the_same_model(algorithm, aggregator):
    plain = {"run.tau": ""} if aggregator == "mean" else {}
    chosen = {"run.algorithm": algorithm, "run.aggregator": aggregator, **plain, **ALGORITHMS[algorithm]}
    config = config_of(**chosen)
    assert federated(config, [50, 10, 40, 20, 30]) == simulated(config)


def test_simulator_and_flower_train_the_same_model_with_sampled_nodes():
    config = config_of(**{"run.partition.clients": 10, "run.clients_per_round": 3, "run.rounds": 3})
    assert federated(config, list(range(10, 0, -1))) == simulated(config)


@pytest.mark.parametrize("algorithm", ["scaffold", "fedcm"])
def test_an_algorithm_that_nodes_cannot_run_is_refused(algorithm):
    with pytest.raises(ConfigError, match=f"{algorithm} runs in the simulator only"):
        task.spec_of(task.words_of(config_of(**{"run.algorithm": algorithm})))


def test_the_twins_can_differ():
    assert simulated(config_of()) != simulated(config_of(**{"run.tau": 0.9}))


def test_frozen_parameters_do_not_travel(monkeypatch):
    def build(model, shape, classes, seed):
        network = models.build(model, shape, classes, seed)
        network.conv1.requires_grad_(False)
        return network

    for module in (assembly, fleet_module):
        monkeypatch.setattr(module, "build", build)
    task.fleet_of.cache_clear()
    config = config_of()
    assert not any(name.startswith("conv1") for name in task.initial_model(task.words_of(config)))
    assert federated(config, [50, 10, 40, 20, 30]) == simulated(config)
    task.fleet_of.cache_clear()
