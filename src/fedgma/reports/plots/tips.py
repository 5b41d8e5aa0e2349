"""What a figure says where the pointer rests on it: an invisible shape with a title over each point, bar and cell."""

import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import QuadMesh
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

MOST = 60  # points of a line; of more, some are left out
MOST_CELLS = 600  # of a heat map; a larger one has none
RADIUS = 4.5  # points
NEAR = 0.3  # of a place with a name; dots beside it belong to it
COLOUR_BAR = "<colorbar>"  # what matplotlib calls the axes of one

Names = Mapping[float, str]  # places on an axis that have names in place of numbers


class Panel(NamedTuple):
    """One panel of a figure that is drawn already, and what its axes say."""

    axes: Axes
    height: float  # of the figure, in points
    scale: float  # points a pixel
    across: str  # label of the horizontal axis
    columns: Names
    rows: Names

    def place(self, x: float, y: float) -> tuple[float, float]:
        """A point of the data in the coordinates of the SVG: points from the top left."""
        across, up = self.axes.transData.transform((x, y)) * self.scale
        return float(across), float(self.height - up)

    def words(self, label: str, x: float, y: float) -> str:
        """What a point means: its arm, where it is, and its value."""
        who = [] if label.startswith("_") else [label]
        if self.rows:  # a row for each of several things: the value is along the other axis
            return f"{', '.join([_value_name(self.rows, y), *who])}: {x:.4g} ({self.across})"
        where = f"{self.across} {_value_name(self.columns, x)}".strip()
        return f"{', '.join([*who, where])}: {y:.4g} ({_flat(self.axes.get_ylabel())})"


def tips(figure: Figure) -> str:
    """The shapes as an element of the figure's `<svg>`; the figure has to be drawn already."""
    panels = [axes for axes in figure.axes if axes.get_label() != COLOUR_BAR]
    shared = panels[-1].get_xlabel() if panels else ""  # panels above each other have one
    shapes = [shape for axes in panels for shape in _shapes(_panel(axes, figure, shared))]
    return f'<g class="tips" fill-opacity="0" stroke="none">\n{"".join(shapes)}</g>' if shapes else ""


def _panel(axes: Axes, figure: Figure, shared: str) -> Panel:
    across = _flat(axes.get_xlabel() or shared)
    return Panel(axes, 72 * figure.get_figheight(), 72 / figure.dpi, across, _names(axes.xaxis), _names(axes.yaxis))


def _shapes(panel: Panel) -> Iterator[str]:
    for line in panel.axes.lines:
        if line.get_transform() == panel.axes.transData:  # and not a line across the panel
            points = np.column_stack([np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)])
            for x, y in points[::-1][:: -(-len(points) // MOST) or 1]:
                if np.isfinite([x, y]).all():
                    yield _dot(panel, x, y, panel.words(str(line.get_label()), x, y))
    for bars in [held for held in panel.axes.containers if isinstance(held, BarContainer)]:
        for bar in bars.patches:
            (left, low), (right, high) = bar.get_bbox().get_points()
            words = panel.words(str(bars.get_label()), (left + right) / 2, high)
            yield _rectangle(panel, (left, low), (right, high), words)
    for mesh in [held for held in panel.axes.collections if isinstance(held, QuadMesh)]:
        yield from _cells(panel, mesh)


def _cells(panel: Panel, mesh: QuadMesh) -> Iterator[str]:
    corners: Any = mesh.get_coordinates()  # [row, column, axis]
    values: Any = np.ma.filled(np.ma.asarray(mesh.get_array(), float), np.nan).reshape(len(corners) - 1, -1)
    for row, column in np.ndindex(values.shape) if values.size <= MOST_CELLS else ():
        (left, low), (right, high) = corners[row, column], corners[row + 1, column + 1]
        x, y = _value_name(panel.columns, (left + right) / 2), _value_name(panel.rows, (low + high) / 2)
        if np.isfinite(values[row, column]):
            words = f"{y}, {panel.across} {x}: {values[row, column]:.4g}"
            yield _rectangle(panel, (left, low), (right, high), words)


def _names(axis: Axis) -> Names:
    if not isinstance(axis.get_major_locator(), FixedLocator):
        return {}
    texts = [label.get_text() for label in axis.get_ticklabels()]
    named = dict(zip(map(float, axis.get_majorticklocs()), texts, strict=False))
    return named if any(re.search("[A-Za-z]", text) for text in texts) else {}


def _value_name(names: Names, value: float) -> str:
    """A value on an axis: the name of its place if it has one."""
    near = min(names, key=lambda at: abs(at - value), default=None)
    return _flat(names[near]) if near is not None and abs(near - value) <= NEAR else f"{value:.4g}"


def _flat(text: str) -> str:
    return " ".join(text.split())


def _dot(panel: Panel, x: float, y: float, words: str) -> str:
    across, down = panel.place(x, y)
    return f'<circle cx="{across:.1f}" cy="{down:.1f}" r="{RADIUS}"><title>{escape(words)}</title></circle>\n'


def _rectangle(panel: Panel, corner: tuple[float, float], opposite: tuple[float, float], words: str) -> str:
    (x1, y1), (x2, y2) = panel.place(*corner), panel.place(*opposite)
    size = f'width="{abs(x2 - x1):.1f}" height="{abs(y2 - y1):.1f}"'
    return f'<rect x="{min(x1, x2):.1f}" y="{min(y1, y2):.1f}" {size}><title>{escape(words)}</title></rect>\n'
