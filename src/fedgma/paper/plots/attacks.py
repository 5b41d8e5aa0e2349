"""Figures of membership inference: the ROC curve of each attack, and the loss of the paper's attacker."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from fedgma.paper.plots.analyses import logarithmic
from fedgma.reports.plots.style import BASE, COLOURS, DASHES, INK, SIZE, name_axes, new_figure

Numbers = npt.NDArray[np.float64]
ARM_COLOURS = {"AVG": BASE, "GMA": COLOURS[0]}
PLACE = ("dataset", "model", "partition", "algorithm")  # the settings that identify an attacked federation


def draw_attacks(curves: Mapping[str, Mapping[str, tuple[Numbers, Numbers]]]) -> Figure:
    """True by false positive rate on logarithmic axes, mean over attacked models: arm -> attack -> curve."""
    figure, (axes,) = new_figure(3.6, "Membership inference: members found")
    for arm, attacks in curves.items():
        for index, (name, (false, true)) in enumerate(attacks.items()):
            look: dict[str, Any] = {"color": ARM_COLOURS.get(arm, INK), "ls": DASHES[index % len(DASHES)], "lw": 1.3}
            axes.plot(false, np.maximum(true, 1e-6), label=f"{arm}, {name}", **look)
    chance = np.geomspace(1e-4, 1, 50)
    axes.plot(chance, chance, color=INK, lw=0.8, ls=":", label="chance")
    logarithmic(axes, "x")
    logarithmic(axes, "y")
    axes.set_xlim(1e-4, 1)
    axes.set_ylim(1e-4, 1.05)
    _legend(figure, axes)
    name_axes(axes, "false positives", "true positives")
    return figure


def draw_losses(losses: Sequence[Mapping[str, Any]]) -> Figure:
    """Test loss of the paper's attacker by epoch: a panel per federation, a line per arm and kind of model."""
    places = list(dict.fromkeys(place_of(row) for row in losses))
    figure, panels = new_figure(1.2 + 1.6 * len(places), "", (1,) * len(places))
    title = "The paper's attacker: loss on its own test half"
    figure.suptitle(title, fontsize=SIZE + 1.5, color=INK, x=0.02, ha="left")
    kinds = list(dict.fromkeys(row["models"] for row in losses))
    for axes, federation in zip(panels, places, strict=True):
        here = [row for row in losses if place_of(row) == federation]
        for kind, arm in dict.fromkeys((row["models"], row["arm"]) for row in here):
            line = [row for row in here if (row["models"], row["arm"]) == (kind, arm)]
            look: dict[str, Any] = {"color": ARM_COLOURS.get(arm, INK), "ls": DASHES[kinds.index(kind)], "lw": 1.4}
            axes.plot(
                [row["epoch"] for row in line], [row["test_loss"] for row in line], label=f"{arm}, {kind}", **look
            )
        axes.axhline(float(np.log(2)), color=INK, lw=0.8, ls=":", label="chance")
        axes.set_title(federation, fontsize=SIZE, loc="left", color=INK)
        name_axes(axes, "epoch of the attacker" if axes is panels[-1] else "", "cross-entropy")
    _legend(figure, *panels)
    return figure


def place_of(row: Mapping[str, Any]) -> str:
    """The attacked federation of a row, in words."""
    return ", ".join(str(row[name]) for name in PLACE if name in row)


def _legend(figure: Figure, *panels: Any) -> None:
    """One legend for all panels, with every label once."""
    lines = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    look = {"ncols": 2, "fontsize": SIZE - 0.5, "frameon": False, "labelcolor": INK}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", **look)
