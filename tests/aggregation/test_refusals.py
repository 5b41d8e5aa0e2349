"""What the gate says about each update that it refuses, norms at any size, and what a tally keeps of it all."""

import math

import numpy as np
import pytest
import torch

import fedgma
from fedgma import Gate, Tally, finish
from fedgma.aggregation.gate import entry_kind, find_refusal
from fedgma.aggregation.norms import PIECE, norm
from fedgma.arrays import Spec

LIKE = {name: np.zeros(2, np.float32) for name in ("a", "b", "c", "d", "e")}
ONES = {name: np.ones(2, np.float32) for name in LIKE}


@pytest.mark.parametrize(
    ("update", "detail"),
    [
        ({**ONES, "x": ONES["a"]}, "entries missing: none, unexpected: ['x']"),
        ({"a": ONES["a"]}, "entries missing: ['b', 'c', 'd'], unexpected: none"),
        ({**ONES, "b": np.ones(3, np.float32)}, "'b' must have shape [2], got [3]"),
        ({**ONES, "b": np.ones(2)}, "'b' must be float32, got float64; Gate(cast=True) accepts it"),
        (
            {**ONES, "b": np.ones(2, bool)},
            "'b' must hold real numbers of 16 to 64 bits, got bool; leave out masks that never change",
        ),
        ({**ONES, "b": np.array([1, np.nan], np.float32)}, "'b' holds a NaN or an infinity"),
        ({**ONES, 3: ONES["a"]}, "entry names must be strings, got 3"),
        (
            [1.0],
            "an update must be a mapping of names to arrays, got list; give each array a name, "
            "such as dict(zip(names, arrays))",
        ),
        ({}, "an update must be a mapping of names to arrays, got an empty one"),
    ],
)
def test_a_refusal_says_what_was_expected_and_what_came(update, detail):
    assert Tally(LIKE).add(update).detail == detail


@pytest.mark.parametrize(
    ("weight", "reason", "detail"),
    [
        ("10", "weight", "the weight must be a number of samples, got '10'"),
        (0, "empty", "the client has no samples"),
        (10**400, "weight", "the weight must be one number, got int"),
    ],
)
def test_a_refused_weight_is_quoted(weight, reason, detail):
    assert Tally(LIKE).add(ONES, weight)[1:] == (reason, detail)


def test_a_weight_is_a_number_up_to_the_limit():
    for weight in (1e9, np.float32(0.5), 3):
        assert Tally(LIKE).add(ONES, weight) is None
    for weight in (math.nextafter(1e9, 2e9), -1, math.nan, np.bool_(True), b"1"):
        assert Tally(LIKE).add(ONES, weight).reason == "weight"


@pytest.mark.parametrize("limits", [{"max_weight": 0}, {"max_norm": 0}, {"max_weight": -1.0}, {"max_norm": math.nan}])
def test_limits_of_a_gate_are_above_zero(limits):
    with pytest.raises(fedgma.ConfigError):
        Gate(**limits)
    assert Gate(max_weight=1e-6, max_norm=1e-6).max_norm == 1e-6


def test_conversion_is_between_floating_types_only():
    gate = Gate(cast=True)
    assert Tally(LIKE, gate=gate).add({**ONES, "b": np.ones(2)}) is None
    assert Tally(LIKE, gate=gate).add({**ONES, "b": np.ones(2, np.int64)}).reason == "dtype"
    counter = {**LIKE, "n": np.zeros(1, np.int64)}
    assert Tally(counter, gate=gate).add({**ONES, "n": np.zeros(1)}).reason == "dtype"


@pytest.mark.parametrize(
    ("name", "dtype", "buffers", "kind"),
    [
        ("w", "float32", None, "masked"),
        ("bn.running_mean", "float32", None, "averaged"),
        ("bn.running_var", "bfloat16", None, "averaged"),
        ("bn.num_batches_tracked", "float64", None, "averaged"),
        ("bn.num_batches_tracked", "int64", None, "maximum"),
        ("bn.running_mean", "float32", ["w"], "averaged"),
        ("w", "float32", ["w"], "averaged"),
        ("w", "int64", ["w"], "maximum"),
    ],
)
def test_an_entry_is_masked_averaged_or_takes_the_maximum(name, dtype, buffers, kind):
    assert entry_kind(name, Spec((1,), dtype), buffers) == kind


