"""Faults of clients' updates (rows A): each costs its client, or the round, and never the model or the others."""

import hashlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import damaged_tallies
import fedgma
import update_checks
from fedgma import Gate, Tally, finish
from fedgma.aggregation.masks import soft_mask
from fedgma.aggregation.server import MaskedServer
from rows import row
from strategies import rows as per_client
from strategies import same_bits, stacks
from tables import AGGREGATORS, OPTIMIZERS, STREAMING

MODEL = {"w": np.zeros((2, 3), np.float32), "bias": np.zeros(1, np.float32)}
GOOD = [{"w": np.array([[1, 2, 3], [4, 5, 6]], np.float32) * k, "bias": np.array([k], np.float32)} for k in (1, -2, 3)]
RULES = pytest.mark.parametrize("rule", AGGREGATORS.values(), ids=list(AGGREGATORS))
SERVERS = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=list(OPTIMIZERS))


def spoiled(value, base=GOOD[0]):
    update = {name: entry.copy() for name, entry in base.items()}
    update["w"][1, 1] = value
    return update


def reasons(merged):
    return [(refusal.client, refusal.reason) for refusal in merged.notes["refused"]]


def assert_only_it_is_left_out(rule, bad, reason, weight=10, **options):
    """A bad client in the middle: refused for this reason, and the result is that of the others, bit for bit."""
    merged = rule([GOOD[0], bad, *GOOD[1:]], [10, weight, 10, 10], like=MODEL, **options)
    assert reasons(merged) == [(1, reason)]
    assert same_bits(merged.update, rule(GOOD, [10] * 3, clients=[0, 2, 3], like=MODEL, **options).update)


# -- values ------------------------------------------------------------------------------------------------------------


@row(
    "A1",
    "a NaN in one client's update",
    happens="the update is refused; the round is the one of the other clients, bit for bit",
    seen="`nonfinite` beside the client's name",
)
@RULES
def test_a1_a_nan_costs_its_client_alone(rule):
    assert_only_it_is_left_out(rule, spoiled(np.nan), "nonfinite")


@row(
    "A2",
    "an infinity in one client's update",
    happens="the update is refused; the round is the one of the other clients, bit for bit",
    seen="`nonfinite` beside the client's name",
)
@RULES
def test_a2_an_infinity_costs_its_client_alone(rule):
    for value in (np.inf, -np.inf):
        assert_only_it_is_left_out(rule, spoiled(value), "nonfinite")


@row(
    "A3",
    "a NaN that reaches a server optimiser with moments",
    happens="the moments do not change; the next round is that of a run without the client",
    seen="`nonfinite` beside the client's name",
)
@SERVERS
def test_a3_a_nan_does_not_reach_the_moments(optimizer):
    clean = poisoned = (MODEL, None)
    for bad in ([spoiled(np.nan)], []):
        clean = fedgma.server_round(clean[0], GOOD, [10] * 3, optimizer=optimizer, state=clean[1])[:2]
        weights = [10] * (3 + len(bad))
        poisoned = fedgma.server_round(poisoned[0], [*GOOD, *bad], weights, optimizer=optimizer, state=poisoned[1])[:2]
    assert same_bits(clean[0], poisoned[0])
    assert all(same_bits(clean[1][moment], poisoned[1][moment]) for moment in clean[1])


@row(
    "A4",
    "finite updates whose sum or step overflows",
    happens="sums are kept in float64; a step that is not finite changes neither the model nor the moments",
    seen="`Diverged`, with the name of the entry",
)
@SERVERS
def test_a4_a_step_that_overflows_is_not_committed(optimizer):
    near = {"w": np.full((4, 2), 3e38, np.float32)}
    assert fedgma.mean()(near, [1000] * 4).update["w"].tolist() == [np.float32(3e38)] * 2
    model = {"w": np.full(2, 3e38, np.float32)}
    state = optimizer.init(model)
    before = {moment: {name: array.copy() for name, array in arrays.items()} for moment, arrays in state.items()}
    with pytest.raises(fedgma.Diverged, match="'w' would not be finite"):
        optimizer.step(fedgma.mean()(near), state, model)
    assert all(same_bits(before[moment], state[moment]) for moment in state)


