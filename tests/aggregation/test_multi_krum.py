"""Multi-Krum against loops over plain numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedgma
from fedgma.errors import ConfigError


def literal(updates, share):
    """The clients that multi-Krum averages, and their mean."""
    clients = len(updates)
    left_out = int(share * clients)
    scores = []
    for one in range(clients):
        others = [other for other in range(clients) if other != one]
        distances = sorted(sum((a - b) ** 2 for a, b in zip(updates[one], updates[o], strict=True)) for o in others)
        scores.append(sum(distances[: max(1, clients - left_out - 2)]))
    limit = sorted(scores)[clients - left_out - 1]
    chosen = [client for client in range(clients) if scores[client] <= limit]
    return chosen, [sum(updates[client][entry] for client in chosen) / len(chosen) for entry in range(len(updates[0]))]


WHOLE = st.integers(-8, 8).map(float)
STACKS = st.integers(1, 7).flatmap(
    lambda clients: st.lists(st.lists(WHOLE, min_size=3, max_size=3), min_size=clients, max_size=clients)
)


@given(STACKS, st.sampled_from([0.0, 0.1, 0.25, 0.4]))
def test_the_mean_is_that_of_the_literal_rule_in_any_order_and_library(updates, share):
    _, wanted = literal(updates, share)
    forward, backward = np.array(updates), np.array(updates[::-1])
    for stack in (forward, backward, torch.from_numpy(forward)):
        named = {"a": stack[:, :2], "b": stack[:, 2:]}  # distances are over all entries together
        merged = fedgma.multi_krum(share)(named, [1] * len(updates)).update
        np.testing.assert_allclose(np.concatenate([np.asarray(merged["a"]), np.asarray(merged["b"])]), wanted)


def test_a_crowd_outvotes_those_who_stand_far_away():
    updates = [[1.0, 1.0], [1.1, 0.9], [0.9, 1.0], [1.0, 1.1], [50.0, -50.0]]
    chosen, _ = literal(updates, 0.2)
    assert chosen == [0, 1, 2, 3]
    merged = fedgma.multi_krum(0.2)({"w": np.array(updates)}, [1, 1, 1, 1, 1000]).update["w"]
    np.testing.assert_allclose(merged, [1.0, 1.0])


@pytest.mark.parametrize("share", [-0.1, 0.5, True, "0.1"])
def test_an_impossible_share_is_refused(share):
    with pytest.raises(ConfigError, match="at least 0 and below"):
        fedgma.multi_krum(share)
