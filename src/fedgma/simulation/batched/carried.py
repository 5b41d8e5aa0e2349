"""What algorithms carry from round to round and send to clients, of many runs at once (see `simulation.algorithms`).

A round has four places where an algorithm acts: what clients start from and are sent (`starts`, `lane_terms`), what
they send (`sent`), what is gathered from those that were counted (`gather`), and the step of the server (`conclude`).
Arrays of clients change in place; a client that was refused keeps its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgma.simulation.algorithms import Algorithm
from fedgma.simulation.batched.tallies import Merged, Sums
from fedgma.simulation.spec import RunSpec
from fedgma.training.batches import effective_rates
from fedgma.training.lane_batch import LaneBatch, Tilt, Trained
from fedgma.training.stacked import Shapes, Stacked, flatten, ship, unflatten

TINY = 1e-12  # added to a norm that is divided by


class Carried(NamedTuple):
    """The arrays of all runs; None where no run has them, or where a run has none."""

    control: Tensor | None = None  # [run, entry], of the servers: SCAFFOLD's c, FedDyn's h, FedCM's direction
    variates: tuple[Tensor | None, ...] = ()  # per run [client, entry]: SCAFFOLD's c_i, FedDyn's g_i
    tilt: Tensor | None = None  # [run, entry], of the servers: FedSMOO's s
    tilts: tuple[Tensor | None, ...] = ()  # per run [client, entry]: FedSMOO's mu_i


class Algorithms(NamedTuple):
    """The algorithms of all runs, on the device; columns are [run, 1], rows are the runs of a kind."""

    algorithms: tuple[Algorithm, ...]
    clients: tuple[int, ...]  # of each run, all that there are
    mu: Tensor
    rho: Tensor
    share: Tensor  # of the server's array in the correction of a client
    total: Tensor  # float64: how many clients there are
    ahead: Tensor  # what the server's momentum is multiplied by for the start of clients
    duals: Tensor  # rows
    directions: Tensor  # rows
    shapes: Shapes


@dataclass
class RoundSums:
    """Sums over the counted clients of a round, changed in place."""

    drift: Tensor  # float64 [run, entry]: changes of SCAFFOLD's c_i
    rates: Tensor  # float64 [run]: weight times how far a gradient of 1 moves the client
    tilt: Tensor | None  # float64 [run, entry]: FedSMOO's mu_i - e


def lay_out(specs: Sequence[RunSpec], shapes: Shapes, device: torch.device) -> Algorithms | None:
    """The algorithms of the runs, copied to the device once; None if none of them carries anything."""
    chosen = tuple(spec.algorithm for spec in specs)
    if not any(algorithm.keeps != "nothing" or algorithm.lookahead for algorithm in chosen):
        return None
    shares = {"gradients": 1.0, "duals": 0.0, "sent duals": 0.0, "nothing": 0.0}
    server = [spec.optimizer.settings if spec.algorithm.lookahead else {} for spec in specs]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)[:, None].to(device)

    def rows(kind: str) -> Tensor:
        return torch.tensor(
            [row for row, algorithm in enumerate(chosen) if algorithm.keeps == kind], dtype=torch.int64
        ).to(device)

    return Algorithms(
        algorithms=chosen,
        clients=tuple(len(spec.federation.clients) for spec in specs),
        mu=column([algorithm.mu for algorithm in chosen]),
        rho=column([algorithm.rho for algorithm in chosen]),
        share=column([shares.get(algorithm.keeps, 1 - algorithm.scale) for algorithm in chosen]),
        total=column([len(spec.federation.clients) for spec in specs]).double(),
        ahead=column(
            [float(settings.get("learning_rate", 0.0)) * float(settings.get("beta1", 0.0)) for settings in server]
        ),
        duals=rows("duals"),
        directions=rows("direction"),
        shapes=shapes,
    )


def first(algorithms: Algorithms | None, params: Tensor) -> Carried:
    """The arrays before the first round: zeros."""
    if algorithms is None:
        return Carried()
    chosen = tuple(zip(algorithms.algorithms, algorithms.clients, strict=True))

    def per_client(kept: list[bool]) -> tuple[Tensor | None, ...]:
        sizes = [clients if keep else None for (_, clients), keep in zip(chosen, kept, strict=True)]
        return tuple(None if size is None else params.new_zeros(size, params.shape[1]) for size in sizes)

    return Carried(
        control=torch.zeros_like(params) if any(algorithm.keeps != "nothing" for algorithm, _ in chosen) else None,
        variates=per_client([algorithm.on_clients for algorithm, _ in chosen]),
        tilt=torch.zeros_like(params) if any(algorithm.tilted for algorithm, _ in chosen) else None,
        tilts=per_client([algorithm.tilted for algorithm, _ in chosen]),
    )


def open_round(algorithms: Algorithms | None, carried: Carried, sums: Sums) -> RoundSums | None:
    """The sums of a round before its first client; None where nothing is carried."""
    if algorithms is None or carried.control is None:
        return None
    tilt = None if carried.tilt is None else torch.zeros_like(sums.total)
    return RoundSums(torch.zeros_like(sums.total), torch.zeros_like(sums.weight), tilt)


def starts(algorithms: Algorithms | None, params: Tensor, momentum: Tensor) -> Tensor:
    """What clients start from [run, entry]: the model, or where the server's momentum alone would take it."""
    if algorithms is None or not any(algorithm.lookahead for algorithm in algorithms.algorithms):
        return params
    return params + algorithms.ahead * momentum


