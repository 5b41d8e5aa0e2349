"""A figure of all differences between arms, one row each, with their 95 % CIs."""

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedgma.reports.plots.style import BASE, COLOURS, GRID, INK, SIZE, dress, name_axes

WIDTH = 7.0
LINEAR = 1.0  # points; beyond it the axis is logarithmic
TICKS = (-30, -10, -3, -1, 0, 1, 3, 10, 30)
GREY = "#8a929b"
LOOKS = {  # surety -> colour, whether the mark is filled, and what it means
    "decided": (COLOURS[0], True, "significant after the correction"),
    "open": (COLOURS[0], False, "not significant"),
    "preliminary": (GREY, False, "preliminary: few seeds, or not converged"),
}


class Row(NamedTuple):
    """A difference with its interval, the printed one, how sure it is, and whether the paper claims it."""

    label: str
    mean: float
    low: float
    high: float
    printed: float | None
    surety: str
    claimed: bool = True


def draw_forest(rows: Sequence[Row]) -> Figure:
    """The paper's claims above, our own below; the axis is linear up to a point and logarithmic beyond."""
    ordered = [row for row in rows if row.claimed] + [row for row in rows if not row.claimed]
    figure = Figure(figsize=(WIDTH, 1.2 + 0.17 * len(ordered)), layout="constrained")
    axes = figure.subplots()
    dress(axes, "x")
    axes.set_xscale("symlog", linthresh=LINEAR, linscale=1.0)
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlim(-60, 60)
    for y, row in enumerate(ordered):
        _draw_row(axes, row, y)
    first = sum(row.claimed for row in ordered)
    axes.axhline(first - 0.5, color=GRID, linewidth=1.2)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(ordered)), [row.label for row in ordered], fontsize=SIZE - 2)
    axes.set_ylim(len(ordered) - 0.4, -0.6)
    name_axes(axes, "difference of the arms, points (linear up to 1, then logarithmic)")
    _key(figure, axes)
    return figure


def _draw_row(axes: Axes, row: Row, y: int) -> None:
    colour, filled, _ = LOOKS[row.surety]
    axes.plot([row.low, row.high], [y, y], color=colour, linewidth=1.3, solid_capstyle="butt")
    axes.plot([row.mean], [y], "o", color=colour, mfc=colour if filled else "white", markersize=4)
    if row.printed is not None:
        axes.plot([row.printed], [y], "D", color=BASE, mfc="none", markersize=4)


def _key(figure: Figure, axes: Axes) -> None:
    for colour, filled, meaning in LOOKS.values():
        axes.plot([], [], "o", color=colour, mfc=colour if filled else "white", markersize=4, label=meaning)
    axes.plot([], [], "D", color=BASE, mfc="none", markersize=4, linestyle="", label="printed")
    figure.legend(loc="outside lower right", ncols=2, fontsize=SIZE - 1, frameon=False, labelcolor=INK)
