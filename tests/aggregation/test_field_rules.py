"""The field's rules against slow, literal forms of their papers, and TIES against mergekit where it is installed."""

import math
from functools import partial

import numpy as np
import pytest
import torch

import fedgma
from fedgma.aggregation.server import MaskedServer
from strategies import rows

RNG = np.random.default_rng(4)
CLIENTS = 6
UPDATES = {"a.weight": RNG.standard_normal((CLIENTS, 5, 7)), "a.bias": RNG.standard_normal((CLIENTS, 9))}
UPDATES["a.bias"][:, 3] = 0.0
WEIGHTS = [4, 1, 9, 2, 2, 7]


def columns(stack):
    """The values of each entry over the clients, as a list of lists."""
    return stack.reshape(len(stack), -1).T.tolist()


def trim(stack, density):
    """The largest entries of each client's array, found by sorting."""
    flat = stack.reshape(len(stack), -1).copy()
    for row in flat:
        kept = sorted(range(len(row)), key=lambda place: -abs(row[place]))[: max(1, int(density * len(row)))]
        row[[place for place in range(len(row)) if place not in kept]] = 0.0
    return flat.reshape(stack.shape)


def merge_elected(values, weights, elect):
    plus = elect(values, weights)
    agree = [(v, w) for v, w in zip(values, weights, strict=True) if (v > 0 if plus else v < 0)]
    return sum(v * w for v, w in agree) / sum(w for _, w in agree) if agree else 0.0


def by_sum(values, weights):
    return sum(v * w for v, w in zip(values, weights, strict=True)) >= 0


def by_votes(values, weights):
    votes = sum(math.copysign(1, v) if v else 0 for v in values)
    return by_sum(values, weights) if votes == 0 else votes > 0


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_ties_trims_elects_and_merges_as_in_its_paper(density):
    actual = fedgma.ties(density)(UPDATES, WEIGHTS).update
    for name, stack in UPDATES.items():
        trimmed = trim(stack, density) if density < 1 else stack
        expected = [merge_elected(values, WEIGHTS, by_sum) for values in columns(trimmed)]
        np.testing.assert_allclose(actual[name].reshape(-1), expected, atol=1e-12)


@pytest.mark.parametrize("density", [0.2, 1.0])
def test_ties_streamed_and_merged_is_mergekits(density):
    pytest.importorskip("mergekit", reason="mergekit is not installed")
    from mergekit.merge_methods.generalized_task_arithmetic import get_mask
    from mergekit.sparsify import magnitude

    rule, halves = fedgma.ties(density), []
    for part in (range(4), range(4, CLIENTS)):
        halves.append(rule.open())
        for client in part:
            update = {name: torch.from_numpy(array[client]).float() for name, array in UPDATES.items()}
            halves[-1].add(rule.prepared(update, None), WEIGHTS[client])
    halves[0].merge(fedgma.from_bytes(fedgma.to_bytes(halves[1])))
    actual = rule.conclude(halves[0]).update
    for name, stack in UPDATES.items():
        sparse = torch.stack([magnitude(torch.from_numpy(row).float(), density) for row in stack])
        weights = torch.tensor(WEIGHTS).float().reshape(-1, *[1] * (sparse.dim() - 1))
        agree = get_mask(sparse * weights)
        divisor = (weights * agree).sum(0)
        expected = (sparse * weights * agree).sum(0) / divisor.where(divisor != 0, torch.ones(()))
        torch.testing.assert_close(actual[name], expected, rtol=0, atol=1e-6)


def test_entries_of_one_size_at_the_edge_of_the_trim_all_stay():
    rule = fedgma.ties(0.5)
    assert rule([{"w": np.array([2.0, -2.0, 2.0, 1.0])}]).update["w"].tolist() == [2.0, -2.0, 2.0, 0.0]
    assert rule([{"w": np.array([3.0])}, {"w": "text"}]).update["w"].tolist() == [3.0]  # at least one


def test_the_majority_sign_counts_heads():
    actual = fedgma.majority_sign()(UPDATES, WEIGHTS).update
    for name, stack in UPDATES.items():
        expected = [merge_elected(values, WEIGHTS, by_votes) for values in columns(stack)]
        np.testing.assert_allclose(actual[name].reshape(-1), expected, atol=1e-12)


@pytest.mark.parametrize("tau", [0.0, 0.4, 1.0])
def test_the_magnitude_agreement_is_the_share_that_does_not_cancel(tau):
    found = fedgma.magnitude_agreement(tau)(UPDATES, WEIGHTS).mask
    for name, stack in UPDATES.items():
        for mask, values in zip(found[name].reshape(-1), columns(stack), strict=True):
            total = abs(sum(v * w for v, w in zip(values, WEIGHTS, strict=True)))
            size = sum(abs(v) * w for v, w in zip(values, WEIGHTS, strict=True))
            agreement = total / size if size else 0.0
            assert mask == pytest.approx(1.0 if agreement >= tau else agreement, abs=1e-12)