# -- norms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1.0, 1e-300, 1e-145, 1e-140, 1e160, 1e300, 5e-324])
@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_a_norm_is_over_all_arrays_at_any_size(size, convert):
    arrays = [np.array([2.0 * size]), np.empty(0), np.array([3.0, -6.0]) * size, np.zeros(3)]
    assert norm(map(convert, arrays)) == pytest.approx(7 * size, rel=1e-14, abs=0)


def test_a_norm_of_pieces_is_that_of_the_whole():
    for entries in (PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 1):
        assert norm([np.full(entries, 2.0, np.float32)]) == pytest.approx(2 * math.sqrt(entries), rel=1e-12)
    assert norm([np.full((3, 3), 2.0)]) == 6.0
    assert norm([]) == 0.0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_norm_of_what_is_not_finite_is_not_finite(value):
    assert not math.isfinite(norm([np.ones(2), np.array([1.0, value])]))


def test_an_update_alone_is_checked_against_a_gate():
    update = {"w": np.array([3.0, 4.0])}
    assert find_refusal(update, Gate()) is None
    assert find_refusal(update, Gate(max_norm=5.0)) is None
    assert find_refusal(update, Gate(max_norm=4.9)) == (None, "norm", "the norm must be at most 4.9, got 5")
    assert find_refusal({"w": np.array([math.inf])}, Gate()).reason == "nonfinite"
    assert find_refusal({"w": "text"}, Gate(max_norm=4.9)).reason == "dtype"


def test_a_norm_at_the_limit_passes_and_counters_and_buffers_do_not_enter_it():
    like = {"w": np.zeros(2), "s": np.zeros(1), "n": np.zeros(1, np.int64)}
    for limit, reason in ((5.0, None), (4.9, "norm")):
        update = {"w": np.array([3.0, 4.0]), "s": np.array([100.0]), "n": np.array([100])}
        one, many = (Tally(like, buffers=["s"], gate=Gate(max_norm=limit)) for _ in range(2))
        refusals = [one.add(update), *many.add_many({name: entry[None] for name, entry in update.items()})]
        assert [refusal and refusal.reason for refusal in refusals] == ([None] if reason is None else [reason] * 2)
        assert one.norms == many.norms == [5.0]  # also of those above the limit
        assert one.buffer_norms == many.buffer_norms == [100.0]


def test_the_change_of_buffers_has_a_limit_of_its_own():
    like = {"w": np.zeros(2), "s": np.zeros(1), "n": np.zeros(1, np.int64)}
    update = {"w": np.array([300.0, 400.0]), "s": np.array([-5.0]), "n": np.array([100])}
    for limit, reason in ((5.0, None), (4.9, "norm")):
        one, many, whole = (Tally(like, buffers=["s"], gate=Gate(max_buffer_norm=limit)) for _ in range(3))
        refusals = [one.add(update), *many.add_many({name: entry[None] for name, entry in update.items()})]
        assert [refusal and refusal.reason for refusal in refusals] == ([None] if reason is None else [reason] * 2)
        whole.merge(one)
        assert (whole.norms, whole.buffer_norms) == (one.norms, one.buffer_norms) == ([500.0], [5.0])
    whole.clear()
    assert whole.buffer_norms == []
    result = fedgma.server_round(like, [update], buffers=["s"], gate=Gate(max_buffer_norm=5.0))
    assert result.params["s"].tolist() == [-5.0]
    with pytest.raises(fedgma.NotEnoughClients, match=r"the norm of the buffers' change must be at most 4.9, got 5"):
        fedgma.server_round(like, [update], buffers=["s"], gate=Gate(max_buffer_norm=4.9))


def test_norms_are_kept_only_where_they_are_limited_and_finite():
    free, bounded = Tally(), Tally(gate=Gate(max_norm=9.0))
    for tally in (free, bounded):
        tally.add({"w": np.array([3.0, 4.0])})
        tally.add({"w": np.array([math.nan, 4.0])})
        tally.add_many({"w": np.array([[0.0, 2.0], [math.inf, 0.0]])})
    assert free.norms == []
    assert bounded.norms == [5.0, 2.0]
    assert [refusal.reason for refusal in bounded.refused] == ["nonfinite", "nonfinite"]


