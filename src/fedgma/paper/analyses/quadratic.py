"""Convergence against mask density (E18): a quadratic with random masks, and how dense real masks are.

The paper's rate is O(1 / sqrt(alpha^2 T) + 1 / (alpha^2 T)) for random masks, independent of the gradients, whose every
entry has a mean of at least alpha, with client rates of O(alpha / (K L)). On a quadratic the sums over local steps have
a closed form, so a round costs a few array operations. The real mask is neither binary nor independent of the
gradients: this checks the statement and predicts nothing about training.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedgma.aggregation.masks import soft_mask
from fedgma.paper.analyses import AnalysisRequest, AnalysisResult
from fedgma.paper.findings import ClaimVerdict, Finding
from fedgma.paper.plots.analyses import POWERS, draw_density, draw_slowdown
from fedgma.reports.tables import slug
from fedgma.seeds import generator
from fedgma.statistics.verdicts import paired

Numbers = npt.NDArray[np.float64]
Mask = Callable[[Numbers, np.random.Generator], Numbers]  # updates [seed, client, entry] -> [seed, entry]
ALPHAS = (1.0, 0.7, 0.5, 0.35, 0.25, 0.18, 0.125)
TARGET = 1e-4  # as a share of the initial squared gradient norm
LOCAL_STEPS = 5


class Problem(NamedTuple):
    """f_n(w) = sum_j h_j (w_j - c_nj)^2 / 2: clients share the curvature and differ in their optima."""

    curvature: Numbers  # [entry]
    centres: Numbers  # [client, entry]
    start: Numbers  # [entry]

    @property
    def smoothness(self) -> float:
        """L, the largest curvature."""
        return float(self.curvature.max())


def make_problem(
    entries: int = 100, clients: int = 10, *, condition: float = 10.0, spread: float = 1.0, seed: int = 0
) -> Problem:
    """Curvatures from 1 / condition to 1, centres around zero, and a start at a distance of about ten."""
    rng = generator(seed, "quadratic")
    curvature = np.geomspace(1 / condition, 1.0, entries)
    centres = spread * rng.standard_normal((clients, entries))
    return Problem(curvature, centres, 10 * rng.standard_normal(entries))


def bernoulli(alpha: float) -> Mask:
    """A random mask: every entry moves with probability alpha, independently of the updates."""
    return lambda updates, rng: (rng.random((len(updates), updates.shape[2])) < alpha).astype(np.float64)


def voted(tau: float) -> Mask:
    """The paper's mask, computed from the signs of the updates."""

    def mask(updates: Numbers, rng: np.random.Generator) -> Numbers:
        votes = np.sign(updates).sum(1).astype(np.int32)
        return np.asarray(soft_mask(tau)(votes, updates.shape[1], "float64"))

    return mask


def simulate(
    problem: Problem,
    mask: Mask,
    rate: float,
    rounds: int,
    *,
    noise: float = 0.0,
    seeds: int = 1,
    steps: int = LOCAL_STEPS,
) -> tuple[Numbers, Numbers]:
    """Squared gradient norms [seed, round + 1] and each entry's mean mask [seed, entry] of masked averaging.

    Every client takes `steps` gradient steps with Gaussian noise on the gradient.

    >>> problem = Problem(np.array([1.0]), np.array([[0.0]]), np.array([1.0]))
    >>> simulate(problem, bernoulli(1.0), 0.5, 3, steps=1)[0].round(4).tolist()  # halves the weight in every round
    [[1.0, 0.25, 0.0625, 0.0156]]
    """
    rng = generator(0, "quadratic rounds")
    keep = 1 - rate * problem.curvature
    towards = 1 - keep**steps
    deviation = noise * rate * np.sqrt((keep[:, None] ** (2 * np.arange(steps))).sum(1))
    centre, w = problem.centres.mean(0), np.tile(problem.start, (seeds, 1))
    norms, moved = np.empty((seeds, rounds + 1)), np.zeros_like(w)
    for round in range(rounds + 1):
        norms[:, round] = np.square(problem.curvature * (w - centre)).sum(1)
        if round == rounds:
            break
        updates = towards * (problem.centres - w[:, None])
        if noise:
            updates = updates + deviation * rng.standard_normal(updates.shape)
        chosen = mask(updates, rng)
        w, moved = w + chosen * updates.mean(1), moved + chosen
    return norms, moved / max(rounds, 1)


