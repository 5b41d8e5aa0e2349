"""Runs in the few words that tests need: a rule and a server optimiser by their names, the state that they end in."""

import math

from torch import nn

from fedgma.aggregation.optimizers import server_optimizer
from fedgma.aggregation.rules import RULES
from fedgma.simulation.algorithms import Algorithm
from fedgma.simulation.fleet import play
from fedgma.simulation.spec import RunSpec

SHORT = {"lr": "client_learning_rate", "clip": "gradient_clip"}


def make_spec(
    federation,
    *,
    aggregator="gma",
    server="sgd",
    server_lr=1.0,
    mask_position="after",
    tau=0.4,
    threshold=2,
    mu=0.0,
    scaffold=False,
    **words,
):
    row = RULES[aggregator]
    given = {"tau": tau, "threshold": threshold, "seed": words.get("seed", 0)}
    rule = row.make(**{name: given[name] for name in row.settings if name in given})
    settings = {SHORT.get(name, name): value for name, value in words.items()}
    settings.setdefault("algorithm", Algorithm(mu=mu, keeps="gradients" if scaffold else "nothing"))
    return RunSpec(federation, rule=rule, optimizer=server_optimizer(server, server_lr, mask_position), **settings)


def last_state(specs, **options):
    *_, played = play(specs, **options)
    return played.state


def relative_distance(first, second):
    return ((first - second).norm() / first.norm()).item()


class Normalised(nn.Module):
    """Dense layers with batch normalisation: a model with buffers, one of them a counter."""

    def __init__(self, shape, classes):
        super().__init__()
        size = math.prod(shape)
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(size, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, classes)
        )

    def forward(self, x):
        return self.layers(x)
