"""Data, network, evaluation and one client's epoch in torch, shared by the engines that are built on torch."""

import torch
from torch import nn
from workload import BATCH, LR, MOMENTUM, data, scaled


def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images and labels, then those of the test, ready for the network."""
    x, y, x_test, y_test = data()
    images = (torch.from_numpy(scaled(values)) for values in (x, x_test))
    labels = (torch.from_numpy(values) for values in (y, y_test))
    return next(images), next(labels), next(images), next(labels)


def lenet(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    features = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    features += [nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    head = [nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*features, *head)


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, order: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for index in order.split(BATCH):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()


@torch.inference_mode()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    hits = sum((model(a).argmax(1) == b).sum().item() for a, b in zip(x.split(1000), y.split(1000), strict=True))
    return hits / len(y)
