"""Agreement and homogeneity (E11, the paper's Figure 4): the share of entries below tau by homogeneity of clients.

It is measured in runs of plain FedAvg, so that the mask does not change the runs in which it is measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fedgma.aggregation.masks import votes_needed
from fedgma.experiments.materials import Materials
from fedgma.paper.analyses import AnalysisRequest, AnalysisResult, Follow, unseen
from fedgma.paper.analyses.rounds import data_and_model, specs_of
from fedgma.paper.findings import Finding, judged
from fedgma.paper.plots.analyses import draw_homogeneity
from fedgma.reports.plots.masks import coins
from fedgma.simulation import fleet as fleets
from fedgma.simulation.spec import RunSpec
from fedgma.statistics.verdicts import paired

ALPHAS = (0.1, 0.5, 1.0, 5.0, 10.0, 100.0)
CLIENTS = 10


def share_below(counts: npt.NDArray[np.number[Any]], tau: float) -> npt.NDArray[np.float64]:
    """The share of entries whose agreement is below tau, given the counts of |votes| = 0 .. clients on the last axis.

    >>> share_below(np.array([5, 0, 2, 0, 3]), 0.6).item()  # four clients: |votes| of 3 or more pass
    0.7
    """
    below = counts[..., : votes_needed(tau, counts.shape[-1] - 1)].sum(-1)
    return np.asarray(below / np.maximum(counts.sum(-1), 1))


def fair_share_below(clients: int, tau: float) -> float:
    """The same share if every vote is a fair coin, exactly: the reference for heterogeneity.

    >>> [round(fair_share_below(clients, 0.4), 3) for clients in (2, 5, 10, 30)]
    [0.5, 0.625, 0.656, 0.957]
    """
    return float(share_below(coins(clients), tau))


def along_runs(specs: Sequence[RunSpec], tau: float, follow: Follow = unseen) -> Iterator[dict[str, Any]]:
    """A row for each run, round and layer, and for the whole model; every round is measured."""
    played_rounds = fleets.play([replace(spec, mask_every=1) for spec in specs])
    for played in follow(played_rounds, specs[0].rounds, f"rounds of {len(specs)} runs"):
        scores = {record.run: record.scores["test"]["accuracy"] for record in played.records if record.scores}
        for run, votes in played.votes.items():
            counts = votes.counts.cpu().numpy()
            shares = share_below(np.concatenate([counts.sum(0)[None], counts]), tau)
            tested = 100 * scores[run] if run in scores else None
            for layer, share in zip(("all", *votes.names), shares.tolist(), strict=True):
                row = {"run": run, "round": int(played.rounds[run]), "layer": layer}
                yield {**row, "below_%": 100 * share, "test_accuracy_%": tested}


def measure(request: AnalysisRequest, tau: float) -> list[dict[str, Any]]:
    """Plain FedAvg with every client in every round, for each concentration and seed."""
    materials, rounds = Materials(request.device), 3 if request.quick else request.rounds or 30
    labels = [(alpha, seed) for alpha in ALPHAS for seed in request.seed_range]
    specs = []
    for alpha in ALPHAS:
        partition = {"name": "dirichlet", "clients": CLIENTS, "alpha": alpha}
        settings = {"partition": partition, "rounds": rounds, "aggregator": "mean", "client_learning_rate": 0.01}
        more = {"evaluate_every": rounds, "client_test_size": 0, **data_and_model(request, "mnist")}
        specs += specs_of(materials, request.seed_range, **settings, **more)
    rows = along_runs(specs, tau, request.follow)
    return [dict(zip(("alpha", "seed"), labels[row.pop("run")], strict=True)) | row for row in rows]


def summarise(rows: list[dict[str, Any]], tau: float) -> list[dict[str, Any]]:
    """By concentration and layer: mean over rounds, then over seeds with its interval; also first and last round."""
    summary = []
    for layer in dict.fromkeys(row["layer"] for row in rows):
        for alpha in ALPHAS:
            group = [row for row in rows if row["layer"] == layer and row["alpha"] == alpha]
            seeds = sorted({row["seed"] for row in group})
            means = [float(np.mean([row["below_%"] for row in group if row["seed"] == seed])) for seed in seeds]
            verdict = paired(means)
            ends = {row["round"] for row in group}
            first, last = ([row["below_%"] for row in group if row["round"] == end] for end in (min(ends), max(ends)))
            tested = [row["test_accuracy_%"] for row in group if row["test_accuracy_%"] is not None]
            head = {"layer": layer, "alpha": alpha, "seeds": len(seeds), "below_%": verdict.mean}
            low, high = verdict.interval or (None, None)
            rest = {"first_round": float(np.mean(first)), "last_round": float(np.mean(last))}
            fair = {"fair_coins": 100 * fair_share_below(CLIENTS, tau), "test_accuracy_%": float(np.mean(tested))}
            summary.append({**head, "low": low, "high": high, **rest, **fair})
    return summary


def analyse(request: AnalysisRequest, tau: float = 0.4) -> AnalysisResult:
    """E11: the share of entries below tau against the Dirichlet concentration, for the whole model and by layer."""
    rows = measure(request, tau)
    summary = summarise(rows, tau)
    reference = 100 * fair_share_below(CLIENTS, tau)
    figures = {"homogeneity": draw_homogeneity(summary, rows, reference)}
    # the page and the figure need only the whole model; the rounds of every layer would be long
    curves = [row for row in rows if row["layer"] == "all"]
    return AnalysisResult({"agreement": summary, "rounds": curves}, find(rows, summary, reference), figures)


def find(rows: list[dict[str, Any]], summary: list[dict[str, Any]], reference: float) -> list[Finding]:
    """Test the paper's claim that the shares fall as alpha rises."""
    whole_model = [row for row in summary if row["layer"] == "all"]
    shares = [row["below_%"] for row in whole_model]
    falling = all(before > after for before, after in pairwise(shares))
    means = {(row["alpha"], row["seed"]): 0.0 for row in rows}
    for alpha, seed in means:
        values = [r["below_%"] for r in rows if (r["layer"], r["alpha"], r["seed"]) == ("all", alpha, seed)]
        means[alpha, seed] = float(np.mean(values))
    seeds = sorted({seed for _, seed in means})
    verdict = paired([means[ALPHAS[0], seed] - means[ALPHAS[-1], seed] for seed in seeds])
    between = f", 95 % CI {verdict.low:.2f} to {verdict.high:.2f}" if verdict.interval else ", one seed"
    listed = ", ".join(f"{row['below_%']:.1f} % at {row['alpha']:g}" for row in whole_model)
    first, last = (
        f"{whole_model[0][end]:.1f} % to {whole_model[-1][end]:.1f} %" for end in ("first_round", "last_round")
    )
    way = "falling" if falling else "not falling"
    fall = f"From alpha {ALPHAS[0]:g} to {ALPHAS[-1]:g} the share falls by {verdict.mean:.2f} points{between}."
    ends = f"In the first round it goes from {first}, in the last from {last}."
    chance = f"Independent fair signs would give {reference:.1f} % at every alpha."
    return [
        Finding("agreement/shares", f"Entries below tau, mean over rounds: {listed}; {way} all the way."),
        Finding("agreement/fall", fall, judged(verdict.interval), verdict.mean, verdict.interval, verdict.of),
        Finding("agreement/ends", ends),
        Finding("agreement/chance", chance, estimate=reference),
    ]
