"""The library's rules at their edges: settings, limits, what each needs, and the controls by hand."""

import math

import numpy as np
import pytest
import torch

import fedgma
from fedgma.aggregation.elections import Trim
from fedgma.aggregation.rules import AGGREGATORS, BASELINE, RULES, clip
from fedgma.aggregation.view import View
from fedgma.seeds import generator

UPDATES = {"w": np.array([[1.0, 4.0], [3.0, -2.0], [2.0, 1.0]])}


@pytest.mark.parametrize(
    ("rule", "name", "settings"),
    [
        (fedgma.masked_mean(), "gma", {"tau": 0.4}),
        (fedgma.mean(), "mean", {}),
        (fedgma.and_mask(), "and_mask", {"tau": 0.4, "inverse_sparsity_scale": False}),
        (fedgma.rlr(3), "rlr", {"threshold": 3}),
        (fedgma.median(), "median", {}),
        (fedgma.trimmed_mean(), "trimmed_mean", {"share": 0.1}),
        (fedgma.damped_mean(), "damped_mean", {"tau": 0.4}),
        (fedgma.shuffled_mask(), "shuffled_mask", {"tau": 0.4, "seed": 0}),
        (fedgma.multi_krum(), "multi_krum", {"share": 0.1}),
        (fedgma.stale_mask(), "stale_mask", {"tau": 0.4}),
        (fedgma.cross_fitted(), "cross_fitted", {"tau": 0.4, "seed": 0}),
        (fedgma.norm_kept(), "norm_kept", {"tau": 0.4}),
        (fedgma.masked_extra(), "masked_extra", {"tau": 0.4}),
        (fedgma.clipped(fedgma.masked_mean(0.3), 2.0), "clipped_gma", {"tau": 0.3, "norm": 2.0}),
    ],
)
def test_a_rule_says_its_name_and_its_settings(rule, name, settings):
    assert (rule.name, dict(rule.settings)) == (name, settings)


@pytest.mark.parametrize("name", ["mean", "gma", "and_mask", "rlr", "median", "trimmed_mean"])
def test_a_rule_in_the_list_is_made_under_its_name_and_needs_what_its_row_says(name):
    rule = AGGREGATORS[name](2) if name == "rlr" else AGGREGATORS[name]()
    assert rule.name == name
    assert RULES[name].needs == rule.needs


def test_rules_say_what_they_read_of_a_round():
    assert fedgma.mean().needs == ("mean",)
    assert fedgma.masked_mean().needs == ("mean", "votes")
    assert fedgma.median().needs == ("updates",)
    assert fedgma.mean().streams
    assert not fedgma.median().streams
    assert RULES["shuffled_mask"].settings == ("tau", "seed")
    assert (RULES["gma"].label, RULES["rlr"].label, RULES["and_mask"].label) == ("GMA", "RLR", "AND-mask")
    assert [row.noun for row in (RULES["gma"], RULES[BASELINE])] == ["", "the mean"]
    assert (BASELINE, RULES["median"].label, RULES[BASELINE].label) == ("mean", "median", "mean")


# -- median and trimmed mean -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convert", [np.array, lambda rows: torch.tensor(rows, dtype=torch.float64)])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (fedgma.median(), 3.5),  # of 6 clients: the mean of the third and the fourth
        (fedgma.trimmed_mean(0.4), 3.5),  # cuts int(2.4) = 2 at each end
        (fedgma.trimmed_mean(0.2), 4.25),  # cuts int(1.2) = 1
        (fedgma.trimmed_mean(0.1), (1 + 2 + 3 + 4 + 8 + 90) / 6),  # cuts int(0.6) = 0
        (fedgma.trimmed_mean(0), (1 + 2 + 3 + 4 + 8 + 90) / 6),
    ],
)
def test_the_ends_of_each_entry_are_cut(convert, rule, expected):
    merged = rule({"w": convert([[90.0], [2.0], [1.0], [8.0], [4.0], [3.0]])})
    assert merged.update["w"].tolist() == [pytest.approx(expected, rel=1e-15)]


@pytest.mark.parametrize(("clients", "expected"), [(1, 0.0), (2, 0.5), (3, 1.0), (4, 1.5), (5, 2.0)])
def test_the_median_is_the_middle_of_any_number_of_clients(clients, expected):
    assert fedgma.median()({"w": np.arange(clients, dtype=float)[:, None]}).update["w"].tolist() == [expected]


@pytest.mark.parametrize("share", [-0.01, 0.5, 1, math.nan, True, False, "0.1", None])
def test_a_share_of_half_the_clients_or_more_is_refused(share):
    with pytest.raises(fedgma.ConfigError, match=r"must be at least 0 and below 0.5"):
        fedgma.trimmed_mean(share)


