"""Scores by round: the mean over seeds with a band, and below it the paired difference with its interval."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedgma.reports.plots.style import GRID, INK, SIZE, colour_of, is_plain, key, name_axes, new_figure
from fedgma.statistics.metrics import ACCURACY, Metric
from fedgma.statistics.verdicts import paired

Seeds = Mapping[int, Mapping[int, float]]  # seed -> round -> share
DOTS = 30  # evaluations; a curve with more has no dots
BANDS = 3  # arms; with more, the bands would hide each other
Curve = npt.NDArray[np.float64]
Course = Sequence[tuple[float, float]]  # simulated seconds and share
MOMENTS = 200  # at which curves against time are drawn
UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


def draw_accuracy(arms: Mapping[str, Seeds], title: str = "", split: str = "test", metric: Metric = ACCURACY) -> Figure:
    """One line per arm, with a band of one deviation if arms are few; below, by how much each is ahead of the mean."""
    base = next((name for name in arms if is_plain(name)), None)
    others = [name for name in arms if base is not None and name != base and _shared(arms[name], arms[base])]
    figure, panels = new_figure(3.5 if others else 2.6, title, (2.4, 1) if others else (1,))
    for name, seeds in arms.items():
        _line(panels[0], name, seeds, colour_of(name, list(arms)), metric, band=len(arms) <= BANDS)
    name_axes(panels[0], "" if others else "round", f"{split} {metric.label}")
    for name in others:
        look = colour_of(name, list(arms))
        _difference(panels[1], arms[name], arms[base or ""], look, metric, band=len(others) < BANDS)
    if others:
        panels[1].axhline(0, color=INK, linewidth=0.8)
        name_axes(panels[1], "round", f"ahead of mean,\n{metric.apart}")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(arms) <= BANDS:
        key(panels[0], 1, "lower right" if metric.better == "higher" else "upper right")
    else:
        legend: dict[str, Any] = {"loc": "outside lower center", "ncols": 2, "frameon": False, "labelcolor": INK}
        figure.legend(*panels[0].get_legend_handles_labels(), fontsize=SIZE, **legend)
        figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(arms) // 2))
    return figure


def draw_over_time(arms: Mapping[str, Sequence[Course]], metric: Metric = ACCURACY) -> Figure:
    """One line per arm against simulated time: at every moment the last evaluation before it, mean over seeds."""
    figure, (axes,) = new_figure(2.6, "", (1,))
    unit, seconds = next((unit for unit in UNITS if _latest(arms) >= 2 * unit[1]), UNITS[-1])
    for name, seeds in arms.items():
        moments, values = _held(seeds, metric.factor)
        look = colour_of(name, list(arms))
        axes.plot(moments / seconds, values.mean(axis=0), color=look[0], linestyle=look[1], lw=1.6, label=name)
    name_axes(axes, f"simulated time, {unit}", f"test {metric.label}")
    key(axes, 1, "lower right" if metric.better == "higher" else "upper right")
    return figure


def _latest(arms: Mapping[str, Sequence[Course]]) -> float:
    return max(time for seeds in arms.values() for course in seeds for time, _ in course)


def _held(seeds: Sequence[Course], factor: float) -> tuple[Curve, Curve]:
    """Moments that all seeds cover, and the last score of each before them, [seed, moment]."""
    first = max(min(time for time, _ in course) for course in seeds)
    last = max(first, min(max(time for time, _ in course) for course in seeds))
    moments = np.linspace(first, last, MOMENTS)
    rows = []
    for course in seeds:
        known, scores = np.array(sorted(course)).T
        rows.append(factor * scores[np.searchsorted(known, moments, side="right") - 1])
    return moments, np.array(rows)


def _line(axes: Axes, name: str, seeds: Seeds, look: tuple[str, Any], metric: Metric, *, band: bool) -> None:
    rounds, values = stacked(list(seeds.values()), metric.factor)
    middle = values.mean(axis=0)
    marker = "o" if len(rounds) <= DOTS else ""
    axes.plot(rounds, middle, color=look[0], linestyle=look[1], lw=1.6, label=name, marker=marker, markersize=3)
    if band and len(values) > 1:
        spread = values.std(axis=0, ddof=1)
        axes.fill_between(rounds, middle - spread, middle + spread, color=look[0], alpha=0.16, linewidth=0)


def stacked(seeds: Sequence[Mapping[int, float]], factor: float = 100.0) -> tuple[npt.NDArray[np.int64], Curve]:
    """The rounds that were measured for all seeds, and the percentages [seed, round]; or another multiple.

    >>> stacked([{1: 0.5, 2: 0.6}, {2: 0.8}])[1].tolist()
    [[60.0], [80.0]]
    """
    rounds = sorted(set.intersection(*(set(seed) for seed in seeds)))
    return np.array(rounds, np.int64), factor * np.array([[seed[round] for round in rounds] for seed in seeds], float)


def _shared(arm: Seeds, base: Seeds) -> list[int]:
    return sorted(set(arm) & set(base))


def _difference(axes: Axes, arm: Seeds, base: Seeds, look: tuple[str, Any], metric: Metric, *, band: bool) -> None:
    seeds = _shared(arm, base)
    rounds, values = stacked([side[seed] for side in (arm, base) for seed in seeds], metric.sign * metric.factor)
    apart = values[: len(seeds)] - values[len(seeds) :]
    axes.plot(rounds, apart.mean(axis=0), color=look[0], linestyle=look[1], linewidth=1.3)
    if band and len(seeds) > 1 and len(rounds):
        verdicts = [paired(column.tolist()) for column in apart.T]
        low, high = [v.low for v in verdicts], [v.high for v in verdicts]
        axes.fill_between(rounds, low, high, color=look[0], alpha=0.2, linewidth=0)
        _keep_in_sight(axes, apart, least=0.5 if metric.share else 1e-9)


def _keep_in_sight(axes: Axes, apart: Curve, *, least: float) -> None:
    """Fit the axis to the seeds: intervals of two or three seeds are too wide to show in full."""
    reach = max(least, 1.8 * float(np.abs(apart).max()))
    low, high = axes.get_ylim() if axes.get_autoscaley_on() is False else (-reach, reach)
    axes.set_ylim(min(low, -reach), max(high, reach))
    axes.grid(visible=True, color=GRID, linewidth=0.6)
