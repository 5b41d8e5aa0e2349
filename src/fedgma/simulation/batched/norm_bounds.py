"""The norm bound of a deployment (`aggregation.server`) in the simulator, for many runs at once.

An update longer than `norm_factor` times the usual norm is refused. The usual norm is the lower median, over the last
rounds, of each round's lower median over all finite updates; before the first round it is the norm of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedgma.aggregation.norms import norm
from fedgma.aggregation.server import WINDOW
from fedgma.training.stacked import Shapes, ship


@dataclass(frozen=True, eq=False)
class Bounds:
    """The bounds of a fleet's runs."""

    bounded: np.ndarray  # bool [run]
    factors: Tensor  # float64 [run]; infinite for runs without a bound
    shapes: Shapes


@dataclass
class RoundNorms:
    """A round: the largest norm of each run, and the norms of the updates so far; changed in place."""

    limits: Tensor  # float64 [run]
    runs: list[np.ndarray] = field(default_factory=list)  # of lanes, rising
    norms: list[Tensor] = field(default_factory=list)


def lay_out(factors: Sequence[float | None], shapes: Shapes, device: torch.device) -> Bounds | None:
    """The bounds of runs with these factors; None if none has a bound."""
    bounded = np.array([factor is not None for factor in factors])
    if not bounded.any():
        return None
    values = [np.inf if factor is None else factor for factor in factors]
    return Bounds(bounded, torch.tensor(values, dtype=torch.float64, device=device), shapes)


def no_medians(runs: int, device: torch.device) -> Tensor:
    """The state before the first round: float64 [run, round], NaN for rounds that were not played."""
    return torch.full((runs, WINDOW), torch.nan, dtype=torch.float64, device=device)


def open_round(bounds: Bounds, medians: Tensor, params: Tensor) -> RoundNorms:
    """The limits of a round; there is none if the usual norm is zero."""
    usual = lower_medians(medians)
    usual = torch.where(usual.isnan(), norms(params, bounds.shapes), usual)
    limits = bounds.factors * usual
    return RoundNorms(torch.where(limits > 0, limits, torch.inf))


def find_long(bounds: Bounds, round: RoundNorms, run: np.ndarray, updates: Tensor) -> Tensor:
    """Which lanes [lane] are longer than their run's limit; notes their norms."""
    rows = np.flatnonzero(bounds.bounded[run])
    longer = torch.zeros(len(run), dtype=torch.bool, device=updates.device)
    if len(rows):
        picked, owner = ship(rows, updates.device), ship(run[rows], updates.device)
        lengths = norms(updates[picked], bounds.shapes)
        round.runs.append(run[rows])
        round.norms.append(lengths)
        longer[picked] = lengths.isfinite() & (lengths > round.limits[owner])
    return longer


def close_round(round: RoundNorms, medians: Tensor) -> Tensor:
    """The medians with that of this round appended, for the runs that had a finite update."""
    if not round.runs:
        return medians
    run, lengths = np.concatenate(round.runs), torch.cat(round.norms)
    rank = np.arange(len(run)) - np.searchsorted(run, run)
    table = torch.full((len(medians), int(rank.max()) + 1), torch.nan, dtype=torch.float64, device=medians.device)
    finite = torch.where(lengths.isfinite(), lengths, torch.nan)
    table[ship(run, medians.device), ship(rank, medians.device)] = finite
    newest = lower_medians(table)[:, None]
    return torch.where(newest.isnan(), medians, torch.cat([medians[:, 1:], newest], 1))


def lower_medians(values: Tensor) -> Tensor:
    """The lower median of each row without its NaNs; NaN for a row of NaNs.

    >>> lower_medians(torch.tensor([[3.0, 1.0, torch.nan], [torch.nan] * 3])).tolist()
    [1.0, nan]
    """
    known = (~values.isnan()).sum(1, keepdim=True)
    middle = ((known - 1) // 2).clamp(min=0)
    return values.sort(1).values.gather(1, middle)[:, 0]  # NaNs are sorted last


def norms(updates: Tensor, shapes: Shapes) -> Tensor:
    """The norm of each row [lane], in float64; on the CPU with the bits of the gate."""
    if updates.device.type != "cpu":
        lengths: Tensor = torch.linalg.vector_norm(updates, dim=1, dtype=torch.float64)
        return lengths
    ends = np.cumsum([shape.numel() for _, shape in shapes])[:-1]
    return torch.tensor([norm(np.split(row, ends)) for row in updates.numpy()], dtype=torch.float64)