def expected_norms(problem: Problem, alpha: float, rate: float, rounds: int, *, steps: int = LOCAL_STEPS) -> Numbers:
    """The mean of the squared gradient norms under random masks without noise, in closed form: [round + 1].

    An entry's distance is multiplied by 1 - a or unchanged, so its mean square is multiplied by
    1 - alpha (2a - a^2).

    >>> problem = Problem(np.array([1.0]), np.array([[0.0]]), np.array([1.0]))
    >>> expected_norms(problem, 0.5, 0.5, 1, steps=1).tolist()  # one quarter or all of it
    [1.0, 0.625]
    """
    towards = 1 - (1 - rate * problem.curvature) ** steps
    first = np.square(problem.curvature * (problem.start - problem.centres.mean(0)))
    shrink = 1 - alpha * (2 * towards - towards**2)
    return np.asarray((first * shrink ** np.arange(rounds + 1)[:, None]).sum(1))


def rounds_to(norms: Numbers, target: float) -> npt.NDArray[np.int64]:
    """The first round at which each row is at or below the target; -1 if there is none.

    >>> rounds_to(np.array([[4.0, 2.0, 1.0], [4.0, 3.0, 3.0]]), 2.0).tolist()
    [1, -1]
    """
    there = norms <= target
    return np.where(there.any(1), there.argmax(1), -1)


SCALES: tuple[Callable[[float], float], ...] = (lambda alpha: alpha, lambda alpha: 1.0)
RULES = dict(zip(POWERS, SCALES, strict=True))  # client rate -> its factor on 1 / (K L)


def slowdown(problem: Problem, alphas: Sequence[float], seeds: int) -> list[dict[str, Any]]:
    """Rounds until the squared gradient norm falls to the target, by density of random masks; no noise."""
    rows = []
    for rule, scale in RULES.items():
        base = None
        for alpha in alphas:
            rate = scale(alpha) / (LOCAL_STEPS * problem.smoothness)
            longest = int(400 / (alpha * scale(alpha)))
            norms, _ = simulate(problem, bernoulli(alpha), rate, longest, seeds=seeds)
            expected = expected_norms(problem, alpha, rate, longest)
            needed = rounds_to(norms, TARGET * norms[0, 0])
            theory = int(rounds_to(expected[None], TARGET * norms[0, 0])[0])
            base = base or float(needed.mean())
            row = {"rate": rule, "alpha": alpha, "seeds": seeds, **_spread(needed), "closed_form": theory}
            rows.append(
                {**row, "times_slower": float(needed.mean()) / base, "1 / alpha": 1 / alpha, "1 / alpha^2": alpha**-2}
            )
    return rows


def _spread(needed: npt.NDArray[np.int64]) -> dict[str, float | None]:
    verdict = paired(needed.astype(float).tolist())
    low, high = verdict.interval or (None, None)
    return {"rounds": verdict.mean, "low": low, "high": high}


