"""The figure of a contest of rules: what each arm gains over its baseline, setting by setting."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedgma.paper.contest import ABOVE, BELOW, Gain, label, short
from fedgma.reports.plots.style import BASE, COLOURS, INK, SIZE, WIDTH, dress, name_axes

FAR = 8.0  # points; what lies beyond is drawn at the edge, with its number


def draw_gains(gains: Sequence[Gain], title: str) -> Figure:
    """A panel for each setting: mean, 95 % CI (thick) and the interval that holds for all tests at once (thin)."""
    settings = list(dict.fromkeys(gain.setting for gain in gains))
    rows = {setting: [gain for gain in gains if gain.setting == setting] for setting in settings}
    heights = [0.75 + 0.19 * len(own) for own in rows.values()]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.4), layout="constrained")
    panels = figure.subplots(len(settings), squeeze=False, sharex=True, gridspec_kw={"height_ratios": heights})[:, 0]
    far = min(FAR, max(1.0, *(abs(end) for gain in gains for end in gain.interval)))
    for axes, (setting, own) in zip(panels, rows.items(), strict=True):
        dress(axes, "x")
        for y, gain in enumerate(sorted(own, key=lambda gain: -gain.verdict.mean)):
            _row(axes, y, gain, far)
        axes.axvline(0, color=INK, lw=0.8)
        axes.axvspan(-BELOW, ABOVE, color=BASE, alpha=0.12, lw=0)
        names = [label(gain.arm) for gain in sorted(own, key=lambda gain: -gain.verdict.mean)]
        axes.set_yticks(range(len(names)), names, fontsize=SIZE - 1)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlim(-1.08 * far, 1.08 * far)
        axes.set_title(short(setting), fontsize=SIZE, loc="left", color=INK)
    figure.suptitle(title, fontsize=SIZE + 1.5, color=INK, x=0.01, ha="left")
    name_axes(panels[-1], "points over the mean (thin: corrected)")
    return figure


def _row(axes: Axes, y: int, gain: Gain, far: float) -> None:
    colour = COLOURS[0] if gain.verdict.significant else INK
    wide, narrow = gain.interval, gain.verdict.interval or (gain.verdict.mean,) * 2
    for (low, high), width in ((wide, 0.8), (narrow, 2.2)):
        axes.plot([max(low, -far), min(high, far)], [y, y], color=colour, lw=width, solid_capstyle="butt")
    mean = gain.verdict.mean
    if abs(mean) <= far:
        axes.plot(mean, y, "o", color=colour, markersize=3.5)
        return
    side, marker, at = (1, ">", "right") if mean > 0 else (-1, "<", "left")
    axes.plot(side * far, y, marker, color=colour, markersize=3.5)
    where, size = (side * far, y), SIZE - 2
    axes.annotate(f"{mean:+.0f}", where, (-6 * side, 3), textcoords="offset points", ha=at, fontsize=size)
