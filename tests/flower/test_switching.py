"""What docs/flower.md says of switching: the plain mean in `Masked` gives the numbers of Flower's own strategies."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedgma[flower]'")

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedProx, FedYogi

import fedgma
from fake_grids import Nodes, record
from fedgma.flower import Masked

ROUNDS = 4
EPSILON = 0.1


class Grid(Nodes):
    """With the calls of Flower's own strategies."""

    def get_node_ids(self):
        return self.ids

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(list(messages)))


def answer(node, message):
    """Five steps of least squares on data of the node, with the proximal term that the server's config asks for."""
    settings, samples = message.content["config"], 50 + 10 * node
    start = message.content["arrays"]["w"].numpy()
    rng = np.random.default_rng([node, int(settings["server-round"])])
    data = rng.standard_normal((samples, 5))
    target, weights = data @ np.arange(5.0) + node, start.astype(np.float64)
    for _ in range(5):
        gradient = data.T @ (data @ weights - target) / samples
        weights = weights - 0.05 * (gradient + float(settings.get("proximal-mu", 0.0)) * (weights - start))
    metrics = MetricRecord({"num-examples": samples})
    return Message(
        RecordDict({"arrays": record({"w": weights.astype(np.float32)}), "metrics": metrics}), reply_to=message
    )


def model_of(strategy, **options):
    strategy.fraction_evaluate = 0.0
    start = record({"w": np.zeros(5, np.float32)})
    result = strategy.start(grid=Grid([1, 2, 3], answer), initial_arrays=start, num_rounds=ROUNDS, **options)
    return result.arrays["w"].numpy()


def plain(optimizer=None):
    return Masked(aggregator=fedgma.mean(), optimizer=optimizer)


def begun(strategy):
    """Flower's strategy with the second moment that fedgma begins with."""
    strategy.v_t = {"w": np.full(5, EPSILON**2, np.float32)}
    return strategy


@pytest.mark.parametrize(
    ("theirs", "ours", "options"),
    [
        (FedAvg(), plain(), {}),
        (FedAvgM(server_momentum=0.9), plain(fedgma.momentum(1.0, beta=0.9)), {}),
        (FedProx(proximal_mu=0.1), plain(), {"train_config": ConfigRecord({"proximal-mu": 0.1})}),
        (begun(FedYogi(eta=0.01, tau=EPSILON)), plain(fedgma.yogi(0.01, beta2=0.99, epsilon=EPSILON)), {}),
        (begun(FedAdagrad(eta=0.01, tau=EPSILON)), plain(fedgma.adagrad(0.01, epsilon=EPSILON)), {}),
    ],
    ids=["FedAvg", "FedAvgM", "FedProx", "FedYogi from epsilon^2", "FedAdagrad from epsilon^2"],
)
def test_the_plain_mean_has_the_numbers_of_flowers_strategy(theirs, ours, options):
    np.testing.assert_allclose(model_of(ours, **options), model_of(theirs), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (FedYogi(eta=0.01, tau=EPSILON), fedgma.yogi(0.01, beta2=0.99, epsilon=EPSILON)),
        (FedAdam(eta=0.01, tau=EPSILON), fedgma.adam(0.01, epsilon=EPSILON)),
    ],
    ids=["FedYogi", "FedAdam"],
)
def test_flowers_adaptive_servers_begin_their_moments_otherwise(theirs, ours):
    assert np.abs(model_of(plain(ours)) - model_of(theirs)).max() > 1e-4


def test_one_node_with_most_of_the_samples_has_fedavgs_numbers_without_share_cap():
    def heavy(node, message):
        reply = answer(node, message)
        reply.content["metrics"]["num-examples"] = 10 if node == 1 else 90
        return reply

    def played(strategy):
        start = record({"w": np.zeros(5, np.float32)})
        strategy.fraction_evaluate = 0.0
        return strategy.start(grid=Grid([1, 2], heavy), initial_arrays=start, num_rounds=1)

    flowers = played(FedAvg()).arrays["w"].numpy()
    uncapped, capped = played(Masked(aggregator=fedgma.mean(), share_cap=None)), played(plain())
    np.testing.assert_allclose(uncapped.arrays["w"].numpy(), flowers, rtol=1e-6)
    assert uncapped.train_metrics_clientapp[1]["gma-capped"] == 0
    assert capped.train_metrics_clientapp[1]["gma-capped"] == 1
    assert np.abs(capped.arrays["w"].numpy() - flowers).max() > 1e-3
