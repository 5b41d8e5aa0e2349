"""Figures of an advice: how a search narrowed its candidates, and differences of arms with their intervals."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from fedgma.reports.plots.style import COLOURS, INK, SIZE, colour_of, name_axes, new_figure
from fedgma.statistics.metrics import ACCURACY, Metric
from fedgma.statistics.verdicts import Verdict

MARKS = "os^D"  # the colours are used again with another mark
Level = Mapping[str, float]  # arm -> score


def draw_search(stages: Mapping[str, Level], metric: Metric = ACCURACY) -> Figure:
    """The validation score of each arm's best rates in every stage; a line ends where its arm was left out."""
    names = list(dict.fromkeys(name for level in stages.values() for name in level))
    figure, (axes,) = new_figure(2.8 + 0.2 * -(-len(names) // 2), "")
    for name in names:
        colour, dash = colour_of(name, names)
        met = [(stage_number, level[name]) for stage_number, level in enumerate(stages.values()) if name in level]
        mark = MARKS[names.index(name) // len(COLOURS) % len(MARKS)]
        axes.plot(*zip(*met, strict=True), color=colour, linestyle=dash, lw=1.6, marker=mark, markersize=5, label=name)
    axes.set_xticks(range(len(stages)), list(stages))
    axes.set_xlim(-0.3, len(stages) - 0.7)
    name_axes(axes, "", f"validation {metric.label}")
    legend: dict[str, Any] = {"loc": "outside lower center", "ncols": 2, "frameon": False, "labelcolor": INK}
    figure.legend(*axes.get_legend_handles_labels(), fontsize=SIZE, **legend)
    return figure


def draw_gains(rows: Mapping[str, tuple[Verdict, Sequence[float]]]) -> Figure:
    """Differences to the plain mean: the mean over seeds with its interval, and a dot for each seed."""
    figure, (axes,) = new_figure(1.1 + 0.45 * len(rows), "")
    names = list(rows)
    metric = next(iter(rows.values()))[0].score
    reach = 0.5 if metric.share else 0.0
    for height, (name, (verdict, differences)) in enumerate(rows.items()):
        colour, _ = colour_of(name, names)
        reach = max([reach, *(1.6 * abs(value) for value in differences)])
        filled = colour if verdict.significant else "none"
        if verdict.interval is not None:
            axes.plot(verdict.interval, [height, height], color=colour, linewidth=2)
        axes.plot(differences, [height + 0.22] * len(differences), ".", color=colour, markersize=4, alpha=0.7)
        axes.plot([verdict.mean], [height], "o", color=colour, mfc=filled, markersize=7)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_xlim(-reach or -1.0, reach or 1.0)
    axes.set_yticks(range(len(rows)), [name.replace(" at ", "\nat ") for name in names])
    axes.set_ylim(len(rows) - 0.4, -0.5)
    axes.grid(visible=False, axis="y")
    name_axes(axes, f"ahead of the plain mean at its best rates, {metric.apart}")
    return figure
