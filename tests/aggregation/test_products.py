"""Pairs of adapters aggregated as their products: laws, twins and a slow literal form."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedgma
from fedgma.aggregation.adapters import Products, factors, in_products
from fedgma.aggregation.optimizers import yogi
from fedgma.aggregation.server import MaskedServer
from fedgma.aggregation.server_round import difference

OUT, IN, RANK, COUNTS = 5, 4, 2, [3, 1, 2]
A, B, BIAS = "query.lora_A.default.weight", "query.lora_B.default.weight", "bias"
PRODUCT = "query.lora_BA.default.weight"


def models(seed: int, clients: int = 3, spread: float = 1.0) -> tuple[dict, list[dict]]:
    """A server's adapters, with a bias that belongs to no pair, and those of clients that started from them."""
    rng = np.random.default_rng(seed)
    shapes = {A: (RANK, IN), B: (OUT, RANK), BIAS: (3,)}
    start = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    moved = [
        {name: value + spread * rng.normal(size=value.shape).astype(np.float32) for name, value in start.items()}
        for _ in range(clients)
    ]
    return start, moved


def literal(start: dict, clients: list[dict], tau: float | None) -> np.ndarray:
    """The next product before truncation: the (masked) mean of the clients' products, entry by entry."""
    before = start[B].astype(np.float64) @ start[A]
    after = before.copy()
    for row in range(OUT):
        for column in range(IN):
            updates = [
                float(one[B][row].astype(np.float64) @ one[A][:, column]) - before[row, column] for one in clients
            ]
            mean = sum(count * update for count, update in zip(COUNTS, updates, strict=True)) / sum(COUNTS)
            agreement = abs(sum(np.sign(updates))) / len(updates)
            after[row, column] += mean * (1 if tau is None or agreement >= tau else agreement)
    return after


def best_of_rank(matrix: np.ndarray, rank: int) -> np.ndarray:
    """The closest matrix of this rank."""
    u, s, v = np.linalg.svd(matrix)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


@pytest.mark.parametrize("tau", [None, 0.4, 1.0])
def test_a_round_is_the_truncated_mean_of_the_products(tau):
    start, clients = models(0)
    rule = fedgma.mean() if tau is None else fedgma.masked_mean(tau)
    after = fedgma.server_round(start, clients, COUNTS, aggregator=in_products(rule)).params
    wanted = best_of_rank(literal(start, clients, tau), RANK)
    np.testing.assert_allclose(after[B] @ after[A], wanted, rtol=1e-4, atol=1e-5)
    plain = fedgma.server_round(start, clients, COUNTS, aggregator=rule).params
    np.testing.assert_array_equal(after[BIAS], plain[BIAS])  # what belongs to no pair is aggregated as ever
    assert {name: (value.shape, value.dtype) for name, value in after.items()} == {
        name: (value.shape, value.dtype) for name, value in start.items()
    }


def test_apart_and_product_differ_by_the_covariance_of_b_and_a():
    start, clients = models(1)
    apart = fedgma.server_round(start, clients, COUNTS, aggregator=fedgma.mean()).params
    share = np.array(COUNTS) / sum(COUNTS)
    covariance = sum(w * (one[B] - apart[B]) @ (one[A] - apart[A]) for w, one in zip(share, clients, strict=True))
    np.testing.assert_allclose(apart[B] @ apart[A] + covariance, literal(start, clients, None), rtol=1e-4, atol=1e-4)
    assert np.abs(covariance).max() > 0.1


@given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([1e-3, 1.0]), tau=st.sampled_from([0.0, 0.4, 1.0]))
@settings(max_examples=15, deadline=None)
def test_numpy_torch_and_the_server_of_frameworks_give_the_same_bits(seed, spread, tau):
    start, clients = models(seed, spread=spread)
    rule = in_products(fedgma.masked_mean(tau))
    ours = fedgma.server_round(start, clients, COUNTS, aggregator=rule)
    tensors = [{name: torch.from_numpy(value.copy()) for name, value in one.items()} for one in (start, *clients)]
    theirs = fedgma.server_round(tensors[0], tensors[1:], COUNTS, aggregator=rule)
    replies = [(difference(one, start), count, str(count)) for one, count in zip(clients, COUNTS, strict=True)]
    served = MaskedServer(rule, norm_factor=None).step(start, replies)
    for name, value in ours.params.items():
        np.testing.assert_array_equal(value, theirs.params[name].numpy())
        np.testing.assert_array_equal(value, served.params[name])


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_the_order_of_clients_changes_no_bit(seed):
    start, clients = models(seed)
    rule = in_products(fedgma.masked_mean())
    first = fedgma.server_round(start, clients, COUNTS, aggregator=rule).params
    second = fedgma.server_round(start, clients[::-1], COUNTS[::-1], aggregator=rule).params
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])