# -- what a tally keeps ------------------------------------------------------------------------------------------------


def test_clients_without_a_name_are_numbered_in_the_order_of_arrival():
    tally, bad = Tally(), np.array([math.nan])
    tally.add({"w": np.ones(1)})
    assert tally.add({"w": bad}).client == 1
    tally.add({"w": np.ones(1)})
    assert tally.add({"w": bad}).client == 3
    assert [refusal.client for refusal in tally.add_many({"w": np.array([[1.0], [math.nan]])})] == [5]
    assert tally.add({"w": bad}, client="name").client == "name"
    assert tally.notes["clients"] == 3


def test_the_weight_of_all_clients_is_summed_to_the_last_digit():
    tally, weights = Tally(), [1e9, 1e-7, 3e-7, 1e9, 1e-7]
    for weight in weights[:3]:
        tally.add({"w": np.ones(1)}, weight)
    tally.add_many({"w": np.ones((2, 1))}, weights[3:])
    assert tally.weight == math.fsum(weights)
    assert tally.notes == {"clients": 5, "weight": math.fsum(weights), "refused": ()}


def test_merging_remembers_who_was_seen_who_was_refused_and_every_norm():
    gate = Gate(max_norm=9.0)
    first, second = Tally(gate=gate), Tally(gate=gate)
    first.add({"w": np.array([1.0])}, 2, client="a")
    second.add({"w": np.array([-3.0])}, 4, client="b")
    second.add({"w": np.array([math.nan])}, client="c")
    second.add({"w": np.array([10.0])}, client="d")
    first.merge(second)
    assert (first.clients, first.weight, first.norms) == (2, 6.0, [1.0, 3.0, 10.0])
    assert [(refusal.client, refusal.reason) for refusal in first.refused] == [("c", "nonfinite"), ("d", "norm")]
    assert first.add({"w": np.array([1.0])}, client="b").reason == "duplicate"
    assert first.add({"w": np.array([1.0])}, client="c") is None
    assert (second.clients, second.weight, second.norms, second.votes["w"].tolist()) == (1, 4.0, [3.0, 10.0], [-1])


def test_a_client_in_both_tallies_is_counted_by_neither_merge():
    first, second = Tally(), Tally()
    for tally in (first, second):
        tally.add({"w": np.array([1.0])}, client="a")
    with pytest.raises(fedgma.DataError, match="clients are in both tallies, such as 'a'"):
        first.merge(second)
    assert first.clients == 1


@pytest.mark.parametrize(
    ("like", "buffers"), [({"w": np.zeros(2)}, None), ({"v": np.zeros(1)}, None), ({"w": np.zeros(1)}, ["w"])]
)
def test_tallies_of_different_models_are_not_merged(like, buffers):
    first, second = Tally({"w": np.zeros(1)}), Tally(like, buffers=buffers)
    first.add({"w": np.ones(1)})
    second.add({name: np.ones_like(entry) for name, entry in like.items()})
    with pytest.raises(fedgma.DataError, match="the tallies belong to different models"):
        first.merge(second)
    assert first.clients == 1


def test_an_empty_tally_takes_over_all_of_the_other_and_shares_nothing_with_it():
    other = Tally(buffers=["s"])
    update = {"w": torch.tensor([1.0, -2.0]), "s": torch.tensor([4.0]), "n": torch.tensor([7])}
    other.add(update, 2, client="a")
    tally = Tally()
    tally.merge(other)
    tally.add({**update, "n": torch.tensor([9])}, 2, client="b")
    merged, alone = finish(tally, 1.0), finish(other, 1.0)
    assert isinstance(merged.mean["w"], torch.Tensor)
    assert (list(merged.mean), sorted(merged.buffers)) == (["w"], ["n", "s"])
    assert (merged.buffers["n"].tolist(), alone.buffers["n"].tolist()) == ([9], [7])
    assert (tally.votes["w"].tolist(), other.votes["w"].tolist()) == ([2, -2], [1, -1])
    assert other.clients == 1


def test_an_empty_tally_merged_into_another_changes_only_its_refusals():
    tally, empty = Tally(), Tally()
    tally.add({"w": np.ones(1)})
    empty.add({"w": np.array([math.inf])}, client="x")
    tally.merge(empty)
    assert (tally.clients, [refusal.client for refusal in tally.refused]) == (1, ["x"])


