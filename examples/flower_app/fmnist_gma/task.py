"""What client and server share: the settings of the run, the initial model, and one client's local training.

Both sides take their settings from the app's config, under the names of `fedgma run`, and draw everything from the
seed, so that the federation trains the same model as the simulator.
"""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgma.errors import ConfigError
from fedgma.experiments.grid import read_grid
from fedgma.experiments.materials import Materials
from fedgma.simulation.fleet import Fleet, assemble, lay_lane_batch, start
from fedgma.simulation.spec import RunSpec
from fedgma.training import loop
from fedgma.training.stacked import unflatten, without

PREFIX = "run."


class Local(NamedTuple):
    """What a client sends back."""

    model: dict[str, Tensor]
    samples: int
    loss: float


def words_of(config: dict[str, Any]) -> tuple[str, ...]:
    """The `run.*` part of an app's config as arguments of `fedgma run`; empty values keep their defaults."""
    given = {key.removeprefix(PREFIX): value for key, value in config.items() if key.startswith(PREFIX) and value != ""}
    return tuple(f"{key}={value}" for key, value in given.items())


@cache
def spec_of(words: tuple[str, ...]) -> RunSpec:
    """The run with these settings: data, partition, model, local training, rule, server optimiser."""
    (settings,) = read_grid(None, words).runs
    materials = Materials("cpu")
    spec = materials.spec(materials.adopt(settings))
    if spec.algorithm.keeps != "nothing":
        raise ConfigError(f"{settings.algorithm} runs in the simulator only: nodes keep nothing from round to round")
    return spec


@cache
def fleet_of(words: tuple[str, ...]) -> Fleet:
    """The run as the simulator has it, with the reference trainer."""
    torch.set_num_threads(1)  # the number of threads can change the last bit of a sum
    return assemble([spec_of(words)], trainer="loop")


def initial_model(words: tuple[str, ...]) -> dict[str, Tensor]:
    """What travels of the global model, before the first round: trainable parameters and buffers."""
    fleet = fleet_of(words)
    first = start(fleet)
    buffers = without(first.buffers, fleet.frozen)
    named = {**unflatten(first.params, fleet.shapes), **buffers}  # one run's row of each
    return {name: value[0].clone() for name, value in named.items()}


def train(words: tuple[str, ...], model: dict[str, Tensor], *, round: int, client: int) -> Local:
    """One client's local training in one round, on the batches that the simulator would draw for it."""
    fleet = fleet_of(words)
    now = replace(start(fleet), rounds=np.array([round - 1]))
    lane_batch, samples = lay_lane_batch(fleet, now, [(0, client)])
    fleet.model.load_state_dict(model, strict=False)  # frozen ones and second names do not travel
    begun = {name: value.detach().clone() for name, value in fleet.model.named_parameters()}
    *_, loss, _ = loop.train_client(fleet.model, lane_batch, 0, fleet.pools[0], begun)
    state = fleet.model.state_dict()
    trained = {name: state[name].detach().clone() for name in model}
    return Local(trained, int(samples[0]), float(loss))
