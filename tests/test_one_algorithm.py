"""One algorithm: whatever the way in, a rule and a server optimiser take the same step, to the bit.

The ways: `server_round` over whole models, a stack of updates, two tallies that are streamed and merged, the server
that deployments share, Flower's strategy, a run alone in the simulator, and the same run in a fleet with all others.
Every rule and every optimiser of the tables takes part, so a new row inherits the law.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import fedgma
from fedgma.aggregation.own import as_rule
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.rules import RULES
from fedgma.aggregation.server import MaskedServer
from fedgma.simulation.fleet import assemble, play_round, start
from fedgma.simulation.spec import RunSpec
from fedgma.training.lane_batch import Trained
from fedgma.training.stacked import flatten, shapes_of, unflatten
from plain_pools import make_federation
from strategies import same_bits
from tables import AGGREGATORS, OPTIMIZERS

SIZES = [7, 3, 12, 5, 1]  # the clients' samples, which are their weights
ROUNDS = 2
# optimisers see a mean, a mask and a length: rules of each kind meet all of them, the others one of each position
EVERY_OPTIMIZER = ("gma", "mean", "median", "damped_mean", "stale_mask", "wiener")
SOME = ("sgd", "averaged", "yogi before")
CASES = [(rule, name) for rule in AGGREGATORS for name in OPTIMIZERS if rule in EVERY_OPTIMIZER or name in SOME]


def dyadic(rng, shape, largest=64):
    """Numbers that float32 adds without rounding, some of them zero."""
    return rng.integers(-largest, largest + 1, shape).astype(np.float32) / 64


def drawn(seed, clients=()):
    rng = np.random.default_rng(seed)
    return {"linear.weight": dyadic(rng, (*clients, 3, 4)), "linear.bias": dyadic(rng, (*clients, 3))}


MODELS = [drawn(seed) for seed in range(ROUNDS)]  # the model before each round
UPDATES = [drawn(10 + seed, (len(SIZES),)) for seed in range(ROUNDS)]
for updates in UPDATES:
    updates["linear.weight"][:, 0] = abs(updates["linear.weight"][:, 0])  # where all agree
    updates["linear.weight"][2, 1] = 0.0


def client_updates(round):
    return [{name: value[client] for name, value in UPDATES[round].items()} for client in range(len(SIZES))]


def by_server_round(rule, optimizer):
    state = None
    for round, model in enumerate(MODELS):
        locals_ = [{name: model[name] + update[name] for name in model} for update in client_updates(round)]
        result = fedgma.server_round(model, locals_, SIZES, aggregator=rule, optimizer=optimizer, state=state)
        state = result.state
        yield result.params


def stepped(optimizer, aggregates):
    state, handed = optimizer.init(MODELS[0]), None
    for model, aggregate in zip(MODELS, aggregates, strict=True):
        merged = aggregate(handed)
        moved, state = optimizer.step(merged, state, model)
        handed = merged.state
        yield moved


def by_stack(rule, optimizer):
    return stepped(optimizer, (lambda state, updates=updates: rule(updates, SIZES, state=state) for updates in UPDATES))


def by_merged_tallies(rule, optimizer):
    return stepped(optimizer, (partial(rule.conclude, merged(rule, round)) for round in range(ROUNDS)))


def merged(rule, round):
    tallies = [rule.open(MODELS[0]), rule.open(MODELS[0])]
    for client, update in enumerate(client_updates(round)):
        assert tallies[client % 2].add(rule.prepared(update, None), SIZES[client], client=client) is None
    tallies[1].merge(fedgma.from_bytes(fedgma.to_bytes(tallies[0])))
    return tallies[1]


def by_shared_server(rule, optimizer):
    server = MaskedServer(rule, optimizer, norm_factor=None)
    for round, model in enumerate(MODELS):
        yield server.step(model, zip(client_updates(round), SIZES, range(len(SIZES)), strict=True)).params


def by_flower(rule, optimizer):
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedgma[flower]'")
    from flwr.app import ConfigRecord

    from fake_grids import Nodes, record, reply
    from fedgma.flower import Masked

    strategy = Masked(aggregator=rule, optimizer=optimizer, norm_factor=None, min_available_nodes=len(SIZES))
    for round, model in enumerate(MODELS):
        strategy.configure_train(round + 1, record(model), ConfigRecord(), Nodes(range(len(SIZES))))
        replies = [
            reply(client, {name: model[name] + update[name] for name in model}, SIZES[client])
            for client, update in enumerate(client_updates(round))
        ]
        arrays, _ = strategy.aggregate_train(round + 1, replies)
        yield {name: array.numpy() for name, array in arrays.items()}


def by_fleet(pairs):
    """The models after each round of all these runs, in one fleet whose local training gives the updates above."""
    federation = make_federation(SIZES, (4,), classes=3)
    shared = {"model": "logistic", "rounds": ROUNDS, "clients_per_round": len(SIZES), "evaluate_every": 0}
    specs = [RunSpec(federation, rule=rule, optimizer=optimizer, **shared) for rule, optimizer in pairs]
    fleet = assemble(specs, trainer="loop", chunk=7)
    state = start(fleet)
    for round, model in enumerate(MODELS):
        row = flatten({name: torch.from_numpy(model[name])[None] for name, _ in fleet.shapes})
        state = replace(state, params=row.repeat(len(pairs), 1))
        state, _ = play_round(replace(fleet, train=lambda assignment, round=round: given(assignment, round)), state)
        named = unflatten(state.params, fleet.shapes)
        yield [{name: value[run].numpy() for name, value in named.items()} for run in range(len(pairs))]


def given(assignment, round):
    """What local training gives back: each client's update of the round."""
    clients = torch.from_numpy(assignment.lane_batch.client)
    shapes = shapes_of(assignment.start)
    flat = flatten({name: torch.from_numpy(UPDATES[round][name])[clients] for name, _ in shapes})
    return Trained(flat, shapes, {}, torch.zeros(len(clients)), torch.zeros(len(clients), 1))