@pytest.mark.parametrize("clients", [3, 7])
@pytest.mark.parametrize("share", [0.0, 0.15, 0.3, 0.45])
def test_multi_krum_averages_the_clients_that_lie_closest_together(clients, share):
    rows = generator(clients, "krum", "rows").standard_normal((clients, 3))
    left_out = int(share * clients)
    nearest = max(1, clients - left_out - 2)
    distances = [sorted(float(((row - other) ** 2).sum()) for other in rows)[1:] for row in rows]
    scores = [sum(of_client[:nearest]) for of_client in distances]
    kept = sorted(range(clients), key=scores.__getitem__)[: clients - left_out]
    np.testing.assert_allclose(fedgma.multi_krum(share)({"w": rows}).update["w"], rows[kept].mean(0), rtol=1e-13)


# -- clipping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [0, -1.0, math.inf, math.nan, True, "1", None])
def test_a_norm_must_be_a_number_above_zero(norm):
    with pytest.raises(fedgma.ConfigError, match=r"norm .* must be a number above 0"):
        fedgma.clipped(fedgma.mean(), norm)


def test_an_update_is_scaled_down_over_all_trainable_entries_together():
    update = {
        "w": np.array([3.0, 0.0]),
        "b": np.array([4.0]),
        "bn.running_mean": np.array([100.0]),
        "bn.num_batches_tracked": np.array([7]),
    }
    clipped = clip(update, 1.0)
    assert clipped["w"].tolist() == pytest.approx([0.6, 0.0], rel=1e-15)
    assert clipped["b"].tolist() == pytest.approx([0.8], rel=1e-15)
    assert clipped["bn.running_mean"] is update["bn.running_mean"]
    assert clipped["bn.num_batches_tracked"] is update["bn.num_batches_tracked"]
    named = clip(update, 1.0, buffers=["b"])
    assert named["b"] is update["b"]
    assert named["bn.running_mean"] is update["bn.running_mean"]
    assert named["w"].tolist() == pytest.approx([1.0, 0.0], rel=1e-15)


def test_an_update_whose_norm_overflows_is_scaled_down_too():
    assert clip({"w": np.array([1.5e308, -1.5e308])}, 1.0)["w"].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_a_limit_below_one_is_a_limit():
    rule = fedgma.clipped(fedgma.mean(), 0.5)
    assert rule([{"w": np.array([3.0, 4.0])}]).update["w"].tolist() == pytest.approx([0.3, 0.4], rel=1e-15)


@pytest.mark.parametrize("limit", [5.0, 5.1])
def test_an_update_within_the_limit_stays_the_same_object(limit):
    update = {"w": np.array([3.0, 4.0])}
    assert clip(update, limit) is update


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_update_that_the_gate_refuses_is_not_clipped(value):
    update = {"w": np.array([3.0, value])}
    assert clip(update, 1.0) is update
    assert clip({"w": "text"}, 1.0) == {"w": "text"}


def test_a_rule_can_be_clipped_twice():
    inner = fedgma.clipped(fedgma.mean(), 4.0)
    for rule in (fedgma.clipped(inner, 2.0), fedgma.clipped(fedgma.clipped(fedgma.mean(), 2.0), 4.0)):
        assert rule([{"w": np.array([0.0, 8.0])}]).update["w"].tolist() == [0.0, 2.0]


def test_a_clipped_update_keeps_its_type_and_library():
    assert clip({"w": np.array([3, 4], np.float32)}, 1.0)["w"].dtype == np.float32
    assert clip({"w": torch.tensor([3.0, 4.0])}, 1.0)["w"].dtype == torch.float32


# -- changes of a mask -------------------------------------------------------------------------------------------------


def test_the_and_mask_can_be_divided_by_the_share_it_keeps():
    updates = {"w": np.array([[1.0, 4.0, 1.0, 1.0], [3.0, -2.0, 1.0, -1.0]]), "none": np.ones((2, 0))}
    scaled = fedgma.and_mask(1.0, inverse_sparsity_scale=True)(updates)
    kept = 1 / (0.5 + 1e-10)
    assert scaled.mask["w"].tolist() == [kept, 0.0, kept, 0.0]
    assert kept != 2.0
    assert scaled.mask["none"].shape == (0,)


def test_a_mask_that_keeps_nothing_stays_zero():
    scaled = fedgma.and_mask(1.0, inverse_sparsity_scale=True)({"w": np.array([[1.0], [-1.0]])})
    assert scaled.mask["w"].tolist() == [0.0]
    assert not np.signbit(scaled.mask["w"]).any()


