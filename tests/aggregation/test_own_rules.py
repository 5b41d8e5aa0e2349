"""A user's own rule: functions and classes of sums, their state and measures, and sentences for what is wrong."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

import fedgma
from fedgma.aggregation.own import as_rule
from fedgma.aggregation.server import MaskedServer, pack_state, unpack_state
from strategies import same_bits

UPDATES = {"w": np.array([[2.0, 1.0, 0.0], [2.0, -4.0, 0.0], [-1.0, 1.0, 0.0]]), "b": np.array([[1.0], [3.0], [2.0]])}
WEIGHTS = [1, 2, 1]


def magnitude(mean, total, positive, negative):
    """Agreement weighted by size."""
    return mean, abs(total) / (positive + negative + 1e-30)


class Halved:
    """State, a measure and a prepared update in one class."""

    state = {"last": 0.0}  # noqa: RUF012

    def measure(self, mean):
        return {"norm": (mean * mean).sum(-1)}

    def prepare(self, update):
        return {name: array / 2 for name, array in update.items()}

    def __call__(self, mean, measured, last):
        return mean + last, None, {"last": measured["norm"] + 0 * mean}


def test_a_function_of_sums_is_a_rule():
    merged = as_rule(magnitude)(UPDATES, WEIGHTS)
    np.testing.assert_allclose(merged.mask["w"], [5 / 7, 6 / 10, 0.0])
    assert merged.mask["b"].tolist() == [1.0]
    assert merged.mean["w"].tolist() == [1.25, -1.5, 0.0]
    assert (as_rule(magnitude).further, as_rule(magnitude).needs) == (("parts",), ("mean", "parts"))


def test_state_measures_and_prepare_come_from_a_class():
    state, moved = None, []
    for _ in range(2):
        merged = as_rule(Halved)(UPDATES, WEIGHTS, state=state)
        state = merged.state
        moved.append(merged.update["w"].tolist())
    norm = (1.25**2 + 1.5**2 + (9 / 4) ** 2) / 4  # of both arrays
    assert moved[0] == [0.625, -0.75, 0.0]
    np.testing.assert_allclose(moved[1], np.array(moved[0]) + norm)
    assert state["last"]["b"].tolist() == pytest.approx([norm])


def test_state_goes_on_in_a_server_that_was_stopped_and_through_server_round():
    def replies():
        return [({n: a[c] for n, a in UPDATES.items()}, WEIGHTS[c], c) for c in range(3)]

    params = {"w": np.zeros(3), "b": np.zeros(1)}
    whole = MaskedServer(as_rule(Halved), fedgma.adam(0.1), norm_factor=None)
    first = whole.step(params, replies()).params
    again = MaskedServer(as_rule(Halved), fedgma.adam(0.1), norm_factor=None)
    restored = unpack_state(again, pack_state(whole, first))
    assert same_bits(whole.step(first, replies()).params, again.step(restored, replies()).params)
    state, model = None, params
    for _ in range(2):
        clients = [{name: model[name] + array[c] for name, array in UPDATES.items()} for c in range(3)]
        step = fedgma.server_round(model, clients, WEIGHTS, aggregator=Halved, optimizer=fedgma.adam(0.1), state=state)
        state, model = step.state, step.params
    np.testing.assert_allclose(model["w"], again.step(restored, replies()).params["w"], atol=1e-1)
    assert list(state) == ["z", "v", "rule.last"]


@dataclass
class Power:
    power: float = 2.0

    def __call__(self, mean, agreement):
        return mean, agreement**self.power


def test_settings_are_the_attributes_of_an_object_and_the_defaults_of_a_function():
    def scaled(mean, factor=0.5):
        return factor * mean

    assert as_rule(Power(3.0)).settings == {"power": 3.0}
    assert as_rule(scaled).settings == {"factor": 0.5}
    assert as_rule(partial(scaled, factor=0.25), "quarter").settings == {"factor": 0.25}
    assert as_rule(partial(scaled, factor=0.25))(UPDATES, WEIGHTS).update["b"].tolist() == [0.25 * 9 / 4]
    assert as_rule(Power)(UPDATES, WEIGHTS).mask["w"].tolist() == pytest.approx([1 / 9, 1 / 9, 0.0])


def test_the_library_of_the_arrays_is_handed_over():
    def bounded(mean, xp):
        return xp.clip(mean, -1.0, 1.0)

    merged = as_rule(bounded)({name: torch.from_numpy(array) for name, array in UPDATES.items()}, WEIGHTS)
    assert merged.update["w"].tolist() == [1.0, -1.0, 0.0]
    assert isinstance(merged.update["w"], torch.Tensor)


def test_a_rule_that_wraps_another_is_a_rule_too():
    rule = fedgma.clipped(as_rule(magnitude), 1.0)
    assert (rule.name, rule.further) == ("clipped_magnitude", ("parts",))


def nothing(mean):
    return mean / 0


def failing(mean):
    return mean.nonsense


def wrong_shape(mean):
    return mean, mean[:1].sum()


def in_place(mean):
    mean *= 0.5
    return mean


def numbers(mean):
    return 3


def three_arrays(mean, agreement):
    return mean, agreement, agreement


def bad_measure(mean, measured):
    return mean


bad_measure.measure = lambda mean: {"x": mean}


@pytest.mark.parametrize(
    ("rule", "error", "sentence"),
    [
        (nothing, fedgma.Diverged, "rule 'nothing' gave values that are not finite for 'w'; nothing was changed"),
        (failing, fedgma.ConfigError, r"rule 'failing' failed on 'w' \(AttributeError: .*nonsense"),
        (wrong_shape, fedgma.ConfigError, r"rule 'wrong_shape' must return arrays of the mean's shape \[3\] for 'w'"),
        (in_place, fedgma.ConfigError, r"rule 'in_place' failed on 'w' \(ValueError: .*read-only"),
        (numbers, fedgma.ConfigError, "rule 'numbers' must return .* got int as its mean"),
        (three_arrays, fedgma.ConfigError, r"rule 'three_arrays' must .* got a ndarray as its state"),
        (bad_measure, fedgma.ConfigError, "rule 'bad_measure': measure must return a number by name"),
        (lambda votez: votez, fedgma.ConfigError, "asks for 'votez', which is not a sum of a round; known: agreement,"),
        (3, fedgma.ConfigError, "expected a rule or a function of sums, got 3"),
        ("gma", fedgma.ConfigError, r"got 'gma'; a rule of the library is made by a call, such as fedgma\.masked"),
        (type("Needy", (), {"__init__": lambda self, x: None}), fedgma.ConfigError, "made without arguments"),
        (type("Odd", (), {"state": 3, "__call__": lambda self, mean: mean}), fedgma.ConfigError, "state must name"),
        (type("Same", (), {"state": {"mean": 0}, "__call__": lambda s, mean: mean}), fedgma.ConfigError, "another"),
    ],
)  # fmt: skip
def test_a_bad_rule_gives_one_sentence_that_names_it(rule, error, sentence):
    with pytest.raises(error, match=sentence):
        as_rule(rule)(UPDATES, WEIGHTS)


def test_a_tally_that_lacks_a_rules_sums_is_refused():
    tally = fedgma.Tally()
    tally.add({"w": np.ones(2)}, 1)
    with pytest.raises(fedgma.DataError, match=r"'magnitude' reads sums that this tally does not keep: parts; .*open"):
        as_rule(magnitude).conclude(tally)


def test_an_update_that_the_gate_refuses_is_not_prepared():
    rows = [{"w": np.ones(2)}, {"w": "text"}, {"w": np.array([np.nan, 1.0])}, {"w": np.full(2, 3.0)}]
    merged = as_rule(Halved)(rows)
    assert [refusal.reason for refusal in merged.notes["refused"]] == ["dtype", "nonfinite"]
    assert merged.mean["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda rule: fedgma.clipped(rule, 100.0),
        lambda rule: fedgma.by_array(rule, {"a*": rule}),
        lambda rule: fedgma.unmasked(rule, "a*"),
        fedgma.keep_norm,
        fedgma.smoothed,
        lambda rule: fedgma.in_products(rule, {"product": ("b", "a")}),
    ],
)
def test_every_wrapper_takes_a_users_function(wrap):
    def halved(mean):
        return mean / 2

    assert wrap(halved).name.endswith("halved")
    params = {"w": np.zeros(2), "a": np.ones((1, 2)), "b": np.ones((2, 1))}
    updates = [{**params, "w": np.array([2.0, 4.0])}, {**params, "w": np.array([4.0, 6.0])}]
    step = fedgma.server_round(params, updates, aggregator=wrap(halved)).params["w"]
    np.testing.assert_allclose(step, [1.5, 2.5])
    with pytest.raises(fedgma.ConfigError, match="mean makes a rule; call it"):
        wrap(fedgma.mean)


@pytest.mark.parametrize(
    ("prepare", "sentence"),
    [
        (lambda update: {}["x"], r"prepare failed \(KeyError: 'x'\)"),
        (lambda update: None, "prepare must return an update with the same names, got NoneType"),
        (lambda update: {"u": update["w"]}, r"prepare must return an update with the same names, got \['u'\]"),
    ],
)
def test_a_prepare_that_fails_is_not_blamed_on_the_clients(prepare, sentence):
    class Prepared:
        def __call__(self, mean):
            return mean

        def prepare(self, update):
            return prepare(update)

    with pytest.raises(fedgma.ConfigError, match=f"rule 'Prepared': {sentence}"):
        as_rule(Prepared)(UPDATES, WEIGHTS)
