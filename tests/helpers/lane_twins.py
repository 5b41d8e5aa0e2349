"""Lane batches and comparisons that the trainer tests share."""

import numpy as np
import torch

from fedgma.training.batches import batch_order, stack_orders
from fedgma.training.gradients import named_tensors
from fedgma.training.lane_batch import RATES, LaneBatch
from fedgma.training.models import ResNet18, build, two_groups

NORMS = {"resnet18-gn": two_groups, "resnet18-gn-imagenet": two_groups, "resnet18-bn": torch.nn.BatchNorm2d}


def make_model(name, shape, classes=10):
    """The model of that name; a ResNet18 is thin, with eight channels in its first stage."""
    if name not in NORMS:
        return build(name, shape, classes, seed=0)
    kind = {"width": 8, "imagenet": name.endswith("imagenet")}
    return build(lambda shape, classes: ResNet18(shape, classes, NORMS[name], **kind), shape, classes, seed=0)


OFF = {"momentum": 0.9, "mu": 0.0, "clip": np.inf, "weight_decay": 0.0, "nesterov": 0.0}
ADAMW = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}
TERMS = {"scale": 1.0, "rho": 0.0, "unit": 1.0, "blend": 0.0, "tilted": 0.0}


def make_lane_batch(federation, clients, *, round=1, batch=4, epochs=1, lr=0.05, optimizer="sgd", **rates):
    """Lanes of these clients; `lr` is a number, or one for each step."""
    orders = [
        batch_order(federation.clients[c], seed=0, round=round, client=c, epochs=epochs, batch=batch) for c in clients
    ]
    index, counts = stack_orders(orders, batch)
    lanes = len(clients)
    given = {**OFF, **ADAMW, **TERMS, **rates}
    columns = np.stack([np.full(lanes, given.pop(name), np.float32) for name in RATES], 1)
    assert not given
    steps = np.array(np.broadcast_to(np.atleast_1d(np.float32(lr))[: counts.shape[1]], counts.shape))
    run, order, who = np.zeros(lanes, np.int64), np.arange(lanes), np.array(clients)
    return LaneBatch(
        *(run, who, run.copy(), order, index, counts),
        rates=columns,
        lr=steps,
        seeds=np.arange(lanes),
        optimizer=optimizer,
    )


def start_of(model):
    params, buffers = named_tensors(model)
    return {n: v.detach().clone()[None] for n, v in params.items()}, {n: v.clone()[None] for n, v in buffers.items()}


def distance(first, second):
    """Norm of the difference of two models, relative to the norm of the first."""
    assert first.keys() == second.keys()
    gap = sum((first[n].double() - second[n].double()).square().sum() for n in first) ** 0.5
    return (gap / sum(first[n].double().square().sum() for n in first) ** 0.5).item()


def local_weights(trained, start, lanes):
    return {name: start[name].expand(lanes, *start[name].shape[1:]) + value for name, value in trained.updates.items()}


def mean_weights(trained, start):
    return {name: start[name] + value.mean(0, keepdim=True) for name, value in trained.updates.items()}


def mean_buffers(trained):
    return {
        n: v.double().mean(0, keepdim=True).to(v.dtype) if v.is_floating_point() else v.amax(0, keepdim=True)
        for n, v in trained.buffers.items()
    }


def correction_like(start, lanes, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return {n: 0.01 * torch.randn((lanes, *v.shape[1:]), generator=generator).to(v) for n, v in start.items()}