@pytest.mark.parametrize("convert", [np.array, lambda rows: torch.tensor(rows, dtype=torch.float64)])
@pytest.mark.parametrize("size", [1.0, 1e-200, 1e200])
def test_the_damped_mean_by_hand_at_any_size(convert, size):
    # means 2 and 1, agreement 1 and 1/3: the masked mean is (2, 1/3), the plain one (2, 1)
    rows = [[1.0 * size, 4.0 * size], [3.0 * size, -2.0 * size], [2.0 * size, 1.0 * size]]
    merged = fedgma.damped_mean(1.0)({"w": convert(rows)})
    ratio = math.hypot(2, 1 / 3) / math.hypot(2, 1)
    assert (merged.update["w"] / size).tolist() == pytest.approx([2 * ratio, 1 * ratio], rel=1e-14)


def test_a_mean_of_zero_is_damped_by_nothing():
    merged = fedgma.damped_mean(1.0)({"w": np.array([[1.0, 2.0], [-1.0, -2.0]]), "none": np.ones((2, 0))})
    assert merged.mask["w"].tolist() == [1.0, 1.0]
    assert merged.update["w"].tolist() == [0.0, 0.0]
    assert merged.update["none"].shape == (0,)


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_the_shuffled_mask_is_drawn_from_the_seed_and_the_entrys_name(convert):
    rows = generator(5, "some", "updates").standard_normal((4, 50))
    plain = np.asarray(fedgma.masked_mean(1.0)({"w": convert(rows)}).mask["w"])
    shuffled = np.asarray(fedgma.shuffled_mask(1.0, seed=7)({"w": convert(rows)}).mask["w"])
    assert np.array_equal(shuffled, plain[generator(7, "shuffled mask", "w").permutation(50)])
    assert not np.array_equal(shuffled, plain)


@pytest.mark.parametrize("control", [fedgma.damped_mean(1.0), fedgma.shuffled_mask(1.0, seed=7)], ids=lambda r: r.name)
def test_a_control_steps_as_far_as_the_masked_mean(control):
    rows = generator(5, "some", "updates").standard_normal((4, 50))
    lengths = [np.linalg.norm(rule({"w": rows}).update["w"]) for rule in (control, fedgma.masked_mean(1.0))]
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-13)


def viewed(mean, mask):
    return View("w", mean, mask, None, None, None, None)


@pytest.mark.parametrize(
    "rule",
    [
        fedgma.and_mask(1.0, inverse_sparsity_scale=True),
        fedgma.damped_mean(1.0),
        fedgma.shuffled_mask(1.0, seed=7),
        fedgma.norm_kept(1.0),
        fedgma.masked_extra(1.0),
    ],
    ids=lambda rule: rule.name,
)
def test_a_mask_on_another_device_is_changed_in_the_same_way(rule):
    # inside, arrays on the CPU are numpy's; tensors are those of other devices
    mean, mask = np.array([[1.0, -2.0, 4.0]] * 2), np.array([[1.0, 0.0, 0.5], [0.0, 0.0, 1.0]])
    ours, theirs = (rule.step(viewed(convert(mean), convert(mask))).mask for convert in (np.asarray, torch.from_numpy))
    assert isinstance(theirs, torch.Tensor)
    np.testing.assert_allclose(theirs.numpy(), ours, rtol=1e-15)


def test_a_mask_that_keeps_the_norm_turns_the_step_and_does_not_shorten_it():
    merged = fedgma.norm_kept(1.0)({**UPDATES, "none": np.ones((3, 0))})
    ratio = math.hypot(2, 1 / 3) / math.hypot(2, 1)  # as above
    assert merged.mask["w"].tolist() == [pytest.approx(1 / ratio, rel=1e-14), pytest.approx(1 / 3 / ratio, rel=1e-14)]
    assert np.linalg.norm(merged.update["w"]) == pytest.approx(math.hypot(2, 1), rel=1e-14)
    assert merged.mask["none"].shape == (0,)


def test_a_mask_that_leaves_nothing_stays():
    merged = fedgma.norm_kept(1.0)({"w": np.array([[1.0, 2.0], [-3.0, -4.0]])})
    assert merged.mask["w"].tolist() == [0.0, 0.0]


def test_the_masked_mean_can_be_added_to_the_plain_one():
    merged = fedgma.masked_extra(1.0)(UPDATES)
    assert merged.mask["w"].tolist() == [2.0, pytest.approx(4 / 3, rel=1e-15)]


# -- forms of updates --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "multi_krum", "cross_fitted"])
def test_a_rule_that_needs_all_updates_is_not_concluded_from_a_tally(name):
    rule = RULES[name].make()
    tally = rule.open()
    tally.add({"w": np.ones(1)})
    with pytest.raises(fedgma.DataError, match=f"{name} needs all updates in memory together"):
        rule.conclude(tally)


def test_a_rule_over_products_is_not_concluded_from_a_tally():
    rule = fedgma.in_products(fedgma.mean())
    with pytest.raises(fedgma.DataError, match="needs the server's model"):
        rule.conclude(rule.open())


