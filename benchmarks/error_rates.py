"""Error rates of the verdicts, by simulation: how often a verdict is wrong where there is nothing to find.

    python benchmarks/error_rates.py [--count 6000] [--workers 2] [--seed 0]

A page has 12 claims, each over 8 cells. Differences are normal; the cells of a claim share half of their variance
through the seed. In the second half of the table one run in ten of one arm diverges and ends 70 points below, which is
part of the true difference. For 2 to 12 seeds the table gives, in percent:

    cells      a claim is wrong if cells are taken as independent (8 x seeds values)
    claim      a claim is wrong by its seeds' means, 5 % without correction
    page       at least one of the 12 claims of a page is wrong, without correction
    verdict    at least one of them is wrong with a verdict: corrected by Holm's method, at least four seeds
    coverage   the 95 % CI of a single cell holds the truth
    power      a difference of one standard deviation of the seeds' means gets a verdict, as one of 12 claims

Wrong means that the truth is called impossible. It prints the table as Markdown and exits 1 if, without divergence, a
page has a wrong verdict in more than 6 % of cases.
The table of docs/statistics.md was made by this script with its default options.
"""

import argparse
import math
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from scipy import stats

from fedgma.statistics.verdicts import correct, from_interval

CLAIMS, CELLS, SHARED = 12, 8, 0.5
DIVERGE, FALL = 0.1, 70.0
SEEDS = (2, 3, 4, 5, 6, 8, 10, 12)
COLUMNS = ("cells", "claim", "page", "verdict", "coverage", "power")


def draw(rng, pages, seeds, diverging):
    """Differences [page, claim, cell, seed] from the truth; cells of a claim share half of their variance."""
    shape = (pages, CLAIMS, CELLS, seeds)
    values = math.sqrt(SHARED) * rng.standard_normal((pages, CLAIMS, 1, seeds))
    values = values + math.sqrt(1 - SHARED) * rng.standard_normal(shape)
    if diverging:
        values = values + FALL * (DIVERGE - (rng.random(shape) < DIVERGE))
    return values


def p_values(values):
    """Two-sided p of the t test along the last axis, and the half-width of the 95 % CI."""
    count = values.shape[-1]
    mean, error = values.mean(-1), values.std(-1, ddof=1) / math.sqrt(count)
    return 2 * stats.t.sf(abs(mean) / error, count - 1), stats.t.isf(0.025, count - 1) * error


def has_verdict(means, halves, seeds):
    """Whether each claim of a page has a verdict, by the library's own correction."""
    made = [from_interval(float(m), (float(m - h), float(m + h)), seeds) for m, h in zip(means, halves, strict=True)]
    return [verdict.significant for verdict in correct(made)]


def simulate(job):
    """One row of the table."""
    seeds, diverging, pages, seed = job
    rng = np.random.default_rng([seed, seeds, diverging])
    values = draw(rng, pages, seeds, diverging)
    by_seed = values.mean(2)
    p, half = p_values(by_seed)
    independent, _ = p_values(values.reshape(pages, CLAIMS, -1))
    some = min(pages, 2000)  # pages on which the library's own functions decide
    means = by_seed.mean(-1)
    verdicts = [has_verdict(means[page], half[page], seeds) for page in range(some)]
    size = math.sqrt(SHARED + (1 - SHARED) / CELLS)
    lifted = by_seed[:some, 0] + size
    _, lifted_half = p_values(lifted)
    with_one = [
        has_verdict([lifted[page].mean(), *means[page, 1:]], [lifted_half[page], *half[page, 1:]], seeds)[0]
        for page in range(some)
    ]
    shares = {
        "cells": (independent < 0.05).mean(),
        "claim": (p < 0.05).mean(),
        "page": (p < 0.05).any(1).mean(),
        "verdict": np.mean([any(page) for page in verdicts]),
        "coverage": (abs(values[:, 0, 0].mean(-1)) <= p_values(values[:, 0, 0])[1]).mean(),
        "power": np.mean(with_one),
    }
    return seeds, diverging, {name: 100 * float(value) for name, value in shares.items()}


def main():
    """Simulate, print the table, and judge it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=6_000, help="pages for each row")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jobs = [(seeds, diverging, options.count, options.seed) for diverging in (False, True) for seeds in SEEDS]
    rows = []
    with ProcessPoolExecutor(options.workers) as pool:
        for done in pool.map(simulate, jobs):
            rows.append(done)
            print(f"{len(rows)} of {len(jobs)} rows", file=sys.stderr)
    print(f"| runs | seeds | {' | '.join(COLUMNS)} |\n| --- | ---: |{' ---: |' * len(COLUMNS)}")
    for seeds, diverging, shares in rows:
        words = "one in ten diverges" if diverging else "none diverges"
        print(f"| {words} | {seeds} | {' | '.join(f'{shares[name]:.1f}' for name in COLUMNS)} |")
    worst = max(shares["verdict"] for _, diverging, shares in rows if not diverging)
    print(f"\npages with a wrong verdict, where no run diverges: at most {worst:.1f} %")
    return worst > 6


if __name__ == "__main__":
    sys.exit(main())
