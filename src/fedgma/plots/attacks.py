"""Pictures of membership inference: the trade-off of each attack, and the loss of the paper's attacker."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from fedgma.plots.analyses import logarithmic
from fedgma.plots.style import BASE, COLOURS, DASHES, INK, SIZE, name_axes, new_figure

Numbers = npt.NDArray[np.float64]
ARM_COLOURS = {"AVG": BASE, "GMA": COLOURS[0]}


def draw_attacks(curves: Mapping[str, Mapping[str, tuple[Numbers, Numbers]]]) -> Figure:
    """True against false positives on logarithmic axes, mean over attacked models: arm -> attack -> curve."""
    figure, (axes,) = new_figure(3.6, "Membership inference: members found")
    for arm, attacks in curves.items():
        for place, (name, (false, true)) in enumerate(attacks.items()):
            look: dict[str, Any] = {"color": ARM_COLOURS.get(arm, INK), "ls": DASHES[place % len(DASHES)], "lw": 1.3}
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
    """The paper's attacker: test loss against epoch, a line an arm and a kind of model."""
    figure, (axes,) = new_figure(2.8, "The paper's attacker: loss on its own test half")
    for place, kind in enumerate(dict.fromkeys(row["models"] for row in losses)):
        for arm in dict.fromkeys(row["arm"] for row in losses):
            own = [row for row in losses if row["models"] == kind and row["arm"] == arm]
            look: dict[str, Any] = {"color": ARM_COLOURS.get(arm, INK), "ls": DASHES[place], "lw": 1.4}
            axes.plot([row["epoch"] for row in own], [row["test_loss"] for row in own], label=f"{arm}, {kind}", **look)
    axes.axhline(float(np.log(2)), color=INK, lw=0.8, ls=":", label="chance")
    _legend(figure, axes)
    name_axes(axes, "epoch of the attacker", "binary cross-entropy")
    return figure


def _legend(figure: Figure, axes: Any) -> None:
    handles = axes.get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, fontsize=SIZE - 0.5, frameon=False, labelcolor=INK)