@row(
    "A5",
    "one finite update of a huge size",
    happens="refused above `Gate(max_norm=...)`, or above ten times the usual norm on a deployed server; "
    "`clipped` scales it down instead",
    seen="`norm` beside the client's name, with the norm and the limit",
)
@pytest.mark.parametrize("size", [1e3, 1e30, 3e38])
def test_a5_a_huge_update_is_refused_or_clipped(size):
    huge = spoiled(size)
    for rule in STREAMING.values():
        if not rule.name.startswith("clipped"):
            assert_only_it_is_left_out(rule, huge, "norm", gate=Gate(max_norm=100.0))
    clipped = fedgma.clipped(fedgma.mean(), norm=1.0)([*GOOD, huge], [10] * 4)
    assert sum(float((entry.astype(float) ** 2).sum()) for entry in clipped.update.values()) <= 1.0 + 1e-6
    server = MaskedServer(fedgma.mean())
    server.step(MODEL, zip(GOOD, [10] * 3, "abc", strict=True))
    step = server.step(MODEL, [*zip(GOOD, [10] * 3, "abc", strict=True), (huge, 10, "d")])
    assert [(refusal.client, refusal.reason) for refusal in step.refused] == [("d", "norm")]


@row("A5")
def test_a5_a_norm_that_overflows_float64_is_above_every_limit():
    longest = {"w": np.full(4, 1e308)}
    assert Tally(gate=Gate(max_norm=1e300)).add(longest).reason == "norm"
    stack = {"w": np.stack([longest["w"], np.ones(4)])}
    assert reasons(fedgma.mean()(stack, gate=Gate(max_norm=1e300))) == [(0, "norm")]
    assert fedgma.clipped(fedgma.mean(), norm=2.0)([longest]).update["w"] == pytest.approx([1.0] * 4)


@row(
    "A6",
    "all updates of a round refused",
    happens="the round does not take place; model and moments stay",
    seen="`NotEnoughClients`, with the number of refusals and their reasons",
)
@RULES
def test_a6_a_round_without_valid_updates_changes_nothing(rule):
    with pytest.raises(
        fedgma.NotEnoughClients, match=r"3 refused: nonfinite; the first: 'w' holds a NaN .*\); nothing was"
    ):
        fedgma.server_round(MODEL, [spoiled(np.nan, good) for good in GOOD], [10] * 3, aggregator=rule)
    server = MaskedServer(rule)
    step = server.step(MODEL, [(spoiled(np.nan), 10, "a")])
    assert step.params is None
    assert isinstance(step.error, fedgma.NotEnoughClients)
    assert server.state is None


# -- shapes, names and types -------------------------------------------------------------------------------------------


@row(
    "A7",
    "an entry of another shape that would broadcast",
    happens="the update is refused; arrays are never broadcast",
    seen="`shape` beside the client's name, with both shapes",
)
@RULES
@pytest.mark.parametrize("shape", [(3,), (1, 3), (), (2, 1), (1, 2, 3)])
def test_a7_a_shape_that_broadcasts_is_refused(rule, shape):
    assert_only_it_is_left_out(rule, {**GOOD[0], "w": np.ones(shape, np.float32)}, "shape")


@row(
    "A8",
    "an entry of another shape",
    happens="the update is refused; the round goes on",
    seen="`shape` beside the client's name, with both shapes",
)
@RULES
def test_a8_another_shape_is_refused(rule):
    assert_only_it_is_left_out(rule, {**GOOD[0], "w": np.ones((4, 3), np.float32)}, "shape")


@row(
    "A9",
    "a missing, extra or renamed entry",
    happens="the update is refused; the round goes on",
    seen="`schema` beside the client's name, with the names of the entries",
)
@RULES
def test_a9_missing_extra_and_renamed_entries_are_refused(rule):
    w, b = GOOD[0]["w"], GOOD[0]["bias"]
    for bad in ({"w": w}, {"w": w, "bias": b, "c": b}, {"W": w, "bias": b}, {}, None):
        assert_only_it_is_left_out(rule, bad, "schema")


@row(
    "A10",
    "the same entries in another order",
    happens="entries are matched by name; the result has the model's order",
    seen="nothing",
)
@RULES
def test_a10_entries_are_matched_by_name(rule):
    shuffled = [dict(reversed(GOOD[0].items())), *GOOD[1:]]
    merged = rule(shuffled, [10] * 3, like=MODEL)
    assert same_bits(merged.update, rule(GOOD, [10] * 3, like=MODEL).update)
    assert list(merged.update) == list(MODEL)


