"""Our numbers beside printed ones: differences with their intervals, accuracy along a setting, thresholds as steps."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedgma.reports.plots.style import BASE, COLOURS, INK, SIZE, WIDTH, colour_of, dress, name_axes, new_figure


class Difference(NamedTuple):
    """A row of a picture of differences; what is None is not drawn."""

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
    """One line a cell: our mean difference with its interval, and the printed one as an open diamond."""
    longest = max(len(row.label) for row in rows)
    figure = Figure(figsize=(WIDTH + 0.6 + 0.07 * max(0, longest - 24), 0.9 + 0.2 * len(rows)), layout="constrained")
    axes = figure.subplots()
    dress(axes, "x")
    axes.set_title(title, fontsize=SIZE + 1.5, loc="left", color=INK)
    for place, row in enumerate(rows):
        if row.mean is not None:
            _interval(axes, row, place)
        if row.printed is not None:
            label = "printed" if place == next(i for i, r in enumerate(rows) if r.printed is not None) else None
            axes.plot(row.printed, place, "D", color=BASE, mfc="none", markersize=5, label=label)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(*_reach(rows))
    name_axes(axes, "masked minus plain averaging, points")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower right", ncols=2, fontsize=SIZE, frameon=False, labelcolor=INK)
    return figure


def _interval(axes: Axes, row: Difference, place: int) -> None:
    sure = row.low is not None and row.high is not None and not row.low <= 0 <= row.high
    colour = COLOURS[0]
    if row.low is not None and row.high is not None:
        axes.plot([row.low, row.high], [place, place], color=colour, linewidth=1.6, solid_capstyle="butt")
    axes.plot([row.mean or 0.0], [place], "o", color=colour, mfc=colour if sure else "none", markersize=5)


def _reach(rows: Sequence[Difference]) -> tuple[float, float]:
    """The view follows means and printed numbers; intervals of few seeds may reach out of it."""
    seen = [abs(value) for row in rows for value in (row.mean, row.printed) if value is not None]
    ends = sorted(abs(value) for row in rows for value in (row.low, row.high) if value is not None)
    most = ends[int(0.9 * (len(ends) - 1))] if ends else 0.0
    reach = 1.15 * max([*seen, min(most, 3 * max([1.0, *seen])), 0.5])
    return -reach, reach


def draw_axis(arms: Mapping[str, Mapping[float, Point]], axis: str, title: str = "") -> Figure:
    """Accuracy of each arm along a setting, evenly spaced, with one deviation; the printed numbers as open diamonds."""
    figure, (axes,) = new_figure(2.8, title)
    values = sorted({value for points in arms.values() for value in points})
    places = {value: place for place, value in enumerate(values)}
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
    """Accuracy by threshold as the step function it is: thresholds that give one mask stand on one step."""
    figure, (axes,) = new_figure(2.8, title)
    bounds = [0.0, *(group[-1] for group, _ in groups)]
    for place, (group, points) in enumerate(groups):
        level = sum(point.mean for point in points) / len(points)
        axes.plot([bounds[place], bounds[place + 1]], [level, level], color=COLOURS[0], linewidth=2.2, alpha=0.5)
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
