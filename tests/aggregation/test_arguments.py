"""Arguments that look right and are not: each is understood, or refused in a sentence; none gives a wrong result."""

from collections.abc import Mapping

import numpy as np
import pytest
import torch

import fedgma
from fedgma import Gate, Tally
from fedgma.aggregation.server import MaskedServer, pack_state, unpack_state
from strategies import same_bits

STACK = {"w": np.array([[1.0, 2.0], [3.0, -4.0], [5.0, 6.0]])}
LIST = [{"w": row} for row in STACK["w"]]


@pytest.mark.parametrize("updates", [STACK, LIST])
@pytest.mark.parametrize(
    ("weights", "sentence"),
    [
        ({7: 10, 8: 20, 9: 30}, "weights: expected a list in the order of the updates, got dict"),
        ({10, 20, 30}, "weights: expected a list in the order of the updates, got set"),
        ("123", "weights: expected a list in the order of the updates, got str"),
        (10, "weights: expected a list with one value for each client, got 10"),
        (np.array(10), r"weights: expected a list with one value for each client, got array\(10\)"),
        ([10, 20], "expected one weight for each of 3 .*, got 2"),
    ],
)
def test_weights_without_an_order_or_a_length_are_refused(updates, weights, sentence):
    with pytest.raises(fedgma.DataError, match=sentence):
        fedgma.mean()(updates, weights)
    with pytest.raises(fedgma.DataError, match=sentence):
        fedgma.server_round({"w": np.zeros(2)}, LIST, weights)


def test_names_of_clients_without_an_order_are_refused():
    for clients in ("abc", {"a", "b", "c"}, {"a": 1, "b": 2, "c": 3}, 3):
        with pytest.raises(fedgma.DataError, match="clients: expected a list"):
            fedgma.mean()(STACK, clients=clients)
    with pytest.raises(fedgma.DataError, match="expected one client name for each of 3 clients, got 2"):
        fedgma.mean()(STACK, clients=["a", "b"])


def test_integers_alone_are_not_averaged_and_not_taken_for_counters():
    whole = {"w": np.array([[1, 2], [3, -4]])}
    with pytest.raises(fedgma.DataError, match="integers are counters and are not averaged: convert the updates"):
        fedgma.masked_mean()(whole)
    assert Tally().add({"w": np.array([1, 2])}).reason == "dtype"
    with pytest.raises(fedgma.DataError, match="integers are counters"):
        Tally({"w": np.array([1, 2])})


def test_a_masked_array_is_refused_and_its_mask_is_not_lost():
    masked = np.ma.array([1.0, 1e6], mask=[False, True])
    assert "a masked array (fill the masked values first)" in Tally().add({"w": masked}).detail
    weights = np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False])
    merged = fedgma.mean()(STACK, weights)
    assert [(refusal.client, refusal.reason) for refusal in merged.notes["refused"]] == [(1, "weight")]


@pytest.mark.parametrize("optimizer", ["adam", fedgma.sgd, {"learning_rate": 1.0}])
def test_what_cannot_be_an_optimizer_is_refused_at_the_door(optimizer):
    with pytest.raises(fedgma.ConfigError, match=r"optimizer: .* made by a call, such as fedgma\.adam"):
        fedgma.server_round({"w": np.zeros(2)}, LIST, optimizer=optimizer)
    with pytest.raises(fedgma.ConfigError, match="optimizer: "):
        fedgma.averaged(optimizer)


@pytest.mark.parametrize("rule", [fedgma.mean, fedgma.masked_mean, fedgma.median])
def test_a_rule_that_was_not_called_is_told_apart_from_a_users_function(rule):
    with pytest.raises(fedgma.ConfigError, match=rf"{rule.__name__} makes a rule; call it, such as {rule.__name__}\("):
        fedgma.server_round({"w": np.zeros(2)}, LIST, aggregator=rule)


@pytest.mark.parametrize("name", [("site", 4), 2.5, b"site", frozenset("a"), True])
def test_a_name_that_would_come_back_as_another_is_not_sent(name):
    tally = Tally()
    assert tally.add(LIST[0], client=name) is None
    with pytest.raises(fedgma.DataError, match="name its clients by strings or integers, got"):
        fedgma.to_bytes(tally)


