"""FedLab: its standalone pipeline with its serial SGD trainer; a fresh optimizer a client, or momentum would leak."""

import logging
from importlib.metadata import version

import torch
import torchvision_fix  # noqa: F401
import workload
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from torch.utils.data import DataLoader, TensorDataset

from network import accuracy, lenet, tensors

logging.disable(logging.INFO)
settings = workload.Settings()
torch.set_num_threads(settings.threads)
x, y, xt, yt = tensors()


class Slices:
    """The data set as FedLab asks for it: a loader for each client."""

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader:
        part = slice(client * settings.samples, (client + 1) * settings.samples)
        return DataLoader(TensorDataset(x[part], y[part]), batch_size=batch_size, shuffle=True)


class Trainer(SGDSerialClientTrainer):
    """FedLab's trainer with momentum."""

    def train(self, model_parameters: torch.Tensor, train_loader: DataLoader) -> list[torch.Tensor]:
        parameters = self._model.parameters()
        self.optimizer = torch.optim.SGD(parameters, lr=workload.LR, momentum=workload.MOMENTUM)
        return super().train(model_parameters, train_loader)


class Pipeline(StandalonePipeline):
    """FedLab calls `evaluate` after every round: a good place for the clock."""

    def evaluate(self) -> None:
        clock.end()
        clock.begin()


model = lenet()
trainer = Trainer(model, settings.clients)
trainer.setup_dataset(Slices())
trainer.setup_optim(1, workload.BATCH, workload.LR)
handler = SyncServerHandler(model, settings.rounds, settings.clients_per_round / settings.clients)
clock = workload.Clock(settings)
clock.begin()
Pipeline(handler, trainer).main()
clock.report(accuracy(handler.model, xt, yt), fedlab=version("fedlab"), torch=torch.__version__)
