"""Weights of clients in the mean: their numbers of samples, or the same for all."""

import numpy as np
import pytest

from fedgma.errors import ConfigError
from fedgma.experiments.settings import Settings, complete, record
from fedgma.simulation.fleet import assemble, lay_lane_batch, play_round, start
from fedgma.simulation.spec import RunSpec
from plain_pools import make_federation

SIZES = [7, 3, 12, 5]


def spec(**changes):
    return RunSpec(
        make_federation(SIZES, (6,)), model="logistic", rounds=1, clients_per_round=4, batch_size=4, **changes
    )


def test_clients_weigh_their_samples_or_all_the_same_in_one_fleet():
    fleet = assemble([spec(), spec(weighting="uniform")], trainer="lanes")
    lanes = [(run, client) for run in (0, 1) for client in range(4)]
    weights = lay_lane_batch(fleet, start(fleet), lanes)[1]
    assert weights.tolist() == [*SIZES, 1, 1, 1, 1]


def test_the_mean_of_uniform_weights_is_another():
    fleet = assemble([spec(), spec(weighting="uniform")], trainer="lanes")
    state, _ = play_round(fleet, start(fleet))
    plain, uniform = state.params.numpy()
    assert np.abs(plain - uniform).max() > 1e-6
    alone = assemble([spec(weighting="uniform")], trainer="lanes")
    np.testing.assert_allclose(play_round(alone, start(alone))[0].params.numpy()[0], uniform, atol=1e-6)


def test_an_unknown_weighting_is_refused_and_the_usual_one_is_not_recorded():
    with pytest.raises(ConfigError, match="unknown weighting 'size'; known: samples, uniform"):
        spec(weighting="size")
    assert "weighting" not in record(complete(Settings()))
    assert record(complete(Settings(weighting="uniform")))["weighting"] == "uniform"
