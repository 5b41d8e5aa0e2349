"""Rounds and simulated time until runs reach a score.

A run reaches a target in the first evaluated round whose score is at least as good. Over seeds the median counts, in
which a run that never got there is later than any other; where half of the seeds or more did not, there is no number.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from fedgma.records.reader import Run, curve, number
from fedgma.statistics.arms import Row
from fedgma.statistics.metrics import Metric, course


class Reached(NamedTuple):
    """How the runs of an arm got to a target: medians over seeds, None where too few did."""

    rounds: float | None
    seconds: float | None  # of simulated time; None for runs without a clock too
    runs: int  # that got there
    of: int


def first_round(scores: Mapping[int, float], target: float, metric: Metric) -> int | None:
    """The first round with a score, in the unit that is shown, that is at least as good as the target.

    >>> first_round({10: 0.5, 20: 0.7, 30: 0.6}, 60, Metric())
    20
    """
    good = [round for round, score in scores.items() if metric.sign * (metric.factor * score - target) >= 0]
    return min(good, default=None)


def times(run: Run) -> dict[int, float]:
    """Round -> simulated seconds from the start to its end; empty for a run without a clock."""
    return curve(run, "clock", "time")


def reach(row: Row, target: float, split: str = "test") -> Reached:
    """When the runs of an arm reach a target."""
    firsts = [first_round(course(run, split, row.metric), target, row.metric) for run in row.runs]
    clocks = [times(run) for run in row.runs]
    seconds = [
        math.inf if first is None else clock.get(first, math.nan) for first, clock in zip(firsts, clocks, strict=True)
    ]
    rounds = [math.inf if first is None else first for first in firsts]
    there = sum(first is not None for first in firsts)
    return Reached(_median(rounds), _median(seconds) if all(clocks) else None, there, len(row.runs))


def _median(values: Sequence[float]) -> float | None:
    middle = median(values)
    return middle if math.isfinite(middle) else None


def usual_target(rows: Sequence[Row]) -> float | None:
    """The worst `last10` of these arms, which all of them come near; None if nothing was evaluated."""
    levels = [row.scores["last10"].mean for row in rows if row.scores]
    if not levels:
        return None
    return min(levels) if rows[0].metric.better == "higher" else max(levels)


def lost_share(run: Run) -> float | None:
    """The share of the clients that were asked and whose updates came too late or never; None without a clock."""
    asked, lost = (sum(curve(run, "clock", name).values()) for name in ("asked", "lost"))
    return lost / asked if asked else None


def mean_staleness(run: Run) -> float | None:
    """The mean age of the updates, in versions of the model; None without a clock."""
    if not times(run):
        return None
    ages = [number(record, "clock", "staleness") or 0.0 for record in run.rounds]
    return math.fsum(ages) / len(ages)
