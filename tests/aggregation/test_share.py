"""The cap on one client's share of the weight: exact, in any order of arrival, and not to be dodged."""

import itertools

import numpy as np
import pytest

import fedgma
from fedgma.aggregation.server import MaskedServer

START = {"w": np.zeros(3)}


def step(replies, **options):
    server = MaskedServer(rule=fedgma.mean(), norm_factor=None, **{"share_cap": 0.5, **options})
    return server.step(START, replies)


def replies(*weights):
    return [({"w": np.full(3, float(place))}, weight, f"c{place}") for place, weight in enumerate(weights)]


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_no_client_outweighs_all_others_together(order):
    sent = replies(1e9, 10, 20, 30)
    result = step([sent[place] for place in order])
    assert [tuple(one) for one in result.capped] == [("c0", 1e9, 60.0)]
    np.testing.assert_allclose(result.params["w"], (1 * 10 + 2 * 20 + 3 * 30) / 120)


def test_weights_below_the_cap_are_left_alone():
    sent = replies(30, 10, 20)
    result = step(sent)
    assert result.capped == ()
    np.testing.assert_array_equal(result.params["w"], step(sent, share_cap=None).params["w"])


def test_a_larger_share_can_be_allowed():
    assert step(replies(90, 10), share_cap=0.9).capped == ()
    assert step(replies(91, 10), share_cap=0.9).capped[0].counted == pytest.approx(90)


def test_a_single_client_counts_in_full():
    result = step(replies(1000))
    assert result.capped == ()
    np.testing.assert_array_equal(result.params["w"], np.zeros(3))


@pytest.mark.parametrize("bad", [{"w": np.full(3, np.nan)}, {"v": np.zeros(3)}, "nonsense"])
@pytest.mark.parametrize("first", [True, False])
def test_an_invalid_reply_does_not_take_the_place_of_the_largest(bad, first):
    sent = replies(1e6, 10, 20)
    decoy = (bad, 1e8, "decoy")
    result = step([decoy, *sent] if first else [*sent, decoy])
    assert [(one.client, one.counted) for one in result.capped] == [("c0", 30.0)]
    assert [one.client for one in result.refused] == ["decoy"]


def test_an_update_that_is_too_long_does_not_take_the_place_of_the_largest():
    decoy = ({"w": np.full(3, 1e6)}, 1e8, "decoy")
    result = step([decoy, *replies(1e6, 10, 20)], gate=fedgma.Gate(max_norm=100.0))
    assert [one.client for one in result.capped] == ["c0"]


@pytest.mark.parametrize("client", ["c0", "c1"])
def test_the_first_of_two_replies_of_a_client_counts(client):
    sent = replies(1000, 10, 20)
    result = step([sent[1], sent[0], ({"w": np.full(3, 50.0)}, 10**6, client), sent[2]])
    np.testing.assert_array_equal(result.params["w"], step(sent).params["w"])
    assert [(one.client, one.reason) for one in result.refused] == [(client, "duplicate")]
    assert [(one.client, one.counted) for one in result.capped] == [("c0", 30.0)]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0, 2.0, float("nan")])
def test_a_share_that_cannot_be_kept_is_refused(share):
    with pytest.raises(fedgma.ConfigError, match="share_cap must be at least"):
        MaskedServer(share_cap=share)