@row(
    "A11",
    "an entry of another floating type",
    happens="refused, or rounded to the model's type with `Gate(cast=True)`; results always have the model's type",
    seen="`dtype` beside the client's name; with `cast`, `nonfinite` for values that the model's type cannot hold",
)
@RULES
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_a11_another_floating_type_is_refused_or_rounded(rule, dtype):
    other = {name: torch.from_numpy(entry.copy()).to(getattr(torch, dtype)) for name, entry in GOOD[0].items()}
    assert_only_it_is_left_out(rule, other, "dtype")
    merged = rule([other, *GOOD[1:]], [10] * 3, like=MODEL, gate=Gate(cast=True))
    wanted = rule(GOOD, [10] * 3, like=MODEL).update
    if "clipped" in rule.name:  # scaled in the client's type
        assert all(np.allclose(merged.update[name], wanted[name], rtol=0.02) for name in wanted)
    else:  # the values are whole numbers, which every type holds
        assert same_bits(merged.update, wanted)


@row("A11")
def test_a11_a_value_that_the_models_type_cannot_hold_is_refused():
    gate, wide = Gate(cast=True), {"w": np.full((2, 3), 1e300), "bias": np.ones(1)}
    assert_only_it_is_left_out(fedgma.masked_mean(), wide, "nonfinite", gate=gate)
    stack = {"w": np.array([[1e300], [2.0]])}
    merged = fedgma.masked_mean()(stack, like={"w": np.zeros(1, np.float32)}, gate=gate)
    assert reasons(merged) == [(0, "nonfinite")]
    assert merged.update["w"].tolist() == [2.0]


@row(
    "A12",
    "an entry of objects, text, complex numbers or truth values; a sparse, masked, nested or meta array",
    happens="the update is refused",
    seen="`dtype` beside the client's name, with what came",
)
@RULES
def test_a12_what_is_not_a_dense_array_of_numbers_is_refused(rule):
    for dtype in ("object", "U5", "complex64", "bool"):
        assert_only_it_is_left_out(rule, {**GOOD[0], "bias": np.ones(1).astype(dtype)}, "dtype")
    for odd in (
        torch.eye(3).to_sparse(),
        torch.ones(1, device="meta"),
        np.ma.array([1.0], mask=[True]),
        [[1.0], [2, 3]],
    ):
        assert_only_it_is_left_out(rule, {**GOOD[0], "bias": odd}, "dtype")


@row("A12")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a12_a_nested_tensor_is_refused_by_its_name():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert "a nested tensor" in Tally().add({"w": nested}).detail


@row(
    "A13",
    "big-endian and strided arrays",
    happens="read like any other",
    seen="nothing",
)
@RULES
def test_a13_byte_order_and_strides_do_not_matter(rule):
    wide = np.zeros((4, 6), np.float32)
    wide[::2, ::2] = GOOD[0]["w"]
    odd = {"w": wide[::2, ::2], "bias": GOOD[0]["bias"].astype(">f4")}
    merged = rule([odd, *GOOD[1:]], [10] * 3, like=MODEL)
    assert same_bits(merged.update, rule(GOOD, [10] * 3, like=MODEL).update)


@row(
    "A14",
    "integer buffers, such as BatchNorm's `num_batches_tracked`",
    happens="they take the largest value of the clients, in the model's type; one that does not fit is an error",
    seen="nothing; `Diverged` with the counter's name if it does not fit",
)
@SERVERS
@pytest.mark.parametrize("dtype", ["int64", "uint8", "int8"])
def test_a14_counters_take_the_largest_value(optimizer, dtype):
    model = {"w": np.zeros(1), "steps": np.array([5], dtype)}
    clients = [{"w": np.ones(1), "steps": np.array([steps], dtype)} for steps in (3, 7, 4)]
    after = fedgma.server_round(model, clients, optimizer=optimizer).params["steps"]
    assert after.tolist() == [7]
    assert after.dtype == dtype
    lower = fedgma.server_round(model, clients[:1], optimizer=optimizer).params["steps"]
    assert lower.tolist() == [3]  # an unsigned difference would be 254


