"""How stable a mask is (E17, the paper's Appendix G): bounds over a grid, and repeats of real training."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from fedgma.aggregation.masks import votes_needed
from fedgma.paper.analyses import AnalysisRequest, AnalysisResult, repeats
from fedgma.paper.analyses.bounds import (
    corrected_bound,
    corrected_condition,
    monte_carlo,
    pass_probability,
    printed_condition,
)
from fedgma.paper.findings import ClaimVerdict, Finding
from fedgma.paper.plots.analyses import draw_repeats, draw_stability
from fedgma.seeds import seed as keyed

RATIOS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0)  # of mean to deviation
COHORTS = (5, 10, 30, 100)
TAUS = (0.2, 0.4, 0.6, 0.8)
SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)  # of clients with a positive mean
ALMOST_SURE = 0.95  # a lower probability is not "almost surely"


def grid(draws: int = 20_000) -> list[dict[str, Any]]:
    """P(mask = 1) over ratios, numbers of clients, thresholds and shares: simulated, exact, and the bounds."""
    return [
        _cell(clients, positive, tau, ratio, draws)
        for clients in COHORTS
        for tau in TAUS
        for positive in sorted({round(share * clients) for share in SHARES})
        for ratio in RATIOS
    ]


def _cell(clients: int, positive: int, tau: float, ratio: float, draws: int) -> dict[str, Any]:
    means = np.where(np.arange(clients) < positive, ratio, -ratio)
    bound = float(corrected_bound(means, 1.0, tau))
    key = keyed(0, "stability grid", clients, positive, round(100 * tau), round(100 * ratio))
    return {
        "clients": clients,
        "tau": tau,
        "positive": positive,
        "share": positive / clients,
        "ratio": ratio,
        "printed_condition": bool(printed_condition(means, tau)),
        "corrected_condition": bool(corrected_condition(means, tau)),
        "drawn": monte_carlo(means, 1.0, tau, draws=draws, seed=key),
        "exact": float(pass_probability(means, 1.0, tau)),
        "bound": None if np.isnan(bound) else bound,
    }


def growth(tau: float = 0.4, ratios: Iterable[float] = (1.0, 2.0, 3.0)) -> list[dict[str, Any]]:
    """P(mask is not 1) at the smallest sufficient share, by number of clients, on which the constant depends."""
    rows = []
    for clients in (5, 10, 20, 30, 50, 100, 200):
        positive = -(-(clients + votes_needed(tau, clients)) // 2)
        for ratio in ratios:
            means = np.where(np.arange(clients) < positive, ratio, -ratio)
            missed = 1 - float(pass_probability(means, 1.0, tau))
            single = float(np.exp(-(ratio**2)))
            row = {"clients": clients, "positive": positive, "ratio": ratio, "tau": tau, "not_1": missed}
            rows.append({**row, "exp_of_minus_ratio_squared": single, "constant_needed": missed / single})
    return rows


def analyse(request: AnalysisRequest) -> AnalysisResult:
    """E17: mask stability by Monte Carlo against the corrected bound, and by repeated local training."""
    cells = grid(2_000 if request.quick else 20_000)
    grown, rows = growth(), repeats.repeated_training(request)
    summary = repeats.summarise(rows)
    figures = {"stability": draw_stability(cells), "repeats": draw_repeats(summary)}
    tables = {"probabilities": cells, "cohorts": grown, "repeated_training": summary, "repeated_training_seeds": rows}
    return AnalysisResult(tables, [*find(cells), *repeats.find(summary)], figures)


def find(cells: list[dict[str, Any]]) -> list[Finding]:
    """Findings: whether the corrected bound and the printed condition hold, and the error of the simulation."""
    promised = [cell for cell in cells if cell["corrected_condition"]]
    misled = [cell for cell in cells if cell["printed_condition"] and not cell["corrected_condition"]]
    sharp = [cell["exact"] for cell in misled if cell["ratio"] == max(RATIOS)]
    broken = sum(cell["exact"] < cell["bound"] - 1e-12 for cell in promised)
    apart = max(abs(cell["drawn"] - cell["exact"]) for cell in cells)
    corrected = (
        f"Where the corrected condition p >= (1 + tau) / 2 holds ({len(promised)} cells), P(mask = 1) is below the "
        f"bound 1 - sum exp(-mu^2 / 2 sigma^2) in {broken} of them."
    )
    printed = (
        f"The condition as printed (p > tau) holds in {len(misled)} cells more; at mu / sigma = {max(RATIOS):g}, where "
        "the paper promises a mask of 1 almost surely, P(mask = 1) is at most "
        f"{max(sharp):.4f} in the {len(sharp)} of them."
    )
    kept = ClaimVerdict.CONTRADICTED if broken else ClaimVerdict.HOLDS
    sure = ClaimVerdict.CONTRADICTED if min(sharp) < ALMOST_SURE else ClaimVerdict.HOLDS
    return [
        Finding("condition/corrected", corrected, kept, estimate=broken, n=len(promised)),
        Finding("condition/printed", printed, sure, estimate=max(sharp), n=len(sharp)),
        Finding("drawn", f"Drawn and exact probabilities differ by {apart:.4f} at most.", estimate=apart, n=len(cells)),
    ]