def noise(values, population):
    """The variance of the mean of equally weighted values, drawn from a population."""
    return np.var(values, ddof=1) / len(values) * (1 - len(values) / population)


def test_wiener_goes_on_where_the_squares_of_updates_are_too_large_for_its_state():
    updates = {"w": np.full((4, 2), 1e30, np.float32) * np.array([[1], [2], [3], [4]], np.float32)}
    first = fedgma.wiener(0.5)(updates)
    assert all(np.isfinite(first.state[name]["w"]).all() for name in ("power", "noise"))
    assert np.isfinite(fedgma.wiener(0.5)(updates, state=first.state).update["w"]).all()


def test_wiener_uses_the_signal_and_noise_of_past_rounds():
    rule, state = fedgma.wiener(0.75, population=24), None
    power, spread = np.zeros(9), np.zeros(9)
    for round in range(3):
        updates = {"b": UPDATES["a.bias"] + round}
        merged = rule(updates, state=state)
        wanted = np.ones(9) if round == 0 else np.maximum(0, 1 - spread / power)
        if round == 1:
            wanted[3] = 1.0  # always zero so far: nothing is known
        np.testing.assert_allclose(merged.mask["b"], wanted, rtol=1e-6)
        values = columns(updates["b"])
        power = 0.75 * power + 0.25 * np.array([np.mean(v) ** 2 for v in values])
        spread = 0.75 * spread + 0.25 * np.array([noise(v, 24) for v in values])
        power[3] = power[3] if power[3] else 1e-300
        state = merged.state


def test_all_clients_of_a_population_have_no_noise():
    merged = fedgma.james_stein(population=CLIENTS)(UPDATES)
    assert all((mask == 1).all() for mask in merged.mask.values())


def test_james_stein_shrinks_each_array_by_one_number():
    merged = fedgma.james_stein(population=24)(UPDATES)
    for name, stack in UPDATES.items():
        values = columns(stack)
        length = sum(np.mean(v) ** 2 for v in values)
        factor = max(0.0, 1 - (1 - 2 / len(values)) * sum(noise(v, 24) for v in values) / length)
        np.testing.assert_allclose(merged.mask[name], factor, rtol=1e-10)
    assert fedgma.james_stein()({"w": UPDATES["a.bias"][:, :2]}).mask["w"].tolist() == [1.0, 1.0]