@row("A14")
def test_a14_a_counter_that_does_not_fit_is_an_error():
    merged = fedgma.mean()([{"w": np.ones(1), "steps": np.array([100], np.uint8)}])
    model = {"w": np.zeros(1), "steps": np.array([200], np.uint8)}
    with pytest.raises(fedgma.Diverged, match="'steps' would not fit uint8"):
        fedgma.sgd().step(merged, {}, model)
    far = {"w": np.ones(1), "steps": np.array([2**63 - 1])}
    with pytest.raises(fedgma.NotEnoughClients, match="dtype"):
        fedgma.server_round({"w": np.ones(1), "steps": np.array([-2])}, [far])


@row(
    "A15",
    "BatchNorm's running statistics",
    happens="averaged without mask, learning rate and moments, so variances stay positive",
    seen="nothing",
)
@SERVERS
def test_a15_running_variances_stay_positive(optimizer):
    rng = np.random.default_rng(0)
    model, state = {"w": np.zeros(2, np.float32), "bn.running_var": np.ones(2, np.float32)}, None
    for _ in range(20):
        clients = [
            {"w": rng.standard_normal(2, np.float32), "bn.running_var": rng.random(2, np.float32)} for _ in range(3)
        ]
        model, state, _ = fedgma.server_round(model, clients, [1, 2, 3], optimizer=optimizer, state=state)
        mean = sum(k * client["bn.running_var"].astype(float) for k, client in zip((1, 2, 3), clients, strict=True)) / 6
        np.testing.assert_allclose(model["bn.running_var"], mean, rtol=1e-6)
        assert (model["bn.running_var"] >= 0).all()


# -- weights -----------------------------------------------------------------------------------------------------------


@row(
    "A16",
    "a client without samples",
    happens="left out of the mean and of the count of votes",
    seen="`empty` beside the client's name",
)
@RULES
def test_a16_a_client_without_samples_has_no_vote(rule):
    for weight in (0, 0.0, np.int64(0)):
        assert_only_it_is_left_out(rule, GOOD[1], "empty", weight)


@row(
    "A17",
    "a weight that is negative, not a number, or too large",
    happens="the update is refused; `Gate(max_weight=...)` sets the limit, and `Gate(max_share=...)` refuses a round "
    "that one client dominates",
    seen="`weight` beside the client's name; `NotEnoughClients` with the share",
)
@RULES
def test_a17_an_invalid_weight_costs_its_client_alone(rule):
    wrong = [
        -1,
        -0.5,
        np.nan,
        np.inf,
        True,
        "10",
        None,
        1j,
        [3],
        1e18,
        1e-300,
        10**400,
        np.array([4]),
        torch.tensor(True),
    ]
    for weight in wrong:
        assert_only_it_is_left_out(rule, GOOD[0], "weight", weight)
    assert_only_it_is_left_out(rule, GOOD[0], "weight", 501, gate=Gate(max_weight=500))


@row("A17")
def test_a17_a_round_that_one_client_dominates_is_not_averaged():
    gate = Gate(max_share=0.5)
    with pytest.raises(fedgma.NotEnoughClients, match=r"one client has 99\.0% of the weight of the 3 clients"):
        fedgma.mean()(GOOD, [10, 1980, 10], gate=gate)
    assert fedgma.mean()(GOOD, [10, 20, 10], gate=gate).notes["clients"] == 3
    server = MaskedServer(gate=gate)
    assert isinstance(server.step(MODEL, zip(GOOD, [1, 9, 1], "abc", strict=True)).error, fedgma.NotEnoughClients)
    first, second = Tally(gate=gate), Tally()
    first.add(GOOD[0], 10)
    second.add(GOOD[1], 90)
    first.merge(fedgma.from_bytes(fedgma.to_bytes(second)))
    with pytest.raises(fedgma.NotEnoughClients, match=r"90\.0%"):
        finish(first)


@row(
    "A18",
    "a sum of weights that float32 could not hold",
    happens="weights are summed exactly",
    seen="nothing",
)
def test_a18_weights_are_summed_exactly():
    sizes = np.random.default_rng(0).integers(1, 10**9, 2_000)
    tally = Tally()
    for size in sizes:
        tally.add({"w": np.ones(1)}, int(size))
    assert tally.weight == int(sizes.sum())
    assert abs(finish(tally).update["w"][0] - 1) < 1e-12


# -- small and special numbers -----------------------------------------------------------------------------------------


