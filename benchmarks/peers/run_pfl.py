"""pfl-research: its FederatedAveraging on its SimulatedBackend, one process. It does not shuffle inside a user."""

from importlib.metadata import version

import numpy as np
import torch
import workload
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from network import accuracy, lenet, tensors

settings = workload.Settings()
torch.set_num_threads(settings.threads)
np.random.seed(1)  # noqa: NPY002  pfl draws its users from the global generator
x, y, xt, yt = tensors()


class Network(torch.nn.Module):
    """The network with the two methods that pfl asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = lenet()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(images)

    def loss(self, images: torch.Tensor, labels: torch.Tensor, eval: bool = False) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(images), labels)

    def metrics(self, images: torch.Tensor, labels: torch.Tensor, eval: bool = True) -> dict[str, object]:
        return {}


class Ticker(TrainingProcessCallback):
    """Ends a round and begins the next."""

    def after_central_iteration(self, *args: object, **kwargs: object) -> tuple[bool, Metrics]:
        clock.end()
        clock.begin()
        return False, Metrics()


def user(k: int) -> Dataset:
    part = slice(k * settings.samples, (k + 1) * settings.samples)
    return Dataset([x[part], y[part]], user_id=str(k))


network = Network()
local = lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=workload.MOMENTUM)  # noqa: E731
model = PyTorchModel(network, local, torch.optim.SGD(network.parameters(), lr=1.0))
users = FederatedDataset(user, get_user_sampler("minimize_reuse", list(range(settings.clients))))
rounds = NNAlgorithmParams(
    central_num_iterations=settings.rounds,
    evaluation_frequency=10**9,
    train_cohort_size=settings.clients_per_round,
    val_cohort_size=0,
)
epoch = NNTrainHyperParams(local_batch_size=workload.BATCH, local_num_epochs=1, local_learning_rate=workload.LR)
clock = workload.Clock(settings)
clock.begin()
backend, held_out = SimulatedBackend(users, users), NNEvalHyperParams(local_batch_size=1000)
FederatedAveraging().run(rounds, backend, model, epoch, held_out, [Ticker()], send_metrics_to_platform=False)
clock.report(accuracy(network.body, xt, yt), pfl=version("pfl"), torch=torch.__version__)