@pytest.mark.parametrize("rule", [fedgma.clipped(fedgma.mean(), 1.0), fedgma.ties(density=0.5)])
def test_a_tally_of_a_rule_that_prepares_updates_takes_no_others(rule):
    updates = [{"w": np.array([3.0, 4.0])}, {"w": np.array([0.3, 0.4])}]
    tally = rule.open()
    for wrong in (lambda: tally.add(updates[0]), lambda: tally.add_many({"w": np.ones((2, 2))})):
        with pytest.raises(
            fedgma.DataError, match=r"changes every update before it is counted; add each by .*rule\.prepared"
        ):
            wrong()
    for update in updates:
        assert tally.add(rule.prepared(update, None)) is None
    assert rule.conclude(tally).update["w"].tolist() == rule(updates).update["w"].tolist()


@pytest.mark.parametrize("update", ["text", None, 5, {}, {"w": "a"}])
def test_a_rule_that_prepares_updates_leaves_what_is_none_to_the_gate(update):
    for rule in (fedgma.clipped(fedgma.mean(), 1.0), fedgma.ties(density=0.5)):
        merged = rule([{"w": np.ones(3)}, update, {"w": np.ones(3)}])
        assert [refusal.client for refusal in merged.notes["refused"]] == [1]


def test_updates_without_names_are_named_by_their_position():
    merged = fedgma.median()([[np.array([1.0]), np.array([5.0])], [np.array([3.0]), np.array([7.0])]])
    assert {name: entry.tolist() for name, entry in merged.update.items()} == {"0": [2.0], "1": [6.0]}


@pytest.mark.parametrize("updates", ["text", b"text", 7, None, {1.0, 2.0}])
@pytest.mark.parametrize("rule", [fedgma.mean(), fedgma.median()])
def test_anything_else_than_updates_is_refused_in_one_sentence(rule, updates):
    with pytest.raises(fedgma.DataError, match="expected a mapping of arrays or a list of clients"):
        rule(updates)


@pytest.mark.parametrize("client", ["text", b"text"])
def test_a_client_that_sends_text_is_refused_alone(client):
    merged = fedgma.mean()([{"w": np.array([1.0])}, client, {"w": np.array([3.0])}])
    assert merged.update["w"].tolist() == [2.0]
    assert [(refusal.client, refusal.reason) for refusal in merged.notes["refused"]] == [(1, "schema")]


def test_the_most_common_schema_counts_and_not_the_first():
    odd, even = {"w": np.ones(3)}, {"w": np.ones(2)}
    merged = fedgma.mean()([odd, even, even])
    assert [refusal.client for refusal in merged.notes["refused"]] == [0]
    assert fedgma.mean()([odd, even, even], like=odd).notes["clients"] == 1
    both = fedgma.mean()([odd, even])  # a tie: the first
    assert [refusal.client for refusal in both.notes["refused"]] == [1]


def test_without_any_readable_update_nothing_is_aggregated():
    with pytest.raises(fedgma.FedgmaError):
        fedgma.mean()([None, "text"])


def test_a_refused_client_does_not_enter_the_median():
    rows = [{"w": np.array([value])} for value in (1.0, math.nan, 2.0, 3.0)]
    assert fedgma.median()(rows).update["w"].tolist() == [2.0]


def test_a_stack_gives_the_median_of_its_clients_with_their_names_and_weights():
    merged = fedgma.median()(UPDATES, [1, 0, 1], clients=["a", "b", "c"])
    assert merged.update["w"].tolist() == [1.5, 2.5]
    assert [(refusal.client, refusal.reason) for refusal in merged.notes["refused"]] == [("b", "empty")]


def test_the_gate_and_the_buffers_are_those_that_are_passed():
    gate = fedgma.Gate(max_weight=5)
    for rule in (fedgma.masked_mean(1.0), fedgma.median()):
        merged = rule({"w": UPDATES["w"], "s": UPDATES["w"]}, [1, 9, 1], buffers=["s"], gate=gate)
        assert [refusal.client for refusal in merged.notes["refused"]] == [1]
        assert list(merged.buffers) == ["s"]
        assert list(merged.mean) == ["w"]


@pytest.mark.filterwarnings("error")
def test_ties_trims_updates_that_are_not_finite_without_a_warning():
    rows = np.array([[np.inf, np.nan, np.nan, -2.0], [np.inf, -np.inf, np.inf, 1.0], [4.0, 1.0, -3.0, 2.0]], np.float32)
    trimmed = Trim(0.5).rows(rows)
    np.testing.assert_array_equal(trimmed, Trim(0.5).rows(torch.from_numpy(rows)).numpy())
    np.testing.assert_array_equal(trimmed[2], [4, 0, -3, 0])
    assert not np.isfinite(trimmed[:2]).all(1).any()  # so the gate still refuses them