@row("A19", "entries without elements, and single numbers", happens="handled like any entry", seen="nothing")
@RULES
def test_a19_empty_and_scalar_entries_are_averaged(rule):
    update = {"none": np.ones((0, 5)), "flat": np.ones(0, np.float32), "one": np.array(2.0)}
    merged = rule([update, update], [1, 3])
    assert {name: np.shape(array) for name, array in merged.update.items()} == {"none": (0, 5), "flat": (0,), "one": ()}
    assert float(merged.update["one"]) == pytest.approx(4.0 if rule.name == "masked_extra" else 2.0)  # mean + masked


@row("A20", "a single client", happens="all of its non-zero entries agree: the plain mean", seen="nothing")
@RULES
def test_a20_a_single_client_is_averaged(rule):
    wanted = fedgma.mean()([rule.prepared(GOOD[0], None)], [10]).update  # clipped, trimmed
    if rule.name == "rlr":  # one vote, where it asks for two
        wanted = {name: -array for name, array in wanted.items()}
    if rule.name == "masked_extra":  # the mean and the masked mean
        wanted = {name: 2 * array for name, array in wanted.items()}
    assert same_bits(rule(GOOD[:1], [10]).update, wanted)


@row(
    "A21",
    "two clients with opposite signs",
    happens="agreement is 0: the entry does not move",
    seen="`gma-mask-mean` and `gma-share-unmasked` in a deployed server's metrics",
)
def test_a21_opposite_signs_freeze_the_entry():
    model, updates = {"w": np.array([5.0, 7.0])}, [{"w": np.array([1.0, 1.0])}, {"w": np.array([1.0, -3.0])}]
    clients = [{"w": model["w"] + update["w"]} for update in updates]
    assert fedgma.server_round(model, clients).params["w"].tolist() == [6.0, 7.0]
    step = MaskedServer().step(model, zip(updates, [1, 1], "ab", strict=True))
    assert step.statistics["gma-share-unmasked"] == 0.5


@row(
    "A22",
    "updates of exactly 0.0 and -0.0",
    happens="neither votes; an entry that no client moves keeps its value",
    seen="nothing",
)
@SERVERS
def test_a22_zeros_of_both_signs_do_not_vote(optimizer):
    tally = Tally()
    for value in (0.0, -0.0, 1.0, -0.0):
        tally.add({"w": np.array([value, -value * 0])})
    assert tally.votes["w"].tolist() == [1, 0]
    model = {"w": np.array([np.pi, 1e-310])}
    after = fedgma.server_round(model, [dict(model)] * 2, optimizer=optimizer).params["w"]
    assert after.tobytes() == model["w"].tobytes()


@row(
    "A23",
    "agreement exactly equal to tau",
    happens="passes; decided on integers, the same on every path",
    seen="nothing",
)
def test_a23_agreement_equal_to_tau_passes():
    for clients in range(1, 101):
        votes = np.arange(clients + 1, dtype=np.int16)
        for twentieths in range(21):
            tau = twentieths / 20
            exact = [Fraction(int(vote), clients) >= Fraction(twentieths, 20) for vote in votes]
            for form in (tau, np.float32(tau), np.float16(tau), float(np.float32(tau))):
                mask = soft_mask(form)
                assert (votes >= mask.needed(clients)).tolist() == exact


@row("A23")
def test_a23_a_threshold_in_float32_means_the_decimal_that_was_written():
    updates = {"w": np.array([[1.0]] * 7 + [[-1.0]] * 3)}  # agreement 0.4
    for tau in (0.4, np.float32(0.4), np.float16(0.4), np.float64(0.4), torch.tensor(0.4).item()):
        assert fedgma.masked_mean(tau)(updates).mask["w"].tolist() == [1.0]
        assert fedgma.masked_mean(tau).settings["tau"] == 0.4


@row(
    "A24",
    "tau of 0, 1, or outside",
    happens="0 is the plain mean, bit for bit; a number outside 0 to 1 is refused",
    seen="`ConfigError`, with the number",
)
@given(stacks())
def test_a24_tau_zero_is_the_plain_mean(stack):
    updates, weights = stack
    assert same_bits(fedgma.masked_mean(0)(updates, weights).update, fedgma.mean()(updates, weights).update)
    for tau in (-0.1, 1.1, np.nan, True, "0.4", None):
        with pytest.raises(fedgma.ConfigError, match="tau must be a number from 0 to 1"):
            fedgma.masked_mean(tau)


# -- clients -----------------------------------------------------------------------------------------------------------


