"""Networks by name, or user-defined: LeNet, ResNet18, a small CNN, a network of one hidden layer, logistic regression.

`build` draws the initial weights from the given seed and does not change torch's generators, so a seed gives the same
initial model in a single run, in a fleet and after a resume.
"""

import copy
import importlib
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from fedgma.errors import ConfigError

Shape = Sequence[int]
Factory = Callable[..., nn.Module]
Model = str | nn.Module | Factory


class LeNet(nn.Module):
    """LeNet-5 with ReLU and max pooling: two 5x5 convolutions (6 and 16 channels) and three dense layers."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.shape = tuple(shape)
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2), 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, c, h, w] to logits [n, classes]."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2).flatten(1)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))  # type: ignore[no-any-return]


class Logistic(nn.Module):
    """Multinomial logistic regression: one linear layer."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(int(torch.Size(shape).numel()), classes)

    def forward(self, x: Tensor) -> Tensor:
        """Anything [n, ...] to logits [n, classes]."""
        return self.linear(x.flatten(1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """One hidden layer of 64 units with ReLU, for tables."""

    def __init__(self, shape: Shape, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(int(torch.Size(shape).numel()), 64)
        self.out = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Anything [n, ...] to logits [n, classes]."""
        return self.out(F.relu(self.hidden(x.flatten(1))))  # type: ignore[no-any-return]


class SmallCNN(nn.Module):
    """The CNN of pfl-research's CIFAR10 benchmark: two 3x3 convolutions, one pooling, two dropouts, Glorot weights."""

    def __init__(self, shape: Shape, classes: int, dropout: tuple[float, float] = (0.25, 0.5)) -> None:
        super().__init__()
        self.shape = tuple(shape)
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128)
        self.fc2 = nn.Linear(128, classes)
        self.dropout = dropout
        for layer in (self.conv1, self.conv2, self.fc1, self.fc2):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, c, h, w] to logits [n, classes]."""
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2).flatten(1)
        x = F.relu(self.fc1(F.dropout(x, self.dropout[0], self.training)))
        return self.fc2(F.dropout(x, self.dropout[1], self.training))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A basic residual block: two 3x3 convolutions, each normalised, and a shortcut."""

    def __init__(self, inside: int, outside: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = norm(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = norm(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), norm(outside))

    def forward(self, x: Tensor) -> Tensor:
        """Feature maps to feature maps."""
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet18 for small images: 3x3 stem with stride 1 and no first pooling; `width` channels in the first stage.

    With `imagenet` it is the network of He et al., "Deep residual learning for image recognition" (2016), whatever the
    size of the images: a 7x7 stem with stride 2, 3x3 max pooling with stride 2, and weights that start as in He et al.,
    "Delving deep into rectifiers" (2015), scaled by the outputs of a layer.
    """

    def __init__(
        self, shape: Shape, classes: int, norm: Callable[[int], nn.Module], width: int = 64, imagenet: bool = False
    ) -> None:
        super().__init__()
        self.shape = shape
        self.imagenet = imagenet
        self.conv1 = nn.Conv2d(shape[0], width, *((7, 2, 3) if imagenet else (3, 1, 1)), bias=False)
        self.norm1 = norm(width)
        widths = (width, width, 2 * width, 4 * width, 8 * width)
        stages = [
            nn.Sequential(Block(before, after, 1 if before == after else 2, norm), Block(after, after, 1, norm))
            for before, after in itertools.pairwise(widths)
        ]
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(8 * width, classes)
        for part in self.modules() if imagenet else ():
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Images [n, c, h, w] to logits [n, classes]."""
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.max_pool2d(x, 3, 2, 1) if self.imagenet else x
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


def two_groups(channels: int) -> nn.Module:
    """Group normalisation as in the paper's network."""
    return nn.GroupNorm(2, channels)


MODELS: dict[str, Factory] = {
    "lenet": LeNet,
    "resnet18-gn": lambda shape, classes: ResNet18(shape, classes, two_groups),
    "resnet18-gn-imagenet": lambda shape, classes: ResNet18(shape, classes, two_groups, imagenet=True),
    "resnet18-bn": lambda shape, classes: ResNet18(shape, classes, nn.BatchNorm2d),
    "logistic": Logistic,
    "cnn": SmallCNN,
    "mlp": MLP,
}


# pixels of the smallest images that they take
SIDES = {"lenet": 12, "cnn": 6, "resnet18-gn": 1, "resnet18-gn-imagenet": 1, "resnet18-bn": 1}


def build(model: Model, shape: Shape, classes: int, seed: int) -> nn.Module:
    """A network with its initial weights: by name, by import path "package.module:Name", by factory, or a ready module.

    A factory is called as `factory(shape, classes)`, or without arguments if it takes none. A ready module is copied
    and keeps the weights it has; lazy layers get theirs from samples of this shape. The weights depend only on `seed`,
    and torch's generators are not changed.

    >>> sum(p.numel() for p in build("lenet", (1, 28, 28), 10, seed=0).parameters())
    61706
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if isinstance(model, nn.Module):
            return _materialised(_copied(model), shape)
        _check_images(model, shape)
        network = _call(factory_of(model), tuple(shape), classes)
        if not isinstance(network, nn.Module):
            raise ConfigError(f"expected a model factory to return a torch.nn.Module, got {type(network).__name__}")
        return _materialised(network, shape)


def _check_images(model: Model, shape: Shape) -> None:
    """Refuse samples that a network of the library cannot take."""
    side = SIDES.get(model) if isinstance(model, str) else None
    if side is not None and (len(shape) != 3 or min(shape[1:]) < side):
        raise ConfigError(
            f"model {model} takes images [channel, height, width] of at least {side} x {side} pixels, got samples of "
            f"shape {list(shape)}; choose {'cnn, ' if len(shape) == 3 and side > 6 else ''}mlp, logistic or a model of "
            "your own"
        )


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except ValueError as error:  # torch cannot copy a lazy buffer
        raise ConfigError(
            f"the module {type(model).__name__} could not be copied ({str(error).splitlines()[0][:100]}); "
            "pass a function that makes it, or apply it to a batch first"
        ) from error


def _call(factory: Factory, shape: tuple[int, ...], classes: int) -> nn.Module:
    """What a factory makes: called with shape and classes, or without arguments if it does not take these two."""
    if getattr(factory, "__init__", None) is nn.Module.__init__:
        return factory()  # it has no constructor of its own
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # of compiled code
        return factory(shape, classes)
    if _binds(signature, shape, classes):
        return factory(shape, classes)
    if _binds(signature):
        return factory()
    name = getattr(factory, "__name__", "the model")
    raise ConfigError(
        f"{name} must be callable as {name}(shape, classes) or as {name}(), but it takes {signature}; "
        f"give the other arguments defaults, or write a function of shape and classes that returns the module"
    )


def _binds(signature: inspect.Signature, *arguments: object) -> bool:
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _materialised(network: nn.Module, shape: Shape) -> nn.Module:
    """The network; layers that learn their size from the first input see two samples of zeros."""
    if waits_for_input(network):
        training, device = network.training, next(network.parameters()).device
        with torch.no_grad():
            network.eval()(torch.zeros(2, *shape, device=device))  # eval: no statistics of these samples stay
        network.train(training)
    return network


def waits_for_input(network: nn.Module) -> bool:
    """Whether a network has lazy layers, which get their weights from the first input."""
    return any(is_lazy(value) for value in itertools.chain(network.parameters(), network.buffers()))


def factory_of(model: str | Factory) -> Factory:
    """The factory of a model that is given by name, by import path or as a function or class."""
    if not isinstance(model, str):
        return model
    if model in MODELS:
        return MODELS[model]
    if ":" not in model:
        known = ", ".join(sorted(MODELS))
        raise ConfigError(f"unknown model {model!r}; known: {known}, or your own as 'package.module:Name'")
    return _imported(model)


def _imported(path: str) -> Factory:
    module, _, name = path.partition(":")
    try:
        factory: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model {path!r} could not be imported ({error}); is its package installed here?") from error
    if not callable(factory):
        raise ConfigError(
            f"model {path!r} is a {type(factory).__name__}; name a factory called as factory(shape, classes)"
        )
    return factory  # type: ignore[no-any-return]


def parameter_count(model: nn.Module) -> int:
    """Number of trainable parameters; it goes into every result file.

    >>> parameter_count(build("logistic", (1, 28, 28), 10, seed=0))
    7850
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