@pytest.mark.parametrize("library", [np.array, torch.tensor])
def test_counters_of_every_type_take_the_maximum(library):
    kinds = ["uint8", "int8", "int16", "int32", "int64"] + (
        ["uint16", "uint32", "uint64"] if library is np.array else []
    )
    for kind in kinds:
        dtype = getattr(np if library is np.array else torch, kind)
        model = {"w": library([0.0]), "steps": library([5], dtype=dtype)}
        clients = [{"w": library([1.0]), "steps": library([steps], dtype=dtype)} for steps in (3, 100, 4)]
        after = fedgma.server_round(model, clients).params["steps"]
        assert after.tolist() == [100]
        assert after.dtype == dtype


def test_a_torch_model_may_have_numpy_clients_and_the_other_way_round():
    arrays = [{"w": np.array([1.0, 3.0], np.float32)}, {"w": np.array([2.0, -1.0], np.float32)}]
    tensors = [{"w": torch.from_numpy(client["w"])} for client in arrays]
    for server in (fedgma.sgd(), fedgma.adam()):
        plain = fedgma.server_round({"w": np.ones(2, np.float32)}, arrays, optimizer=server)
        mixed = fedgma.server_round({"w": torch.ones(2)}, [arrays[0], tensors[1]], optimizer=server)
        turned = fedgma.server_round({"w": np.ones(2, np.float32)}, [tensors[0], arrays[1]], optimizer=server)
        assert isinstance(mixed.params["w"], torch.Tensor)
        assert same_bits({"w": mixed.params["w"].numpy()}, plain.params)
        assert same_bits(turned.params, plain.params)
        step = server.step(fedgma.masked_mean()(STACK), server.init({"w": torch.zeros(2)}), {"w": torch.zeros(2)})
        assert isinstance(step[0]["w"], torch.Tensor)


def test_lists_of_numbers_are_arrays():
    after = fedgma.server_round({"w": [1.0, 2.0]}, [{"w": [2.0, 2.0]}, {"w": [4.0, 2.0]}], optimizer=fedgma.sgd())
    assert after.params["w"].tolist() == [3.0, 2.0]


@pytest.mark.parametrize("clients", [{"a": LIST[0]}, (client for client in LIST), 3, "abc", None])
def test_server_round_asks_for_a_list_of_models(clients):
    with pytest.raises(fedgma.DataError, match="client_params: expected a list with a model for each client, got"):
        fedgma.server_round({"w": np.zeros(2)}, clients)


@pytest.mark.parametrize(
    "options",
    [
        {"max_weight": "5"}, {"max_weight": None}, {"max_weight": np.nan}, {"max_weight": np.inf}, {"max_weight": 0},
        {"max_norm": True}, {"max_norm": -1}, {"max_norm": "1"}, {"max_share": 0}, {"max_share": 1.5}, {"cast": "yes"},
        {"selected": "abc"}, {"selected": 3}, {"selected": [[1]]}, {"round": "7"}, {"round": True},
    ],
)  # fmt: skip
def test_odd_limits_of_a_gate_are_refused(options):
    with pytest.raises(fedgma.ConfigError, match=r"^(a gate's|the selected clients)"):
        Gate(**options)


@pytest.mark.parametrize(
    "options", [{"norm_factor": "10"}, {"norm_factor": 0}, {"quorum": 1.5}, {"quorum": True}, {"share_cap": "0.6"}]
)
def test_odd_limits_of_a_server_are_refused(options):
    with pytest.raises(fedgma.ConfigError):
        MaskedServer(**options)


class Unreadable:
    def __array__(self, *arguments, **options):
        raise RuntimeError("no")


class Lazy(Mapping):
    """A mapping that reads its entries when they are asked for."""

    def __init__(self, entries):
        self.entries = entries

    def __getitem__(self, name):
        raise OSError("the file is gone")

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)


def test_whatever_an_update_raises_costs_its_client():
    assert Tally().add({"w": Unreadable()}).reason == "dtype"
    assert Tally().add(Lazy({"w": np.ones(2)})).reason == "schema"


def test_the_detail_of_a_refusal_is_short_whatever_a_client_sends():
    for update, weight in (
        ({"x" * 10_000: np.ones(1)}, 1),
        ({"w": np.ones(2)}, "9" * 10_000),
        ({"w" * 10_000: "a"}, 1),
    ):
        refusal = Tally({"w": np.ones(2)}).add(update, weight)
        assert len(refusal.detail) <= 300