@row(
    "A25",
    "a client that sends twice",
    happens="the first update counts, the second is refused, also after a tally was sent as bytes",
    seen="`duplicate` beside the client's name",
)
@RULES
@pytest.mark.parametrize("name", ["ann", 7, np.int64(7)])
def test_a25_only_the_first_update_of_a_client_counts(rule, name):
    merged = rule([*GOOD, GOOD[0]], [10] * 4, clients=["x", name, "y", name])
    assert reasons(merged) == [(name, "duplicate")]
    assert same_bits(merged.update, rule(GOOD, [10] * 3, clients=["x", name, "y"]).update)
    tally = Tally()
    tally.add(GOOD[0], 10, client=name)
    again = fedgma.from_bytes(fedgma.to_bytes(tally))
    assert again.add(GOOD[0], 10, client=name).reason == "duplicate"
    with pytest.raises(fedgma.DataError, match="in both tallies"):
        again.merge(tally)


@row("A25")
def test_a25_merging_remembers_who_was_seen():
    first, second = Tally(), Tally()
    first.add(GOOD[0], 10, client="a")
    second.add(GOOD[1], 10, client="b")
    first.merge(second)
    assert first.add(GOOD[1], 10, client="b").reason == "duplicate"
    assert first.add(GOOD[1], 10, client="c") is None
    with pytest.raises(fedgma.DataError, match="a tally cannot be merged with itself"):
        first.merge(first)


@row("A25")
def test_a25_a_client_whose_first_update_was_refused_may_send_again():
    stack = {"w": np.array([[np.nan], [2.0], [5.0]], np.float32)}
    for form in (stack, per_client(stack)):
        merged = fedgma.mean()(form, clients=["a", "a", "a"])
        assert reasons(merged) == [("a", "nonfinite"), ("a", "duplicate")]
        assert merged.update["w"].tolist() == [2.0]


@row(
    "A26",
    "the same client selected twice, or names that cannot be compared",
    happens="refused before the round begins; an update under such a name is refused",
    seen="`ConfigError`; `client` beside the name",
)
def test_a26_names_must_be_distinct_and_comparable():
    with pytest.raises(fedgma.ConfigError, match="one is named twice"):
        Gate(selected=["a", "b", "a"])
    with pytest.raises(fedgma.ConfigError, match="must be hashable"):
        Gate(selected=[["a"]])
    for name in (["a"], {"a": 1}, np.array([1]), float("nan"), torch.tensor(3)):
        assert reasons(fedgma.mean()(GOOD, clients=["x", name, "y"]))[0][1] == "client"
        assert Tally().add(GOOD[0], client=name).reason == "client"


@row(
    "A27",
    "an update for another round",
    happens="refused, if the gate names the round",
    seen="`round` beside the client's name, with both rounds",
)
def test_a27_an_update_for_another_round_is_refused():
    tally = Tally(MODEL, gate=Gate(round=7))
    assert tally.add(GOOD[0], round=6).reason == "round"
    assert tally.add(GOOD[0]).reason == "round"
    assert tally.add(GOOD[0], round=7) is None
    assert fedgma.mean()(GOOD, gate=Gate(round=7)).notes["clients"] == 3  # a list is of its round


@row(
    "A28",
    "an update of a client that was not selected",
    happens="refused; a whole tally with such a client too",
    seen="`unselected` beside the client's name; `DataError` for a tally",
)
def test_a28_an_unselected_client_is_refused():
    gate = Gate(selected=["a", "b"])
    tally = Tally(MODEL, gate=gate)
    assert tally.add(GOOD[0], client="eve").reason == "unselected"
    assert tally.add(GOOD[0]).reason == "unselected"
    assert tally.add(GOOD[0], client="a") is None
    for name, wrong in (("eve", "not selected, such as 'eve'"), (None, "1 clients of the tally have no name")):
        other = Tally(MODEL)
        other.add(GOOD[1], client=name)
        with pytest.raises(fedgma.DataError, match=wrong):
            tally.merge(other)
        with pytest.raises(fedgma.DataError, match=wrong):
            fedgma.from_bytes(fedgma.to_bytes(other), gate=gate)
    assert tally.clients == 1


