"""Figures of the analyses: stability of masks, convergence by density, agreement by homogeneity, participation.

They take the rows of the analyses, so a table that is read from a file gives the same figure.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from fedgma.reports.plots.style import BASE, COLOURS, DASHES, INK, SIZE, WIDTH, dress, key, name_axes, new_figure

Rows = Sequence[Mapping[str, Any]]
POWERS = {"alpha / (K L)": 2, "1 / (K L)": 1}  # client rate -> power of 1 / alpha by which rounds should grow
PARTICIPATING = "participating"


def _pick(rows: Rows, **wanted: Any) -> list[Mapping[str, Any]]:
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def _column(rows: Rows, name: str) -> list[float]:
    return [float("nan") if row[name] is None else float(row[name]) for row in rows]


def logarithmic(axes: Axes, which: Literal["x", "y"], ticks: Sequence[float] | None = None) -> None:
    """A logarithmic axis with plain numbers as ticks: powers of ten, or the given ticks."""
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if which == "x" else axes.yaxis
    if ticks is not None:
        axis.set_major_locator(FixedLocator(list(ticks)))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def draw_stability(cells: Rows, clients: int = 10, tau: float = 0.4) -> Figure:
    """P(mask = 1) by ratio of mean to deviation, a line per share of clients: exact, simulated, and bounded."""
    figure, (axes,) = new_figure(3.4, f"{clients} clients, tau {tau:g}: when is the mask 1?")
    picked = _pick(cells, clients=clients, tau=tau)
    shares = [share for share in sorted({row["share"] for row in picked}) if share >= 0.5]
    for index, share in enumerate(shares):
        line = _pick(picked, share=share)
        kept = line[0]["corrected_condition"]
        colour = COLOURS[index % len(COLOURS)] if kept else BASE
        ratios = _column(line, "ratio")
        axes.plot(ratios, _column(line, "exact"), color=colour, lw=1.5, ls="-" if kept else "--")
        axes.plot(ratios, _column(line, "drawn"), "o", color=colour, markersize=3)
        axes.plot(ratios, _column(line, "bound"), color=colour, lw=0.9, ls=":")
        spot = 4 if kept else 5  # index of a dot that has room for a label
        aside = (4, -9) if kept else (4, 3)
        where = (ratios[spot], line[spot]["exact"])
        axes.annotate(f"p = {share:g}", where, aside, textcoords="offset points", fontsize=SIZE - 1, color=INK)
    axes.plot([], [], color=INK, lw=1.5, label="p ≥ (1 + tau) / 2")
    axes.plot([], [], color=BASE, lw=1.5, ls="--", label="p > tau alone, as printed")
    axes.plot([], [], "o", color=INK, markersize=3, label="drawn")
    axes.plot([], [], color=INK, lw=0.9, ls=":", label="promised")
    axes.set_ylim(-0.03, 1.05)
    _legend(figure, axes)
    name_axes(axes, "mean / deviation of a client's update", "P(mask = 1)")
    return figure


def _legend(figure: Figure, axes: Axes, columns: int = 2) -> None:
    handles = axes.get_legend_handles_labels()
    figure.legend(
        *handles,
        loc="outside lower center",
        ncols=columns,
        fontsize=SIZE,
        frameon=False,
        labelcolor=INK,
        handlelength=2.2,
    )


def draw_repeats(summary: Rows) -> Figure:
    """Stability of real masks by round and partition, and for fair coins."""
    figure, (axes,) = new_figure(2.6, "Local training repeated: is the mask the same?")
    for index, skew in enumerate(dict.fromkeys(row["partition"] for row in summary)):
        picked = _pick(summary, partition=skew)
        points, middle = [str(row["after_round"]) for row in picked], np.array(_column(picked, "stability"))
        reach = [middle - np.array(_column(picked, "low")), np.array(_column(picked, "high")) - middle]
        colour, dash = COLOURS[index], DASHES[index]
        axes.errorbar(
            points,
            middle,
            np.nan_to_num(np.array(reach)),
            fmt="o",
            ls=dash,
            color=colour,
            capsize=3,
            label=_words(skew),
        )
    axes.axhline(summary[0]["by_chance"], color=INK, lw=0.9, ls=":", label="fair coins")
    axes.set_ylim(0, 103)
    key(axes, 1, "lower right")
    name_axes(axes, "rounds of training before", "repeats with the\ncommonest mask, %")
    return figure


def _words(name: str) -> str:
    return name.replace("_", " ")


def draw_slowdown(slow: Rows, noise: Rows) -> Figure:
    """Rounds to the target by 1 / alpha and rule for the rate; below, the mean squared gradient norm with noise."""
    figure, (above, under) = new_figure(4.6, "A quadratic under random masks", (1, 1))
    for index, rule in enumerate(dict.fromkeys(row["rate"] for row in slow)):
        picked = _pick(slow, rate=rule)
        inverse = 1 / np.array(_column(picked, "alpha"))
        rounds = np.array(_column(picked, "rounds"))
        above.plot(inverse, rounds, "o", color=COLOURS[index], markersize=4, label=f"client rate {rule}")
        power = POWERS[rule]
        line = rounds[0] * inverse**power
        above.plot(inverse, line, color=COLOURS[index], lw=1, ls=":", label=f"(1 / alpha)^{power}")
    logarithmic(above, "y")
    name_axes(above, "", "rounds to the target")
    above.legend(fontsize=SIZE - 1, frameon=False, labelcolor=INK, loc="upper left")
    for index, length in enumerate(dict.fromkeys(row["T"] for row in noise)):
        picked = _pick(noise, T=length)
        inverse = 1 / np.array(_column(picked, "alpha"))
        measured, shape = np.array(_column(picked, "mean_squared_norm")), np.array(_column(picked, "reference"))
        under.plot(inverse, measured, "o", color=COLOURS[index], markersize=4, label=f"noise, T = {length}")
        under.plot(inverse, shape * measured[0] / shape[0], color=COLOURS[index], lw=1, ls=":")
    under.plot([], [], color=INK, lw=1, ls=":", label="the paper's rate, scaled")
    logarithmic(under, "y")
    under.legend(fontsize=SIZE - 1, frameon=False, labelcolor=INK, loc="upper left")
    logarithmic(under, "x", [1, 2, 4, 8])
    for axes in (above, under):
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.5)  # room for the legend
    name_axes(under, "1 / alpha", "mean squared\ngradient norm")
    return figure


def draw_density(curve: Rows) -> Figure:
    """Entries sorted by their mean mask over a real run."""
    figure, (axes,) = new_figure(2.6, "Mean mask of every entry over a run")
    for index, skew in enumerate(dict.fromkeys(row["partition"] for row in curve)):
        picked = _pick(curve, partition=skew)
        look: dict[str, Any] = {"color": COLOURS[index], "ls": DASHES[index], "lw": 1.6}
        axes.plot(_column(picked, "entries_%"), _column(picked, "mean_mask"), label=_words(skew), **look)
    logarithmic(axes, "x", [0.01, 0.1, 1, 10, 100])
    axes.set_ylim(0, 1)
    axes.legend(fontsize=SIZE, frameon=False, labelcolor=INK, loc="upper left")
    name_axes(axes, "share of entries, % (lowest first)", "mean mask")
    return figure


def draw_homogeneity(summary: Rows, rows: Rows, reference: float) -> Figure:
    """Entries below tau by Dirichlet concentration and layer; below, by round."""
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    above, under = figure.subplots(2)
    for axes in (above, under):
        dress(axes)
        axes.axhline(reference, color=INK, lw=0.9, ls=":")
    above.set_title("Entries whose agreement is below tau", fontsize=SIZE + 1.5, loc="left", color=INK)
    for index, layer in enumerate(dict.fromkeys(row["layer"] for row in summary)):
        picked = _pick(summary, layer=layer)
        style = {"color": INK, "lw": 2.2} if layer == "all" else {"color": COLOURS[(index - 1) % 6], "lw": 1.1}
        above.plot(_column(picked, "alpha"), _column(picked, "below_%"), "o-", markersize=3, label=layer, **style)
        if layer == "all" and picked[0]["low"] is not None:
            above.fill_between(
                _column(picked, "alpha"), _column(picked, "low"), _column(picked, "high"), color=INK, alpha=0.15, lw=0
            )
    logarithmic(above, "x", sorted({row["alpha"] for row in summary}))
    low, high = above.get_ylim()
    above.set_ylim(low, high + 0.2 * (high - low))  # room for the legend
    name_axes(above, "Dirichlet alpha (right: clients alike)", "entries, %")
    above.legend(fontsize=SIZE - 1, ncols=3, frameon=False, labelcolor=INK, handlelength=1.5)
    alphas = sorted({row["alpha"] for row in rows})
    for index, alpha in enumerate(alphas):
        picked = _pick(rows, layer="all", alpha=alpha)
        rounds = sorted({row["round"] for row in picked})
        values = [float(np.mean(_column(_pick(picked, round=round), "below_%"))) for round in rounds]
        under.plot(rounds, values, color=COLOURS[index % len(COLOURS)], lw=1.4, label=f"alpha {alpha:g}")
    under.xaxis.set_major_locator(MaxNLocator(integer=True))
    under.legend(fontsize=SIZE - 1, ncols=3, frameon=False, labelcolor=INK, handlelength=1.5)
    name_axes(under, "round (dotted: independent fair signs)", "entries, %")
    return figure


def draw_participation(rows: Rows) -> Figure:
    """Change of accuracy in points by number of sampled clients, group and mode; printed changes as crosses."""
    figure, (axes,) = new_figure(1.2 + 0.3 * len(rows), "GMA minus AVG, by clients")
    names = []
    for y, row in enumerate(sorted(rows, key=lambda row: (-row["cohort"], row["group"] != PARTICIPATING))):
        colour = COLOURS[0] if row["mode"] == "paired" else COLOURS[1]
        low, high = (row["points"] if row[name] is None else row[name] for name in ("points_low", "points_high"))
        axes.plot([low, high], [y, y], color=colour, lw=1.6, marker="|", markersize=6)
        axes.plot(row["points"], y, "o", color=colour, markersize=5)
        axes.plot(row["printed_points"], y, "x", color=BASE, markersize=6, mew=1.6)
        names.append(f"{row['cohort']} of 10, {'taking part' if row['group'] == PARTICIPATING else 'others'}")
    axes.axvline(0, color=INK, lw=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    axes.plot([], [], "x", color=BASE, mew=1.6, ls="", label="printed")
    axes.plot([], [], "o", color=COLOURS[0], ls="", label="paired")
    axes.plot([], [], "o", color=COLOURS[1], ls="", label="trained apart")
    _legend(figure, axes, 3)
    name_axes(axes, "points of accuracy, 95 % CI over seeds")
    return figure
