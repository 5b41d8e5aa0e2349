"""The update gate: every way in which a client's update can be bad, and what each gets."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedgma
from fedgma import Gate, Tally, finish
from fedgma.aggregation.gate import MIN_WEIGHT
from fedgma.aggregation.norms import norm
from strategies import rows, same_bits, stacks
from tables import AGGREGATORS, OPTIMIZERS

GOOD = [{"w": np.array([[1, 2, 3], [4, 5, 6]], np.float32) * k, "b": np.array([k], np.float32)} for k in (1, -2, 3)]
LIKE = {"w": np.zeros((2, 3), np.float32), "b": np.zeros(1, np.float32)}


def outcome(bad, weight=10, **options):
    """The reason a fourth client is refused for; checks that the others give what they give without it."""
    tally, alone = Tally(LIKE, **options), Tally(LIKE, **options)
    for update in GOOD[:2]:
        tally.add(update, 10)
    refusal = tally.add(bad, weight)
    tally.add(GOOD[2], 10)
    for update in GOOD:
        alone.add(update, 10)
    if refusal is not None:
        assert same_bits(finish(tally).update, finish(alone).update)
        assert finish(tally).notes["clients"] == 3
        assert finish(tally).notes["refused"] == (refusal,)
    return None if refusal is None else refusal.reason


def with_value(value):
    update = {name: entry.copy() for name, entry in GOOD[0].items()}
    update["w"][1, 1] = value
    return update


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_excludes_only_its_client(value):
    assert outcome(with_value(value)) == "nonfinite"


@pytest.mark.parametrize("shape", [(3,), (1, 3), (), (4, 3), (2, 3, 1), (0, 3)])
def test_another_shape_is_refused_and_never_broadcast(shape):
    assert outcome({**GOOD[0], "w": np.ones(shape, np.float32)}) == "shape"


@pytest.mark.parametrize(
    "update",
    [
        {"w": GOOD[0]["w"]},
        {**GOOD[0], "extra": np.ones(2, np.float32)},
        {"W": GOOD[0]["w"], "b": GOOD[0]["b"]},
        {},
        None,
        7,
        "weights",
        [GOOD[0]["w"]],
        {3: GOOD[0]["w"], "b": GOOD[0]["b"]},
    ],
)
def test_missing_extra_or_renamed_entries_are_refused(update):
    assert outcome(update) == "schema"


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "complex64", "bool", "object", "U5"])
def test_another_number_type_is_refused(dtype):
    assert outcome({**GOOD[0], "b": np.ones(1).astype(dtype)}) == "dtype"


def test_a_ragged_list_is_refused():
    assert outcome({**GOOD[0], "b": [[1.0], [1.0, 2.0]]}) == "dtype"


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_floating_types_are_converted_with_cast(dtype):
    tally = Tally(LIKE, gate=Gate(cast=True))
    assert tally.add({name: entry.astype(dtype) for name, entry in GOOD[0].items()}, 10) is None
    assert finish(tally).mean["w"].dtype == np.float32
    np.testing.assert_array_equal(finish(tally).mean["w"], GOOD[0]["w"])


def test_bfloat16_is_refused_for_float32_and_converted_with_cast():
    update = {name: torch.from_numpy(entry).bfloat16() for name, entry in GOOD[0].items()}
    assert outcome(update) == "dtype"
    assert Tally(LIKE, gate=Gate(cast=True)).add(update, 10) is None


@pytest.mark.parametrize(
    "weight", [-9, float("nan"), float("inf"), -0.5, True, "10", b"1", None, 1j, [1, 2], 1e18, 2e9]
)
def test_an_invalid_weight_is_refused(weight):
    assert outcome(GOOD[0], weight) == "weight"


@pytest.mark.parametrize("weight", [0, 0.0, np.int64(0), torch.tensor(0)])
def test_a_client_without_samples_is_left_out_of_the_count_too(weight):
    assert outcome(GOOD[0], weight) == "empty"


@pytest.mark.parametrize("weight", [1, 0.5, np.int32(7), np.float16(3), torch.tensor(12), np.array(5)])
def test_any_positive_number_is_a_valid_weight(weight):
    assert outcome(GOOD[0], weight) is None


def test_the_limit_on_weights_can_be_set():
    assert outcome(GOOD[0], 600, gate=Gate(max_weight=500)) == "weight"
    assert outcome(GOOD[0], 500, gate=Gate(max_weight=500)) is None


def test_an_update_above_the_norm_limit_is_refused():
    assert outcome(with_value(1e30), gate=Gate(max_norm=100.0)) == "norm"
    assert outcome(with_value(9.0), gate=Gate(max_norm=100.0)) is None


def test_clipping_bounds_the_effect_of_one_client():
    aggregator = fedgma.clipped(fedgma.mean(), norm=1.0)
    for scale in (1e3, 1e30):
        merged = aggregator([*GOOD, with_value(scale)], [10] * 4)
        length = np.sqrt(sum(float((entry.astype(float) ** 2).sum()) for entry in merged.update.values()))
        assert length <= 1.0 + 1e-6


def test_the_order_of_names_does_not_matter():
    assert outcome(dict(reversed(GOOD[0].items()))) is None


def test_big_endian_and_strided_arrays_are_accepted():
    plain, odd = Tally(LIKE), Tally(LIKE)
    wide = np.zeros((4, 6), np.float32)
    wide[::2, ::2] = GOOD[0]["w"]
    plain.add(GOOD[0], 10)
    assert odd.add({"w": wide[::2, ::2], "b": GOOD[0]["b"].astype(">f4")}, 10) is None
    assert same_bits(finish(plain).update, finish(odd).update)


def test_empty_and_scalar_arrays_are_accepted():
    update = {"none": np.ones((0, 5)), "one": np.array(2.0)}
    tally = Tally()
    assert tally.add(update, 3) is None
    merged = finish(tally)
    assert merged.update["none"].shape == (0, 5)
    assert merged.update["one"].shape == ()
    assert float(merged.update["one"]) == 2.0


def test_opposed_clients_freeze_an_entry():
    merged = fedgma.masked_mean(0.4)({"w": np.array([[1.0, 1.0], [-3.0, 1.0]])})
    assert merged.update["w"].tolist() == [0.0, 1.0]
    server, params = fedgma.sgd(), {"w": np.array([0.3, 0.3])}
    assert server.step(merged, {}, params)[0]["w"].tolist() == [0.3, 1.3]


def test_zeros_of_both_signs_leave_an_entry_as_it_is():
    merged = fedgma.masked_mean(0.4)({"w": np.array([[0.0], [-0.0], [0.0]], np.float32)})
    params = {"w": np.array([0.1], np.float32)}
    assert same_bits(fedgma.sgd().step(merged, {}, params)[0], params)


@pytest.mark.parametrize(("dtype", "tiny"), [("float64", 1e-310), ("float32", 1e-42)])
def test_subnormal_updates_have_a_sign(dtype, tiny):
    updates = np.array([[tiny], [tiny], [-tiny]], dtype)
    assert (updates != 0).all()
    for entry in (updates, torch.from_numpy(updates)):
        tally = Tally()
        tally.add_many({"w": entry})
        assert tally.votes["w"].tolist() == [1]


def test_a_second_update_by_one_client_is_refused_and_the_first_kept():
    tally = Tally(LIKE)
    assert tally.add(GOOD[0], 10, client="a") is None
    assert tally.add(GOOD[1], 10, client="a").reason == "duplicate"
    assert tally.add(GOOD[1], 10, client="b") is None
    assert tally.clients == 2


def test_a_client_that_fails_may_try_again():
    tally = Tally(LIKE)
    assert tally.add(with_value(np.nan), 10, client="a").reason == "nonfinite"
    assert tally.add(GOOD[0], 10, client="a") is None


def test_updates_of_other_rounds_and_of_unselected_clients_are_refused():
    tally = Tally(LIKE, gate=Gate(selected=("a", "b"), round=7))
    assert tally.add(GOOD[0], 10, client="a", round=6).reason == "round"
    assert tally.add(GOOD[0], 10, client="c", round=7).reason == "unselected"
    assert tally.add(GOOD[0], 10, client="a", round=7) is None


def test_a_client_selected_twice_is_refused_at_the_start():
    with pytest.raises(fedgma.ConfigError, match="named twice"):
        Gate(selected=["a", "b", "a"])


def test_a_bad_first_client_does_not_set_the_schema():
    odd = {"w": np.ones((5, 5), np.float32)}
    merged = fedgma.masked_mean()([odd, *GOOD], [10] * 4)
    assert [refusal.client for refusal in merged.notes["refused"]] == [0]
    assert same_bits(merged.update, fedgma.masked_mean()(GOOD, [10] * 3).update)


@given(
    stack=stacks(dtypes=("float32",), min_clients=2),
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
    position=st.integers(0, 10**6),
)
def test_a_client_that_is_not_finite_changes_nothing_for_the_others(stack, value, position):
    updates, weights = stack
    spoiled = {key: entry.copy() for key, entry in updates.items()}
    big = max(spoiled, key=lambda key: spoiled[key].size)
    if not spoiled[big].size:
        return
    flat = spoiled[big].reshape(-1)
    flat[position % flat.size] = value
    victim = (position % flat.size) // (flat.size // len(weights))
    others = [client for client in range(len(weights)) if client != victim]
    sound, counted = {key: entry[others] for key, entry in updates.items()}, [weights[client] for client in others]
    for name, aggregator in AGGREGATORS.items():
        expected = aggregator(sound, counted, clients=others).update
        for form in (spoiled, rows(spoiled)):
            merged = aggregator(form, weights)
            refused = [(refusal.client, refusal.reason) for refusal in merged.notes["refused"]]
            assert refused == [(victim, "nonfinite")], name
            assert same_bits(merged.update, expected), name


@pytest.mark.parametrize("name", AGGREGATORS)
def test_a_round_without_valid_clients_raises(name):
    stack = {"w": np.full((3, 2), np.nan)}
    with pytest.raises(fedgma.NotEnoughClients, match=r"\(3 refused: nonfinite; the first: 'w' holds a NaN"):
        AGGREGATORS[name](stack, [1, 2, 3])
    with pytest.raises(fedgma.NotEnoughClients, match="none was added"):
        AGGREGATORS[name]([], [])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_refused_client_does_not_change_the_moments(name):
    server = OPTIMIZERS[name]
    histories = []
    for poison in (False, True):
        params, state = LIKE, server.init(LIKE)
        for _ in range(2):
            replies = [*GOOD, with_value(np.nan)] if poison else GOOD
            params, state = server.step(fedgma.masked_mean()(replies, [10] * len(replies)), state, params)
        histories.append((params, state))
    (clean, clean_state), (poisoned, poisoned_state) = histories
    assert same_bits(clean, poisoned)
    for moment in clean_state:
        assert same_bits(clean_state[moment], poisoned_state[moment])


def test_float32_sums_near_the_limit_do_not_overflow():
    merged = fedgma.mean()({"w": np.full((4, 2), 3e38, np.float32)}, [1000] * 4)
    assert merged.update["w"].tolist() == [np.float32(3e38)] * 2


def test_a_float64_sum_that_overflows_is_an_error_and_nothing_is_committed():
    with pytest.raises(fedgma.Diverged, match="overflows float64"):
        fedgma.mean()({"w": np.full((4, 2), 1e308)}, [1000] * 4)


def test_weights_of_ten_thousand_clients_are_summed_exactly():
    sizes = np.random.default_rng(0).integers(1, 10**9, 10_000)
    tally = Tally()
    for size in sizes:
        tally.add({"w": np.ones(1)}, int(size))
    assert tally.weight == int(sizes.sum())
    assert abs(finish(tally).update["w"][0] - 1) < 1e-12


def test_a_stack_of_different_lengths_raises():
    with pytest.raises(fedgma.DataError, match="holds 2 clients, but the first entry holds 3"):
        fedgma.mean()({"a": np.ones((3, 2)), "b": np.ones((2, 2))})
    with pytest.raises(fedgma.DataError, match="one weight for each of 3 clients, got 2"):
        fedgma.mean()({"a": np.ones((3, 2))}, [1, 2])
    with pytest.raises(fedgma.DataError, match="one weight for each of 2 updates, got 3"):
        fedgma.mean()([{"a": np.ones(2)}, {"a": np.ones(2)}], [1, 2, 3])
    with pytest.raises(fedgma.DataError, match="expected a mapping of arrays or a list of clients"):
        fedgma.mean()(7)


@given(st.data())
def test_arbitrary_values_are_refused(data):
    rubbish = st.one_of(
        st.none(), st.integers(), st.text(), st.binary(), st.floats(), st.lists(st.floats(), max_size=3),
        st.dictionaries(st.one_of(st.text(), st.integers()), st.one_of(st.floats(), st.text(), st.none()), max_size=2),
    )  # fmt: skip
    update = data.draw(st.one_of(rubbish, st.fixed_dictionaries({"w": rubbish, "b": rubbish})))
    weight = data.draw(rubbish)
    if outcome(update, weight) is None:
        pytest.fail(f"{update!r} with weight {weight!r} was counted")


def test_selected_clients_may_be_named_in_any_collection():
    gate = Gate(selected=["a", "b"])
    assert gate.selected == frozenset({"a", "b"})
    assert hash(gate) == hash(Gate(selected=("b", "a")))


def test_a_limit_says_how_far_it_goes():
    with pytest.raises(fedgma.ConfigError, match=r"max_share must be a number above 0 and at most 1, got 2"):
        Gate(max_share=2)
    for name in ("max_norm", "max_buffer_norm"):
        with pytest.raises(fedgma.ConfigError, match=rf"{name} must be a number above 0, got 0"):
            Gate(**{name: 0})


def test_the_heaviest_and_the_lightest_weight_allowed_count():
    tally = Tally(gate=Gate(max_weight=5))
    assert tally.add({"w": np.ones(1)}, weight=5) is None
    assert tally.add({"w": np.ones(1)}, weight=MIN_WEIGHT) is None
    assert tally.add_many({"w": np.ones((2, 1))}, [5.0, MIN_WEIGHT]) == []
    assert tally.clients == 4


def test_an_update_without_values_has_no_norm():
    assert norm([np.empty((0, 3))]) == 0.0
