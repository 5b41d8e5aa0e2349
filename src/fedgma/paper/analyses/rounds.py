"""Access to the inside of a round: the specs of an analysis, every client's update, and the resulting mask."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from fedgma.aggregation.rules import BASELINE, mean
from fedgma.data.files import load
from fedgma.errors import DataError
from fedgma.experiments.materials import Materials
from fedgma.experiments.settings import Settings, complete
from fedgma.paper.analyses import AnalysisRequest
from fedgma.simulation.batched import optimizers, rules, tallies
from fedgma.simulation.fleet import Fleet, lay_lane_batch
from fedgma.simulation.sampling import sample_clients
from fedgma.simulation.spec import RunSpec
from fedgma.simulation.state import State
from fedgma.training.lane_batch import Assignment, Trained
from fedgma.training.stacked import unflatten

MINI = "fmnist-mini"


def data_and_model(request: AnalysisRequest, dataset: str) -> dict[str, str]:
    """Data set and model of an analysis; if quick, the embedded data set and logistic regression."""
    return {"dataset": MINI, "model": "logistic"} if request.quick else {"dataset": dataset}


def found_or_mini(request: AnalysisRequest, name: str) -> dict[str, str]:
    """The same, with the embedded data set if the other is not on this machine."""
    try:
        load(name)
    except DataError:
        return data_and_model(request, MINI)
    return data_and_model(request, name)


def specs_of(materials: Materials, seeds: Iterable[int], **settings: Any) -> list[RunSpec]:
    """One run per seed, with settings as in a settings file; the rest are the paper's defaults."""
    return [materials.spec(run_settings) for run_settings in settings_of(seeds, **settings)]


def settings_of(seeds: Iterable[int], **settings: Any) -> list[Settings]:
    """The complete settings of one run per seed."""
    return [complete(Settings.model_validate({**settings, "seed": seed})) for seed in seeds]


def arm_of(spec: RunSpec, name: str, **changes: Any) -> RunSpec:
    """The same run as one arm of a comparison: with the plain mean, or with its own rule."""
    return replace(spec, rule=mean() if name == BASELINE else spec.rule, **changes)


def train_clients(fleet: Fleet, state: State, run: int, clients: Sequence[int]) -> tuple[Trained, np.ndarray]:
    """Train some clients of one run in its next round without aggregation; also return the clients' weights."""
    lane_batch, weights = lay_lane_batch(fleet, state, [(run, int(client)) for client in clients])
    start = unflatten(state.params, fleet.shapes)
    return fleet.train(Assignment(fleet.model, lane_batch, fleet.pools, start, state.buffers)), weights


def retrain(fleet: Fleet, state: State, run: int, clients: Sequence[int], repeats: int) -> Iterator[Tensor]:
    """The clients' updates [client, entry] from the same initial weights, `repeats` times, with new batch orders.

    The batch orders are those of the following rounds, since they depend on the round number.
    """
    for ahead in range(repeats):
        yield train_clients(fleet, replace(state, rounds=state.rounds + ahead), run, clients)[0].flat


def open_round(
    fleet: Fleet, state: State, sampled: Callable[[RunSpec, int], np.ndarray] = sample_clients
) -> tuple[State, tallies.Sums, tallies.Merged]:
    """Run one round as `fleet.play_round` does, return its votes and mask too, and skip evaluation; no SCAFFOLD.

    `sampled` gives the clients of a run in a round.
    """
    sums = tallies.empty(state.params, state.buffers, fleet.columns.number, fleet.rules.further)
    kept: rules.Kept = {}
    for run, spec in enumerate(fleet.specs):
        clients = sampled(spec, int(state.rounds[run]) + 1)
        trained, weights = train_clients(fleet, state, run, clients.tolist())
        rules.add(fleet.rules, sums, kept, np.full(len(clients), run), weights, trained, clients)
    merged = rules.merge(fleet.rules, sums, kept, state.buffers, state.rule)
    params, moments = optimizers.step(fleet.optimizers, merged, state.moments, state.params)
    after = replace(state, rounds=state.rounds + 1, params=params, buffers=merged.buffers, moments=moments)
    after = replace(after, rule=merged.state)
    return after, sums, merged