def test_moments_of_another_shape_are_refused():
    server, model = fedgma.adam(), {"w": np.zeros(2)}
    state = server.init({"w": np.zeros(1)})  # would broadcast
    with pytest.raises(fedgma.DataError, match="has another shape"):
        server.step(fedgma.mean()(STACK), state, model)


@pytest.mark.parametrize("name", ["adagrad", "adam", "yogi"])
def test_moments_that_overflow_are_not_committed(name):
    server, model = getattr(fedgma, name)(), {"w": np.zeros(1, np.float32)}
    state = server.init(model)
    with pytest.raises(fedgma.Diverged):
        server.step(fedgma.mean()([{"w": np.full(1, 1e30, np.float32)}]), state, model)
    assert np.isfinite(state["v"]["w"]).all()


def norms_seen(lengths, factor=2.0):
    """The limit after a round of updates of these norms: the largest that passes."""
    server, model = MaskedServer(fedgma.mean(), norm_factor=factor), {"w": np.full(1, 1e6)}
    server.step(model, [({"w": np.array([length])}, 1, client) for client, length in enumerate(lengths)])
    return server.open(model).gate.max_norm


def test_the_usual_norm_is_the_lower_median():
    assert norms_seen([1.0, 100.0]) == 2.0  # one of two clients cannot raise it
    assert norms_seen([1.0, 3.0, 100.0, 100.0]) == 6.0
    assert norms_seen([1.0, 3.0, 100.0]) == 6.0
    server, model = MaskedServer(fedgma.mean(), norm_factor=2.0), {"w": np.full(1, 1e6)}
    for length in (1.0, 100.0):  # the median of rounds, too
        server.step(model, [({"w": np.array([length])}, 1, 0)])
    assert server.open(model).gate.max_norm == 2.0


def test_the_usual_norm_is_that_of_the_last_five_rounds():
    server, model = MaskedServer(fedgma.mean(), norm_factor=2.0), {"w": np.full(1, 1e6)}
    for length in (*[1.0] * 6, *[100.0] * 5):  # refused at first, but counted among the norms
        server.step(model, [({"w": np.array([length])}, 1, 0)])
    assert server.open(model).gate.max_norm == 200.0


@pytest.mark.parametrize(
    ("buffers", "sentence"),
    [
        (["bn.meen"], "the model has no entry 'bn.meen'; did you mean 'bn.mean'?"),
        ("bn.mean", "expected a list of names, got the text 'bn.mean'"),
    ],
)
def test_buffers_that_no_entry_is_called_are_refused_and_not_masked(buffers, sentence):
    model = {"w": np.zeros(2), "bn.mean": np.zeros(2)}
    with pytest.raises(fedgma.ConfigError, match=sentence):
        fedgma.server_round(model, [model], buffers=buffers)
    with pytest.raises(fedgma.ConfigError, match=sentence):
        MaskedServer(buffers=buffers).open(model)


def test_a_model_that_is_not_finite_is_not_blamed_on_the_clients():
    model = {"v": np.zeros(2), "w": np.array([0.0, np.nan])}
    with pytest.raises(fedgma.DataError, match="the model: 'w' holds a NaN or an infinity"):
        fedgma.server_round(model, [{"v": np.ones(2), "w": np.ones(2)}] * 2)
    with pytest.raises(fedgma.NotEnoughClients, match="'w' holds a NaN"):
        fedgma.server_round({"w": np.zeros(2)}, [{"w": np.array([1.0, np.nan])}])


def test_a_module_in_place_of_its_weights_is_told_so():
    with pytest.raises(fedgma.DataError, match=r"params: .*got Linear; pass its state_dict\(\)"):
        fedgma.server_round(torch.nn.Linear(2, 2), LIST)


@pytest.mark.parametrize(
    "call",
    [
        lambda data: Tally().merge(data),
        fedgma.to_bytes,
        fedgma.pack,
        fedgma.finish,
    ],
)
def test_bytes_in_place_of_a_tally_are_refused(call):
    with pytest.raises(fedgma.DataError, match=r"tally.*, got bytes"):
        call(b"fedgma tally")


def test_finish_says_how_a_rule_finishes_a_tally():
    rule, tally = fedgma.rlr(threshold=1), Tally()
    tally.add(LIST[0])
    with pytest.raises(fedgma.ConfigError, match=r"for another rule: rule.conclude\(tally\)"):
        fedgma.finish(tally, rule)
    assert rule.conclude(tally).mean["w"].tolist() == [1.0, 2.0]


