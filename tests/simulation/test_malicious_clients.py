"""Malicious clients: each attack against loops over plain numbers, and the same attack in every way of playing."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedgma
from fedgma.aggregation.server import MaskedServer
from fedgma.errors import ConfigError
from fedgma.seeds import generator
from fedgma.simulation.algorithms import scaffold
from fedgma.simulation.attacks import ATTACKS, Attack, Known, malicious
from fedgma.simulation.fleet import assemble, play_round, restore, start
from fedgma.simulation.spec import RunSpec
from fedgma.simulation.state import export
from fedgma.training.lane_batch import Trained
from fedgma.training.stacked import flatten, shapes_of, unflatten
from plain_pools import make_federation
from run_specs import last_state

OWN = [[1.0, -2.0, 2.0], [0.0, 3.0, -4.0]]
HONEST = [[2.0, 4.0, -1.0], [4.0, -2.0, -3.0]]
NOISE = [[1.0, -1.0, 0.5], [0.25, 2.0, -3.0]]


def known(needed=0):
    return Known(torch.tensor(OWN), torch.tensor(HONEST), needed, lambda: torch.tensor(NOISE))


def rms(row):
    return math.sqrt(sum(value * value for value in row) / len(row))


def honest_mean():
    return [sum(column) / len(HONEST) for column in zip(*HONEST, strict=True)]


def deviations():
    return [
        math.sqrt(sum((value - centre) ** 2 for value in column) / len(HONEST))
        for column, centre in zip(zip(*HONEST, strict=True), honest_mean(), strict=True)
    ]


def twice(row):
    return [row, row]


ORACLES = {
    "sign_flip": lambda scale: [[-scale * value for value in row] for row in OWN],
    "noise": lambda scale: [
        [scale * rms(row) * value for value in draws] for row, draws in zip(OWN, NOISE, strict=True)
    ],
    "zero": lambda scale: [[0.0] * 3] * 2,
    "same_value": lambda scale: [[scale * rms(row)] * 3 for row in OWN],
    "label_flip": lambda scale: [[scale * value for value in row] for row in OWN],
    "backdoor": lambda scale: [[scale * value for value in row] for row in OWN],
    "alie": lambda scale: twice([m - scale * d for m, d in zip(honest_mean(), deviations(), strict=True)]),
    "inner_product": lambda scale: twice([-scale * m for m in honest_mean()]),
    "mimic": lambda scale: twice([scale * value for value in HONEST[0]]),
    "sybil": lambda scale: twice([-scale * value for value in OWN[0]]),
    # honest mean 3, 1, -2; without a mask the reversed mean, as long as 3 and 5 are on average
    "mask_aware": lambda scale: twice([-scale * 4 / math.sqrt(14) * m for m in honest_mean()]),
}


@pytest.mark.parametrize("scale", [None, 2.5])
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_sends_what_its_formula_says(name, scale):
    sent = Attack(name, 0.5, scale).send(known())
    wanted = ORACLES[name](ATTACKS[name].scale if scale is None else scale)
    np.testing.assert_allclose(sent.numpy(), wanted, rtol=1e-6)


def test_an_attacker_who_knows_the_mask_only_votes_where_it_would_be_damped():
    # honest votes 2, 0, -2 against two attackers: 0, -2, 0; four clients, and two votes pass
    sent = Attack("mask_aware", 0.5).send(known(needed=2)).numpy()
    assert (np.sign(sent) == [[-1, -1, 1]] * 2).all()
    np.testing.assert_allclose(np.linalg.norm(sent, axis=1), 4, rtol=1e-6)
    np.testing.assert_allclose(sent[:, 1], -4, rtol=1e-6)  # all of its length is where the mask passes
    assert (abs(sent[:, [0, 2]]) < 1e-4).all()


def test_the_seed_decides_who_attacks_and_a_larger_share_includes_a_smaller_one():
    shares = [malicious(7, 20, share) for share in (0.1, 0.3, 0.4)]
    assert [chosen.sum() for chosen in shares] == [2, 6, 8]
    assert (shares[0] <= shares[1]).all()
    assert (shares[1] <= shares[2]).all()
    assert (malicious(7, 20, 0.3) == shares[1]).all()
    assert (malicious(8, 20, 0.3) != shares[1]).any()


def test_an_unknown_attack_and_an_impossible_share_are_refused():
    with pytest.raises(ConfigError, match="unknown attack 'flip'; known: sign_flip, noise"):
        Attack("flip", 0.3)
    with pytest.raises(ConfigError, match="from 0 to 1, got"):
        Attack("zero", 1.5)


# -- in a fleet --------------------------------------------------------------------------------------------------------

SIZES = [20, 13, 30, 8, 25, 40]


def run_of(attack=None, rule=None, **settings):
    shared = {"model": "logistic", "rounds": 3, "clients_per_round": 5, "batch_size": 8, "evaluate_every": 0}
    chosen = fedgma.masked_mean() if rule is None else rule
    return RunSpec(FEDERATION, rule=chosen, attack=attack, **{**shared, **settings})


FEDERATION = make_federation(SIZES, (6,), classes=3)
EVERY = [run_of(Attack(name, 0.5), seed=seed) for seed in range(2) for name in ATTACKS]


@pytest.mark.parametrize("trainer", ["loop", "lanes"])
def test_an_attacked_run_has_the_same_bits_alone_in_a_fleet_and_in_chunks(trainer):
    company = last_state(EVERY, trainer=trainer).params
    assert torch.equal(last_state(EVERY, trainer=trainer, chunk=4).params, company)
    for run in range(len(EVERY)):
        (alone,) = last_state([EVERY[run]], trainer=trainer).params
        assert torch.equal(alone, company[run])


def test_every_attack_changes_its_run_and_nothing_beside_it():
    honest = [run_of(seed=0), run_of(seed=1)]
    attacked = last_state([*honest, *EVERY], trainer="loop").params
    clean = last_state(honest, trainer="loop").params
    assert torch.equal(attacked[:2], clean)
    data_side = [name for name, row in ATTACKS.items() if row.poisons]  # these send honest updates of poisoned data
    for spec, params in zip(EVERY, attacked[2:], strict=True):
        assert torch.equal(params, clean[spec.seed]) == (spec.attack.name in data_side), spec.attack.name


@pytest.mark.parametrize("name", ATTACKS)
def test_a_share_of_zero_is_no_attack_to_the_bit(name):
    specs = [run_of(Attack(name, 0.0, 10.0)), run_of()]
    assert assemble(specs).attackers is None
    first, second = last_state(specs, trainer="loop").params
    assert torch.equal(first, second)


def given(updates):
    """A trainer whose clients return these updates [client, entry]."""

    def train(assignment):
        flat = updates[torch.from_numpy(assignment.lane_batch.client).to(updates.device)]
        return Trained(flat, shapes_of(assignment.start), {}, flat.new_zeros(len(flat)), flat.new_zeros(len(flat), 1))

    return train


def one_round(spec, updates):
    fleet = assemble([spec], trainer="loop")
    state, _ = play_round(replace(fleet, train=given(updates)), start(fleet))
    return start(fleet), state


UPDATES = torch.randn(len(SIZES), 21, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", ATTACKS)
def test_the_server_receives_the_attackers_rows_and_the_honest_ones_as_trained(name):
    spec = run_of(Attack(name, 0.5), rule=fedgma.masked_mean(0.4), clients_per_round=len(SIZES), seed=3)
    chosen = malicious(3, len(SIZES), 0.5)
    draws = [generator(3, "attack", 1, client).standard_normal(21, np.float32) for client in np.flatnonzero(chosen)]
    told = Known(UPDATES[chosen], UPDATES[~chosen], 3, lambda: torch.from_numpy(np.stack(draws)))  # 0.4 of 6: 3 votes
    sent = UPDATES.clone()
    sent[torch.from_numpy(chosen)] = spec.attack.send(told)
    before, state = one_round(spec, UPDATES)
    merged = fedgma.masked_mean(0.4)({"w": sent.numpy()}, SIZES)
    assert torch.equal(state.params[0], before.params[0] + torch.from_numpy(merged.update["w"]))


def test_where_everybody_attacks_the_honest_updates_are_their_own_as_trained():
    spec = run_of(Attack("inner_product", 1.0), rule=fedgma.mean(), clients_per_round=len(SIZES))
    before, state = one_round(spec, UPDATES)
    torch.testing.assert_close(state.params[0], before.params[0] - UPDATES.mean(0))


def test_scaffolds_variates_stay_those_of_honest_training():
    settings = {"algorithm": scaffold(), "rounds": 1}
    attacked, clean = run_of(Attack("sign_flip", 0.5, 100.0), **settings), run_of(**settings)
    first, second = (last_state([spec], trainer="loop") for spec in (attacked, clean))
    assert torch.equal(first.carried.variates[0], second.carried.variates[0])


# -- the norm bound ----------------------------------------------------------------------------------------------------

BOUND = 3.0
ROBUST = (fedgma.median(), fedgma.trimmed_mean(0.3), fedgma.multi_krum(0.3))


def by_server(rounds, rule):
    """The models after each round by the server of a deployment."""
    fleet = assemble([run_of(rule=rule, clients_per_round=len(SIZES))], trainer="loop")
    model = {name: value[0].numpy() for name, value in unflatten(start(fleet).params, fleet.shapes).items()}
    server = MaskedServer(rule, fedgma.sgd(1.0), norm_factor=BOUND)
    for updates in rounds:
        named = unflatten(updates, fleet.shapes)
        replies = [({n: v[c].numpy() for n, v in named.items()}, SIZES[c], c) for c in range(len(SIZES))]
        step = server.step(model, replies)
        model = model if step.params is None else step.params
        yield flatten({name: torch.as_tensor(model[name])[None] for name, _ in fleet.shapes})[0], step.refused


def growing_rounds():
    """Updates of several rounds, some of them much longer than usual or not finite."""
    source = torch.Generator().manual_seed(1)
    for round, factor in enumerate((0.01, 1.0, 5.0, 1.0, 0.2, 4.0, 1.0, 1.0)):
        updates = factor * torch.randn(len(SIZES), 21, generator=source)
        updates[round % len(SIZES)] *= 20
        if round in (2, 5):
            updates[0, 3] = torch.nan
        yield updates


@pytest.mark.parametrize("rule", [fedgma.mean(), fedgma.clipped(fedgma.masked_mean(), 2.0)], ids=lambda r: r.name)
def test_the_lab_bounds_norms_as_a_deployment_does_to_the_bit(rule):
    shared = {"rule": rule, "clients_per_round": len(SIZES), "rounds": 8}
    fleet = assemble([run_of(**shared), run_of(norm_factor=BOUND, **shared)], trainer="loop")
    state, refusals = start(fleet), 0
    for updates, (model, refused) in zip(growing_rounds(), by_server(growing_rounds(), rule), strict=True):
        state, played = play_round(replace(fleet, train=given(updates)), state)
        state = restore(fleet, [export(fleet, state, run) for run in range(2)])  # a stopped run goes on the same way
        assert torch.equal(state.params[1], model)
        assert played.records[1].refused == tuple((refusal.client, refusal.reason) for refusal in refused)
        assert all(reason == "nonfinite" for _, reason in played.records[0].refused)
        refusals += sum(reason == "norm" for _, reason in played.records[1].refused)
    assert rule.prepare is not None or refusals > 3


def test_a_norm_factor_must_be_positive():
    with pytest.raises(ConfigError, match="norm_factor must be a number above 0"):
        run_of(norm_factor=0.0)


@pytest.mark.gpu
def test_on_a_gpu_attacks_clipping_and_bounds_do_the_same():
    rule, shared = fedgma.clipped(fedgma.masked_mean(), 2.0), {"clients_per_round": len(SIZES), "norm_factor": BOUND}
    specs = [run_of(Attack(name, 0.5), rule=rule, **shared) for name in ATTACKS]
    specs += [run_of(Attack("sign_flip", 0.5, 100.0), rule=chosen, **shared) for chosen in ROBUST]
    here = assemble(specs, trainer="loop")
    there = assemble([replace(spec, federation=FEDERATION.to("cuda")) for spec in specs], trainer="loop")
    first, second = start(here), start(there)
    for _ in range(2):
        first, played = play_round(replace(here, train=given(UPDATES)), first)
        second, also = play_round(replace(there, train=given(UPDATES.cuda())), second)
        torch.testing.assert_close(second.params.cpu(), first.params, rtol=1e-5, atol=1e-6)
        assert [record.refused for record in also.records] == [record.refused for record in played.records]
