"""Rounds that are drawn several at a time are those that are drawn one by one."""

from dataclasses import fields, replace

import numpy as np
import pytest

from fedgma.seeds import generator, seed
from fedgma.simulation.fleet import assemble, play_round, start
from fedgma.simulation.plans import lay, plan_round
from fedgma.simulation.rates import learning_rates
from fedgma.simulation.sampling import sample_all_clients, sample_clients
from fedgma.simulation.spec import RunSpec
from fedgma.training.batches import batch_order
from fedgma.training.lane_batch import LaneBatch
from fedgma.training.many_orders import TOGETHER
from fedgma.training.schedules import CONSTANT, Schedule, factor, factors
from plain_pools import make_federation

SIZES = [7, 3, 12, 5, 9, 1]


def specs(**changes):
    shared = {"model": "logistic", "clients_per_round": 3, "batch_size": 4, **changes}
    federation = make_federation(SIZES, (6,))
    return [
        RunSpec(federation, rounds=9, **shared),
        RunSpec(federation, seed=5, rounds=6, weighting="uniform", **shared),
    ]


def assert_same_lanes(actual, expected):
    for one in fields(LaneBatch):
        first, second = getattr(actual, one.name), getattr(expected, one.name)
        assert first == second if one.name == "optimizer" else np.array_equal(first, second), one.name


@pytest.mark.parametrize(
    "changes", [{}, {"local_epochs": 2}, {"augment": "none", "round_schedule": Schedule("cosine")}, {"local_steps": 2}]
)
def test_rounds_ahead_are_those_drawn_alone(changes):
    fleet, rounds = assemble(specs(**changes), trainer="lanes"), np.zeros(2, np.int64)
    ends, ahead = np.array([spec.rounds for spec in fleet.specs]), 0
    while busy := np.flatnonzero(rounds < ends).tolist():
        plan, alone = plan_round(fleet, rounds, busy, {}), plan_round(replace(fleet, chunk=1), rounds, busy, {})
        assert alone.laid is None
        assert np.array_equal(plan.lanes, alone.lanes)
        assert [clients.tolist() for clients in plan.sampled.values()] == [
            clients.tolist() for clients in alone.sampled.values()
        ]
        batch, weights = lay(fleet, alone.lanes)
        if plan.laid is not None:
            ahead += 1
            assert_same_lanes(plan.laid[0], batch)
            assert np.array_equal(plan.laid[1], weights)
        rounds[busy] += 1
    assert ahead == 9


def test_a_round_can_be_played_again_and_out_of_turn():
    fleet = assemble(specs(), trainer="lanes")
    first = start(fleet)
    second, _ = play_round(fleet, first)
    third, _ = play_round(fleet, second)
    for before, after in ((second, third), (first, second)):
        again, _ = play_round(fleet, before)
        assert np.array_equal(again.params.numpy(), after.params.numpy())


def test_rounds_without_clients_are_played():
    federation = make_federation([2, 9, 1, 1, 1, 1], (6,))
    words = {"model": "logistic", "clients_per_round": 1, "batch_size": 4, "smallest_batch": 3}
    fleet = assemble([RunSpec(federation, rounds=12, **words)], trainer="lanes")
    state, counted = start(fleet), []
    for _ in range(12):
        state, played = play_round(fleet, state)
        counted.append(played.records[0].clients)
    assert set(counted) == {0, 1}


def test_large_rounds_are_drawn_alone():
    fleet = replace(assemble(specs(), trainer="lanes"), chunk=5)
    assert plan_round(fleet, np.zeros(2, np.int64), [0, 1], {}).laid is None
    assert not fleet.plans


def literal_sample(spec, round):
    clients = spec.federation.clients
    drawn = generator(spec.seed, "cohort", round).choice(len(clients), spec.clients_per_round, replace=False)
    return [client for client in sorted(drawn.tolist()) if len(clients[client]) >= spec.smallest_batch]


@pytest.mark.parametrize("seeds", [3, TOGETHER + 5])
def test_the_clients_of_many_runs_are_those_of_each(seeds):
    first, second = make_federation(SIZES, (6,)), make_federation([*SIZES, 0, 2], (6,))
    shared = {"model": "logistic", "clients_per_round": 4, "smallest_batch": 3}
    runs = [RunSpec(data, seed=seed, rounds=9, **shared) for seed in range(seeds) for data in (first, second, first)]
    rounds = np.arange(len(runs)) // 3 % 5 + 1
    found = sample_all_clients(runs, rounds, range(1, len(runs)))
    assert list(found) == list(range(1, len(runs)))
    for run, clients in found.items():
        assert clients.dtype == np.int64
        assert clients.tolist() == literal_sample(runs[run], int(rounds[run]))
        assert np.array_equal(clients, sample_clients(runs[run], int(rounds[run])))
    assert found[3] is found[5]  # the same federation, seed and round
    assert found[3] is not found[4]


@pytest.mark.parametrize("steps", [CONSTANT, Schedule("exponential", decay=0.5)])
@pytest.mark.parametrize("over_rounds", [CONSTANT, Schedule("cosine", warm_up=2)])
def test_learning_rates_are_products_of_a_run_a_round_and_a_step(over_rounds, steps):
    plain, scheduled = specs()
    runs = [plain, replace(scheduled, client_learning_rate=1, round_schedule=over_rounds, step_schedule=steps)]
    owner, rounds = np.array([0, 0, 1, 1]), np.array([3, 4, 2, 5])
    counts = np.array([[4, 2, 0], [4, 4, 1], [4, 0, 0], [4, 4, 4]])
    rates = learning_rates(runs, rounds, owner, counts)
    assert rates.dtype == np.float32
    for lane, (run, round) in enumerate(zip(owner.tolist(), rounds.tolist(), strict=True)):
        spec, taken = runs[run], int((counts[lane] > 0).sum())
        expected = spec.client_learning_rate * factor(spec.round_schedule, round - 1, spec.rounds)
        expected = expected * factors(spec.step_schedule, taken)
        assert rates[lane, :taken].tolist() == expected.astype(np.float32).tolist()


@pytest.mark.parametrize("runs", [1, 2, TOGETHER + 2])
def test_lanes_have_the_batches_and_seeds_of_their_run_round_and_client(runs):
    federation = make_federation([70, 33, 48, 5, 64], (6,))
    shared = {"model": "logistic", "clients_per_round": 4, "batch_size": 8, "local_epochs": 2, "rounds": 9}
    chosen = [RunSpec(federation, seed=run // 2 * 3, **shared) for run in range(runs)]  # two by two, the same draws
    fleet = assemble(chosen, trainer="lanes")
    plan = plan_round(replace(fleet, chunk=1), np.full(runs, 4), list(range(runs)), {})
    batch, weights = lay(fleet, plan.lanes)
    assert len(batch.orders) == 4 * -(-runs // 2)
    for lane, (run, client, round) in enumerate(plan.lanes.tolist()):
        key = {"seed": chosen[run].seed, "round": round, "client": client}
        index, counts = batch_order(federation.clients[client], **key, epochs=2, batch=8)
        assert batch.index[lane, : len(counts)].tolist() == index.tolist()
        assert batch.counts[lane].tolist() == [*counts.tolist(), *[0] * (batch.counts.shape[1] - len(counts))]
        assert batch.seeds[lane] == seed(chosen[run].seed, "dropout", round, client)
        assert weights[lane] == len(federation.clients[client])
