"""Client agreement: its histogram, masked entries by layer and round, and what each tau would mask."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedgma.aggregation.masks import votes_needed
from fedgma.reports.plots.style import COLOURS, INK, SEQUENCE, SIZE, colour_of, key, name_axes, new_figure
from fedgma.statistics.arms import Spread

Shares = npt.NDArray[np.float64]
GRID_OF_TAUS = tuple(round(0.1 * step, 1) for step in range(1, 11))  # the paper's search grid, and 1


def draw_agreement(histograms: Mapping[str, Shares], tau: float | None = None, title: str = "") -> Figure:
    """Share of entries at each agreement, and the shares for random signs; all for one number of sampled clients."""
    figure, (axes,) = new_figure(2.6, title)
    clients = len(next(iter(histograms.values()))) - 1
    places = np.arange(clients + 1)
    seen = places[np.any([shares > 0 for shares in [*histograms.values(), coins(clients)]], axis=0)]
    width = 0.8 * (float(np.diff(seen).min()) if len(seen) > 1 else 1.0) / len(histograms)
    for row, (name, shares) in enumerate(histograms.items()):
        where = (seen + (row - (len(histograms) - 1) / 2) * width) / clients
        pale = 1.0 if row == len(histograms) - 1 else 0.4  # the last stage is emphasised
        axes.bar(where, 100 * shares[seen], width=width / clients * 0.94, color=COLOURS[0], alpha=pale, label=name)
    fair = coins(clients)
    even = np.nonzero(fair)[0]
    axes.plot(even / clients, 100 * fair[even], "o", mfc="none", color=INK, markersize=5, label="fair coins")
    if tau is not None:
        _mark_tau(axes, tau, seen, clients)
    key(axes, 1, "best")  # with few clients the highest bar may be on the right
    name_axes(axes, f"agreement |votes| / {clients}", "share of entries, %")
    axes.grid(visible=False, axis="x")
    return figure


def _mark_tau(axes: Axes, tau: float, seen: npt.NDArray[np.int64], clients: int) -> None:
    """A line between the highest masked agreement and the lowest that is kept."""
    masked, kept = seen[seen < votes_needed(tau, clients)], seen[seen >= votes_needed(tau, clients)]
    if not len(masked) or not len(kept):
        return
    x = float(masked[-1] + kept[0]) / 2 / clients
    axes.axvline(x, color=INK, linewidth=1, linestyle=":")
    top = axes.get_xaxis_transform()
    axes.annotate("masked", (x, 1), (-4, 1), top, "offset points", ha="right", fontsize=SIZE, color=INK)
    axes.annotate(f"kept (tau {tau:g})", (x, 1), (4, 1), top, "offset points", fontsize=SIZE, color=INK)


def coins(clients: int) -> Shares:
    """Shares of |votes| = 0..C if every vote is an independent fair coin.

    >>> coins(2).tolist(), round(float(coins(10) @ np.arange(11) / 10), 3)
    ([0.5, 0.0, 0.5], 0.246)
    """
    shares = np.zeros(clients + 1)
    for heads in range(clients + 1):
        shares[abs(2 * heads - clients)] += math.comb(clients, heads) / 2**clients
    return shares


def draw_layers(below: Shares, rounds: Sequence[int], layers: Sequence[str], title: str = "") -> Figure:
    """Heat map of the share of masked entries [layer, round], first layer on top; needs two rounds or more."""
    figure, (axes,) = new_figure(1.25 + 0.21 * max(3, len(layers)), title)
    middles = (np.array(rounds[1:]) + np.array(rounds[:-1])) / 2
    edges = [2 * rounds[0] - middles[0], *middles, 2 * rounds[-1] - middles[-1]]  # rounds may be unevenly spaced
    places = np.arange(len(layers) + 1) - 0.5
    shown = axes.pcolormesh(
        edges, places, 100 * below, cmap=SEQUENCE, vmin=0, vmax=_ceiling(100 * below), rasterized=True
    )
    axes.invert_yaxis()
    axes.grid(visible=False)
    step = -(-len(layers) // 40)
    axes.set_yticks(range(0, len(layers), step), [layers[n][-22:] for n in range(0, len(layers), step)])
    axes.tick_params(axis="y", labelsize=SIZE - 1, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    bar = figure.colorbar(shown, ax=axes, pad=0.01, aspect=12)
    bar.set_label("masked entries, %", fontsize=SIZE, color=INK)
    bar.ax.tick_params(labelsize=SIZE - 1, colors=INK)
    name_axes(axes, "round")
    return figure


def _ceiling(percent: Shares) -> float:
    return max(10.0, 10.0 * math.ceil(float(percent.max()) / 10))


def draw_stability(curves: Mapping[str, tuple[Shares, Shares]], rounds: Sequence[int], title: str = "") -> Figure:
    """How a mask differs from an earlier one, by round: name -> shares [round], measured and expected by chance."""
    figure, panels = new_figure(1.3 + 1.25 * len(curves), title, (1,) * len(curves))
    for axes, (name, (measured, chance)) in zip(panels, curves.items(), strict=True):
        dot = "o" if len(rounds) <= 30 else ""
        axes.plot(rounds, 100 * measured, color=COLOURS[0], lw=1.6, label="measured", marker=dot, markersize=3)
        axes.plot(rounds, 100 * chance, color=INK, lw=1, ls=":", label="by chance")
        room = 1.3 if axes is panels[0] else 1.05  # room for the legend above the lines
        axes.set_ylim(0, room * _ceiling(100 * np.concatenate([measured, chance])))
        name_axes(axes, "round" if axes is panels[-1] else "", f"{name}, %")
    key(panels[0], 2, "upper right")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def draw_taus(
    shares: Shares, scores: Mapping[float, Spread] | None = None, title: str = "", label: str = "accuracy, %"
) -> Figure:
    """Share of masked entries by tau, a step function; lines join taus that give the same mask on these votes."""
    measured = scores or {}
    figure, panels = new_figure(3.8 if measured else 2.6, title, (1.5, 1) if measured else (1,))
    axes = panels[0]
    clients = len(shares) - 1
    edges = np.arange(clients + 1) / clients
    masked = np.concatenate([[0.0], np.cumsum(shares)[:-1]])  # below the k-th agreement
    axes.step(edges, 100 * masked, where="pre", color=COLOURS[0], linewidth=1.8)
    for group in same_mask(shares, GRID_OF_TAUS):
        _brace(axes, group, 100 * float(masked[votes_needed(group[0], clients)]))
    axes.set_xlim(0, 1.03)
    axes.set_ylim(0, 108)
    name_axes(axes, "" if measured else "tau", "masked entries, %")
    if measured:
        _scores_by_tau(panels[1], measured, label)
    return figure


def same_mask(shares: Shares, taus: Sequence[float]) -> list[list[float]]:
    """Groups of taus that mask the same entries: no entry's agreement lies between two taus of a group.

    >>> votes = np.array([0.2, 0, 0.4, 0, 0.4])  # of four clients, none of them zero: |votes| is even
    >>> same_mask(votes, [0.1, 0.4, 0.5, 0.6, 0.9])
    [[0.1, 0.4, 0.5], [0.6, 0.9]]
    """
    clients = len(shares) - 1
    groups: dict[int, list[float]] = {}
    present = [k for k in range(clients + 1) if shares[k] > 0]
    for tau in sorted(taus):
        needed = votes_needed(tau, clients)
        groups.setdefault(next((k for k in present if k >= needed), clients + 1), []).append(tau)
    return list(groups.values())


def _brace(axes: Axes, group: Sequence[float], height: float) -> None:
    """Dots for a group of taus, joined and labelled."""
    axes.plot(group, [height] * len(group), "o-", color=INK, markersize=3.5, linewidth=1)
    name = f"{group[0]:g}" if len(group) == 1 else f"{group[0]:g} = {group[-1]:g}"
    axes.annotate(
        name,
        (group[-1], height),
        (-4, 4),
        textcoords="offset points",
        ha="right",
        fontsize=SIZE - 1,
        color=INK,
    )


def _scores_by_tau(axes: Axes, measured: Mapping[float, Spread], label: str) -> None:
    taus = sorted(measured)
    means = [measured[tau].mean for tau in taus]
    colour, _ = colour_of("GMA", ["GMA"])
    axes.errorbar(
        taus, means, [measured[tau].deviation or 0.0 for tau in taus], fmt="o", color=colour, markersize=4, capsize=2
    )
    name_axes(axes, "tau", label)