@row(
    "A29",
    "subnormal numbers",
    happens="they vote with their sign and are averaged; the library does not flush them to zero",
    seen="nothing",
)
@pytest.mark.parametrize(("dtype", "tiny"), [("float64", 1e-310), ("float32", 1e-42), ("float16", 6e-8)])
def test_a29_subnormal_numbers_vote_and_are_averaged(dtype, tiny):
    updates = {"w": np.array([[tiny, -tiny], [tiny, -tiny]], dtype)}
    tally = Tally()
    tally.add_many(updates, [10, 30])
    assert tally.votes["w"].tolist() == [2, -2]
    assert same_bits(finish(tally).update, {"w": updates["w"][0]})


# -- order -------------------------------------------------------------------------------------------------------------


@row("A30", "one by one or all at once", happens="the same bits", seen="nothing")
@settings(max_examples=10)  # tests/aggregation/test_laws.py has more, and torch
@given(stack=stacks())
def test_a30_streamed_is_stacked(stack):
    updates, weights = stack
    for name, rule in STREAMING.items():
        stacked, streamed = rule(updates, weights), rule(per_client(updates), weights)
        assert same_bits(stacked.update, streamed.update), name
        assert stacked.notes == streamed.notes, name


@row(
    "A31",
    "clients that arrive in another order",
    happens="the same bits while the sums are exact, which the documentation states as a bound on the range of values",
    seen="nothing",
)
@given(st.data())
def test_a31_sums_are_exact_and_order_does_not_matter_within_the_documented_range(data):
    """float32, whole weights: the largest over the smallest non-zero size is below 2**52 / (weight * clients**2)."""
    clients = data.draw(st.sampled_from([2, 5, 32, 100]))
    heaviest = data.draw(st.sampled_from([1, 1000]))
    span = 2.0**52 / (heaviest * clients**2)
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    sizes = np.exp2(rng.uniform(0, np.log2(span), (clients, 8))) * 1e-9
    values = (sizes * rng.choice([-1, 0, 1], (clients, 8))).astype(np.float32)
    if clients > 2:
        values[1] = -values[0]  # sums that cancel need their last digits
    weights = rng.integers(1, heaviest + 1, clients)
    weights[:2] = heaviest
    exact = [
        sum(Fraction(int(w)) * Fraction(float(v)) for w, v in zip(weights, column, strict=True)) for column in values.T
    ]
    for tally in in_three_orders(rng, values, weights):
        sums = tally.sums["w"]
        found = [Fraction(float(total)) + Fraction(float(rest)) for total, rest in zip(*sums[:2], strict=True)]
        assert found == exact


def in_three_orders(rng, values, weights):
    """The clients one by one, one by one in another order, and merged in pieces."""
    streamed, shuffled, merged = Tally(), Tally(), Tally()
    for order, tally in ((range(len(values)), streamed), (rng.permutation(len(values)), shuffled)):
        for client in order:
            tally.add({"w": values[client]}, int(weights[client]))
    for part in np.array_split(rng.permutation(len(values)), 3):
        if len(part):
            piece = Tally()
            piece.add_many({"w": values[part]}, weights[part])
            merged.merge(piece)
    return streamed, shuffled, merged


# -- every way in, at random -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.slow) for part in range(2, 10))])
def test_five_thousand_random_rounds_are_those_of_exact_fractions(part):
    wrong = [problem for seed in range(part * 500, part * 500 + 500) if (problem := update_checks.run_case(seed))]
    assert not wrong, wrong[:3]


def test_the_exact_fractions_can_tell_a_wrong_result(monkeypatch):
    monkeypatch.setattr(update_checks, "weighted_mean", lambda column, weights: Fraction(float(np.mean(column))))
    assert any(update_checks.run_case(seed) for seed in range(200))


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 5))])
def test_of_five_hundred_damaged_tallies_none_is_accepted(part):
    wrong = [
        problem
        for seed in range(part * 100, part * 100 + 100)
        if (problem := damaged_tallies.run_case(seed, seconds=9))
    ]
    assert not wrong, wrong[:3]


def test_a_reseal_of_an_undamaged_tally_is_read():
    tally = damaged_tallies.make_tally(np.random.default_rng(0))
    sent = fedgma.to_bytes(tally)
    assert damaged_tallies.seal(damaged_tallies.read_parts(sent)) == sent
    assert damaged_tallies.with_header(sent, lambda header: header) == sent
    assert damaged_tallies.read(sent) == "accepted"
    assert sent[-32:] == hashlib.sha256(sent[:-32]).digest()
