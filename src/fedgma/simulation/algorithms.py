"""Federated algorithms that change local training: what each adds to federated averaging, as a small value.

A local step of client i, at its weights w, subtracts its learning rate times

    v = scale * (g + mu (w - start)) + correction
    g = (1 - blend) gradient(w) + blend gradient(w + e),   e = rho u / |u|, or rho u where `unit` is off

with u = gradient(w). The correction, and what is kept between rounds, is named by `keeps`:

    nothing     no correction
    gradients   c - c_i: client i keeps c_i, the mean gradient of its steps, and the server c, their mean (SCAFFOLD)
    duals       -g_i: client i keeps g_i, from which mu (w - start) is subtracted after its last step; the server
                keeps h, what the g_i sum to over all clients, and adds mean - h / mu to the model (FedDyn)
    sent duals  -g_i: as before, but the server keeps nothing and client i sends w - g_i / mu (FedSpeed)
    direction   (1 - scale) d: the server keeps d, the mean gradient of the steps of the round before (FedCM)

With `tilted`, u = gradient(w) - mu_i - s, where client i keeps mu_i, to which e - s is added in every local step, and
the server keeps s, the mean of mu_i - e in the last local step, scaled to length rho (FedSMOO). With `lookahead`,
clients start where the server's momentum alone would take the model (FedACG).

A gradient clip applies to g + mu (w - start). Means over clients are those of the rule, so they are weighted with the
clients' samples and, with a robust rule, robust. The mask multiplies the step of the server, and what is kept is
computed from unmasked means. `ALGORITHMS` is the only list of algorithms. This module imports no torch.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from fedgma.errors import ConfigError

KEEPS = ("nothing", "gradients", "duals", "sent duals", "direction")


@dataclass(frozen=True)
class Algorithm:
    """The terms that an algorithm adds to federated averaging; the defaults add none."""

    mu: float = 0.0
    scale: float = 1.0
    rho: float = 0.0
    unit: bool = True  # whether rho is the length of the perturbation, and not a factor of the gradient
    blend: float = 0.0
    keeps: str = "nothing"
    tilted: bool = False
    lookahead: bool = False

    def __post_init__(self) -> None:
        if self.keeps not in KEEPS:
            raise ConfigError(f"an algorithm keeps one of {', '.join(KEEPS)}, got {self.keeps!r}")
        if "duals" in self.keeps and not self.mu > 0:
            raise ConfigError(f"an algorithm that keeps {self.keeps} needs mu > 0, got {self.mu}")

    @property
    def changes_gradients(self) -> bool:
        """Whether a gradient is scaled or taken at a perturbed point, not only added to."""
        return self.scale != 1 or self.blend > 0

    @property
    def reads_gradients(self) -> bool:
        """Whether mean gradients are computed from how far SGD moved the clients."""
        return self.keeps in ("gradients", "direction")

    @property
    def on_clients(self) -> bool:
        """Whether every client keeps an array between rounds."""
        return self.keeps in ("gradients", "duals", "sent duals")

    @property
    def on_server(self) -> bool:
        """Whether the server keeps an array between rounds, beside the state of its optimiser."""
        return self.keeps in ("gradients", "duals", "direction")

    @property
    def arrays_of_a_lane(self) -> int:
        """How many more arrays of the size of the model a lane needs for a second pass and a tilt."""
        return 3 * (self.blend > 0) + 3 * self.tilted

    @property
    def arrays_of_a_client(self) -> int:
        """How many arrays of the size of the model a client keeps between rounds."""
        return int(self.on_clients) + int(self.tilted)


def fedavg() -> Algorithm:
    """Federated averaging (McMahan et al., Communication-Efficient Learning of Deep Networks ..., 2017)."""
    return Algorithm()


def fedprox(mu: float = 0.01) -> Algorithm:
    """A proximal term (Li et al., Federated Optimization in Heterogeneous Networks, 2020)."""
    return Algorithm(mu=_positive(mu=mu))


def scaffold() -> Algorithm:
    """Control variates, option II (Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging ..., 2020)."""
    return Algorithm(keeps="gradients")


def feddyn(alpha: float = 0.01) -> Algorithm:
    """Dynamic regularisation (Acar et al., Federated Learning Based on Dynamic Regularization, 2021)."""
    return Algorithm(mu=_positive(alpha=alpha), keeps="duals")


def fedcm(alpha: float = 0.1) -> Algorithm:
    """Momentum of the clients (Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021).

    `alpha` is the share of the client's own gradient in a step. The paper's server rate is ours times the mean of
    local rate and number of local steps.
    """
    return Algorithm(scale=_share(alpha=alpha), keeps="direction")


def fedacg(lambda_: float = 0.85, beta: float = 0.01) -> Algorithm:
    """Lookahead (Kim et al., Communication-Efficient Federated Learning with Accelerated Client Gradient, 2024).

    `lambda_` is the momentum of the server, `beta` the proximal coefficient.
    """
    if not 0 <= lambda_ < 1:
        raise ConfigError(f"lambda_ must be at least 0 and below 1 for fedacg, got {lambda_!r}")
    return Algorithm(mu=_positive(beta=beta), lookahead=True)


def fedsam(rho: float = 0.1) -> Algorithm:
    """Sharpness-aware steps (Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, 2022)."""
    return Algorithm(rho=_positive(rho=rho), blend=1.0)


def mofedsam(rho: float = 0.1, beta: float = 0.1) -> Algorithm:
    """Sharpness-aware steps with momentum (Qu et al., as `fedsam`); `beta` is FedCM's alpha."""
    return Algorithm(scale=_share(beta=beta), rho=_positive(rho=rho), blend=1.0, keeps="direction")


