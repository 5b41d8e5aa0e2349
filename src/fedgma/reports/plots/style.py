"""The common style of all figures: narrow enough for a phone, colour-blind safe, legible on white and on black."""

import io
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedgma.reports.colours import BASE as BASE  # for the drawers, which take their style from here
from fedgma.reports.colours import COLOURS as COLOURS
from fedgma.reports.colours import is_plain as is_plain
from fedgma.reports.colours import place_of
from fedgma.reports.plots.tips import tips

WIDTH = 4.4  # inches: nearly full size on a phone, two side by side on a desktop
INK = "#1d2329"  # text and axes; an HTML page replaces it by its text colour
GRID = "#d9dee4"  # grid lines; an HTML page replaces it too
DASHES = ("-", "-.", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), ":", "-")
SEQUENCE = "viridis"
SIZE = 8.5  # points


def colour_of(name: str, names: Sequence[str]) -> tuple[str, object]:
    """Colour and dash of an arm among `names`; the plain mean always has the same.

    >>> colour_of("mean", ["GMA", "mean"]), colour_of("GMA", ["GMA", "mean"])
    (('#d07c00', '--'), ('#2b83c6', '-'))
    """
    place = place_of(name, names)
    return (BASE, "--") if place is None else (COLOURS[place], DASHES[place])


def new_figure(height: float, title: str, ratios: Sequence[float] = (1,)) -> tuple[Figure, list[Axes]]:
    """A figure with stacked panels that share their horizontal axis."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    grid = {"height_ratios": list(ratios)}
    panels = list(figure.subplots(len(ratios), sharex=True, squeeze=False, gridspec_kw=grid)[:, 0])
    for panel in panels:
        dress(panel)
    panels[0].set_title(title, fontsize=SIZE + 1.5, loc="left", color=INK)
    return figure, panels


def dress(axes: Axes, grid: Literal["both", "x", "y"] = "both") -> None:
    """Light grid, two spines, small labels."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[:].set_color(INK)
    axes.spines[:].set_linewidth(0.6)
    axes.tick_params(labelsize=SIZE, colors=INK, width=0.6, length=3)
    axes.grid(visible=True, axis=grid, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def name_axes(axes: Axes, x: str = "", y: str = "") -> None:
    """Axis labels in the common size."""
    axes.set_xlabel(x, fontsize=SIZE, color=INK)
    axes.set_ylabel(y, fontsize=SIZE, color=INK)


def key(axes: Axes, columns: int, place: Literal["lower right", "upper right", "best"]) -> None:
    """A legend without a box."""
    axes.legend(fontsize=SIZE, ncols=columns, frameon=False, loc=place, labelcolor=INK, handlelength=2.2)


def plain_text() -> AbstractContextManager[None]:
    """A context in which a dollar sign, as in a class or layer name, does not start a formula."""
    return mpl.rc_context({"text.parse_math": False})


def svg(figure: Figure, name: str) -> str:
    """A figure as an `<svg>` element with the page's text colour, unique ids, no date, and words under the pointer."""
    out = io.StringIO()
    with plain_text(), mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace("</svg>", f"{tips(figure)}</svg>")
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = text.replace(INK, "currentColor").replace(GRID, "var(--line)")
    # the page sets the width; the view box keeps the aspect ratio
    return re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1
    )


def save(figure: Figure, path: Path) -> Path:
    """Save a figure as PNG or SVG, by the suffix of the path."""
    with plain_text(), mpl.rc_context({"svg.hashsalt": path.stem}):
        plain = {"metadata": {"Date": None}} if path.suffix == ".svg" else {"dpi": 160}
        figure.savefig(path, **plain)
    return path
