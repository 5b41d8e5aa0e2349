"""Figures of our numbers and the printed ones: differences with intervals, accuracy by setting, accuracy by tau."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedgma.reports.plots.style import BASE, COLOURS, INK, SIZE, WIDTH, colour_of, dress, name_axes, new_figure


class Difference(NamedTuple):
    """A row in a figure of differences; None is not drawn."""

    label: str
    mean: float | None
    low: float | None
    high: float | None
    printed: float | None


class Point(NamedTuple):
    """Accuracy at one value of a setting."""

    mean: float
    deviation: float | None
    printed: float | None


def draw_differences(rows: Sequence[Difference], title: str = "") -> Figure:
    """One row per cell: our mean difference with its interval, and the printed one as an open diamond."""
    longest = max(len(row.label) for row in rows)
    figure = Figure(figsize=(WIDTH + 0.6 + 0.07 * max(0, longest - 24), 0.9 + 0.2 * len(rows)), layout="constrained")
    axes = figure.subplots()
    dress(axes, "x")
    axes.set_title(title, fontsize=SIZE + 1.5, loc="left", color=INK)
    for y, row in enumerate(rows):
        if row.mean is not None:
            _interval(axes, row, y)
        if row.printed is not None:
            label = "printed" if y == next(i for i, r in enumerate(rows) if r.printed is not None) else None
            axes.plot(row.printed, y, "D", color=BASE, mfc="none", markersize=5, label=label)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(*_reach(rows))
    name_axes(axes, "masked minus plain averaging, points")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower right", ncols=2, fontsize=SIZE, frameon=False, labelcolor=INK)
    return figure


def _interval(axes: Axes, row: Difference, y: int) -> None:
    sure = row.low is not None and row.high is not None and not row.low <= 0 <= row.high
    colour = COLOURS[0]
    if row.low is not None and row.high is not None:
        axes.plot([row.low, row.high], [y, y], color=colour, linewidth=1.6, solid_capstyle="butt")
    axes.plot([row.mean or 0.0], [y], "o", color=colour, mfc=colour if sure else "none", markersize=5)


def _reach(rows: Sequence[Difference]) -> tuple[float, float]:
    """The limits of the axis, from means and printed numbers; wide intervals of few seeds may exceed them."""
    values = [abs(value) for row in rows for value in (row.mean, row.printed) if value is not None]
    ends = sorted(abs(value) for row in rows for value in (row.low, row.high) if value is not None)
    most = ends[int(0.9 * (len(ends) - 1))] if ends else 0.0
    reach = 1.15 * max([*values, min(most, 3 * max([1.0, *values])), 0.5])
    return -reach, reach


def draw_axis(arms: Mapping[str, Mapping[float, Point]], axis: str, title: str = "") -> Figure:
    """Accuracy of each arm by a setting, evenly spaced, with one deviation; printed numbers as open diamonds."""
    figure, (axes,) = new_figure(2.8, title)
    values = sorted({value for points in arms.values() for value in points})
    places = {value: index for index, value in enumerate(values)}
    for name, points in arms.items():
        colour, dash = colour_of(name, list(arms))
        x = [places[value] for value in sorted(points)]
        y = [points[value].mean for value in sorted(points)]
        spread = [points[value].deviation or 0.0 for value in sorted(points)]
        line = axes.errorbar(x, y, spread, color=colour, marker="o", markersize=4, capsize=2, linewidth=1.4, label=name)
        line[0].set_linestyle(dash)
        printed = [(places[value], point.printed) for value, point in points.items() if point.printed is not None]
        if printed:
            axes.plot(
                *zip(*sorted(printed), strict=True), "D:", color=colour, mfc="none", lw=0.8, label=f"{name}, printed"
            )
    axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    name_axes(axes, axis, "test accuracy, %")
    axes.legend(fontsize=SIZE - 0.5, frameon=False, labelcolor=INK, handlelength=2.2)
    return figure


def draw_steps(
    groups: Sequence[tuple[Sequence[float], Sequence[Point]]], plain: float | None, title: str = ""
) -> Figure:
    """Accuracy by threshold, a step function: thresholds that give the same mask share a step."""
    figure, (axes,) = new_figure(2.8, title)
    bounds = [0.0, *(group[-1] for group, _ in groups)]
    for index, (group, points) in enumerate(groups):
        level = sum(point.mean for point in points) / len(points)
        axes.plot([bounds[index], bounds[index + 1]], [level, level], color=COLOURS[0], linewidth=2.2, alpha=0.5)
        spread = [point.deviation or 0.0 for point in points]
        axes.errorbar(
            list(group),
            [p.mean for p in points],
            spread,
            fmt="o",
            color=COLOURS[0],
            markersize=4,
            capsize=2,
            linewidth=1,
        )
    if plain is not None:
        axes.axhline(plain, color=BASE, linestyle="--", linewidth=1.4, label="mean")
        figure.legend(loc="outside upper right", fontsize=SIZE, frameon=False, labelcolor=INK)
    axes.set_xticks([tau for group, _ in groups for tau in group])
    axes.tick_params(axis="x", labelsize=SIZE - 1)
    name_axes(axes, "tau", "test accuracy, %")
    return figure