def served(server, model, *variances, steps=1):
    clients = [{"w": np.full(1, 0.1), "bn.running_var": np.array([value]), "n": np.array(steps)} for value in variances]
    return server.step(model, [(client, 1, f"site {number}") for number, client in enumerate(clients)])


def test_buffers_that_change_by_far_more_than_usual_are_refused_from_the_second_round_on():
    server, model = MaskedServer(), {"w": np.ones(1), "bn.running_var": np.ones(1), "n": np.array(0)}
    first = served(server, model, 0.5, -0.2, 0.1)
    assert (first.refused, server.buffer_medians) == ((), [0.2])
    second = served(server, model, 0.5, 1e30, 1.9)
    ((client, reason, detail),) = second.refused
    assert (client, reason) == ("site 1", "norm")
    assert detail == "the norm of the buffers' change must be at most 2, got 1e+30"
    assert second.params["bn.running_var"].tolist() == [2.2]
    assert server.buffer_medians == [0.2, 1.9]  # of all readable replies, as for the updates


def test_nobody_but_the_clients_of_the_round_decides_what_change_of_buffers_is_usual():
    server, model = MaskedServer(), {"w": np.ones(1), "bn.running_var": np.ones(1), "n": np.array(0)}
    honest, huge = ({"w": np.full(1, 0.1), "bn.running_var": np.full(1, x), "n": np.array(1)} for x in (0.2, 1e20))
    outsiders = [(huge, 1, f"outsider {number}") for number in range(9)]
    again = [(huge, 1, "a")] * 9
    server.step(model, [(honest, 1, "a"), *again, *outsiders], selected={"a", "b"})
    assert server.buffer_medians == [0.2]
    step = server.step(model, [(honest, 1, "a"), (huge, 1, "b")], selected={"a", "b"})
    assert [refusal[:2] for refusal in step.refused] == [("b", "norm")]


def test_one_with_too_large_buffers_is_not_held_back_as_the_heaviest():
    gate = Gate(max_buffer_norm=1.0)
    server = MaskedServer(fedgma.mean(), gate=gate, norm_factor=None, share_cap=0.5)
    model = {"w": np.zeros(1), "bn.running_var": np.zeros(1)}
    replies = [({"w": np.ones(1), "bn.running_var": np.full(1, x)}, w, x) for x, w in ((9.0, 100), (0.5, 10), (0.1, 1))]
    step = server.step(model, replies)
    assert ([refusal[:2] for refusal in step.refused], step.capped) == ([(9.0, "norm")], ((0.5, 10.0, 1.0),))


def test_a_counter_that_jumps_is_refused_and_honest_clients_go_on():
    server, model = MaskedServer(), {"w": np.ones(1), "bn.running_var": np.ones(1), "n": np.array(0)}
    jump = {"w": np.full(1, 0.1), "bn.running_var": np.zeros(1), "n": np.array(2**63 - 1)}
    honest = {**jump, "n": np.array(5)}
    step = server.step(model, [(jump, 1, "a"), (honest, 1, "b")])
    assert [refusal[:2] for refusal in step.refused] == [("a", "norm")]
    assert "'n' is too far from the server's counter" in step.refused[0].detail
    assert server.step(step.params, [(honest, 1, "b")]).params["n"].tolist() == 10


def test_without_a_factor_and_before_the_first_round_buffers_have_no_limit():
    model = {"w": np.ones(1), "bn.running_var": np.ones(1), "n": np.array(0)}
    assert served(MaskedServer(), model, 1e30).refused == ()
    server = MaskedServer(norm_factor=None)
    for _ in range(2):
        assert served(server, model, 0.1, 1e30).refused == ()
    assert server.buffer_medians == []


def test_the_usual_change_of_buffers_is_kept_in_a_checkpoint():
    server, model = MaskedServer(), {"w": np.ones(1), "bn.running_var": np.ones(1), "n": np.array(0)}
    after = served(server, model, 0.5, 0.2)
    again = MaskedServer()
    unpack_state(again, pack_state(server, after.params))
    assert again.buffer_medians == server.buffer_medians == [0.2]
    packed = {name: array for name, array in pack_state(server, after.params).items() if name != "buffer_medians"}
    unpack_state(again, packed)  # of a run from before
    assert again.buffer_medians == []