def exponent(alphas: Sequence[float], values: Sequence[float]) -> float:
    """The power of 1 / alpha that fits the values, by least squares on logarithms.

    >>> round(exponent([1.0, 0.5, 0.25], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    return float(np.polyfit(-np.log(alphas), np.log(values), 1)[0])


def noisy(problem: Problem, alphas: Sequence[float], lengths: Sequence[int], seeds: int) -> list[dict[str, Any]]:
    """Mean squared gradient norm over T rounds with noisy gradients at rates min(alpha, 1 / sqrt(T)) / (K L)."""
    rows = []
    for rounds in lengths:
        for alpha in alphas:
            rate = min(alpha, rounds**-0.5) / (LOCAL_STEPS * problem.smoothness)
            norms, _ = simulate(problem, bernoulli(alpha), rate, rounds, noise=1.0, seeds=seeds)
            mean = float(norms[:, :-1].mean())
            shape = 1 / (alpha * rounds**0.5) + 1 / (alpha**2 * rounds)
            rows.append(
                {"alpha": alpha, "T": rounds, "mean_squared_norm": mean, "reference": shape, "ratio": mean / shape}
            )
    return rows


def against_votes(seeds: int, taus: Sequence[float] = (0.0, 0.4, 1.0), rounds: int = 2000) -> list[dict[str, Any]]:
    """The paper's mask on such quadratics without noise, one per seed: whether it reaches the target, and how fast.

    If clients are evenly split on an entry, the mask is 0 and the entry does not move towards the mean.
    """
    rows = []
    for tau in taus:
        results = [_voted_run(make_problem(seed=seed), tau, rounds) for seed in range(seeds)]
        there = [result["rounds"] for result in results if result["rounds"] >= 0]
        means = {name: float(np.mean([result[name] for result in results])) for name in results[0] if name != "rounds"}
        reached = {"reached": f"{len(there)} of {seeds}", "rounds": float(np.mean(there)) if there else None}
        rows.append({"tau": tau, **reached, **means})
    return rows


def _voted_run(problem: Problem, tau: float, rounds: int) -> dict[str, float]:
    rate = 1 / (LOCAL_STEPS * problem.smoothness)
    norms, density = simulate(problem, voted(tau), rate, rounds)
    plain = expected_norms(problem, 1.0, rate, rounds)[None]
    return {
        "rounds": int(rounds_to(norms, TARGET * norms[0, 0])[0]),
        "rounds_without_mask": int(rounds_to(plain, TARGET * plain[0, 0])[0]),
        "last_norm / first": float(norms[0, -1] / norms[0, 0]),
        "alpha_hat": float(density.min()),
        "mean_mask": float(density.mean()),
    }


def analyse(request: AnalysisRequest) -> AnalysisResult:
    """E18: rounds by mask density on a quadratic, and the density of the masks of real runs."""
    from fedgma.paper.analyses import density

    alphas = (1.0, 0.5, 0.25) if request.quick else ALPHAS
    problem, seeds = make_problem(), max(4, 2 * request.seeds)
    slow = slowdown(problem, alphas, seeds)
    noise = noisy(problem, alphas, (256, 1024) if request.quick else (256, 1024, 4096), seeds)
    votes = against_votes(seeds)
    dense, curve = density.densities(request)
    figures = {"slowdown": draw_slowdown(slow, noise), "density": draw_density(curve)}
    tables = {"rounds_to_target": slow, "noisy_gradients": noise, "voted_masks": votes}
    tables |= {"density_of_real_masks": dense, "density_curve": curve}
    return AnalysisResult(tables, [*find(slow, noise, votes), *density.find(dense)], figures)


def find(slow: list[dict[str, Any]], noise: list[dict[str, Any]], votes: list[dict[str, Any]]) -> list[Finding]:
    """Findings: how rounds and gradient norms grow with sparser masks, and the final norm under the voted mask."""
    findings = [_slowdown(rule, [row for row in slow if row["rate"] == rule]) for rule in RULES]
    longest = max(row["T"] for row in noise)
    at_longest = [row for row in noise if row["T"] == longest]
    power = exponent([row["alpha"] for row in at_longest], [row["mean_squared_norm"] for row in at_longest])
    grown = f"Noisy gradients, T = {longest}: the mean squared gradient norm grows as (1 / alpha)^{power:.2f}."
    masked = next(row for row in votes if row["tau"] == 0.4)
    ends = (
        f"The voted mask at tau 0.4 brings {masked['reached']} quadratics to the target that the plain mean reaches "
        f"in {masked['rounds_without_mask']:.0f} rounds, and ends at {masked['last_norm / first']:.1e} of the first "
        f"squared norm (target {TARGET:g}): entries on which clients are evenly split stay where they are (alpha-hat "
        f"{masked['alpha_hat']:.3f})."
    )
    findings.append(Finding("noise", grown, estimate=power, n=len(at_longest)))
    findings.append(Finding("votes", ends, estimate=masked["last_norm / first"]))
    return findings


def _slowdown(rule: str, rows: list[dict[str, Any]]) -> Finding:
    """The power of 1 / alpha by which the rounds to the target grow, for one rule for the client rate."""
    power = exponent([row["alpha"] for row in rows], [row["rounds"] for row in rows])
    text = f"Client rate {rule}, no noise: rounds to the target grow as (1 / alpha)^{power:.2f}."
    verdict = ClaimVerdict.HOLDS if power > 0 else ClaimVerdict.CONTRADICTED
    return Finding(f"rounds/{slug(rule)}", text, verdict, power, n=rows[0]["seeds"])
