"""Figures of federated data: classes by client, client sizes, sample images."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedgma.data.partitions import Index, Labels
from fedgma.reports.plots.style import INK, SIZE, dress, name_axes
from fedgma.seeds import generator

if TYPE_CHECKING:  # a report draws partitions without torch
    from fedgma.data.federation import Federation
    from fedgma.data.pools import ImagePool

BUBBLES = 120  # clients, and CLASSES classes, above which bubbles are too small and a heat map is drawn
CLASSES = 40
COLUMNS = 300  # of the heat map; with more clients, several share a column
NAMED = 25  # classes; with more, only about every fifth is named
BLUE = "#2b6ca3"


def draw_classes(counts: Index, classes: Sequence[str], title: str = "") -> Figure:
    """Classes by client: bubbles for few clients, a sorted heat map for many; `counts` is [client, class]."""
    clients = len(counts)
    few = clients <= BUBBLES and len(classes) <= CLASSES
    width = 5 + clients * 0.075 if few else 12
    figure = Figure(figsize=(width, 1.6 + 0.24 * min(len(classes), NAMED)), layout="constrained")
    axes = figure.subplots()
    dress(axes)
    (_bubbles if few else _heat)(figure, axes, counts)
    step = -(-len(classes) // NAMED)
    axes.set_yticks(range(0, len(classes), step), [classes[c][:18] for c in range(0, len(classes), step)])
    axes.set_ylim(-0.6, len(classes) - 0.4)
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    return figure


def _bubbles(figure: Figure, axes: Axes, counts: Index) -> None:
    client, label = np.nonzero(counts)
    samples = counts[client, label]
    height = 72 * 0.24 * min(1.0, NAMED / counts.shape[1])
    largest = min(height, 72 * figure.get_figwidth() * 0.85 / len(counts)) * 0.95  # points between two neighbours
    axes.scatter(client, label, s=largest**2 * samples / counts.max(), color=BLUE, linewidths=0)
    axes.set_xlim(-0.8, len(counts) - 0.2)
    name_axes(axes, f"client (area: samples; the largest dot is {counts.max()})")


def _heat(figure: Figure, axes: Axes, counts: Index) -> None:
    """Share of each class, clients sorted by their commonest class; many clients are averaged in columns."""
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    order = np.lexsort(
        (*np.sort(-shares, axis=1).T[::-1], np.argsort(-shares, axis=1, kind="stable")[:, 1], shares.argmax(axis=1))
    )
    groups = np.array_split(shares[order], min(len(shares), COLUMNS))
    picture = np.stack([group.mean(axis=0) for group in groups], axis=1)  # [class, column]
    extent = (0.0, float(len(shares)), -0.5, counts.shape[1] - 0.5)
    shown = axes.imshow(
        picture, aspect="auto", origin="lower", cmap="Blues", vmin=0, extent=extent, interpolation="none"
    )
    axes.grid(visible=False)
    bar = figure.colorbar(shown, ax=axes, pad=0.01)
    bar.set_label("share of the client's samples", fontsize=SIZE, color=INK)
    bar.ax.tick_params(labelsize=SIZE, colors=INK)
    each = f", {len(shares) / len(groups):.3g} to a column" if len(groups) < len(shares) else ""
    name_axes(axes, f"{len(shares)} clients, sorted by their commonest class{each}")


def draw_sizes(sizes: Index, title: str = "") -> Figure:
    """Histogram of client sizes, with the median."""
    figure = Figure(figsize=(6, 2.8), layout="constrained")
    axes = figure.subplots()
    dress(axes, "y")
    low, high = int(sizes.min()), int(sizes.max())
    bins = np.linspace(low - 0.5, high + 0.5, min(40, high - low + 1) + 1).tolist()
    axes.hist(sizes, bins=bins, color=BLUE, rwidth=0.92)
    median = float(np.median(sizes))
    axes.axvline(median, color="#c0392b", linewidth=1)
    name_axes(axes, f"samples of a client (smallest {low}, median {median:g}, largest {high})", "clients")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if low == high:
        axes.set_xlim(low - 5, high + 5)
    axes.set_title(title, fontsize=10, loc="left", color=INK)
    return figure


def draw_images(federation: "Federation", clients: Sequence[int], *, columns: int = 20, seed: int = 0) -> Figure:
    """Sample images: a row for each of these clients, as the client sees them, then the test splits."""
    rows: list[tuple[str, ImagePool, Index, int | None]] = []
    rows += [(f"client {n}", federation.train, federation.clients[n], n) for n in clients]
    tests = {"test": federation.test, **{f"test: {name}": pool for name, pool in federation.more_tests.items()}}
    rows += [(name, pool, np.arange(len(pool), dtype=np.int64), None) for name, pool in tests.items()]
    figure = Figure(figsize=(11, 0.62 * len(rows) + 0.1), layout="constrained")
    for axes, (name, pool, index, client) in zip(figure.subplots(len(rows), squeeze=False)[:, 0], rows, strict=True):
        chosen = examples(pool.y.cpu().numpy(), index, columns, seed)
        axes.imshow(_strip(pool, chosen, client, columns), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
    return figure


def examples(labels: Labels, index: Index, count: int, seed: int) -> Index:
    """Up to `count` samples, balanced over the classes present and ordered by class; without classes, at random.

    >>> examples(np.array([0, 0, 0, 1]), np.arange(4), 2, seed=0).shape
    (2,)
    """
    mixed: Index = generator(seed, "examples").permutation(index)
    if labels.ndim > 1 or labels.dtype.kind == "f":
        return mixed[:count]
    by_class = mixed[np.argsort(labels[mixed], kind="stable")]
    first = np.searchsorted(labels[by_class], labels[by_class])
    turn = np.arange(len(by_class)) - first  # 0 for the first sample of every class, then 1, ...
    chosen = by_class[np.argsort(turn, kind="stable")[:count]]
    ordered: Index = chosen[np.argsort(labels[chosen], kind="stable")]
    return ordered


def _strip(pool: "ImagePool", chosen: Index, client: int | None, columns: int) -> npt.NDArray[np.float32]:
    """Images side by side with white gaps: [height, width, channel]."""
    import torch

    index = torch.from_numpy(chosen).to(pool.y.device)
    seen = pool.show(index, pool.client_of[index] if client is None else torch.full_like(index, client)).cpu().numpy()
    side = seen.shape[-1] + 2
    strip = np.ones((seen.shape[-2], side * columns, seen.shape[1]), np.float32)
    for column, image in enumerate(seen):
        strip[:, column * side : column * side + side - 2] = image.transpose(1, 2, 0)
    return strip