WAYS = {"stack": by_stack, "merged tallies": by_merged_tallies, "shared server": by_shared_server, "flower": by_flower}


@pytest.fixture(scope="module")
def everybody():
    """All pairs of rule and optimiser as one fleet: pair -> the model after each round."""
    pairs = [(AGGREGATORS[rule], OPTIMIZERS[optimizer]) for rule, optimizer in CASES]
    rounds = list(by_fleet(pairs))
    return {case: [models[run] for models in rounds] for run, case in enumerate(CASES)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("rule", "optimizer"), CASES)
def test_every_server_takes_the_step_of_server_round(rule, optimizer, way):
    chosen = AGGREGATORS[rule], OPTIMIZERS[optimizer]
    if way == "merged tallies" and not chosen[0].streams:
        assert chosen[0].needs == ("updates",)
        return
    for expected, actual in zip(by_server_round(*chosen), WAYS[way](*chosen), strict=True):
        assert same_bits(expected, actual)


@pytest.mark.parametrize(("rule", "optimizer"), CASES)
def test_a_run_alone_takes_the_step_of_server_round(rule, optimizer):
    chosen = AGGREGATORS[rule], OPTIMIZERS[optimizer]
    for expected, (actual,) in zip(by_server_round(*chosen), by_fleet([chosen]), strict=True):
        assert same_bits(expected, actual)


@pytest.mark.parametrize(("rule", "optimizer"), CASES)
def test_so_does_the_run_in_a_fleet_with_all_others(rule, optimizer, everybody):
    for expected, actual in zip(
        by_server_round(AGGREGATORS[rule], OPTIMIZERS[optimizer]), everybody[rule, optimizer], strict=True
    ):
        assert same_bits(expected, actual)


def test_the_law_can_tell_the_rules_apart():
    models = {  # after the second round: the first of a stale mask is the plain mean's
        name: b"".join(array.tobytes() for array in list(by_server_round(rule, OPTIMIZERS["sgd"]))[-1].values())
        for name, rule in AGGREGATORS.items()
        if name != "gma off"  # tau = 0 is the plain mean
    }
    assert len(set(models.values())) == len(models)


def test_every_rule_of_the_registry_is_in_the_table():
    wrapped = ("by_array", "smoothed", "clipped gma", "clipped median")
    assert {rule.name for name, rule in AGGREGATORS.items() if name not in wrapped} == set(RULES)


def half_of_the_votes(votes, clients, dtype):
    """A user's own mask: half where more than one client is in the majority."""
    return np.where(abs(np.asarray(votes)) > 1, 0.5, 0.0).astype(dtype)


def own_optimizer():
    """A user's own server optimiser: the sum of all steps so far."""

    def init(params):
        return {"sum": {name: value * 0 for name, value in params.items()}}

    def step(aggregate, state, params):
        total = {name: state["sum"][name] + aggregate.masked(name, value) for name, value in aggregate.mean.items()}
        return {name: params[name] + total[name] for name in params}, {"sum": total}

    return fedgma.ServerOptimizer("own", init, step, {})


class Inertia:
    """A user's own rule: every kind of sum, a measure over the model, and state."""

    state = {"last": 0.0}  # noqa: RUF012

    def measure(self, squares):
        return {"size": squares.sum(-1)}

    def __call__(self, mean, magnitude, positives, negative_weight, weight, measured, last):
        mask = positives / (1 + negative_weight) + magnitude / weight
        return mean + 0.5 * last, mask, {"last": mean * measured["size"]}


@pytest.mark.parametrize("way", WAYS)
def test_a_users_own_function_of_sums_takes_the_same_step_everywhere(way):
    own = (as_rule(Inertia), OPTIMIZERS["adam"])
    other = (fedgma.stale_mask(), fedgma.sgd())
    fleet = by_fleet([other, own, (fedgma.mean(), fedgma.sgd()), (as_rule(own[0].compute), OPTIMIZERS["adam"])])
    for expected, actual, (_, mine, _, again) in zip(by_server_round(*own), WAYS[way](*own), fleet, strict=True):
        assert same_bits(expected, actual)
        assert same_bits(expected, mine)
        assert same_bits(expected, again)


def test_a_rule_that_is_not_finite_is_named_when_the_round_is_read():
    def broken(mean):
        return mean / 0

    federation = make_federation(SIZES, (4,), classes=3)
    shared = {"model": "logistic", "clients_per_round": len(SIZES), "evaluate_every": 0}
    specs = [RunSpec(federation, rule=rule, **shared) for rule in (fedgma.mean(), as_rule(broken))]
    fleet = assemble(specs, trainer="loop")
    _, played = play_round(fleet, start(fleet))
    for round in (played, played.sent()):
        with pytest.raises(fedgma.Diverged, match="rule 'broken' gave values that are not finite in round 1"):
            _ = round.records


def test_a_users_own_rule_and_optimiser_run_in_a_fleet_too():
    own = (Rule("half", mask=half_of_the_votes), own_optimizer())
    rounds = list(by_fleet([own, (fedgma.masked_mean(), fedgma.adam(0.1)), own]))
    for expected, (actual, _, again) in zip(by_server_round(*own), rounds, strict=True):
        assert same_bits(expected, actual)
        assert same_bits(expected, again)
