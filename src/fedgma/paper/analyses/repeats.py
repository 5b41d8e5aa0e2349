"""The stability of real masks (E17): local training repeated from one state of a run, with new batch orders.

Only the order of the clients' batches varies between repeats, so this is the minimal noise of an update. The clients'
data, the sampled clients and the initial weights stay the same.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fedgma.aggregation.masks import votes_needed
from fedgma.experiments.materials import Materials
from fedgma.paper.analyses import AnalysisRequest
from fedgma.paper.analyses.bounds import (
    Numbers,
    chance_stability,
    corrected_bound,
    corrected_condition,
    pass_probability,
    printed_condition,
    stability,
)
from fedgma.paper.analyses.rounds import found_or_mini, open_round, retrain, specs_of
from fedgma.paper.findings import Finding
from fedgma.simulation import fleet as fleets
from fedgma.simulation.sampling import sample_clients
from fedgma.simulation.state import State
from fedgma.statistics.verdicts import paired


class Repeats(NamedTuple):
    """Statistics of repeated local training from one state, by entry."""

    votes: npt.NDArray[np.int32]  # [repeat, entry]
    means: Numbers  # [client, entry], of the update over repeats
    deviations: Numbers


def gather(updates: Iterable[Tensor]) -> Repeats:
    """Votes, means and deviations over repeats; `updates` yields [client, entry] for each repeat."""
    votes, first, second, count = [], None, None, 0
    for update in updates:
        values = update.cpu().numpy().astype(np.float64)
        votes.append(np.sign(values).sum(0).astype(np.int32))
        first = values if first is None else first + values
        second = values**2 if second is None else second + values**2
        count += 1
    assert first is not None
    assert second is not None
    mean = first / count
    variance = np.maximum(second / count - mean**2, 0) * count / max(count - 1, 1)
    return Repeats(np.stack(votes), mean, np.sqrt(variance))


def describe(seen: Repeats, tau: float) -> dict[str, Any]:
    """Shares in %: the stability of the mask, and how often it is 1 under the two conditions."""
    clients, repeats = len(seen.means), len(seen.votes)
    often = stability(seen.votes, clients, tau)
    passed = (np.abs(seen.votes) >= votes_needed(tau, clients)).mean(0)
    sigma = np.maximum(seen.deviations, 1e-30)
    side = np.where((seen.means > 0).sum(0) >= (seen.means < 0).sum(0), 1.0, -1.0)  # makes the commoner sign positive
    printed, corrected = printed_condition(side * seen.means, tau), corrected_condition(seen.means, tau)
    bound = corrected_bound(seen.means, sigma, tau)
    slack = 2 * np.sqrt(np.maximum(bound * (1 - bound), 0.25 / repeats) / repeats)
    return {
        "stability": 100 * often.mean(),
        "by_chance": 100 * chance_stability(clients, tau, repeats),
        "always_the_same": 100 * np.mean(often == 1),
        "mask_is_1": 100 * passed.mean(),
        "printed_condition": 100 * printed.mean(),
        "corrected_condition": 100 * corrected.mean(),
        "mask_is_1_where_printed_alone": 100 * _mean(passed[printed & ~corrected]),
        "mask_is_1_where_corrected": 100 * _mean(passed[corrected]),
        "bound_where_corrected": 100 * _mean(bound[corrected]),
        "gaussian_model": 100 * pass_probability(seen.means, sigma, tau).mean(),
        "below_bound": 100 * _mean((passed < bound - slack)[corrected]),
    }


def _mean(values: npt.NDArray[Any]) -> float:
    return float(values.mean()) if len(values) else float("nan")


def repeated_training(request: AnalysisRequest, tau: float = 0.4) -> list[dict[str, Any]]:
    """Repeat local training from several rounds of real FedAvg runs: a row for each seed, partition and round."""
    chosen = found_or_mini(request, "fmnist")
    points = (0, 2) if request.quick else (0, 10, request.rounds or 50)
    repeats = 5 if request.quick else 30
    materials, rows = Materials(request.device), []
    for skew in ("label_skew", "iid"):
        settings = {**chosen, "partition": {"name": skew, "clients": 100}, "rounds": points[-1] + 1}
        rates = {"aggregator": "mean", "client_learning_rate": 0.01}
        specs = specs_of(materials, request.seed_range, **settings, **rates)
        fleet = fleets.assemble(specs)
        for point, state in _states(fleet, points):
            for run, spec in request.follow(enumerate(specs), len(specs), f"seeds, {skew}, after {point} rounds"):
                clients = sample_clients(spec, point + 1).tolist()
                seen = gather(retrain(fleet, state, run, clients, repeats))
                row = {
                    "dataset": chosen["dataset"],
                    "partition": skew,
                    "after_round": point,
                    "seed": run,
                    "repeats": repeats,
                }
                rows.append({**row, **describe(seen, tau)})
    return rows


def _states(fleet: fleets.Fleet, points: Iterable[int]) -> Iterator[tuple[int, State]]:
    """The state of the fleet after each of these rounds, which ascend."""
    state, done = fleets.start(fleet), 0
    for point in points:
        for _ in range(point - done):
            state, _, _ = open_round(fleet, state)
        done = point
        yield point, state


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds, and the 95 % CI of the stability."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["dataset"], row["partition"], row["after_round"]), []).append(row)
    summary = []
    for (dataset, skew, point), group in groups.items():
        verdict = paired([row["stability"] for row in group])
        low, high = verdict.interval or (None, None)
        names = [name for name in group[0] if name not in ("dataset", "partition", "after_round", "seed")]
        means = {name: float(np.nanmean([row[name] for row in group])) for name in names if name != "repeats"}
        head = {"dataset": dataset, "partition": skew, "after_round": point, "seeds": len(group)}
        summary.append({**head, "stability": means.pop("stability"), "low": low, "high": high, **means})
    return summary


def find(summary: list[dict[str, Any]]) -> list[Finding]:
    """A finding for each partition after the last round: how often a mask has its commonest value."""
    last = max(row["after_round"] for row in summary)
    return [_stability(row) for row in summary if row["after_round"] == last]


def _stability(row: dict[str, Any]) -> Finding:
    text = (
        f"{row['dataset']}, {row['partition']}, after round {row['after_round']}: a mask has its commonest value in "
        f"{row['stability']:.1f} % of repeats (fair coins: {row['by_chance']:.1f} %); the printed condition "
        f"holds for {row['printed_condition']:.1f} % of entries, the corrected one for "
        f"{row['corrected_condition']:.1f} %; the mask is 1 for {row['mask_is_1_where_corrected']:.1f} % there "
        f"and for {row['mask_is_1_where_printed_alone']:.1f} % where the printed condition alone holds."
    )
    interval = None if row["low"] is None else (row["low"], row["high"])
    return Finding(f"condition/repeats/{row['partition']}", text, None, row["stability"], interval, row["seeds"])