def test_a_small_update_has_the_right_votes():
    start, _ = models(2)
    nudge = {name: np.full_like(value, 1e-7 if name == A else 0) for name, value in start.items()}
    lifted = Products().lift_update(nudge, start)
    wanted = np.repeat(np.float32(1e-7) * start[B].astype(np.float64).sum(1, keepdims=True), IN, axis=1)
    np.testing.assert_allclose(lifted[PRODUCT], wanted, rtol=1e-5)


def test_one_client_gets_its_own_product_back():
    start, clients = models(3, clients=1)
    after = fedgma.server_round(start, clients, aggregator=in_products(fedgma.mean())).params
    np.testing.assert_allclose(after[B] @ after[A], clients[0][B] @ clients[0][A], rtol=1e-4, atol=1e-5)


def test_a_round_without_a_step_keeps_the_pair_to_the_bit():
    start, _ = models(4)
    after = fedgma.server_round(start, [start, start], aggregator=in_products(fedgma.mean())).params
    for name, value in start.items():
        np.testing.assert_array_equal(after[name], value)


def test_directions_that_the_product_lacks_can_still_be_trained():
    rng = np.random.default_rng(5)
    a = rng.normal(size=(RANK, IN))
    b, next_a = factors(np.outer(rng.normal(size=OUT), rng.normal(size=IN)), a)  # of rank one
    assert np.linalg.matrix_rank(next_a) == RANK
    np.testing.assert_allclose(b[:, 1], 0, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(next_a), np.linalg.norm(a))


def test_a_rank_above_the_layer_s_is_padded():
    matrix = np.arange(6.0).reshape(3, 2)
    b, a = factors(matrix, np.ones((4, 2)))
    assert (b.shape, a.shape) == ((3, 4), (4, 2))
    np.testing.assert_allclose(b @ a, matrix, atol=1e-12)


def test_moments_are_those_of_the_products_and_go_on():
    start, clients = models(6)
    rule, optimizer = in_products(fedgma.masked_mean()), yogi(0.01)
    first = fedgma.server_round(start, clients, COUNTS, aggregator=rule, optimizer=optimizer)
    assert first.state["z"][PRODUCT].shape == (OUT, IN)
    second = fedgma.server_round(first.params, clients, COUNTS, aggregator=rule, optimizer=optimizer, state=first.state)
    assert np.abs(second.params[B] - first.params[B]).max() > 0


def test_a_client_that_cannot_be_multiplied_is_refused_and_the_others_count():
    start, clients = models(7)
    clients[1] = {**clients[1], A: np.zeros((RANK, IN + 1), np.float32)}
    clients[2] = {**clients[2], B: np.full((OUT, RANK), np.nan, np.float32)}
    result = fedgma.server_round(start, clients, COUNTS, aggregator=in_products(fedgma.mean()))
    assert [(one.client, one.reason) for one in result.notes["refused"]] == [(1, "shape"), (2, "nonfinite")]
    alone = fedgma.server_round(start, clients[:1], COUNTS[:1], aggregator=in_products(fedgma.mean()))
    np.testing.assert_array_equal(result.params[B], alone.params[B])


def test_pairs_can_be_given_and_a_convolution_is_a_pair_too():
    rng = np.random.default_rng(8)
    start = {"down": rng.normal(size=(2, 3, 5, 5)), "up": rng.normal(size=(4, 2, 1, 1))}
    clients = [{name: value + rng.normal(size=value.shape) for name, value in start.items()} for _ in range(2)]
    rule = in_products(fedgma.mean(), {"layer": ("up", "down")})
    after = fedgma.server_round(start, clients, aggregator=rule).params
    mean = np.mean([one["up"].reshape(4, 2) @ one["down"].reshape(2, 75) for one in clients], 0)
    product = after["up"].reshape(4, 2) @ after["down"].reshape(2, 75)
    np.testing.assert_allclose(product, best_of_rank(mean, 2), atol=1e-9)


def test_what_is_missing_is_said():
    start, clients = models(9)
    rule = in_products(fedgma.mean())
    assert rule.needs == ("mean", "model")
    with pytest.raises(fedgma.ConfigError, match="needs the server's model"):
        rule({name: np.stack([one[name] for one in clients]) for name in start})
    with pytest.raises(fedgma.ConfigError, match="no pair"):
        fedgma.server_round({"w": np.ones(2)}, [{"w": np.ones(2)}], aggregator=rule)
    with pytest.raises(fedgma.ConfigError, match="no 'up'"):
        fedgma.server_round(start, clients, aggregator=in_products(fedgma.mean(), {"p": ("up", A)}))
    with pytest.raises(fedgma.ConfigError, match="expected B"):
        Products((("p", A, B),)).lift(start)
    with pytest.raises(fedgma.ConfigError, match="already"):
        in_products(rule)


def test_the_decomposition_of_a_tensor_is_that_of_an_array():
    rng = np.random.default_rng(10)
    matrix, a = rng.normal(size=(OUT, IN)), rng.normal(size=(RANK, IN))
    ours = factors(matrix, a)
    theirs = factors(torch.from_numpy(matrix), torch.from_numpy(a))  # as on a GPU, whose tensors stay there
    for array, tensor in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(array, tensor.numpy(), atol=1e-12)
