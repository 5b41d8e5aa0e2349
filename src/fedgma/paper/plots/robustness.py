"""The picture of rules under attack: a heat map of accuracy, attack by rule, for each partition."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from fedgma.paper.robustness import Matrix
from fedgma.reports.plots.style import INK, SEQUENCE, SIZE, dress


def draw_attacks(matrices: Sequence[Matrix]) -> Figure:
    """Accuracy in percent, on one colour scale from 10 (chance) to 90."""
    rows, columns = max(len(m.attacks) for m in matrices), max(len(m.rules) for m in matrices)
    figure = Figure(figsize=(1.9 + 0.5 * columns, 0.6 + len(matrices) * (0.9 + 0.21 * rows)), layout="constrained")
    panels = figure.subplots(len(matrices), squeeze=False)[:, 0]
    for axes, matrix in zip(panels, matrices, strict=True):
        dress(axes)
        axes.grid(visible=False)
        axes.imshow(matrix.means, aspect="auto", cmap=SEQUENCE, vmin=10, vmax=90)
        for (row, column), value in np.ndenumerate(matrix.means):
            said, tone = ("-", INK) if np.isnan(value) else (f"{value:.0f}", "#000000" if value > 50 else "#ffffff")
            axes.text(column, row, said, ha="center", va="center", fontsize=SIZE - 1, color=tone)
        axes.set_xticks(range(len(matrix.rules)), matrix.rules, rotation=40, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(matrix.attacks)), matrix.attacks)
        axes.set_title(matrix.title, fontsize=SIZE, loc="left", color=INK)
    return figure