def lane_terms(
    algorithms: Algorithms | None, carried: Carried, lane_batch: LaneBatch
) -> tuple[Stacked | None, Tilt | None]:
    """The correction and the tilt of every lane, zero for lanes of runs without; None if no lane has any."""
    if algorithms is None or carried.control is None:
        return None, None
    run = ship(lane_batch.run, carried.control.device)
    correction = algorithms.share[run] * carried.control[run]
    for lane, variate in _lanes(lane_batch, carried.variates):
        correction[lane] -= variate
    named = unflatten(correction, algorithms.shapes)
    if carried.tilt is None:
        return named, None
    own = torch.zeros_like(correction)
    for lane, tilt in _lanes(lane_batch, carried.tilts):
        own[lane] = tilt
    parts = (own, carried.tilt[run], torch.zeros_like(own))
    return named, Tilt(*(unflatten(part, algorithms.shapes) for part in parts))


def sent(algorithms: Algorithms | None, carried: Carried, lane_batch: LaneBatch, updates: Tensor) -> Tensor:
    """What clients send [lane, entry]: their updates, and with FedSpeed minus the new g_i / mu."""
    if algorithms is None:
        return updates
    if not any(algorithm.keeps == "sent duals" for algorithm in algorithms.algorithms):
        return updates
    changed = updates.clone()
    for lane, variate in _lanes(lane_batch, carried.variates):
        algorithm = algorithms.algorithms[lane_batch.run[lane]]
        if algorithm.keeps == "sent duals":
            changed[lane] -= (variate - algorithm.mu * updates[lane]) / algorithm.mu
    return changed


