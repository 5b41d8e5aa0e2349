"""The parts of a run's specification that its settings alone decide: device, attack, server, wrappers of rules, ..."""

from typing import Any

import torch

from fedgma.aggregation.adapters import in_products
from fedgma.aggregation.optimizers import ServerOptimizer, averaged, server_optimizer
from fedgma.aggregation.rule import Rule
from fedgma.aggregation.rules import clipped
from fedgma.aggregation.wrappers import unmasked
from fedgma.data.shifts import Colour, Rotation, Shift
from fedgma.errors import ConfigError
from fedgma.experiments.settings import Settings
from fedgma.experiments.settings.local_training import AXES, schedule_of
from fedgma.experiments.settings.shift import COLOUR
from fedgma.simulation.algorithms import ALGORITHMS
from fedgma.simulation.attacks import Attack


def attack_of(settings: Settings) -> Attack | None:
    """The attack of a run's malicious clients; None without one."""
    attack = settings.attack
    return None if attack.name == "none" else Attack(attack.name, attack.share, attack.scale)


def optimizer_of(settings: Settings) -> ServerOptimizer:
    """The server optimiser of a run's algorithm."""
    row = ALGORITHMS[settings.algorithm]
    optimizer = server_optimizer(
        row.server,
        settings.server_learning_rate or row.learning_rate,
        settings.mask_position,
        beta1=getattr(settings, row.momentum),
        beta2=settings.beta2,
        epsilon=settings.epsilon,
    )
    return averaged(optimizer, settings.server_average) if settings.server_average else optimizer


def wrapped(rule: Rule, settings: Settings) -> Rule:
    """The rule without a mask for some arrays, over products of adapters, over clipped updates, as settings ask."""
    if rule.space is not None:
        raise ConfigError(f"aggregator {rule.name!r}: give the rule without in_products, and set adapters='product'")
    rule = rule if settings.unmasked is None or not _masks(rule) else unmasked(rule, settings.unmasked)
    rule = in_products(rule) if settings.adapters == "product" else rule
    return rule if settings.update_clip is None else clipped(rule, settings.update_clip)


def _masks(rule: Rule) -> bool:
    return rule.mask is not None or rule.compute is not None


def local_of(settings: Settings) -> dict[str, Any]:
    """The local training of a run: optimiser, rates and schedules."""
    names = ("client_optimizer", "client_learning_rate", "momentum", "weight_decay", "label_smoothing")
    return {
        **{name: getattr(settings, name) for name in (*names, "client_beta1", "client_beta2", "client_epsilon")},
        **{axis: schedule_of(getattr(settings, axis)) for axis in AXES},
        "nesterov": settings.nesterov and settings.client_optimizer == "sgd",
        "gradient_clip": settings.gradient_clip or float("inf"),
    }


def shift_of(settings: Settings) -> Shift | None:
    """The shift of a run; None without one, or for that of its data set."""
    chosen = settings.shift
    if chosen.name == "rotation":
        return Rotation(chosen.low, chosen.high, chosen.test)
    if chosen.name == "colour":
        return Colour(**{name: getattr(chosen, name) for name in COLOUR})
    return None


def device_of(chosen: str) -> torch.device:
    """The device of that name; for "auto" a GPU if there is one, else the CPU."""
    if chosen == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(chosen)
    except RuntimeError:
        raise ConfigError(f"unknown device {chosen!r}; known: auto, cpu, cuda, cuda:0, ...") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"no GPU was found for --device {chosen}; use --device cpu")
    return device
