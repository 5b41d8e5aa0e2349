"""The cells of an experiment: a masked arm, its plain baseline, and their printed numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedgma.aggregation.rules import BASELINE
from fedgma.experiments.settings import record
from fedgma.paper.catalogue import Experiment, Part
from fedgma.paper.plans import WHOLE, Cut, Plan, plan_runs
from fedgma.paper.printed import Number, number_of, printed_rows
from fedgma.paper.rates import KEYS, Chosen
from fedgma.paper.universes import name_of, read
from fedgma.records.reader import flat
from fedgma.statistics.arms import frozen, telling_names
from fedgma.statistics.labels import AGGREGATION

# settings that do not identify a cell: the length of a run, how often it is measured, its seed
LOOSE = ("seed", "partition.seed", "rounds", "evaluate_every", "mask_every", "client_test_size")

Flat = dict[str, Any]  # settings by their dotted names


class Cell(NamedTuple):
    """One cell of a table: the same settings with and without the mask."""

    part: Part
    label: dict[str, Any]  # the settings that tell it from the other cells
    plain: Flat | None
    masked: Flat | None
    printed: Mapping[tuple[str, str], Number]  # split and "plain" or "masked" -> number

    @property
    def arm(self) -> str:
        """The aggregator under test."""
        return str((self.masked or self.plain or {})["aggregator"])

    @property
    def settings(self) -> Flat:
        """The settings of the masked arm, or of the plain arm if there is no masked one."""
        return self.masked or self.plain or {}


def cells_of(experiment: Experiment, chosen: Chosen, cut: Cut = WHOLE) -> list[Cell]:
    """Every cell of an experiment, in the order of its parts."""
    rows = printed_rows(experiment)
    cells = []
    for part, plain, masked in _pairs(plan_runs(experiment, chosen, cut._replace(seeds=1))):
        sides = {"plain": plain, "masked": masked}
        printed = {
            (split, side): number
            for split in experiment.splits
            for side, settings in sides.items()
            if settings is not None and (number := number_of(rows, settings, part, split)) is not None
        }
        cells.append(Cell(part, {}, plain, masked, printed))
    labels = _universe_labels(cells) if experiment.universes else _labels(cells)
    named = [cell._replace(label=label) for cell, label in zip(cells, labels, strict=True)]
    return sorted(named, key=_in_order([cell.label for cell in named]))


def _pairs(plan: Plan) -> list[tuple[Part, Flat | None, Flat | None]]:
    """(part, plain, masked) for every masked arm; a plain arm without a masked arm has a cell alone."""
    groups: dict[str, tuple[Part, list[Flat]]] = {}
    for part, settings in plan.runs:
        values = dict(flat(record(settings)))
        chosen = part.own_rates and not any(key in part.settings for key in KEYS)  # the arms have other rates
        free = (*AGGREGATION, *LOOSE, *(KEYS if chosen else ()))
        groups.setdefault(f"{part.name}{frozen(values, free)}", (part, []))[1].append(values)
    pairs: list[tuple[Part, Flat | None, Flat | None]] = []
    for part, members in groups.values():
        plain = next((values for values in members if values["aggregator"] == BASELINE), None)
        masked = [values for values in members if values["aggregator"] != BASELINE]
        pairs += [(part, plain, values) for values in masked] or [(part, plain, None)]
    return pairs


def _in_order(labels: Sequence[Mapping[str, Any]]) -> Callable[[Cell], list[Any]]:
    """Sort key: the settings of the label in turn, numbers by value, words in order of appearance, aggregation last."""
    first: dict[str, list[Any]] = {}
    for label in labels:
        for name, value in label.items():
            if value not in first.setdefault(name, []):
                first[name].append(value)
    last = ("algorithm", *AGGREGATION)
    names = sorted(first, key=lambda name: last.index(name) if name in last else -1)
    numeric = {name for name in names if all(isinstance(value, int | float) for value in first[name])}
    return lambda cell: [cell.label[n] if n in numeric else first[n].index(cell.label[n]) for n in names]


def _labels(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The settings that tell the cells apart; chosen rates are left out, since data set and algorithm imply them."""
    rows = []
    for cell in cells:
        given = any(key in cell.part.settings for key in KEYS)
        hidden = (*LOOSE, *(() if given else KEYS))
        shown = {name: value for name, value in cell.settings.items() if name not in hidden}
        rows.append({**shown, "rates": cell.part.rates})
    names = telling_names(rows)
    return [{name: row.get(name) for name in names} for row in rows]


def _universe_labels(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The number and the choices of each cell's universe, and the rates where they are given."""
    known = {name_of(universe): {**universe, "number": int(universe["number"])} for universe in read()}
    given = [{key: cell.settings[key] for key in KEYS if key in cell.part.settings} for cell in cells]
    return [{**known[cell.part.name], **rates} for cell, rates in zip(cells, given, strict=True)]
