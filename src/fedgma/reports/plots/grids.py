"""Heat maps of learning rates, and the spread of scores over clients."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fedgma.reports.plots.style import INK, SEQUENCE, SIZE, WIDTH, colour_of, dress, name_axes, new_figure
from fedgma.statistics.labels import CLIENTS
from fedgma.statistics.metrics import ACCURACY, Metric

Grid = npt.NDArray[np.float64]
MARKS = {"worst_decile": "v", "mean": "o", "participating": "s", "non_participating": "D"}


def draw_rates(
    grids: Mapping[str, Grid],
    server: Sequence[float],
    client: Sequence[float],
    title: str = "",
    metric: Metric = ACCURACY,
) -> Figure:
    """Scores [client rate, server rate] of each arm on one colour scale, with the best pair of each arm framed."""
    height = 0.75 + len(grids) * (0.55 + 0.3 * len(client))
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    figure.suptitle(title, fontsize=SIZE + 1.5, x=0.01, ha="left", color=INK)
    low = min(float(np.nanmin(grid)) for grid in grids.values())
    high = max(float(np.nanmax(grid)) for grid in grids.values())
    panels = figure.subplots(len(grids), squeeze=False)[:, 0]
    for axes, (name, grid) in zip(panels, grids.items(), strict=True):
        dress(axes)
        axes.grid(visible=False)
        axes.imshow(grid, aspect="auto", cmap=SEQUENCE, vmin=low, vmax=max(high, low + 1e-9), origin="lower")
        for (row, column), value in np.ndenumerate(grid):
            light = (value - low) / max(high - low, 1e-9) > 0.5
            label = "-" if np.isnan(value) else f"{value:.1f}" if metric.share else f"{value:.3g}"
            tone = INK if np.isnan(value) else "#000000" if light else "#ffffff"
            axes.text(column, row, label, ha="center", va="center", fontsize=SIZE, color=tone)
        row, column = np.unravel_index(int(np.nanargmax(metric.sign * grid)), grid.shape)
        frame = ((column - 0.46, row - 0.42), 0.92, 0.84)
        axes.add_patch(_frame(*frame))
        axes.set_xticks(range(len(server)), [f"{rate:g}" for rate in server])
        axes.set_yticks(range(len(client)), [f"{rate:g}" for rate in client])
        axes.set_title(name, fontsize=SIZE, loc="left", color=INK)
        name_axes(axes, "server learning rate" if axes is panels[-1] else "", "client rate")
    return figure


def draw_fairness(
    arms: Mapping[str, Mapping[str, Sequence[float]]], title: str = "", metric: Metric = ACCURACY
) -> Figure:
    """Scores of the worst tenth of clients, of all, of sampled and of other clients: a row per arm."""
    figure, (axes,) = new_figure(1.35 + 0.42 * len(arms), title)
    for row, (name, figures) in enumerate(arms.items()):
        colour, _ = colour_of(name, list(arms))
        means = {what: float(np.mean(values)) for what, values in figures.items()}
        axes.plot([min(means.values()), max(means.values())], [row, row], color=colour, linewidth=2.5, alpha=0.35)
        for what, mark in MARKS.items():
            if what in figures:
                seeds = figures[what]
                axes.plot(seeds, [row + 0.2] * len(seeds), ".", color=colour, markersize=3, alpha=0.7)
                label = CLIENTS[what] if row == 0 else None
                axes.plot(means[what], row, mark, color=colour, mec=INK, mew=0.5, markersize=7, label=label)
    axes.set_yticks(range(len(arms)), list(arms))
    axes.set_ylim(len(arms) - 0.5, -0.6)
    axes.grid(visible=False, axis="y")
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower left",
        ncols=2,
        fontsize=SIZE,
        frameon=False,
        labelcolor=INK,
    )
    name_axes(axes, f"{metric.words} of clients" + (f", {metric.unit}" if metric.unit else ""))
    return figure


def _frame(corner: tuple[float, float], width: float, height: float) -> Rectangle:
    return Rectangle(corner, width, height, fill=False, edgecolor="#d43d2a", linewidth=2)
