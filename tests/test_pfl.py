"""Masked averaging on pfl-research, through its own simulated backend."""

import numpy as np
import pytest

pytest.importorskip("pfl", reason="pfl is not installed: pip install 'fedgma[pfl]'")
pytest.importorskip("torch", reason="torch is not installed: pip install torch")

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.postprocessor.base import Postprocessor
from pfl.stats import ElementWeightedMappedVectorStatistics, MappedVectorStatistics

import fedgma
from fedgma.pfl import Masked

rng = np.random.default_rng(3)
SIZES = {"0": 5, "1": 9, "2": 20, "3": 12, "4": 7}
USERS = {
    user: Dataset([torch.from_numpy(rng.normal(size=(size, 4)).astype(np.float32)), torch.ones(size)], user_id=user)
    for user, size in SIZES.items()
}


class Network(torch.nn.Module):
    """A linear layer with the two methods that pfl asks for."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def loss(self, x, y, eval=False):
        return ((self.layer(x)[:, 0] - y) ** 2).mean()

    def metrics(self, x, y, eval=True):
        return {}


class Witness(Postprocessor):
    """Keeps what each user would send, before anything is done to it; spoils the users named."""

    def __init__(self, spoiled=()):
        self.updates, self.spoiled = {}, spoiled

    def postprocess_one_user(self, *, stats, user_context):
        if user_context.user_id in self.spoiled:
            stats["layer.weight"][0, 0] = float("nan")
        self.updates[user_context.user_id] = {name: array.numpy().copy() for name, array in stats.items()}
        return stats, Metrics()


def played(*postprocessors):
    """One round of pfl's federated averaging over all users: the model's move, and the round's metrics."""
    torch.manual_seed(0)
    network = Network()
    before = {name: value.detach().numpy().copy() for name, value in network.named_parameters()}
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    users = FederatedDataset(USERS.get, get_user_sampler("minimize_reuse", list(USERS)))
    backend = SimulatedBackend(users, users, postprocessors=list(postprocessors))
    rounds = NNAlgorithmParams(
        central_num_iterations=1, evaluation_frequency=10, train_cohort_size=len(USERS), val_cohort_size=0
    )
    epoch = NNTrainHyperParams(local_batch_size=4, local_num_epochs=1, local_learning_rate=0.1)
    FederatedAveraging().run(
        rounds, backend, model, epoch, NNEvalHyperParams(local_batch_size=10), send_metrics_to_platform=False
    )
    return {name: value.detach().numpy() - before[name] for name, value in network.named_parameters()}


def masked(witness, users, aggregator):
    return aggregator([witness.updates[user] for user in users], [SIZES[user] for user in users]).update


@pytest.mark.parametrize(
    ("kind", "aggregator"), [("soft", fedgma.masked_mean(0.7)), ("hard", fedgma.and_mask(0.7))], ids=["soft", "hard"]
)
def test_the_model_moves_by_the_masked_mean(kind, aggregator):
    witness = Witness()
    moved = played(witness, WeightByDatapoints(), Masked(0.7, mask=kind))
    expected = masked(witness, SIZES, aggregator)
    plain = masked(witness, SIZES, fedgma.mean())
    assert len(witness.updates) == 5
    assert any((expected[name] != plain[name]).any() for name in moved)
    for name, step in moved.items():
        np.testing.assert_allclose(step, expected[name], rtol=1e-5, atol=1e-7)


def test_a_user_that_is_not_finite_is_left_out():
    witness = Witness(spoiled=("2",))
    moved = played(witness, WeightByDatapoints(), Masked(0.4))
    expected = masked(witness, [user for user in SIZES if user != "2"], fedgma.masked_mean(0.4))
    for name, step in moved.items():
        np.testing.assert_allclose(step, expected[name], rtol=1e-5, atol=1e-7)


def statistics(values, weight=1.0):
    return MappedVectorStatistics({"w": np.array(values, np.float32)}, weight)


def served(postprocessor, *users):
    total = None
    for stats in users:
        stats, _ = postprocessor.postprocess_one_user(stats=stats, user_context=None)
        total = stats if total is None else total + stats
    return postprocessor.postprocess_server(stats=total, central_context=None, aggregate_metrics=Metrics())


def test_numpy_statistics_are_masked_and_votes_and_counts_are_removed():
    stats, metrics = served(Masked(0.5), statistics([30, 30], 10), statistics([30, 30], 10), statistics([30, -30], 10))
    stats.average()
    assert list(stats) == ["w"]
    np.testing.assert_allclose(stats["w"], [3.0, 1 / 3], rtol=1e-6)
    assert {str(name): value for name, value in metrics}["gma clients"] == 3


def test_without_valid_users_the_round_raises():
    with pytest.raises(fedgma.NotEnoughClients, match="1 refused"):
        served(Masked(), statistics([np.nan, 1.0]))


def test_statistics_without_names_or_votes_are_refused():
    with pytest.raises(fedgma.DataError, match="got ElementWeighted"):
        served(Masked(), ElementWeightedMappedVectorStatistics({"w": np.ones(2, np.float32)}))
    with pytest.raises(fedgma.DataError, match="must hold votes, got none"):
        Masked().postprocess_server(stats=statistics([1.0]), central_context=None, aggregate_metrics=Metrics())
    with pytest.raises(fedgma.ConfigError, match="known: hard, soft"):
        Masked(mask="sofft")
