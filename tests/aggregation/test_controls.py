"""Controls beside the mask: the length of their steps under every server, and what they take away from the mask."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedgma
from fedgma.aggregation.aggregate import to_length
from fedgma.aggregation.server import MaskedServer, pack_state, unpack_state
from strategies import same_bits, stacks
from tables import OPTIMIZERS

ROUNDS = 6
SHAPES = {"conv": (4, 3, 5), "bias": (7,), "scale": ()}
LONG = {"damped_mean": fedgma.damped_mean(0.4), "shuffled_mask": fedgma.shuffled_mask(0.4, seed=2)}


def drawn(round, clients=10):
    """Updates of different sizes that agree in part, so that masks and moments are uneven."""
    rng = np.random.default_rng(round)
    common = np.random.default_rng(99)
    return {
        name: rng.standard_normal((clients, *shape)) * common.lognormal(0, 1, shape) + common.normal(0, 0.7, shape)
        for name, shape in SHAPES.items()
    }


def steps_of(rule, optimizer, others):
    """Each round's step, and the steps that a server with the other rules would take from the very same state."""
    params = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    state = optimizer.init(params)
    for round in range(ROUNDS):
        updates = drawn(round)
        taken = [optimizer.step(other(updates), state, params)[0] for other in others]
        moved, state = optimizer.step(rule(updates), state, params)
        yield [{name: model[name] - params[name] for name in params} for model in (moved, *taken)]
        params = moved


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", LONG)
def test_a_control_steps_as_far_as_the_masked_server_in_every_array(name, optimizer):
    for own, masked in steps_of(LONG[name], OPTIMIZERS[optimizer], [fedgma.masked_mean(0.4)]):
        for entry in SHAPES:
            assert np.linalg.norm(own[entry]) == pytest.approx(np.linalg.norm(masked[entry]), rel=1e-9)


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if "before" not in name])
def test_the_damped_step_has_the_direction_of_the_step_without_a_mask(optimizer):
    shorter = False
    for own, plain in steps_of(LONG["damped_mean"], OPTIMIZERS[optimizer], [fedgma.mean()]):
        for entry in ("conv", "bias"):
            lengths = np.linalg.norm(own[entry]) * np.linalg.norm(plain[entry])
            assert np.vdot(own[entry], plain[entry]) == pytest.approx(lengths, rel=1e-9)
            shorter = shorter or np.linalg.norm(own[entry]) < 0.99 * np.linalg.norm(plain[entry])
    assert shorter


def test_the_masked_mean_alone_does_not_tell_the_length_of_an_adaptive_step():
    """What the control was before: scaled by norm(mask * mean) / norm(mean), it is not as long as the masked step."""
    optimizer, gaps = fedgma.adam(0.1), []
    params = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    state = optimizer.init(params)
    for round in range(ROUNDS):
        masked = fedgma.masked_mean(0.4)(drawn(round))
        moved, after = optimizer.step(masked, state, params)
        plain, _ = optimizer.step(fedgma.mean()(drawn(round)), state, params)
        ratio = np.linalg.norm(masked.update["conv"]) / np.linalg.norm(masked.mean["conv"])
        steps = [np.linalg.norm(model["conv"] - params["conv"]) for model in (moved, plain)]
        gaps.append(abs(ratio * steps[1] / steps[0] - 1))
        params, state = moved, after
    assert max(gaps) > 0.03


@given(stacks(dtypes=("float64",)), st.sampled_from([0.4, 1.0]))
def test_without_an_optimiser_the_update_is_as_long_too(stack, tau):
    updates, weights = stack
    masked = fedgma.masked_mean(tau)(updates, weights).update
    for rule in (fedgma.damped_mean(tau), fedgma.shuffled_mask(tau, 1)):
        own = rule(updates, weights).update
        for name in updates:
            if np.linalg.norm(own[name]) > 0:
                assert np.linalg.norm(own[name]) == pytest.approx(np.linalg.norm(masked[name]), rel=1e-9, abs=1e-300)


def test_a_step_of_zeros_stays_zero_and_an_empty_one_empty():
    assert to_length(np.zeros(3), np.ones(3)).tolist() == [0, 0, 0]
    assert to_length(np.ones(3), np.zeros(3)).tolist() == [0, 0, 0]
    assert to_length(np.zeros((0, 2)), np.zeros((0, 2))).shape == (0, 2)
    assert to_length(np.array([1e200, 1e200]), np.array([3e-200, 4e-200])) == pytest.approx([5e-200 / np.sqrt(2)] * 2)