def test_a_wrong_name_of_a_buffer_is_said_and_never_masks_the_buffer():
    update = {"w": np.ones(1), "ema": np.ones(1)}
    refusal = Tally(buffers=["emma"]).add(update)
    assert (refusal.reason, refusal.detail) == ("schema", "buffers: the model has no entry 'emma'; did you mean 'ema'?")
    calls = (
        lambda: Tally(update, buffers=["emma"]),
        lambda: Tally(buffers=["emma"]).add_many({"w": np.ones((2, 1)), "ema": np.ones((2, 1))}),
        lambda: fedgma.masked_mean()([update, update], buffers=["emma"]),
    )
    for call in calls:
        with pytest.raises(fedgma.ConfigError, match=r"no entry .emma.; did you mean .ema."):
            call()
    with pytest.raises(fedgma.ConfigError, match=r"got the text 'ema'; write \['ema'\]"):
        Tally(buffers="ema")


def test_a_gate_or_a_state_of_another_kind_is_one_sentence():
    model = {"w": np.ones(1)}
    for call in (
        lambda: Tally(gate={"max_norm": 1}),
        lambda: fedgma.server_round(model, [model], gate={"max_norm": 1}),
    ):
        with pytest.raises(fedgma.ConfigError, match=r"gate: expected fedgma\.Gate"):
            call()
    with pytest.raises(fedgma.DataError, match=r"expected `\.state` of the round before, or None, got ServerRound"):
        fedgma.server_round(model, [model], state=fedgma.server_round(model, [model]))


def test_a_cleared_tally_is_a_new_one_with_the_old_gate_and_buffers():
    tally = Tally(buffers=["s"], gate=Gate(max_norm=9.0))
    tally.add({"w": np.ones(300), "s": np.ones(1), "n": np.ones(1, np.int64)}, 3, client="a")
    tally.add({"w": np.ones(1)}, client="b")
    tally.clear()
    assert (tally.clients, tally.weight, tally.norms, tally.refused, tally.schema) == (0, 0.0, [], [], None)
    assert (tally.votes, tally.maxima, tally.seen) == ({}, {}, set())
    assert tally.add({"v": np.full(2, -1.0), "s": np.full(1, -1.0)}, client="a") is None
    assert tally.votes["v"].tolist() == [-1, -1]
    assert (list(tally.votes), finish(tally).buffers["s"].tolist()) == (["v"], [-1.0])
    assert tally.add({"v": np.full(2, 99.0), "s": np.ones(1)}).reason == "norm"


def test_counters_take_the_maximum_over_clients_and_stacks():
    for convert in (np.asarray, torch.from_numpy):
        tally = Tally()
        tally.add({"w": convert(np.ones(1)), "n": convert(np.array([3, -5]))})
        tally.add({"w": convert(np.ones(1)), "n": convert(np.array([2, -4]))})
        tally.add_many({"w": convert(np.ones((2, 1))), "n": convert(np.array([[1, -9], [4, -8]]))})
        assert finish(tally).buffers["n"].tolist() == [4, -4]


def test_a_stack_refuses_clients_by_name_weight_and_selection():
    tally = Tally(gate=Gate(selected=("a", "b", "c")))
    refusals = tally.add_many({"w": np.ones((5, 1))}, [1, 0, 1, 1, -1], clients=["a", "b", "a", "x", "c"])
    assert [(refusal.client, refusal.reason) for refusal in refusals] == [
        ("b", "empty"),
        ("a", "duplicate"),
        ("x", "unselected"),
        ("c", "weight"),
    ]
    assert tally.add_many({"w": np.ones((1, 1))}, clients=["a"])[0].reason == "duplicate"
    assert tally.clients == 1


def test_after_a_bad_update_the_next_valid_one_of_the_same_name_counts():
    stack = {"w": np.array([[np.nan], [1.0], [2.0], [4.0]])}
    tally = Tally()
    refusals = tally.add_many(stack, [1, 0, 1, 1], clients=["a", "a", "a", "a"])
    assert [refusal.reason for refusal in refusals] == ["nonfinite", "empty", "duplicate"]
    assert (tally.clients, finish(tally).mean["w"].item()) == (1, 2.0)
