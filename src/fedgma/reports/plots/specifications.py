"""A specification curve: the differences of two arms over all settings, sorted, and the settings below as a matrix."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedgma.reports.plots.style import BASE, COLOURS, GRID, INK, SIZE, dress, name_axes
from fedgma.statistics.labels import short, sortable
from fedgma.statistics.verdicts import Verdict

WIDTH = 7.2  # inches: a page shows it over two columns
GREY = "#8a929b"
MOST_CHOICES = 40  # rows of the matrix
FAR = 20  # times the median size of a difference
ROW = 0.155  # inches of a row


class Specification(NamedTuple):
    """One setting: its choices by name, and the verdict on how far the first arm is ahead."""

    choices: Mapping[str, str]
    verdict: Verdict


def draw_specifications(cells: Sequence[Specification]) -> Figure:
    """Differences with 95 % CIs, from the most negative to the most positive, above a matrix of the choices."""
    ordered = sorted(cells, key=lambda cell: cell.verdict.mean)
    rows = shown_choices(ordered)
    heights = (2.3, max(ROW * len(rows), 0.3))
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.9), layout="constrained")
    above, below = figure.subplots(2, sharex=True, gridspec_kw={"height_ratios": heights})
    _draw_curve(above, [cell.verdict for cell in ordered])
    _draw_matrix(below, ordered, rows)
    first, second = ordered[0].verdict.names
    name_axes(above, "", f"{first} ahead of\n{second}, {ordered[0].verdict.score.apart}")
    name_axes(below, f"{len(ordered)} settings, sorted by the difference")
    figure.legend(loc="outside lower right", ncols=3, fontsize=SIZE - 1, frameon=False, labelcolor=INK)
    return figure


def shown_choices(cells: Sequence[Specification]) -> list[tuple[str, str]]:
    """The rows of the matrix, (name, value); a name with too many values for the figure is left out.

    >>> from fedgma.statistics.verdicts import paired
    >>> cells = [Specification({"tau": tau}, paired([0.0])) for tau in ("0.4", "0.2")]
    >>> shown_choices(cells)
    [('tau', '0.2'), ('tau', '0.4')]
    """
    values = {name: sorted({cell.choices[name] for cell in cells}, key=sortable) for name in cells[0].choices}
    fewest = sorted(values, key=lambda name: len(values[name]))
    kept: list[str] = []
    for name in fewest:
        if sum(len(values[other]) for other in (*kept, name)) <= MOST_CHOICES:
            kept.append(name)
    return [(name, value) for name in values if name in kept for value in values[name]]


def _draw_curve(axes: Axes, verdicts: Sequence[Verdict]) -> None:
    dress(axes, "y")
    axes.tick_params(axis="x", length=0)
    size = 5 if len(verdicts) <= 60 else 3
    looks = {
        "first ahead": (COLOURS[0], f"{verdicts[0].names[0]} ahead"),
        "second ahead": (BASE, f"{verdicts[0].names[1]} ahead"),
        "open": (GREY, "not significant, or few seeds"),
    }
    outcomes = [verdict.outcome if verdict.significant else "open" for verdict in verdicts]
    for outcome, (colour, label) in looks.items():
        columns = [column for column, each in enumerate(outcomes) if each == outcome]
        if columns:
            axes.plot(columns, [verdicts[p].mean for p in columns], "o", color=colour, markersize=size, label=label)
        for column in columns:
            if (interval := verdicts[column].interval) is not None:
                axes.plot([column, column], interval, color=colour, linewidth=1.2 if size == 5 else 0.7, alpha=0.7)
    axes.axhline(0, color=INK, linewidth=0.8)
    _keep_in_sight(axes, [verdict.mean for verdict in verdicts])
    _bend(axes, [abs(verdict.mean) for verdict in verdicts])


def _bend(axes: Axes, sizes: Sequence[float]) -> None:
    """A logarithmic axis beyond a point, in both directions, where a few settings are far away from most."""
    usual = float(np.median(sizes))
    if usual > 0 and max(sizes) > FAR * usual:
        axes.set_yscale("symlog", linthresh=1.0)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _keep_in_sight(axes: Axes, means: Sequence[float]) -> None:
    """Fit the axis to the differences: intervals of two or three seeds are too wide to show in full."""
    low, high = min(0.0, *means), max(0.0, *means)
    margin = 0.5 * (high - low) or 0.5
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom, low - margin), min(top, high + margin))


def _draw_matrix(axes: Axes, cells: Sequence[Specification], rows: Sequence[tuple[str, str]]) -> None:
    """A mark where a setting has a choice; lines between the names."""
    dress(axes)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    chosen = np.array([[cell.choices[name] == value for cell in cells] for name, value in rows]).reshape(len(rows), -1)
    row_of_mark, column = np.nonzero(chosen)
    axes.plot(column, row_of_mark, "|", color=INK, markersize=6, markeredgewidth=min(3.0, 220 / len(cells)))
    labels = []
    for row, (name, value) in enumerate(rows):
        new = row == 0 or rows[row - 1][0] != name
        labels.append(f"{short(name)}  {value or 'none'}" if new else value or "none")
        if new and row:
            axes.axhline(row - 0.5, color=GRID, linewidth=0.8)
    axes.set_yticks(range(len(rows)), labels, fontsize=SIZE - 1.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks([])
    axes.set_xlim(-0.7, len(cells) - 0.3)
