"""The laws of masks, over shapes, types, tau, weights and numbers of clients; each for numpy and for torch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedgma
import oracle
from fedgma.aggregation.masks import soft_mask
from fedgma.arrays import placement, spec, to_user
from strategies import TAUS, rows, same_bits, stacks
from tables import AGGREGATORS, STREAMING


def as_numpy(updates):
    return updates


def as_torch(updates):
    return {name: torch.from_numpy(np.array(array)) for name, array in updates.items()}


LIBRARIES = pytest.mark.parametrize("library", [as_numpy, as_torch])


def numbers(params):
    return {name: np.asarray(array) for name, array in params.items()}


def streamed(updates, weights, order=None):
    tally = fedgma.Tally()
    clients = rows(updates)
    for client in range(len(weights)) if order is None else order:
        assert tally.add(clients[client], weights[client]) is None
    return tally


@LIBRARIES
@given(stacks(), TAUS)
def test_mean_and_mask_are_those_of_the_literal_oracle(library, stack, tau):
    updates, weights = stack
    merged = fedgma.masked_mean(tau)(library(updates), weights)
    for name, entry in updates.items():
        flat = entry.reshape(len(weights), -1)
        if flat.shape[1]:
            exact_mean, exact_mask = oracle.masked_mean(flat.tolist(), weights, oracle.Fraction(round(tau * 20), 20))
            expected = np.array([float(value) for value in exact_mean]).astype(entry.dtype)
            got = np.asarray(merged.mean[name]).reshape(-1)
            if entry.dtype == np.float64:  # the product of two float64 is rounded; sums of smaller types are exact
                np.testing.assert_allclose(got, expected, rtol=1e-14, atol=1e-14)
            else:
                assert np.array_equal(got, expected)
            kind = np.asarray(merged.mask[name]).dtype
            expected_mask = np.array([value.numerator for value in exact_mask], kind) / np.array(
                [value.denominator for value in exact_mask], kind
            )
            assert np.array_equal(np.asarray(merged.mask[name]).reshape(-1), expected_mask)


@LIBRARIES
@given(stacks())
def test_tau_zero_is_the_plain_mean_bit_for_bit(library, stack):
    updates, weights = stack
    masked = fedgma.masked_mean(0.0)(library(updates), weights)
    plain = fedgma.mean()(library(updates), weights)
    assert same_bits(numbers(masked.update), numbers(plain.update))


@LIBRARIES
@given(stacks())
def test_tau_one_gives_the_agreement_itself(library, stack):
    updates, weights = stack
    merged = fedgma.masked_mean(1.0)(library(updates), weights)
    for name, entry in updates.items():
        score = np.abs(np.sign(entry.astype(float)).sum(0)) / len(weights)
        np.testing.assert_allclose(np.asarray(merged.mask[name]), score, rtol=1e-6)


@given(stacks(min_clients=1, max_clients=1), TAUS)
def test_one_client_alone_is_averaged(stack, tau):
    updates, weights = stack
    assert same_bits(fedgma.masked_mean(tau)(updates, weights).update, fedgma.mean()(updates, weights).update)


@given(stacks(min_clients=2, max_clients=2))
def test_with_two_clients_only_entries_of_equal_sign_move(stack):
    updates, weights = stack
    merged = fedgma.masked_mean(0.4)(updates, weights)
    for name, (first, second) in updates.items():
        opposed = np.sign(first) * np.sign(second) == -1
        assert not np.asarray(merged.update[name])[opposed].any()


@LIBRARIES
@given(stacks(), TAUS, st.randoms(use_true_random=False))
def test_the_order_of_clients_does_not_matter(library, stack, tau, random):
    updates, weights = stack
    order = list(range(len(weights)))
    random.shuffle(order)
    shuffled = {name: entry[order] for name, entry in updates.items()}
    first = fedgma.masked_mean(tau)(library(updates), weights)
    second = fedgma.masked_mean(tau)(library(shuffled), [weights[client] for client in order])
    assert same_bits(numbers(first.mask), numbers(second.mask))
    assert same_bits(numbers(first.update), numbers(second.update))


@given(stacks(dtypes=("float64", "float32")), TAUS, st.integers(-3, 3))
def test_the_mask_ignores_the_size_of_an_update(stack, tau, exponent):
    updates, weights = stack
    scaled = {name: entry.copy() for name, entry in updates.items()}
    for entry in scaled.values():
        entry[0] *= 2.0**exponent
    first, second = fedgma.masked_mean(tau)(updates, weights), fedgma.masked_mean(tau)(scaled, weights)
    assert same_bits(first.mask, second.mask)


@given(stacks(), TAUS)
def test_the_mask_ignores_weights_and_the_sign_of_everything(stack, tau):
    updates, weights = stack
    flipped = {name: -entry for name, entry in updates.items()}
    first, second = fedgma.masked_mean(tau)(updates, weights), fedgma.masked_mean(tau)(flipped, weights[::-1])
    assert same_bits(first.mask, second.mask)


@given(stacks(), TAUS, TAUS)
def test_a_higher_tau_never_raises_the_mask_and_never_lengthens_the_step(stack, first, second):
    updates, weights = stack
    low = fedgma.masked_mean(min(first, second))(updates, weights)
    high = fedgma.masked_mean(max(first, second))(updates, weights)
    for name in updates:
        assert (low.mask[name] >= high.mask[name]).all()
        assert ((low.mask[name] >= 0) & (low.mask[name] <= 1)).all()
        assert (np.abs(low.update[name]) <= np.abs(low.mean[name])).all()


@given(stacks(dtypes=("float32",)), TAUS)
def test_entries_that_all_clients_move_one_way_are_averaged(stack, tau):
    updates, weights = stack
    positive = {name: np.abs(entry) + np.float32(1) for name, entry in updates.items()}
    merged = fedgma.masked_mean(tau)(positive, weights)
    assert same_bits(merged.update, fedgma.mean()(positive, weights).update)


def test_thresholds_between_two_attainable_scores_give_one_mask():
    votes = np.arange(0, 11, 2, dtype=np.int8)  # ten clients, no zeros
    distinct = {tuple(soft_mask(k / 10)(votes, 10, "float64")) for k in range(1, 10)}
    assert len(distinct) == 5
    assert np.array_equal(
        soft_mask(0.3)(votes, 10, "float64"),
        soft_mask(0.4)(votes, 10, "float64"),
    )


@LIBRARIES
@given(stack=stacks())
def test_streamed_is_stacked(library, stack):
    updates, weights = stack
    whole = library(updates)
    for name, aggregator in STREAMING.items():
        stacked, listed = aggregator(whole, weights), aggregator(rows(whole), weights)
        assert same_bits(numbers(stacked.update), numbers(listed.update)), name
        assert stacked.notes == listed.notes, name


@given(stacks(), TAUS, st.randoms(use_true_random=False))
def test_tallies_merged_in_any_tree_give_the_same_bits(stack, tau, random):
    updates, weights = stack
    expected = fedgma.finish(streamed(updates, weights), tau)
    leaves = []
    for client, update in enumerate(rows(updates)):
        leaf = fedgma.Tally()
        leaf.add(update, weights[client])
        leaves.append(leaf)
    while len(leaves) > 1:
        random.shuffle(leaves)
        first, second, *others = leaves
        first.merge(second)
        leaves = [first, *others]
    merged = fedgma.finish(leaves[0], tau)
    assert same_bits(merged.mask, expected.mask)
    assert same_bits(merged.mean, expected.mean)
    assert merged.notes["clients"] == len(weights)
    assert merged.notes["weight"] == sum(weights)


@given(stacks(min_clients=3), TAUS, st.integers(1, 4))
def test_chunks_of_clients_give_the_same_bits(stack, tau, size):
    updates, weights = stack
    tally = fedgma.Tally()
    for start in range(0, len(weights), size):
        tally.add_many(
            {name: entry[start : start + size] for name, entry in updates.items()}, weights[start : start + size]
        )
    expected = fedgma.finish(streamed(updates, weights), tau)
    assert same_bits(fedgma.finish(tally, tau).update, expected.update)


@given(stack=stacks())
def test_every_aggregator_is_the_same_for_numpy_and_torch(stack):
    updates, weights = stack
    whole = as_torch(updates)
    for name, aggregator in AGGREGATORS.items():
        ours, theirs = aggregator(updates, weights).update, aggregator(whole, weights).update
        tight = aggregator.compute is None  # norms and shares are summed in another order
        for key in updates:
            one, other = np.asarray(ours[key]), theirs[key].numpy()  # a tensor
            assert (one.dtype, one.shape) == (other.dtype, other.shape), name
            np.testing.assert_allclose(one, other, 0 if tight else 2e-3, 0 if tight else 1e-6, err_msg=name)


@pytest.mark.parametrize("like", [np.zeros(1, np.float16), torch.zeros(1, dtype=torch.float16)], ids=["numpy", "torch"])
def test_a_half_is_rounded_once(like):
    above_the_middle = np.array([1 + 2.0**-11 + 2.0**-40])  # by way of float32 it would be the middle, and then 1
    assert float(to_user(above_the_middle, spec(like), placement(like))[0]) == 1 + 2.0**-10


@given(stack=stacks(dtypes=("float32",)))
def test_every_aggregator_keeps_names_shapes_and_types_and_its_inputs(stack):
    updates, weights = stack
    before = {key: entry.copy() for key, entry in updates.items()}
    for name, aggregator in AGGREGATORS.items():
        merged = aggregator(updates, weights).update
        assert same_bits(before, updates), name
        assert list(merged) == list(updates), name
        for key, entry in updates.items():
            assert np.shape(merged[key]) == entry.shape[1:], name
            assert np.asarray(merged[key]).dtype == entry.dtype, name


@given(stacks(dtypes=("float64",)), TAUS)
def test_the_damped_mean_has_the_length_of_the_masked_one_and_the_direction_of_the_plain_one(stack, tau):
    updates, weights = stack
    damped = fedgma.damped_mean(tau)(updates, weights)
    masked = fedgma.masked_mean(tau)(updates, weights)
    for name in updates:
        assert np.linalg.norm(damped.update[name]) == pytest.approx(
            np.linalg.norm(masked.update[name]), rel=1e-9, abs=1e-12
        )
        assert np.ptp(damped.mask[name]) == 0 if damped.mask[name].size else True


@given(stacks(dtypes=("float64",)), TAUS)
def test_a_mask_whose_norm_is_kept_has_the_length_of_the_plain_mean_and_the_direction_of_the_masked_one(stack, tau):
    updates, weights = stack
    kept = fedgma.norm_kept(tau)(updates, weights).update
    masked, plain = (rule(updates, weights).update for rule in (fedgma.masked_mean(tau), fedgma.mean()))
    for name in updates:
        length = np.linalg.norm(masked[name])
        if length > 1e-9 * np.linalg.norm(plain[name]):
            scaled = masked[name] * (np.linalg.norm(plain[name]) / length)
            np.testing.assert_allclose(kept[name], scaled, rtol=1e-9, atol=1e-12)


@given(stacks(dtypes=("float64",)), TAUS)
def test_a_masked_extra_step_is_the_sum_of_both_means(stack, tau):
    updates, weights = stack
    masked, plain = (rule(updates, weights).update for rule in (fedgma.masked_mean(tau), fedgma.mean()))
    for name, step in fedgma.masked_extra(tau)(updates, weights).update.items():
        np.testing.assert_allclose(step, masked[name] + plain[name], rtol=1e-12)


@given(stacks(dtypes=("float64",)), TAUS, st.integers(0, 5))
def test_the_shuffled_mask_holds_the_same_values_elsewhere(stack, tau, seed):
    updates, weights = stack
    shuffled = fedgma.shuffled_mask(tau, seed)(updates, weights)
    again = fedgma.shuffled_mask(tau, seed)(updates, weights)
    masked = fedgma.masked_mean(tau)(updates, weights)
    assert same_bits(shuffled.mask, again.mask)
    for name in updates:
        assert np.array_equal(np.sort(shuffled.mask[name], axis=None), np.sort(masked.mask[name], axis=None))


def test_another_seed_shuffles_the_mask_differently():
    updates = {"w": np.random.default_rng(0).standard_normal((5, 100))}
    masks = [fedgma.shuffled_mask(1.0, seed)(updates).mask["w"] for seed in (0, 1)]
    assert not np.array_equal(*masks)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("clients", [10, 100, 300])
def test_half_precision_counts_every_vote(dtype, clients):
    # bfloat16 sums of signs stop counting at 256; integer votes do not
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(clients, 1000, generator=generator).to(dtype)
    tally = fedgma.Tally()
    tally.add_many({"w": updates})
    assert torch.equal(tally.votes["w"].long(), updates.double().sign().sum(0).long())
    merged = fedgma.finish(tally, 0.4)
    assert merged.mean["w"].dtype == dtype
    exact = updates.double().mean(0)
    assert (merged.mean["w"].double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()
