"""What a round draws: its clients, their batches and rates. Several small rounds are drawn at a time.

Drawing ten clients takes a hundred calls of numpy, and drawing a hundred clients hardly more. A plan depends on the
number of the round alone, so it is the same whenever it is made.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedgma.simulation.rates import learning_rates
from fedgma.simulation.sampling import draw_batches, lay_lanes, sample_all_clients
from fedgma.simulation.setup import Fleet, Plan
from fedgma.simulation.state import State
from fedgma.simulation.timeline import Attendance
from fedgma.training.lane_batch import LaneBatch

TOGETHER = 100  # lanes that are drawn at a time, at most


def plan_round(fleet: Fleet, rounds: np.ndarray, busy: Sequence[int], attended: Mapping[int, Attendance]) -> Plan:
    """The next round after so many rounds [run]; `busy` are the runs that have one, `attended` those with a clock."""
    if attended:  # who takes part depends on the rounds before
        return _drawn(fleet, rounds, busy, attended)
    if (known := fleet.plans.pop(rounds.tobytes(), None)) is not None:
        return known
    first = _drawn(fleet, rounds, busy, {})
    if not 0 < len(first.lanes) <= min(fleet.chunk, TOGETHER // 2):
        return first
    left = min(fleet.specs[run].rounds - int(rounds[run]) for run in busy)
    number = min(left, TOGETHER // len(first.lanes))
    ahead = [advanced(rounds, busy, more) for more in range(number)]
    plans = [first, *(_drawn(fleet, after, busy, {}) for after in ahead[1:])]
    batch, weights = lay(fleet, np.concatenate([plan.lanes for plan in plans]))
    ends = np.cumsum([len(plan.lanes) for plan in plans]).tolist()
    fleet.plans.clear()
    for after, plan, begin, end in zip(ahead, plans, [0, *ends], ends, strict=False):
        fleet.plans[after.tobytes()] = plan._replace(laid=(batch.take(slice(begin, end)), weights[begin:end]))
    return fleet.plans.pop(rounds.tobytes())


def advanced(rounds: np.ndarray, busy: Sequence[int], number: int = 1) -> np.ndarray:
    """The rounds [run] that are complete after some more of the busy runs."""
    after = rounds.copy()
    after[busy] += number
    return after


def _drawn(fleet: Fleet, rounds: np.ndarray, busy: Sequence[int], attended: Mapping[int, Attendance]) -> Plan:
    """The clients of a round, without their batches."""
    sampled = sample_all_clients(fleet.specs, rounds + 1, busy, attended)
    return Plan(sampled, lay_lanes(sampled, rounds + 1, attended))


def lay_lane_batch(
    fleet: Fleet, state: State, lanes: np.ndarray | Sequence[tuple[int, ...]]
) -> tuple[LaneBatch, np.ndarray]:
    """The lanes of (run, client) or (run, client, round), by default the next, and their weights: samples, or ones."""
    runs, clients, *given = np.asarray(lanes, np.int64).T
    return lay(fleet, np.stack([runs, clients, given[0] if given else state.rounds[runs] + 1], 1))


def lay(fleet: Fleet, lanes: np.ndarray) -> tuple[LaneBatch, np.ndarray]:
    """The batches and weights (samples, or ones) of lanes [lane, 3]: run, client, round."""
    runs, clients, rounds = lanes.T
    specs = [fleet.specs[run] for run in runs.tolist()]
    drawn = draw_batches(specs, rounds, clients)
    lr = learning_rates(fleet.specs, rounds, runs, drawn.batches[2])
    rest: dict[str, Any] = {"rates": fleet.rates[runs], "seeds": drawn.seeds, "optimizer": specs[0].client_optimizer}
    uniform = np.array([spec.weighting == "uniform" for spec in fleet.specs])
    weights = np.where(uniform[runs], 1, drawn.samples)
    return LaneBatch(runs, clients, fleet.pool[runs], *drawn.batches, lr=lr, **rest), weights
