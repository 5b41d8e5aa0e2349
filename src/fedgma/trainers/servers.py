"""Server optimisers of many runs at once: [run, entry] tensors and one row of settings a run (SPEC 2.3).

Moments see the unmasked mean; the mask multiplies the preconditioned step. There is no bias correction.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedgma.errors import ConfigError
from fedgma.trainers.tallies import Merged

Step = tuple[Tensor, Tensor, Tensor]  # the step, then both moments


class ServerSettings(Protocol):
    """What a run says about its server."""

    @property
    def server(self) -> str:
        """Kind of server."""

    @property
    def server_lr(self) -> float:
        """The server's learning rate."""

    @property
    def beta1(self) -> float:
        """Of the first moment."""

    @property
    def beta2(self) -> float:
        """Of the second moment."""

    @property
    def epsilon(self) -> float:
        """Stabiliser."""

    @property
    def mask_position(self) -> str:
        """After or before the moments."""


class Moments(NamedTuple):
    """First and second moments [run, entry]; rows of servers that have none stay zero."""

    z: Tensor
    v: Tensor


class Rates(NamedTuple):
    """Settings as columns [run, 1]."""

    beta1: Tensor
    beta2: Tensor
    epsilon: Tensor


def _sgd(delta: Tensor, z: Tensor, v: Tensor, rates: Rates) -> Step:
    return delta, z, v


def _momentum(delta: Tensor, z: Tensor, v: Tensor, rates: Rates) -> Step:
    z = rates.beta1 * z + delta
    return z, z, v


def _adagrad(delta: Tensor, z: Tensor, v: Tensor, rates: Rates) -> Step:
    v = v + delta.square()
    return delta / (v.sqrt() + rates.epsilon), z, v


def _adam(delta: Tensor, z: Tensor, v: Tensor, rates: Rates) -> Step:
    return _precondition(delta, z, rates.beta2 * v + (1 - rates.beta2) * delta.square(), rates)


def _yogi(delta: Tensor, z: Tensor, v: Tensor, rates: Rates) -> Step:
    square = delta.square()
    return _precondition(delta, z, v - (1 - rates.beta2) * square * (v - square).sign(), rates)


def _precondition(delta: Tensor, z: Tensor, v: Tensor, rates: Rates) -> Step:
    z = rates.beta1 * z + (1 - rates.beta1) * delta
    return z / (v.sqrt() + rates.epsilon), z, v


SERVERS: dict[str, Callable[[Tensor, Tensor, Tensor, Rates], Step]] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "adagrad": _adagrad,
    "adam": _adam,
    "yogi": _yogi,
}


PRECONDITIONED = ("adagrad", "adam", "yogi")


class Servers(NamedTuple):
    """The servers of all runs, on the device: which rows have which kind, and their settings as columns [run, 1]."""

    kinds: dict[str, Tensor]  # name -> rows
    rates: Rates
    lr: Tensor
    before: Tensor  # bool: the mask goes before the moments (an ablation)


def lay_out(specs: Sequence[ServerSettings], device: torch.device) -> Servers:
    """Check and ship the settings once, so that a round copies nothing."""
    for spec in specs:
        if spec.server not in SERVERS:
            raise ConfigError(f"unknown server optimiser {spec.server!r}; known: {', '.join(sorted(SERVERS))}")
        if spec.mask_position not in ("after", "before"):
            raise ConfigError(f"mask_position is 'after' (the paper's) or 'before', got {spec.mask_position!r}")

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(s, name) for s in specs], dtype=torch.float32, device=device)[:, None]

    kinds = sorted({s.server for s in specs})
    rows = {k: torch.tensor([r for r, s in enumerate(specs) if s.server == k], device=device) for k in kinds}
    before = torch.tensor([s.mask_position == "before" for s in specs], device=device)[:, None]
    return Servers(rows, Rates(*(column(name) for name in Rates._fields)), column("server_lr"), before)


def init_moments(servers: Servers, params: Tensor) -> Moments:
    """z_0 = 0 and v_0 = epsilon^2."""
    v = torch.zeros_like(params)
    for kind in PRECONDITIONED:
        if kind in servers.kinds:
            rows = servers.kinds[kind]
            v[rows] = servers.rates.epsilon[rows].square().expand(-1, params.shape[1])
    return Moments(torch.zeros_like(params), v)


def step(servers: Servers, merged: Merged, moments: Moments, params: Tensor) -> tuple[Tensor, Moments]:
    """w + server_lr * mask * step, for all runs; a run without a counted client keeps weights and moments."""
    delta = merged.mean
    if merged.mask is not None:
        delta = torch.where(servers.before, delta * merged.mask, delta)
    move, z, v = _by_kind(servers, delta, moments)
    if merged.mask is not None:
        move = torch.where(servers.before, move, move * merged.mask)
    alive = merged.alive[:, None]
    new = torch.where(alive, params + servers.lr * move, params)
    if z is moments.z and v is moments.v:
        return new, moments
    return new, Moments(torch.where(alive, z, moments.z), torch.where(alive, v, moments.v))


def _by_kind(servers: Servers, delta: Tensor, moments: Moments) -> Step:
    """The step of each run's own kind of server."""
    if len(servers.kinds) == 1:
        return SERVERS[next(iter(servers.kinds))](delta, *moments, servers.rates)
    move, z, v = delta.clone(), moments.z.clone(), moments.v.clone()
    for kind, rows in servers.kinds.items():
        rates = Rates(*(value[rows] for value in servers.rates))
        part = SERVERS[kind](delta[rows], moments.z[rows], moments.v[rows], rates)
        for whole, piece in zip((move, z, v), part, strict=True):
            whole[rows] = piece
    return move, z, v
