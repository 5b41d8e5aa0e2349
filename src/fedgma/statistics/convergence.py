"""Whether runs have converged, and which diverged.

A run still rises by what the mean accuracy of the last quarter of its rounds is above that of the quarter before. A
setting has converged if it has at least 40 rounds, so that the last ten lie in the last quarter, and neither of its
arms rises by more than one point on average over seeds. A run has diverged if its last ten rounds and its last
evaluation are below half of its own best evaluation, or its last ten rounds are below half of the median over the runs
of its setting. A run of few rounds that still rises steeply has last ten rounds far below its last one.

A metric that is not a share has no points: there, an arm has converged if it still improves by at most a hundredth of
the range that the evaluations of the setting span. Where lower is better, "below half" is above twice. Scores below
zero have no half. The best of many evaluations of an error near zero is near zero by chance; so a run has fallen from
its best only if it also lost half of the range of its evaluations, which follows where higher is better and no score is
negative. A run whose last scores are not finite has diverged, whatever the others do; so has one whose last test loss
is not finite, or of whose last ten rounds none counted a client: its accuracy is that of a guess, and does not fall.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from fedgma.records.reader import Run
from fedgma.statistics.arms import WINDOW, Summary
from fedgma.statistics.metrics import ACCURACY, LOSS, Metric, is_lost, lacks

LEAST_ROUNDS = 4 * WINDOW
FLAT = 1.0  # points
HUNDREDTH = 0.01  # of the range that a metric spans
GRID = 20  # places in a quarter, at which a curve is read


class Convergence(NamedTuple):
    """How far the runs of a setting got: rounds, by how much each arm still rises, how many runs of each diverged."""

    rounds: int
    rises: tuple[float | None, ...]  # points, by arm; None: too few evaluations to tell
    diverged: tuple[int, ...]  # runs, by arm
    of: int  # runs in all
    flat: float = FLAT  # the most by which a converged arm still rises
    unit: str = "points"

    @property
    def converged(self) -> bool:
        """Whether no arm still rises."""
        return self.rounds >= LEAST_ROUNDS and all(rise is not None and rise <= self.flat for rise in self.rises)

    @property
    def text(self) -> str:
        """Why it has not converged, and what diverged; empty if there is nothing to say."""
        return "; ".join(part for part in (self._still, self._lost) if part)

    @property
    def _still(self) -> str:
        if self.converged:
            return ""
        if self.rounds < LEAST_ROUNDS:
            return f"not converged: {self.rounds} rounds, fewer than {LEAST_ROUNDS}"
        if None in self.rises:
            return "not known to have converged: too few evaluations, or every run of an arm diverged"
        most = max(rise for rise in self.rises if rise is not None)
        still = f"rises by {most:.1f} points" if self.unit == "points" else f"improves by {most:.3g} {self.unit}"
        return f"not converged: still {still} over the last quarter of {self.rounds} rounds"

    @property
    def _lost(self) -> str:
        return f"{sum(self.diverged)} of {self.of} runs diverged" if any(self.diverged) else ""


def rise(scores: Mapping[int, float], metric: Metric = ACCURACY) -> float | None:
    """By how much the mean of the last quarter of the rounds is better than that of the quarter before, in points.

    Scores are those recorded, by round: shares for an accuracy.

    >>> round(rise({r: min(r, 60) / 100 for r in range(1, 101)}), 3), rise({100: 0.5})
    (2.0, None)
    """
    rounds = sorted(scores)
    last = rounds[-1]
    if not any(0.75 * last < r < last for r in rounds) or not any(0.5 * last <= r <= 0.75 * last for r in rounds):
        return None
    places = last * (0.5 + (np.arange(2 * GRID) + 0.5) / (4 * GRID))
    values = np.interp(places, rounds, [scores[r] for r in rounds])
    return float(metric.sign * metric.factor * (values[GRID:].mean() - values[:GRID].mean()))


def is_dead(run: Run, split: str = "test") -> bool:
    """Whether a run's last loss on a split was not finite, or its last ten rounds counted no client.

    >>> from pathlib import Path
    >>> lines = [{"round": 1, "test": {"loss": 2.0}, "counted": 5}, {"round": 2, "test": {"loss": None}, "counted": 5}]
    >>> is_dead(Run(Path(), {}, {}, tuple(lines), None)), is_dead(Run(Path(), {}, {}, tuple(lines[:1]), None))
    (True, False)
    """
    scores = next((record[split] for record in reversed(run.rounds) if split in record), None)
    late = [record.get("counted") for record in run.rounds[-WINDOW:]]
    return lacks(scores, LOSS.name) or (bool(late) and all(counted == 0 for counted in late))


def diverged(
    summaries: Sequence[Summary], metric: Metric = ACCURACY, ranges: Sequence[float] | None = None
) -> list[bool]:
    """Which runs of one setting, both arms together, diverged; `ranges` are those of each run's evaluations.

    >>> diverged([Summary(80, 78, 77), Summary(81, 79, 79), Summary(10, 10, 10), Summary(60, 25, 10)])
    [False, False, True, True]
    >>> diverged([Summary(38, 18, 38), Summary(36, 20, 35)])  # twelve rounds, still rising
    [False, False]
    >>> diverged([Summary(0.001, 0.04, 0.03)], Metric("bias", "lower", ""), [0.5])  # noise: its best is no level
    [False]
    """
    middle = median(summary.last10 for summary in summaries) if summaries else 0.0
    spans = [0.0] * len(summaries) if ranges is None else ranges
    return [
        _is_lost(run, metric) or _below_half(run.last10, middle, metric) or _has_fallen(run, span, metric)
        for run, span in zip(summaries, spans, strict=True)
    ]


def _is_lost(run: Summary, metric: Metric) -> bool:
    return not metric.share and (is_lost(run.last10) or is_lost(run.final))


def _below_half(score: float, level: float, metric: Metric) -> bool:
    """Whether a score is worse than half as good as a level above zero."""
    return level > 0 and (score < level / 2 if metric.better == "higher" else score > 2 * level)


def _has_fallen(run: Summary, span: float, metric: Metric) -> bool:
    """Whether the last ten rounds and the last evaluation are far from the best one."""
    late = metric.best([run.last10, run.final])
    return _below_half(late, run.best, metric) and metric.sign * (run.best - late) >= span / 2


def converge(
    arms: Sequence[Sequence[tuple[Summary, Mapping[int, float] | None]]],
    rounds: int,
    metric: Metric = ACCURACY,
    dead: Sequence[Sequence[bool]] | None = None,
) -> tuple[Convergence, list[list[bool]]]:
    """How far the arms of a setting got, and which of their runs diverged; a run is its summary and its curve.

    `dead` says which runs have diverged whatever their scores are, as `is_dead` does.
    """
    every = [run for runs in arms for run in runs]
    spans = [metric.factor * _range([curve] if curve else []) for _, curve in every]
    known = [False] * len(every) if dead is None else [flag for flags in dead for flag in flags]
    scored = diverged([summary for summary, _ in every], metric, spans)
    flags = (by_score or flag for by_score, flag in zip(scored, known, strict=True))
    lost = [[next(flags) for _ in runs] for runs in arms]
    rises = tuple(
        _mean([None if c is None else rise(c, metric) for (_, c), out in zip(runs, outs, strict=True) if not out])
        for runs, outs in zip(arms, lost, strict=True)
    )
    flat = FLAT if metric.share else HUNDREDTH * _range([curve for runs in arms for _, curve in runs if curve])
    return Convergence(rounds, rises, tuple(map(sum, lost)), sum(map(len, arms)), flat, metric.apart), lost


def _range(curves: Sequence[Mapping[int, float]]) -> float:
    """From the lowest to the highest evaluation, without those of diverged runs that were not finite."""
    values = [value for curve in curves for value in curve.values() if not is_lost(value)]
    return max(values) - min(values) if values else 0.0


def _mean(rises: Sequence[float | None]) -> float | None:
    """The mean over seeds; None without a run, or if one has no value."""
    known = [value for value in rises if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(rises) else None
