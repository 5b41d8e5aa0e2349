"""Algorithms with client state, a broadcast or perturbed gradients: as in their papers, by every trainer, resumable."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedgma
from fedgma.aggregation.optimizers import server_optimizer
from fedgma.errors import ConfigError
from fedgma.simulation.algorithms import ALGORITHMS, Algorithm, fedacg, fedsam
from fedgma.simulation.attacks import Attack
from fedgma.simulation.fleet import assemble, play, play_round, restore, start
from fedgma.simulation.rates import beyond_kernels
from fedgma.simulation.sampling import sample_clients
from fedgma.simulation.spec import RunSpec
from fedgma.simulation.state import export
from literal_algorithms import ROUNDS
from literal_algorithms import play as play_literally
from plain_pools import make_federation
from run_specs import last_state, relative_distance

EVEN, UNEVEN = make_federation([12] * 6, (5,), classes=3), make_federation([12, 3, 17, 9, 5, 8], (5,), classes=3)
# settings large enough for every term to matter
CHOSEN = {
    "fedprox": {"mu": 0.5},
    "scaffold": {},
    "feddyn": {"alpha": 0.5},
    "fedcm": {"alpha": 0.3},
    "fedacg": {"lambda_": 0.7, "beta": 0.5},
    "fedsam": {"rho": 0.3},
    "mofedsam": {"rho": 0.3, "beta": 0.3},
    "fedspeed": {"lambda_": 2.0, "rho": 0.3, "alpha": 0.6},
    "fedsmoo": {"beta": 2.0, "rho": 0.3},
}
STATEFUL = [name for name in CHOSEN if ALGORITHMS[name].make(**CHOSEN[name]).keeps != "nothing"]


class Flat(nn.Module):
    """Softmax regression without a bias."""

    def __init__(self, shape, classes):
        super().__init__()
        self.linear = nn.Linear(shape[0], classes, bias=False)

    def forward(self, x):
        return self.linear(x)


class Normalised(Flat):
    """With batch normalisation of the input."""

    def __init__(self, shape, classes):
        super().__init__(shape, classes)
        self.norm = nn.BatchNorm1d(shape[0])

    def forward(self, x):
        return self.linear(self.norm(self.linear.weight.sum() * x))


def run_of(name, federation=UNEVEN, *, tau=None, **settings):
    row, own = ALGORITHMS[name], CHOSEN[name]
    shared = {"model": Flat, "rounds": 3, "clients_per_round": 4, "batch_size": 5, "client_learning_rate": 0.3}
    return RunSpec(
        federation,
        algorithm=row.make(**own),
        optimizer=server_optimizer(row.server, row.learning_rate, "after", beta1=own.get(row.momentum, 0.9)),
        rule=fedgma.mean() if tau is None else fedgma.masked_mean(tau),
        **{**shared, "evaluate_every": 0, **settings},
    )


def test_every_algorithm_that_changes_local_training_has_a_literal_form():
    changed = [name for name, row in ALGORITHMS.items() if row.make() != Algorithm()]
    assert sorted(changed) == sorted(CHOSEN) == sorted(ROUNDS)


@pytest.mark.parametrize("tau", [None, 0.6])
@pytest.mark.parametrize("name", CHOSEN)
def test_an_algorithm_equals_its_papers_box(name, tau):
    spec = run_of(name, EVEN, tau=tau, momentum=0.0, local_epochs=2)
    fleet = assemble([spec], trainer="loop")
    begun = start(fleet).params[0].double().numpy().reshape(3, 5)
    expected = play_literally(name, spec, begun, tau or 0.0, **CHOSEN[name])
    actual = last_state([spec], trainer="loop").params[0].double().numpy().reshape(3, 5)
    assert np.linalg.norm(actual - expected) < 1e-6 * np.linalg.norm(expected)
    assert np.linalg.norm(expected - begun) > 0.1 * np.linalg.norm(begun)


@pytest.fixture(scope="module")
def company():
    """One run of every algorithm and a plain one, in one fleet."""
    return [*(run_of(name, tau=0.4, seed=seed) for seed, name in enumerate(CHOSEN)), plain_run()]


def plain_run():
    return RunSpec(UNEVEN, model=Flat, rounds=3, clients_per_round=4, batch_size=5, evaluate_every=0)


@pytest.mark.parametrize("trainer", ["lanes", "engine"])
def test_every_trainer_gives_the_same_run(company, trainer):
    first, second = (last_state(company, trainer=name) for name in ("loop", trainer))
    for run in range(len(company)):
        assert relative_distance(first.params[run], second.params[run]) < 1e-5


def test_a_run_is_the_same_alone_and_in_company(company):
    together = last_state(company, trainer="lanes")
    for run, spec in enumerate(company):
        alone = last_state([spec], trainer="lanes")
        assert relative_distance(alone.params[0], together.params[run]) < 1e-5


@pytest.mark.parametrize("trainer", ["loop", "lanes"])
def test_a_resumed_run_is_the_same_to_the_bit(company, trainer):
    straight, fleet = last_state(company, trainer=trainer), assemble(company, trainer=trainer)
    state = start(fleet)
    for _ in range(2):
        state, _ = play_round(fleet, state)
    saved = [export(fleet, state, run) for run in range(len(company))]
    state, _ = play_round(fleet, restore(fleet, saved))
    assert torch.equal(straight.params, state.params)
    for run, spec in enumerate(company):
        carried = {"control", "variates", "tilt", "tilts"} & saved[run].keys()
        assert len(carried) == spec.algorithm.on_server + spec.algorithm.arrays_of_a_client + spec.algorithm.tilted
        for name in carried:
            assert saved[run][name].any()


@pytest.mark.parametrize("name", STATEFUL)
def test_a_refused_client_keeps_its_arrays(name):
    federation = make_federation([12] * 4, (5,), classes=3)
    spec = run_of(name, federation, rounds=2)
    fleet = assemble([spec], trainer="loop")
    state, _ = play_round(fleet, start(fleet))
    bad = int(sample_clients(spec, 2)[0])
    federation.train.x[federation.clients[bad][0]] = float("nan")
    before = {key: value.copy() for key, value in export(fleet, state, 0).items()}
    state, played = play_round(fleet, state)
    after = export(fleet, state, 0)
    assert played.records[0].refused == ((bad, "nonfinite"),)
    for key in {"variates", "tilts"} & after.keys():
        assert np.array_equal(before[key][bad], after[key][bad])
        assert not np.array_equal(before[key], after[key])
    assert all(np.isfinite(value).all() for value in after.values())


@pytest.mark.parametrize("name", STATEFUL)
def test_a_round_without_a_counted_client_changes_nothing(name):
    spec = run_of(name, rounds=2)
    fleet = assemble([spec], trainer="loop")
    state, _ = play_round(fleet, start(fleet))
    before = export(fleet, state, 0)

    def nothing(task):
        trained = fleet.train(task)
        return trained._replace(flat=trained.flat * float("nan"))

    state, played = play_round(replace(fleet, train=nothing), state)
    assert played.records[0].clients == 0
    after = export(fleet, state, 0)
    for key in after.keys() - {"round"}:
        assert np.array_equal(before[key], after[key])


@pytest.mark.parametrize("name", ["feddyn", "fedspeed", "fedsmoo"])
def test_what_clients_keep_is_that_of_honest_training(name):
    attacked, clean = (run_of(name, rounds=1, attack=a) for a in (Attack("sign_flip", 0.5, 100.0), None))
    first, second = (last_state([spec], trainer="loop") for spec in (attacked, clean))
    assert torch.equal(first.carried.variates[0], second.carried.variates[0])
    assert not torch.equal(first.params, second.params)


def test_the_direction_is_the_mean_update_over_the_mean_distance_of_a_gradient():
    spec = run_of("fedcm", UNEVEN, rounds=1, momentum=0.0)
    fleet = assemble([spec], trainer="loop")
    before = start(fleet)
    after, _ = play_round(fleet, before)
    sizes = np.array([len(UNEVEN.clients[client]) for client in sample_clients(spec, 1)])
    distance = 0.3 * np.average(-(-sizes // 5), weights=sizes)  # rate times steps of five samples
    torch.testing.assert_close(after.carried.control, (before.params - after.params) / distance)


@pytest.mark.parametrize("name", ["mean", "gma", "median", "multi_krum", "stale_mask"])
def test_algorithms_take_every_kind_of_rule(name):
    rule = fedgma.aggregation.rules.RULES[name].make()
    specs = [replace(run_of(one), rule=rule) for one in CHOSEN]
    assert torch.isfinite(last_state(specs, trainer="lanes").params).all()


def test_a_plain_fleet_carries_nothing_and_takes_no_second_pass():
    fleet = assemble([plain_run()], trainer="lanes")
    assert fleet.algorithms is None
    assert start(fleet).carried == ((None, (), None, ()))


def test_a_perturbed_pass_leaves_running_statistics_and_loss_to_the_first():
    """At the same weights the statistics after one step do not depend on the perturbation."""
    federation = make_federation([4, 4], (5,), classes=3)
    settings = {"model": Normalised, "rounds": 1, "clients_per_round": 2, "batch_size": 4, "evaluate_every": 0}
    specs = [RunSpec(federation, algorithm=one, **settings) for one in (Algorithm(), fedsam(0.5))]
    for trainer in ("loop", "lanes"):
        plain, sharp = (list(play([spec], trainer=trainer))[-1] for spec in specs)
        assert plain.records[0].train_loss == sharp.records[0].train_loss
        assert not torch.equal(plain.state.params, sharp.state.params)
        for key, value in plain.state.buffers.items():
            torch.testing.assert_close(value, sharp.state.buffers[key])


@pytest.mark.parametrize("name", CHOSEN)
def test_kernels_decline_scaled_and_perturbed_gradients(name):
    declined = beyond_kernels([plain_run(), run_of(name)])
    assert declined == (
        [] if name in ("fedprox", "scaffold", "feddyn", "fedacg") else ["scaled or perturbed gradients"]
    )


@pytest.mark.parametrize(
    ("make", "settings", "said"),
    [
        ("feddyn", {"alpha": 0.0}, "alpha must be a number above 0, got 0.0"),
        ("fedcm", {"alpha": 1.5}, "alpha must be above 0 and at most 1, got 1.5"),
        ("fedacg", {"lambda_": 1.0}, "lambda_ must be at least 0 and below 1"),
        ("fedsam", {"rho": float("inf")}, "rho must be a number above 0"),
    ],
)
def test_impossible_settings_are_refused(make, settings, said):
    with pytest.raises(ConfigError, match=said):
        ALGORITHMS[make].make(**settings)


def test_a_lookahead_needs_a_server_with_momentum():
    with pytest.raises(ConfigError, match="needs the server optimiser 'momentum', got 'sgd'"):
        replace(plain_run(), algorithm=fedacg())
    with pytest.raises(ConfigError, match="needs mu > 0"):
        Algorithm(keeps="duals")
    with pytest.raises(ConfigError, match="keeps one of nothing, gradients"):
        Algorithm(keeps="everything")
