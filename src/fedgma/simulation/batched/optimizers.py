"""Server optimisers of many runs at once: [run, entry] tensors and one row of settings a run (SPEC 2.3).

Moments see the unmasked mean; the mask multiplies the preconditioned step. There is no bias correction.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedgma.aggregation.optimizers import FORMULAS, MOMENTS, Rates, check_settings
from fedgma.errors import ConfigError
from fedgma.simulation.batched.tallies import Merged


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


class Servers(NamedTuple):
    """The servers of all runs, on the device: which rows have which kind, and their settings as columns [run, 1]."""

    kinds: dict[str, Tensor]  # name -> rows
    rates: Rates
    lr: Tensor
    before: Tensor  # bool: the mask goes before the moments (an ablation)
    start: Tensor  # where second moments start


def lay_out(specs: Sequence[ServerSettings], device: torch.device) -> Servers:
    """Check and ship the settings once, so that a round copies nothing."""
    for spec in specs:
        if spec.server not in FORMULAS:
            raise ConfigError(f"unknown server optimiser {spec.server!r}; known: {', '.join(sorted(FORMULAS))}")
        check_settings(spec.server_lr, spec.beta1, spec.beta2, spec.epsilon, spec.mask_position)

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).float().to(device)[:, None]

    rates = Rates(
        keep1=column([s.beta1 for s in specs]),
        take1=column([1 - s.beta1 for s in specs]),
        keep2=column([s.beta2 for s in specs]),
        take2=column([1 - s.beta2 for s in specs]),
        epsilon=column([s.epsilon for s in specs]),
    )

    kinds = sorted({s.server for s in specs})
    rows = {k: torch.tensor([r for r, s in enumerate(specs) if s.server == k], device=device) for k in kinds}
    before = torch.tensor([s.mask_position == "before" for s in specs], device=device)[:, None]
    start = column([s.epsilon**2 if "v" in MOMENTS[s.server] else 0.0 for s in specs])
    return Servers(rows, rates, column([s.server_lr for s in specs]), before, start)


def init_moments(servers: Servers, params: Tensor) -> Moments:
    """z_0 = 0 and v_0 = epsilon^2."""
    return Moments(torch.zeros_like(params), servers.start.expand_as(params).clone())


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


def _by_kind(servers: Servers, delta: Tensor, moments: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """The step of each run's own kind of server."""
    if len(servers.kinds) == 1:
        return FORMULAS[next(iter(servers.kinds))](delta, *moments, servers.rates)
    move, z, v = delta.clone(), moments.z.clone(), moments.v.clone()
    for kind, rows in servers.kinds.items():
        rates = Rates(*(value[rows] for value in servers.rates))
        part = FORMULAS[kind](delta[rows], moments.z[rows], moments.v[rows], rates)
        for whole, piece in zip((move, z, v), part, strict=True):
            whole[rows] = piece
    return move, z, v
