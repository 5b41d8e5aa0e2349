"""Products of adapters on Flower: the strategy takes the step of `server_round`."""

import numpy as np
import pytest
from flwr.app import ConfigRecord

import fedgma
from fake_grids import Nodes, record, reply
from fedgma.aggregation.secure import Encoding
from fedgma.flower import Masked
from fedgma.flower.secagg import SecureMasked

COUNTS = [3, 1, 2]


def drawn(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=size).astype(np.float32) for name, size in (("lora_A", (2, 4)), ("lora_B", (5, 2)))}


def test_the_strategy_takes_the_step_of_server_round():
    rule, optimizer = fedgma.in_products(fedgma.masked_mean()), fedgma.yogi(0.1)
    strategy = Masked(aggregator=rule, optimizer=optimizer, norm_factor=None, min_available_nodes=3)
    model, state = drawn(0), None
    for round in range(2):
        clients = [drawn(10 * round + client + 1) for client in range(3)]
        strategy.configure_train(round + 1, record(model), ConfigRecord(), Nodes(range(3)))
        replies = [reply(client, clients[client], COUNTS[client]) for client in range(3)]
        arrays, _ = strategy.aggregate_train(round + 1, replies)
        result = fedgma.server_round(model, clients, COUNTS, aggregator=rule, optimizer=optimizer, state=state)
        model, state = result.params, result.state
        for name, value in model.items():
            np.testing.assert_array_equal(arrays[name].numpy(), value)


def test_a_secure_sum_has_no_products():
    with pytest.raises(fedgma.ConfigError, match="single updates"):
        SecureMasked(Encoding(clip=1.0, max_weight=8), aggregator=fedgma.in_products(fedgma.mean()))
