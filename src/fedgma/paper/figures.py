"""The paper's figures reproduced from our runs, with the printed numbers if there are any."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from fedgma.aggregation.rules import BASELINE
from fedgma.paper.compare import Compared, Comparison
from fedgma.paper.kinds import lines, mask_step
from fedgma.paper.multiverse import multiverse_of, sentences, specifications
from fedgma.paper.plots.beside import Difference, Point, draw_axis, draw_differences, draw_steps
from fedgma.paper.plots.robustness import draw_attacks
from fedgma.paper.printed import DID_NOT_LEARN, Number
from fedgma.paper.rates import KEYS
from fedgma.paper.robustness import matrices
from fedgma.reports.pictures import Picture
from fedgma.reports.plots.curves import draw_accuracy
from fedgma.reports.plots.grids import draw_rates
from fedgma.reports.plots.specifications import draw_specifications
from fedgma.reports.plots.style import plain_text
from fedgma.reports.tables import slug
from fedgma.statistics.arms import Spread, common
from fedgma.statistics.labels import NAMES, capitalised, plain, short

MOST = 16  # pictures of a kind


def draw(comparison: Comparison) -> list[Picture]:
    """Every figure of the experiment that the runs have numbers for."""
    with plain_text():
        return [picture for name in comparison.experiment.figures for picture in FIGURES[name](comparison)]


def _picture(kind: str, title: str, heading: str, caption: str, figure: object) -> Picture:
    return Picture(slug(f"{kind} {title}"), heading, title, caption, figure)  # type: ignore[arg-type]


def _run(comparison: Comparison, split: str | None = None) -> list[Compared]:
    """The cells that were run, on the first split unless another is named."""
    cells = comparison.on(split or comparison.experiment.splits[0])
    return [compared for compared in cells if compared.plain or compared.masked]


def _named(compared: Compared, without: Sequence[str] = ()) -> str:
    """A short name of a cell: words alone, numbers with their names, unset settings left out."""
    label = {name: value for name, value in compared.cell.label.items() if name not in without and value is not None}
    return ", ".join(
        value if isinstance(value, str) else f"{short(name)} {plain(value)}" for name, value in label.items()
    )


def _arms(compared: Compared) -> tuple[str, str]:
    return BASELINE, NAMES.get(compared.cell.arm, compared.cell.arm)


def _differences(comparison: Comparison) -> Iterator[Picture]:
    groups: dict[str, list[Compared]] = {}
    for compared in _run(comparison):
        groups.setdefault(str(compared.cell.settings["dataset"]), []).append(compared)
    caption = (
        "Masked minus plain averaging, mean over seeds and 95 % CI; filled where the CI excludes zero. Open diamonds: "
        "the printed difference."
    )
    for dataset, cells in groups.items():
        paired = [compared for compared in cells if compared.verdict is not None]
        same = list(common([compared.cell.label for compared in paired]))  # includes the data set
        rows = [_difference(compared, same) for compared in paired]
        if rows:
            yield _picture("differences", dataset, "Differences", caption, draw_differences(rows, dataset))


def _difference(compared: Compared, without: Sequence[str]) -> Difference:
    """The row of a cell, labelled by its settings that are not in `without`."""
    verdict = compared.verdict
    assert verdict is not None
    low, high = verdict.interval or (None, None)
    label = _named(compared, without) or compared.cell.part.name
    return Difference(label, verdict.mean, low, high, compared.printed_difference)


def _curves(comparison: Comparison, split: str = "test") -> Iterator[Picture]:
    scenes: dict[str, dict[str, dict[int, Mapping[int, float]]]] = {}
    seeds = 0
    for compared in _run(comparison):
        arms = scenes.setdefault(_named(compared, ("aggregator",)) or compared.cell.part.name, {})
        for side, name in zip(compared.entries, _arms(compared), strict=True):
            by_seed = {seed: entry.curves[split] for seed, entry in side.items() if split in entry.curves}
            seeds = max(seeds, len(by_seed))
            if by_seed:
                arms[name] = by_seed
    shown = [(title, arms) for title, arms in scenes.items() if arms]
    more = f" {MOST} of {len(shown)} settings are drawn." if len(shown) > MOST else ""
    caption = (
        f"Accuracy on {split.replace('_', ' ')} after each evaluated round, mean of {seeds} seeds; band: one standard "
        f"deviation. Below: the paired difference with its 95 % CI.{more}"
    )
    for title, arms in shown[:MOST]:
        figure = draw_accuracy(arms, title, split)
        yield _picture(f"curves {split}", title, f"Accuracy by round: {split.replace('_', ' ')}", caption, figure)


def _gap(comparison: Comparison) -> Iterator[Picture]:
    """The same curves on every further split."""
    for split in comparison.experiment.splits[1:]:
        yield from _curves(comparison, split)


def _axis(comparison: Comparison) -> Iterator[Picture]:
    axis = comparison.experiment.axis
    caption = "Mean and standard deviation over seeds. Open diamonds: printed."
    for title, row in lines(_run(comparison), axis).items():
        arms: dict[str, dict[float, Point]] = {}
        for compared in row:
            for name, level, number in zip(_arms(compared), compared.levels, compared.printed, strict=True):
                if level is not None:
                    arms.setdefault(name, {})[float(compared.cell.settings[axis])] = _point(level, number)
        figure = draw_axis(arms, short(axis), title)
        yield _picture("axis", title or short(axis), f"Accuracy by {short(axis)}", caption, figure)


def _point(level: Spread, number: Number | None) -> Point:
    return Point(level.mean, level.deviation, None if number is None else number.value)


def _taus(comparison: Comparison) -> Iterator[Picture]:
    caption = (
        "Accuracy of masked averaging by threshold, mean and standard deviation over seeds, and of the plain mean. "
        "Thresholds on one step give the same mask wherever every client moves an entry."
    )
    for title, row in lines([compared for compared in _run(comparison) if compared.masked], "tau").items():
        groups: dict[int, list[Compared]] = {}
        for compared in row:
            groups.setdefault(mask_step(compared.cell.settings), []).append(compared)
        if len(row) < 2:
            continue
        steps = [
            (
                [float(compared.cell.settings["tau"]) for compared in group],
                [_point(compared.levels[1], None) for compared in group if compared.levels[1]],
            )
            for group in groups.values()
        ]
        plain_level = row[0].levels[0]
        figure = draw_steps(steps, None if plain_level is None else plain_level.mean, title)
        yield _picture("taus", title, "Accuracy by threshold", caption, figure)


def _rates(comparison: Comparison) -> Iterator[Picture]:
    """Heat maps of both arms, ours and printed, for every data set and algorithm."""
    caption = "Accuracy in percent, mean over seeds, one colour scale; each map's best pair is framed."
    groups: dict[str, list[Compared]] = {}
    for compared in _run(comparison):
        groups.setdefault(_named(compared, (*KEYS, "aggregator")), []).append(compared)
    for title, cells in list(groups.items())[:MOST]:
        client, server = (sorted({compared.cell.settings[key] for compared in cells}) for key in KEYS)
        ours: dict[str, dict[tuple[float, float], float]] = {}
        printed: dict[str, dict[tuple[float, float], float]] = {}
        for compared in cells:
            at = (compared.cell.settings[KEYS[0]], compared.cell.settings[KEYS[1]])
            for name, level, number in zip(_arms(compared), compared.levels, compared.printed, strict=True):
                if level is not None:
                    ours.setdefault(name, {})[at] = level.mean
                if number is not None:
                    learned = number.value != DID_NOT_LEARN
                    printed.setdefault(f"{name}, printed", {})[at] = number.value if learned else np.nan
        grids = {
            name: np.array([[values.get((c, s), np.nan) for s in server] for c in client])
            for name, values in (ours | printed).items()
        }
        yield _picture("rates", title, "Learning rates", caption, draw_rates(grids, server, client, title))


def _attacks(comparison: Comparison) -> Iterator[Picture]:
    """Heat maps of accuracy by attack and rule, for every split."""
    caption = "Accuracy in percent over the last ten rounds, mean over seeds, one colour scale."
    for split in comparison.experiment.splits:
        if maps := matrices(comparison.entries, split, comparison.experiment.statistic):
            yield _picture("attacks", split, f"Rules under attack: {split}", caption, draw_attacks(maps))


def _specifications(comparison: Comparison) -> Iterator[Picture]:
    if (multiverse := multiverse_of(comparison)) is not None:
        caption = "Masked minus plain averaging in every universe, sorted, with 95 % CIs; below, what each chose. "
        result = ". ".join(capitalised(sentence) for sentence in sentences(multiverse)[:2])
        drawn = draw_specifications(specifications(multiverse))
        yield _picture("specifications", "multiverse", "Specification curve", f"{caption}{result}.", drawn)


FIGURES: dict[str, Callable[[Comparison], Iterator[Picture]]] = {
    "differences": _differences,
    "curves": _curves,
    "gap": _gap,
    "axis": _axis,
    "taus": _taus,
    "rates": _rates,
    "attacks": _attacks,
    "specifications": _specifications,
}
