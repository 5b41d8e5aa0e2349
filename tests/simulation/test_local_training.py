"""Optimisers and schedules of local training in a fleet: runs with different ones together, stopped, resumed."""

import numpy as np
import pytest
import torch

from fedgma.errors import ConfigError
from fedgma.simulation.fleet import assemble, lay_lane_batch, play, play_round, start
from fedgma.simulation.rates import beyond_kernels
from fedgma.simulation.state import export
from fedgma.training.choose import choose
from fedgma.training.memory import measure
from fedgma.training.models import build
from fedgma.training.schedules import Schedule
from fedgma.training.tasks import REGRESSION
from plain_pools import make_federation
from run_specs import make_spec

SIZES, SHAPE = [20, 13, 30, 8], (1, 3, 3)
SGD = [
    {},
    {"weight_decay": 0.1, "round_schedule": Schedule("exponential", decay=0.5)},
    {"nesterov": True, "step_schedule": Schedule("cosine", warm_up=2)},
    {"scaffold": True, "nesterov": True, "step_schedule": Schedule("step", decay=0.5, every=2)},
]
ADAMW = [
    {"client_optimizer": "adamw", "lr": 0.01, "client_beta2": beta, "weight_decay": decay, "mu": decay}
    for beta, decay in ((0.99, 0.0), (0.9, 0.3))
]


def run_of(**settings):
    settings = {"model": "logistic", "rounds": 3, "clients_per_round": 3, "batch_size": 4, **settings}
    return make_spec(make_federation(SIZES, SHAPE), **settings)


def last(specs, **options):
    *_, played = play(specs, trainer="lanes", **options)
    return played.state


@pytest.mark.parametrize("settings", [SGD, ADAMW], ids=["sgd", "adamw"])
def test_a_run_in_company_resumed_after_a_round_is_the_run_alone(settings):
    federation = make_federation(SIZES, SHAPE)
    words = {"model": "logistic", "rounds": 3, "clients_per_round": 3, "batch_size": 4}
    specs = [make_spec(federation, seed=seed, **words, **own) for seed, own in enumerate(settings)]
    straight = last(specs)
    fleet = assemble(specs, trainer="lanes")
    state, _ = play_round(fleet, start(fleet))
    resumed = last(specs, states=[export(fleet, state, run) for run in range(len(specs))])
    assert torch.equal(straight.params, resumed.params)
    for run, spec in enumerate(specs):
        torch.testing.assert_close(last([spec]).params[0], straight.params[run], rtol=1e-4, atol=1e-6)


def test_rates_follow_the_round_and_the_clients_own_steps():
    schedules = {"round_schedule": Schedule("exponential", decay=0.5), "step_schedule": Schedule("cosine")}
    spec = run_of(lr=0.4, **schedules)
    fleet = assemble([spec])
    state, _ = play_round(fleet, start(fleet))
    lane_batch, _ = lay_lane_batch(fleet, state, [(0, 1), (0, 3)])  # the second round, 13 and 8 samples
    assert lane_batch.steps.tolist() == [4, 2]
    full = 0.4 * 0.5
    np.testing.assert_allclose(lane_batch.lr[0], full * (1 + np.cos(np.pi * np.arange(4) / 4)) / 2, rtol=1e-6)
    np.testing.assert_allclose(lane_batch.lr[1, :2], [full, full / 2], rtol=1e-6)


def test_scaffolds_variates_are_the_clients_gradients_whatever_the_rates():
    words = {"scaffold": True, "rounds": 1, "batch_size": 64, "local_epochs": 5, "clients_per_round": 4, "lr": 1e-4}
    plain = last([run_of(**words, momentum=0.0)])
    changed = last([run_of(**words, nesterov=True, step_schedule=Schedule("exponential", warm_up=2, decay=0.5))])
    assert plain.carried.variates[0].norm() > 0.1
    torch.testing.assert_close(changed.carried.variates[0], plain.carried.variates[0], rtol=0.02, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"client_optimizer": "lion"}, "unknown client_optimizer 'lion'; known: sgd, adamw"),
        ({"weight_decay": -0.1}, "expected weight_decay >= 0"),
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1, got 1.0"),
        (
            {"label_smoothing": 0.1, "task": REGRESSION},
            "label_smoothing is for the tasks classification, imbalanced and next_token",
        ),
        ({"client_epsilon": 0.0}, "client_epsilon > 0"),
        ({"client_beta2": 1.0}, "client_beta1 and client_beta2 at least 0 and below 1"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov needs client_optimizer 'sgd' with momentum above 0"),
        ({"round_schedule": Schedule("cosine", length=2)}, "the learning rate falls to 0 before the last of 3 rounds"),
        ({"round_schedule": Schedule("exponential", decay=1e-30)}, "falls to 0 before the last of 3 rounds"),
        ({"client_optimizer": "adamw", "scaffold": True}, "so it needs client_optimizer 'sgd', got 'adamw'"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_local_training_that_makes_no_sense_is_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        run_of(**settings)


def test_a_fleet_has_one_local_optimiser():
    with pytest.raises(ConfigError, match=r"must share .*client_optimizer, label_smoothing.* and the shape of inputs"):
        assemble([run_of(), run_of(client_optimizer="adamw")])


@pytest.mark.parametrize("settings", [ADAMW[0], {"label_smoothing": 0.1}], ids=["adamw", "smoothing"])
def test_what_the_cpu_kernels_do_not_have_is_left_to_torch(settings):
    federation, model = make_federation(SIZES, SHAPE), build("logistic", SHAPE, 10, seed=0)
    assert beyond_kernels([run_of(**SGD[2])]) == []
    (beyond,) = beyond_kernels([run_of(**settings)])
    with pytest.raises(ConfigError, match=f"the CPU kernels have no {beyond}; use trainer 'auto'"):
        choose("kernels", model, [federation.train], beyond_kernels=[beyond])


def test_labels_are_smoothed_in_training_and_not_in_evaluation():
    specs = [run_of(label_smoothing=share, rounds=1, lr=1e-12) for share in (0.0, 0.5)]
    plain, smooth = (next(play([spec], trainer="lanes")).records[0] for spec in specs)
    assert smooth.scores["test"]["loss"] == pytest.approx(plain.scores["test"]["loss"])
    assert abs(smooth.train["loss"] - plain.train["loss"]) > 1e-3


def test_a_lane_of_adamw_takes_one_more_copy_of_the_weights():
    federation, model = make_federation(SIZES, (3, 28, 28)), build("lenet", (3, 28, 28), 10, seed=0)
    first, second = (measure(model, federation.train, 4, budget=2**30, kept=kept).lanes for kept in (1, 2))
    assert second < first
