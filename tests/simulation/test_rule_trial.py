"""The trial of a rule before a run: what mixes runs is found, and no rule of the library is taken for such a one."""

import numpy as np
import pytest
import torch

import fedgma
from fedgma.aggregation.own import as_rule
from fedgma.simulation.rule_trial import try_rule
from tables import AGGREGATORS

SHAPES = (("conv.weight", torch.Size([4, 3])), ("bias", torch.Size([4])))


@pytest.mark.parametrize("name", AGGREGATORS)
def test_the_rules_of_the_library_do_not_mix_runs(name):
    try_rule(AGGREGATORS[name], SHAPES)


@pytest.mark.parametrize(
    "rule",
    [
        lambda mean: mean / abs(mean).max(),
        lambda mean, votes: (mean, (abs(votes) >= np.median(abs(votes))).astype("float32")),
        lambda mean, clients: mean * mean[::-1],
    ],
    ids=["a maximum of all", "a median of all", "another run"],
)
def test_a_rule_that_mixes_runs_is_found(rule):
    with pytest.raises(fedgma.ConfigError, match="mixes runs that train together"):
        try_rule(as_rule(rule), SHAPES)


def test_arrays_that_are_too_large_are_left_out_unless_all_are(monkeypatch):
    seen = []

    def rule(mean, name):
        seen.append(name)
        return mean

    monkeypatch.setattr("fedgma.simulation.rule_trial.LARGEST", 4)
    try_rule(as_rule(rule), SHAPES)
    assert set(seen) == {"bias"}
    seen.clear()
    try_rule(as_rule(rule), SHAPES[:1])
    assert set(seen) == {"conv.weight"}
