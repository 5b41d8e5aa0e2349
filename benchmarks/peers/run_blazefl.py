"""BlazeFL: its FedAvg with clients in two threads, as it recommends; with momentum, and one thread of torch each."""

import logging
from importlib.metadata import version

import torch
import workload
from blazefl.contrib import FedAvgBaseServerHandler, FedAvgThreadPoolClientTrainer, FedAvgUplinkPackage
from blazefl.core import deserialize_model, serialize_model
from torch.utils.data import DataLoader, TensorDataset

from network import accuracy, lenet, tensors

logging.disable(logging.INFO)
settings = workload.Settings()
torch.set_num_threads(1)
x, y, xt, yt = tensors()


class Slices:
    """The data set as BlazeFL asks for it: a loader for each client."""

    def get_dataloader(self, type_: str, cid: int, batch_size: int, generator: torch.Generator) -> DataLoader:
        part = slice(cid * settings.samples, (cid + 1) * settings.samples)
        return DataLoader(TensorDataset(x[part], y[part]), batch_size=batch_size, shuffle=True, generator=generator)


class Selector:
    """The model as BlazeFL asks for it."""

    def select_model(self, model_name: str) -> torch.nn.Module:
        return lenet()


class Trainer(FedAvgThreadPoolClientTrainer):
    """BlazeFL's trainer with momentum and without a progress bar."""

    def progress_fn(self, it: list) -> list:
        return it

    def train(self, model, model_parameters, train_loader, device, epochs, lr, stop_event, cid):
        torch.set_num_threads(1)
        deserialize_model(model, model_parameters)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=workload.MOMENTUM)
        for images, labels in train_loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        return FedAvgUplinkPackage(cid, serialize_model(model), settings.samples)


shared = {"model_selector": Selector(), "model_name": "lenet", "dataset": Slices(), "device": "cpu", "seed": 1}
shared |= {"num_clients": settings.clients, "batch_size": workload.BATCH}
server = FedAvgBaseServerHandler(
    global_round=settings.rounds, sample_ratio=settings.clients_per_round / settings.clients, **shared
)
trainer = Trainer(epochs=1, lr=workload.LR, num_parallels=settings.threads, **shared)
clock = workload.Clock(settings)
while not server.if_stop():
    clock.begin()
    sampled, broadcast = server.sample_clients(), server.downlink_package()
    trainer.local_process(broadcast, sampled)
    for package in trainer.uplink_package():
        server.load(package)
    clock.end()
clock.report(accuracy(server.model, xt, yt), blazefl=version("blazefl"), torch=torch.__version__)