def test_fedexp_is_a_literal_reference_over_two_rounds():
    def gradient(x, client):
        return (client + 1) * (x - np.array([client, -client, 1.0]))

    def trained(x, client):
        for _ in range(3):
            x = x - 0.1 * gradient(x, client)
        return x

    ours, theirs, epsilon, weights = {"x": np.zeros(3)}, np.zeros(3), 1e-3, [1, 3, 2]
    shares = np.array(weights) / sum(weights)
    for _ in range(2):
        clients = [{"x": trained(ours["x"], client)} for client in range(3)]
        ours = fedgma.server_round(ours, clients, weights, aggregator=fedgma.fedexp(epsilon)).params
        deltas = [theirs - trained(theirs, client) for client in range(3)]
        mean = sum(p * d for p, d in zip(shares, deltas, strict=True))
        norms = sum(p * (d @ d) for p, d in zip(shares, deltas, strict=True))
        rate = max(1.0, norms / (2 * (mean @ mean + epsilon)))
        theirs = theirs - rate * mean
        np.testing.assert_allclose(ours["x"], theirs, rtol=0, atol=1e-6)
    assert rate > 1.0


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: fedgma.ties(0), "density .* must be above 0 and at most 1, got 0"),
        (lambda: fedgma.wiener(1.0), "smoothing must be at least 0 and below 1, got 1.0"),
        (lambda: fedgma.wiener(population=0), "population .* must be a whole number above 0, got 0"),
        (lambda: fedgma.fedexp(0.0), r"extrapolation \(FedExP's epsilon\) must be a number above 0, got 0.0"),
        (lambda: fedgma.smoothed(fedgma.mean(), 1.0), "beta .* must be at least 0 and below 1, got 1.0"),
        (lambda: fedgma.smoothed(fedgma.smoothed(fedgma.mean())), "'smoothed_mean' is smoothed already"),
        (lambda: fedgma.by_array(fedgma.median(), {}), "'median' is a rule for a whole model"),
        (lambda: fedgma.unmasked(fedgma.damped_mean(), "x"), "'damped_mean' is a rule for a whole model"),
        (lambda: fedgma.by_array(fedgma.mean(), {"x": fedgma.ties()}), "'ties' for 'x' has `prepare`"),
        (lambda: fedgma.by_array(fedgma.mean(), {"x": fedgma.damped_mean()}), "'damped_mean' for 'x' keeps lengths"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_sentence(make, sentence):
    with pytest.raises(fedgma.ConfigError, match=sentence):
        make()


# -- rules made of rules -----------------------------------------------------------------------------------------------


def test_arrays_can_have_thresholds_of_their_own_or_none():
    rule = fedgma.by_array(fedgma.masked_mean(0.4), {"*.bias": fedgma.masked_mean(1.0), "a.*": fedgma.mean()})
    merged = rule({**UPDATES, "b.weight": UPDATES["a.weight"]}, WEIGHTS)
    soft, usual = fedgma.masked_mean(1.0)(UPDATES, WEIGHTS), fedgma.masked_mean(0.4)(UPDATES, WEIGHTS)
    np.testing.assert_array_equal(merged.mask["a.bias"], soft.mask["a.bias"])
    assert (merged.mask["a.weight"] == 1).all()
    np.testing.assert_array_equal(merged.mask["b.weight"], usual.mask["a.weight"])


@pytest.mark.parametrize(
    "wrap", [lambda rule: rule, fedgma.keep_norm, fedgma.smoothed, partial(fedgma.clipped, norm=9.0)]
)
def test_patterns_that_fit_no_array_of_a_model_are_refused(wrap):
    model, clients = {"a.weight": np.zeros(2)}, [{"a.weight": np.ones(2)}] * 2
    with pytest.raises(fedgma.ConfigError, match=r"the model has no array 'b\*'; it has a.weight"):
        fedgma.server_round(model, clients, aggregator=wrap(fedgma.unmasked(fedgma.and_mask(1.0), "b*")))
    with pytest.raises(fedgma.ConfigError, match=r"the model has no array 'b\*'; it has a.weight"):
        MaskedServer(wrap(fedgma.unmasked(fedgma.and_mask(1.0), "b*"))).step(model, [])
    several = wrap(fedgma.unmasked(fedgma.and_mask(1.0), "b*", "a*"))
    assert fedgma.server_round(model, clients, aggregator=several).params["a.weight"].tolist() == [1.0, 1.0]


def test_a_wrapped_rule_keeps_the_norm_of_its_mean():
    merged = fedgma.keep_norm(fedgma.magnitude_agreement(1.0))(UPDATES, WEIGHTS)
    for name, mean in fedgma.mean()(UPDATES, WEIGHTS).mean.items():
        assert np.linalg.norm(merged.update[name]) == pytest.approx(np.linalg.norm(mean), rel=1e-12)
    plain = fedgma.norm_kept(0.7)(UPDATES, WEIGHTS)
    wrapped = fedgma.keep_norm(fedgma.masked_mean(0.7))(UPDATES, WEIGHTS)
    np.testing.assert_array_equal(wrapped.mask["a.bias"], plain.mask["a.bias"])


def test_a_smoothed_mask_is_an_average_over_rounds_and_the_inner_state_goes_on():
    rule, inner = fedgma.smoothed(fedgma.wiener(0.5), 0.75), fedgma.wiener(0.5)
    state = before = None
    mask = 1.0
    for _ in range(3):
        merged, plain = rule(UPDATES, state=state), inner(UPDATES, state=before)
        mask = 0.75 * mask + 0.25 * plain.mask["a.bias"]
        np.testing.assert_allclose(merged.mask["a.bias"], mask, rtol=1e-12)
        state, before = merged.state, plain.state
    assert list(state) == ["power", "noise", "smoothed"]


def test_clipping_and_trimming_are_nested():
    rule = fedgma.clipped(fedgma.ties(0.5), 1.0)
    assert rule(rows({"w": np.array([[3.0, 4.0, 0.1, 0.2]])})).update["w"].tolist() == pytest.approx([0.6, 0.8, 0, 0])


@pytest.mark.parametrize("tau", [0.0, 0.4, 0.5, 1.0])
def test_voters_only_is_masked_averaging_of_the_clients_that_move_an_entry(tau):
    rng = np.random.default_rng(7)
    updates = np.round(rng.standard_normal((7, 200)), 0)
    found = fedgma.voters_only(tau)({"w": updates}).mask["w"]
    for entry, column in enumerate(updates.T):
        voting = column[column != 0]
        if len(voting):
            alone = fedgma.masked_mean(tau)({"w": voting[:, None]}).mask["w"][0]
            assert found[entry] == pytest.approx(alone)
