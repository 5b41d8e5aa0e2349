"""A fleet over several ranks: the same bits as on one, for all that runs keep and record."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedgma.aggregation.own import as_rule
from fedgma.errors import ConfigError
from fedgma.simulation.algorithms import fedcm, feddyn, fedsmoo, fedspeed
from fedgma.simulation.attacks import Attack
from fedgma.simulation.clock import Clock, Delays
from fedgma.simulation.fleet import assemble, play_round, start
from fedgma.simulation.state import export
from plain_pools import make_federation
from run_specs import make_spec
from thread_ranks import on_ranks

UNEVEN = [10, 7, 15, 4, 12, 20]


class Normed(nn.Module):
    """A small model with buffers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x):
        return self.layers(x)


class Smooth:
    """A rule with state."""

    state = {"last": 0.0}  # noqa: RUF012

    def __call__(self, mean, last):
        return 0.5 * mean + 0.1 * last, None, {"last": mean}


def specs():
    """Runs that use all that a round can: rules, optimisers, arrays of clients, attacks, bounds, own rules."""
    federation = make_federation(UNEVEN, (1, 4, 4), classes=3)
    shared = {
        "model": lambda shape, classes: Normed(),
        "rounds": 2,
        "clients_per_round": 4,
        "batch_size": 8,
        "smallest_batch": 2,
    }
    arms = [
        {"aggregator": "mean"},
        {"aggregator": "gma", "server": "adam", "server_lr": 0.01, "mask_every": 1},
        {"scaffold": True, "aggregator": "gma"},
        {"algorithm": feddyn()},
        {"algorithm": fedcm()},
        {"algorithm": fedsmoo()},
        {"algorithm": fedspeed()},
        {"aggregator": "median"},
        {"aggregator": "gma", "clock": Clock(compute=Delays("lognormal", 0.1, 1.0), concurrency=5), "rounds": 4},
        {"norm_factor": 1.0, "clients_per_round": 5, "seed": 3},
    ]
    made = [make_spec(federation, **{**shared, **arm}) for arm in arms]
    own = replace(made[0], rule=as_rule(Smooth), seed=5, rounds=1)
    return [*made, own]


def attacked():
    federation = make_federation(UNEVEN, (1, 4, 4), classes=3)
    made = make_spec(federation, model="logistic", rounds=2, clients_per_round=5, batch_size=8)
    return [replace(made, attack=Attack("alie", share=0.4)), replace(made, seed=1)]


def assembled(ranks, runs, *, eval_batch=17, **options):
    fleet = assemble(runs, **{"trainer": "loop", **({} if ranks is None else {"ranks": ranks}), **options})
    return replace(fleet, eval_batch=eval_batch)


def played(fleet, state):
    """The records of all rounds, and the exported states after the last."""
    records = []
    while any(state.rounds[run] < spec.rounds for run, spec in enumerate(fleet.specs)):
        state, one = play_round(fleet, state)
        records += one.records
    return records, [export(fleet, state, run) for run in range(len(fleet.specs))]


def on_many(size, runs, **options):
    fleets = on_ranks(size, lambda ranks: ranks)  # models are made one after the other: torch's generator is global
    ready = [assembled(ranks, runs, **options) for ranks in fleets]
    states = [start(fleet) for fleet in ready]
    return on_ranks(size, lambda ranks: played(replace(ready[ranks.rank], ranks=ranks), states[ranks.rank]))


def check_same(one, other):
    for mine, theirs in zip(one[0], other[0], strict=True):
        np.testing.assert_equal(theirs._asdict(), mine._asdict())
    for mine, theirs in zip(one[1], other[1], strict=True):
        assert list(mine) == list(theirs)
        for name, value in mine.items():
            np.testing.assert_array_equal(theirs[name], value, err_msg=name)


@pytest.mark.parametrize(("size", "chunk"), [(2, None), (3, 4), pytest.param(8, 11, marks=pytest.mark.slow)])
def test_any_number_of_ranks_gives_the_bits_of_one(size, chunk, one_rank):
    for came in on_many(size, specs(), chunk=chunk):
        check_same(one_rank(chunk), came)


@pytest.fixture(scope="module")
def one_rank():
    return functools.cache(lambda chunk: played(*alone(specs(), chunk=chunk)))


def alone(runs, **options):
    fleet = assembled(None, runs, **options)
    return fleet, start(fleet)


def test_attackers_know_the_updates_that_other_ranks_trained():
    for came in on_many(2, attacked()):
        check_same(played(*alone(attacked())), came)


@pytest.mark.parametrize("trainer", ["lanes", "engine"])
def test_with_the_same_lane_batches_lanes_have_the_same_bits_too(trainer):
    runs = attacked()[1:] * 2
    for came in on_many(2, runs, trainer=trainer, chunk=5):
        check_same(played(*alone(runs, trainer=trainer, chunk=5)), came)


def test_a_rank_with_another_model_is_noticed():
    runs = attacked()[1:]
    ready = [assembled(ranks, runs) for ranks in on_ranks(2, lambda ranks: ranks)]
    states = [start(fleet) for fleet in ready]
    states[1] = replace(states[1], params=torch.nextafter(states[1].params, torch.tensor(2.0)))
    with pytest.raises(ConfigError, match="ranks 0 and 1 computed different models"):
        on_ranks(2, lambda ranks: played(replace(ready[ranks.rank], ranks=ranks), states[ranks.rank]))
