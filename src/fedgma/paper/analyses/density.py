"""How dense the masks of real runs are (E18): each entry's mask, averaged over rounds, and its low quantiles.

The minimum is the alpha-hat for which the paper's convergence statement would hold.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from fedgma.experiments.materials import Materials
from fedgma.paper.analyses import AnalysisRequest, Follow, unseen
from fedgma.paper.analyses.rounds import found_or_mini, open_round, specs_of
from fedgma.paper.findings import Finding
from fedgma.simulation import fleet as fleets

Numbers = npt.NDArray[np.float64]
QUANTILES = {"q0.1": 0.001, "q1": 0.01, "q10": 0.1, "q50": 0.5}


def mean_masks(fleet: fleets.Fleet, rounds: int, follow: Follow = unseen) -> tuple[Numbers, Numbers]:
    """Each entry's mean mask over `rounds`, and the share of rounds in which no client moved it: two [run, entry]."""
    state = fleets.start(fleet)
    dense, still = np.zeros(tuple(state.params.shape)), np.zeros(tuple(state.params.shape))
    for _ in follow(range(rounds), rounds, f"rounds of {len(fleet.specs)} runs"):
        state, sums, merged = open_round(fleet, state)
        dense += np.ones_like(dense) if merged.mask is None else merged.mask.cpu().numpy()
        still += ((sums.total == 0) & (sums.votes == 0)).cpu().numpy()
    return dense / rounds, still / rounds


def low_quantiles(dense: Numbers) -> dict[str, float]:
    """Minimum and low quantiles of mean masks.

    >>> low_quantiles(np.array([0.2, 0.4, 0.6]))["alpha_hat"]
    0.2
    """
    return {"alpha_hat": float(dense.min()), **{name: float(np.quantile(dense, q)) for name, q in QUANTILES.items()}}


def sorted_curve(dense: Numbers, points: int = 200) -> list[dict[str, float]]:
    """Mean masks in ascending order, at `points` shares of the entries on a logarithmic scale.

    >>> sorted_curve(np.array([0.5, 0.1]), 2)
    [{'entries_%': 50.0, 'mean_mask': 0.1}, {'entries_%': 100.0, 'mean_mask': 0.5}]
    """
    ranks = np.unique(np.geomspace(1, len(dense), points).round().astype(int))
    values = np.sort(dense)[ranks - 1]
    shares = 100 * ranks / len(dense)
    return [{"entries_%": float(share), "mean_mask": float(value)} for share, value in zip(shares, values, strict=True)]


def densities(request: AnalysisRequest, tau: float = 0.4) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for each partition, seed and layer of FedAvg-GMA runs; and sorted mean masks of the first seed."""
    chosen = found_or_mini(request, "fmnist")
    rounds = 3 if request.quick else request.rounds or 100
    materials, rows, curve = Materials(request.device), [], []
    for skew in ("label_skew", "iid"):
        settings = {**chosen, "partition": {"name": skew, "clients": 100}, "rounds": rounds, "tau": tau}
        fleet = fleets.assemble(specs_of(materials, request.seed_range, **settings, client_learning_rate=0.01))
        dense, still = mean_masks(fleet, rounds, request.follow)
        owner = fleet.layers.owner.cpu().numpy()
        curve += [{"partition": skew, **point} for point in sorted_curve(dense[0])]
        for seed in range(len(dense)):
            head = {"dataset": chosen["dataset"], "partition": skew, "rounds": rounds, "seed": seed}
            parts = {"all": slice(None), **{name: owner == index for index, name in enumerate(fleet.layers.names)}}
            for layer, part in parts.items():
                masks, dead = dense[seed][part], still[seed][part] == 1
                live = float(masks[~dead].min()) if not dead.all() else None
                more = {
                    "mean": float(masks.mean()),
                    "never_moved_%": 100 * float(dead.mean()),
                    "alpha_hat_of_moved": live,
                }
                rows.append({**head, "layer": layer, **low_quantiles(masks), **more})
    return rows, curve


def find(rows: list[dict[str, Any]]) -> list[Finding]:
    """A finding for each partition: the minimum of the mean mask."""
    findings = []
    for skew in dict.fromkeys(row["partition"] for row in rows):
        seeds = [row for row in rows if row["partition"] == skew and row["layer"] == "all"]
        least, moved = min(row["alpha_hat"] for row in seeds), min(row["alpha_hat_of_moved"] or 0.0 for row in seeds)
        never, low = np.mean([row["never_moved_%"] for row in seeds]), np.mean([row["q1"] for row in seeds])
        middle = np.mean([row["q50"] for row in seeds])
        text = (
            f"{seeds[0]['dataset']}, {skew}, {seeds[0]['rounds']} rounds, {len(seeds)} seeds: alpha-hat is {least:.3f}"
            f"; without the {never:.2f} % of entries that no client ever moved {moved:.3f}; the 1 % quantile of the "
            f"mean mask is {low:.3f}, the median {middle:.3f}."
        )
        findings.append(Finding(f"density/{skew}", text, estimate=least, n=len(seeds)))
    return findings