def gather(
    algorithms: Algorithms | None,
    carried: Carried,
    sums: RoundSums | None,
    lane_batch: LaneBatch,
    weights: np.ndarray,
    trained: Trained,
    counted: Tensor,
) -> None:
    """Update the arrays of the counted clients after local training, in place, and add to the sums of the round."""
    if algorithms is None or sums is None or carried.control is None:
        return
    moved = effective_rates(lane_batch.lr, lane_batch.steps, lane_batch.rate("momentum"), lane_batch.rate("nesterov"))
    scale = ship(moved.astype(np.float32), counted.device)
    if len(algorithms.directions):
        owner = ship(lane_batch.run == np.arange(len(algorithms.clients))[:, None], counted.device).double()
        sums.rates += owner @ (ship(weights.astype(np.float64), counted.device) * counted * scale)
    if any(algorithm.on_clients for algorithm in algorithms.algorithms):
        _move_variates(algorithms, carried, sums, lane_batch, trained.flat, scale, counted)
    if sums.tilt is not None and trained.tilt is not None:
        own, last = flatten(trained.tilt.own), flatten(trained.tilt.last)
        for lane, tilt in _lanes(lane_batch, carried.tilts):
            tilt.copy_(torch.where(counted[lane], own[lane], tilt))
            sums.tilt[lane_batch.run[lane]] += torch.where(counted[lane], own[lane] - last[lane], 0.0)


def _move_variates(
    algorithms: Algorithms,
    carried: Carried,
    sums: RoundSums,
    lane_batch: LaneBatch,
    updates: Tensor,
    scale: Tensor,
    counted: Tensor,
) -> None:
    """SCAFFOLD's c_i move to the mean gradient of their local steps, duals by -mu (local - start).

    The mean gradient is (global - local) / (K lr), option II. Under momentum K is the number of plain gradients that
    the displacement amounts to, else the variates would be too large by up to 1 / (1 - momentum).
    """
    assert carried.control is not None
    run, kinds = ship(lane_batch.run, counted.device), [algorithms.algorithms[row].keeps for row in lane_batch.run]
    change = -carried.control[run] - updates / scale[:, None]
    if any("duals" in kind for kind in kinds):
        is_dual = ship(np.array(["duals" in kind for kind in kinds]), counted.device)
        change = torch.where(is_dual[:, None], -algorithms.mu[run] * updates, change)
    change = torch.where(counted[:, None], change, 0.0)
    for lane, variate in _lanes(lane_batch, carried.variates):
        variate += change[lane]
        if kinds[lane] == "gradients":
            sums.drift[lane_batch.run[lane]] += change[lane]


def conclude(
    algorithms: Algorithms | None, carried: Carried, round_sums: RoundSums | None, sums: Sums, merged: Merged
) -> tuple[Merged, Carried]:
    """What the servers step by, and the arrays that they carry into the next round; from unmasked means."""
    if algorithms is None or round_sums is None or carried.control is None:
        return merged, carried
    control = carried.control + (round_sums.drift / algorithms.total).float()
    mean, rows = merged.mean, algorithms.duals
    if len(rows):
        mu, share = algorithms.mu[rows], (sums.clients[rows, None] / algorithms.total[rows]).float()
        control[rows] -= mu * share * mean[rows]
        mean = mean.clone()
        mean[rows] -= control[rows] / mu
    rows = algorithms.directions
    if len(rows):
        moved = round_sums.rates[rows, None] / sums.weight[rows, None].clamp(min=1)
        direction = -(merged.mean[rows] / moved).float()
        control[rows] = torch.where(merged.alive[rows, None], direction, control[rows])
    tilt = carried.tilt
    if tilt is not None and round_sums.tilt is not None:
        norm = torch.linalg.vector_norm(round_sums.tilt, dim=1, keepdim=True)
        shared = (algorithms.rho * round_sums.tilt / (norm + TINY)).float()
        tilt = torch.where(merged.alive[:, None], shared, tilt)
    return merged._replace(mean=mean), carried._replace(control=control, tilt=tilt)


def _lanes(lane_batch: LaneBatch, arrays: tuple[Tensor | None, ...]) -> list[tuple[int, Tensor]]:
    """The lanes whose client has an array, each with a view of it."""
    pairs = enumerate(zip(lane_batch.run.tolist(), lane_batch.client.tolist(), strict=True))
    owned = [(lane, arrays[run], client) for lane, (run, client) in pairs]
    return [(lane, array[client]) for lane, array, client in owned if array is not None]
