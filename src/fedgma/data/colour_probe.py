"""Does colour predict the label? A linear classifier that only sees the mean colour of an image."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fedgma.data.federation import Federation
from fedgma.data.pools import CHUNK, ImagePool


class Probe(NamedTuple):
    """Accuracy of the probe: on training images, in the held-out environment, on test images in training colours."""

    train: float
    test: float
    seen: float | None


def colour_probe(federation: Federation, steps: int = 100) -> Probe:
    """Fit softmax regression from mean colour to label on the training images, and measure its accuracy."""
    train = mean_colours(federation.train)
    weights = _fit(train, federation.train.y, federation.train.classes, steps)
    seen = federation.more_tests.get("seen")
    return Probe(
        _accuracy(weights, train, federation.train.y),
        _accuracy(weights, mean_colours(federation.test), federation.test.y),
        None if seen is None else _accuracy(weights, mean_colours(seen), seen.y),
    )


def mean_colours(pool: ImagePool) -> Tensor:
    """Mean colour of every image as its client sees it, without brightness: [sample, channel].

    Each mean is divided by its largest channel, since brightness depends on the area of the digit, which is shape.
    """
    parts = []
    for index in torch.split(torch.arange(len(pool), device=pool.y.device), CHUNK):
        colour = pool.show(index, pool.client_of[index]).mean((-1, -2))
        parts.append(colour / colour.amax(-1, keepdim=True).clamp(min=1e-6))
    return torch.cat(parts)


def _fit(x: Tensor, y: Tensor, classes: int, steps: int) -> Tensor:
    """Weights [classes, features + 1] of softmax regression."""
    weights = torch.zeros(classes, x.shape[1] + 1, device=x.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=steps, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        value = functional.cross_entropy(_scores(weights, x), y) + 1e-5 * weights.square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return float(value.detach())

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach()


def _scores(weights: Tensor, x: Tensor) -> Tensor:
    return x @ weights[:, :-1].T + weights[:, -1]


def _accuracy(weights: Tensor, x: Tensor, y: Tensor) -> float:
    return float((_scores(weights, x).argmax(-1) == y).float().mean())