def fedspeed(lambda_: float = 10.0, rho: float = 0.1, alpha: float = 1.0) -> Algorithm:
    """Prox-correction and perturbed gradients (Sun et al., FedSpeed: Larger Local Interval ..., 2023).

    The proximal coefficient is 1 / `lambda_`. A local gradient is (1 - alpha) of the plain one and alpha of the one
    at w + rho gradient(w): a factor, not a length.
    """
    mu = 1 / _positive(lambda_=lambda_)
    return Algorithm(mu=mu, rho=_positive(rho=rho), unit=False, blend=_share(alpha=alpha), keeps="sent duals")


def fedsmoo(beta: float = 10.0, rho: float = 0.1) -> Algorithm:
    """FedDyn with a perturbation that clients agree on (Sun et al., Dynamic Regularized Sharpness Aware ..., 2023).

    The proximal coefficient is 1 / `beta`; `rho` is the paper's r.
    """
    return Algorithm(mu=1 / _positive(beta=beta), rho=_positive(rho=rho), blend=1.0, keeps="duals", tilted=True)


class AlgorithmRow(NamedTuple):
    """An algorithm of the library: how it is made, its server optimiser and the default rate of that."""

    make: Callable[..., Algorithm] = fedavg
    server: str = "sgd"
    learning_rate: float = 1.0
    momentum: str = "beta1"  # the setting that is the server's momentum

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the algorithm's own, with their defaults."""
        return _defaults(self.make)

    def read(self, settings: object) -> Algorithm:
        """The algorithm with the values that the settings of a run have for its own settings."""
        return self.make(**{name: getattr(settings, name) for name in self.settings})


@cache
def _defaults(make: Callable[..., Algorithm]) -> Mapping[str, Any]:
    return {name: entry.default for name, entry in inspect.signature(make).parameters.items()}


# adaptive server steps have a size near 1, so their rates are small
ALGORITHMS: dict[str, AlgorithmRow] = {
    "fedavg": AlgorithmRow(),
    "fedprox": AlgorithmRow(fedprox),
    "fedadam": AlgorithmRow(server="adam", learning_rate=0.01),
    "fedyogi": AlgorithmRow(server="yogi", learning_rate=0.01),
    "fedavgm": AlgorithmRow(server="momentum"),
    "fedadagrad": AlgorithmRow(server="adagrad", learning_rate=0.01),
    "scaffold": AlgorithmRow(scaffold),
    "feddyn": AlgorithmRow(feddyn),
    "fedcm": AlgorithmRow(fedcm),
    "fedacg": AlgorithmRow(fedacg, server="momentum", momentum="lambda_"),
    "fedsam": AlgorithmRow(fedsam),
    "mofedsam": AlgorithmRow(mofedsam),
    "fedspeed": AlgorithmRow(fedspeed),
    "fedsmoo": AlgorithmRow(fedsmoo),
}


def readers(setting: str) -> str:
    """The algorithms that read a setting, with their defaults, in words.

    >>> readers("lambda_")
    'fedacg (by default 0.85), fedspeed (10)'
    """
    defaults = {name: row.settings[setting] for name, row in ALGORITHMS.items() if setting in row.settings}
    words = [
        f"{name} ({'by default ' if not position else ''}{value:g})"
        for position, (name, value) in enumerate(defaults.items())
    ]
    return ", ".join(words)


def _positive(**named: float) -> float:
    ((name, value),) = named.items()
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be a number above 0, got {value!r}")
    return value


def _share(**named: float) -> float:
    ((name, value),) = named.items()
    if not 0 < value <= 1:
        raise ConfigError(f"{name} must be above 0 and at most 1, got {value!r}")
    return value