def test_the_stale_mask_is_that_of_the_round_before():
    optimizer, rule = fedgma.sgd(), fedgma.stale_mask(0.6)
    params = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    state = optimizer.init(params)
    first = rule(drawn(0))
    moved, state = optimizer.step(first, state, params)
    assert same_bits(moved, fedgma.mean()(drawn(0)).mean)  # no mask is known yet
    then, _ = optimizer.step(rule(drawn(1), state=first.state), state, params)
    before = fedgma.masked_mean(0.6)(drawn(0)).mask
    mean = fedgma.mean()(drawn(1)).mean
    for name in SHAPES:
        np.testing.assert_array_equal(then[name], before[name] * mean[name])


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adam before"])
def test_a_stopped_server_goes_on_with_the_mask_that_it_had(optimizer):
    params = {name: np.zeros(shape) for name, shape in SHAPES.items()}

    def replies(round):
        updates = drawn(round)
        return [({name: value[c] for name, value in updates.items()}, 1, c) for c in range(10)]

    whole = MaskedServer(fedgma.stale_mask(), OPTIMIZERS[optimizer], norm_factor=None)
    for round in range(2):
        params = whole.step(params, replies(round)).params
    again = MaskedServer(fedgma.stale_mask(), OPTIMIZERS[optimizer], norm_factor=None)
    restored = unpack_state(again, pack_state(whole, params))
    assert same_bits(whole.step(params, replies(2)).params, again.step(restored, replies(2)).params)


def test_half_of_the_clients_votes_on_the_other_half():
    rng = np.random.default_rng(0)
    updates, weights = rng.standard_normal((6, 50)), np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    found = fedgma.cross_fitted(0.5, seed=1)({"w": updates}, weights.tolist()).update["w"]

    def cross(own, others):
        votes = np.sign(updates[others]).sum(0)
        mask = np.where(abs(votes) >= 0.5 * len(others), 1.0, abs(votes) / len(others))
        return mask * (weights[own, None] * updates[own]).sum(0)

    possible = [
        (
            cross(list(half), [c for c in range(6) if c not in half])
            + cross([c for c in range(6) if c not in half], list(half))
        )
        / weights.sum()
        for half in combinations(range(6), 3)
    ]
    assert sum(np.allclose(found, one, rtol=1e-12) for one in possible) == 2  # the halves, and the halves swapped


def test_the_halves_go_by_the_clients_names_and_not_by_their_order():
    rng = np.random.default_rng(0)
    updates, names = rng.standard_normal((7, 20)), [f"client {place}" for place in range(7)]
    order = [3, 1, 6, 0, 2, 5, 4]
    rule = fedgma.cross_fitted(0.5)
    one = rule({"w": updates}, list(range(1, 8)), clients=names).update["w"]
    other = rule({"w": updates[order]}, [1 + place for place in order], clients=[names[place] for place in order])
    np.testing.assert_allclose(other.update["w"], one, rtol=1e-12)
    renamed = rule({"w": updates}, list(range(1, 8)), clients=[f"another {place}" for place in range(7)]).update["w"]
    seeded = fedgma.cross_fitted(0.5, seed=9)({"w": updates}, list(range(1, 8)), clients=names).update["w"]
    assert not np.allclose(renamed, one)
    assert not np.allclose(seeded, one)


def test_one_client_has_nobody_to_vote_on_it():
    assert fedgma.cross_fitted()({"w": np.array([[1.0, -2.0]])}, [3]).update["w"].tolist() == [1.0, -2.0]


def test_where_all_agree_no_control_changes_anything_but_the_shuffled_one():
    updates = {"w": abs(np.random.default_rng(0).standard_normal((6, 30))) + 0.1}
    plain = fedgma.mean()(updates).update["w"]
    for rule in (fedgma.damped_mean(), fedgma.shuffled_mask(), fedgma.stale_mask(), fedgma.cross_fitted()):
        np.testing.assert_allclose(rule(updates).update["w"], plain, rtol=1e-12)


def test_the_cross_fitted_mask_needs_all_updates_and_says_so():
    assert fedgma.cross_fitted().needs == ("updates",)
    assert fedgma.stale_mask().needs == ("mean", "votes")
    server = MaskedServer(fedgma.cross_fitted())
    with pytest.raises(fedgma.ConfigError, match="cross_fitted needs all updates in memory together"):
        server.add(server.open({"w": np.zeros(2)}), {"w": np.ones(2)}, 1, "a")


def test_a_users_own_optimiser_goes_with_a_rule_that_has_state():
    own = fedgma.sgd()._replace(name="own")
    states, models = [None, None], [{"w": np.zeros(3)}] * 2
    for round in range(2):
        clients = [{"w": np.array([1.0, -1.0, 2.0]) * sign + round} for sign in (1, 1, -1)]
        for place, optimizer in enumerate((fedgma.sgd(), own)):
            result = fedgma.server_round(
                models[place], clients, aggregator=fedgma.stale_mask(), optimizer=optimizer, state=states[place]
            )
            states[place], models[place] = result.state, result.params
    assert same_bits(models[0], models[1])
    assert list(states[1]) == ["rule.before"]
