"""The figure of why a mask helps or costs: noise by layer, the mask by usefulness, classes by sampled holders."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedgma.paper.plots.analyses import logarithmic
from fedgma.reports.plots.style import BASE, COLOURS, DASHES, INK, SIZE, WIDTH, dress, name_axes

Rows = Sequence[Mapping[str, Any]]
NAMES = {"mean": "mean", "gma": "GMA", "magnitude": "magnitude agreement"}
LOOKS = {"mean": (BASE, "--"), "gma": (COLOURS[0], "-"), "magnitude": (COLOURS[1], "-.")}
FEW = 5  # cases; a mean over fewer is not drawn


def draw_usefulness(tables: Mapping[str, Rows]) -> Figure:
    """Three panels, means over seeds; the last two after the last round that was looked at."""
    figure = Figure(figsize=(WIDTH, 7.6), layout="constrained")
    panels = list(figure.subplots(3))
    for axes in panels:
        dress(axes)
    last = max(row["after"] for row in tables["noise"])
    _noise(panels[0], tables["noise"])
    _useful(panels[1], [row for row in tables["usefulness"] if row["after"] == last])
    _holders(panels[2], [row for row in tables["holders"] if row["after"] == last and row["sampling"] == "uniform"])
    return figure


def _noise(axes: Axes, rows: Rows) -> None:
    """Median signal to noise by layer and round; below the dotted line a sign mask lowers the error."""
    for index, layer in enumerate(layer for layer in dict.fromkeys(row["layer"] for row in rows) if layer != "all"):
        picked = [row for row in rows if row["layer"] == layer]
        points = sorted({row["after"] for row in picked})
        middle = [float(np.mean([row["snr_q50"] for row in picked if row["after"] == point])) for point in points]
        look: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "ls": DASHES[index % len(DASHES)]}
        axes.plot(points, middle, marker="o", markersize=3, lw=1.4, label=layer, **look)
    axes.axhline(0.95, color=INK, lw=0.9, ls=":")
    logarithmic(axes, "x", sorted({row["after"] for row in rows}))
    axes.set_ylim(bottom=0)
    axes.set_title("Signal to noise of a round's mean", fontsize=SIZE + 1.5, loc="left", color=INK)
    axes.legend(fontsize=SIZE - 1, ncols=3, frameon=False, labelcolor=INK, handlelength=2)
    name_axes(axes, "rounds of training before (dotted: a sign mask gains below)", "median |signal| / error")


def _useful(axes: Axes, rows: Rows) -> None:
    """What is left of the signal by size of the entry in the full federation's update, and the mean mask."""
    tenths = sorted({row["tenth"] for row in rows})
    for name, (colour, dash) in LOOKS.items():
        left = [float(np.mean([row[f"kept_{name}"] for row in rows if row["tenth"] == tenth])) for tenth in tenths]
        axes.plot(tenths, left, color=colour, ls=dash, marker="o", markersize=3, lw=1.5, label=NAMES[name])
    mask = [float(np.mean([row["mask"] for row in rows if row["tenth"] == tenth])) for tenth in tenths]
    axes.plot(tenths, mask, color=INK, ls=":", lw=1.2, label="mean mask of GMA")
    share = float(np.mean([row["share_%"] for row in rows if row["tenth"] == tenths[-1]]))
    axes.set_ylim(0, 1.25)
    axes.set_xticks(tenths)
    axes.set_title("What is left of the full federation's update", fontsize=SIZE + 1.5, loc="left", color=INK)
    axes.legend(fontsize=SIZE - 1, ncols=2, frameon=False, labelcolor=INK, handlelength=2, loc="lower right")
    name_axes(axes, f"tenth of the entries by size (the last holds {share:.0f} % of it)", "share kept")


def _holders(axes: Axes, rows: Rows) -> None:
    """How far a class's row of the output layer moves, by the number of its holders among the sampled clients."""
    numbers = [number for number in sorted({row["holders"] for row in rows}) if _cases(rows, number) >= FEW]
    for name, (colour, dash) in LOOKS.items():
        moved = [float(np.mean([row[name] for row in rows if row["holders"] == number])) for number in numbers]
        axes.plot(numbers, moved, color=colour, ls=dash, marker="o", markersize=3, lw=1.5, label=NAMES[name])
    axes.axhline(0, color=INK, lw=0.8)
    axes.set_xticks(numbers)
    axes.set_title("A class and its holders, output layer", fontsize=SIZE + 1.5, loc="left", color=INK)
    axes.legend(fontsize=SIZE - 1, frameon=False, labelcolor=INK, handlelength=2)
    name_axes(axes, "holders among 10 sampled clients", "step, in holders' own")


def _cases(rows: Rows, number: int) -> int:
    return int(sum(row["cases"] for row in rows if row["holders"] == number))
