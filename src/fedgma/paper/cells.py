"""The cells of an experiment: a masked arm and the plain one that it is measured against, and their printed numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedgma.aggregation.rules import BASELINE
from fedgma.experiments.settings import record
from fedgma.paper.catalogue import Experiment, Part
from fedgma.paper.plans import WHOLE, Cut, Plan, plan_runs
from fedgma.paper.printed import Number, number_of, printed_rows
from fedgma.paper.rates import KEYS, Chosen
from fedgma.records.reader import flat
from fedgma.statistics.arms import frozen, telling_names
from fedgma.statistics.labels import AGGREGATION

# settings that do not say which cell a run belongs to: how long it was, how closely it was watched, which seed it had
LOOSE = ("seed", "partition.seed", "rounds", "evaluate_every", "mask_every", "client_test_size")

Flat = dict[str, Any]  # settings by their dotted names


class Cell(NamedTuple):
    """One place of a table: the same settings with and without the mask."""

    part: Part
    label: dict[str, Any]  # what tells it from the other cells
    plain: Flat | None
    masked: Flat | None
    printed: Mapping[tuple[str, str], Number]  # split and "plain" or "masked" -> number

    @property
    def arm(self) -> str:
        """The aggregator that is looked at."""
        return str((self.masked or self.plain or {})["aggregator"])

    @property
    def settings(self) -> Flat:
        """The masked arm's settings, or the plain one's where there is no other."""
        return self.masked or self.plain or {}


def cells_of(experiment: Experiment, chosen: Chosen, cut: Cut = WHOLE) -> list[Cell]:
    """Every cell of an experiment, in the order of its parts."""
    rows = printed_rows(experiment)
    found = []
    for part, plain, masked in _pairs(plan_runs(experiment, chosen, cut._replace(seeds=1))):
        sides = {"plain": plain, "masked": masked}
        printed = {
            (split, side): number
            for split in experiment.splits
            for side, settings in sides.items()
            if settings is not None and (number := number_of(rows, settings, part, split)) is not None
        }
        found.append(Cell(part, {}, plain, masked, printed))
    named = [cell._replace(label=label) for cell, label in zip(found, _labels(found), strict=True)]
    return sorted(named, key=_in_order([cell.label for cell in named]))


def _pairs(plan: Plan) -> list[tuple[Part, Flat | None, Flat | None]]:
    """(part, plain, masked) for every masked arm; a plain arm that nothing is measured against stands alone."""
    groups: dict[str, tuple[Part, list[Flat]]] = {}
    for part, settings in plan.runs:
        own = dict(flat(record(settings)))
        free = (*AGGREGATION, *LOOSE, *(KEYS if part.own_rates else ()))
        groups.setdefault(f"{part.name}{frozen(own, free)}", (part, []))[1].append(own)
    pairs: list[tuple[Part, Flat | None, Flat | None]] = []
    for part, members in groups.values():
        plain = next((own for own in members if own["aggregator"] == BASELINE), None)
        masked = [own for own in members if own["aggregator"] != BASELINE]
        pairs += [(part, plain, own) for own in masked] or [(part, plain, None)]
    return pairs


def _in_order(labels: Sequence[Mapping[str, Any]]) -> Callable[[Cell], list[Any]]:
    """By the label's settings in turn: numbers in their order, words as they first came, the aggregation last."""
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
    """The settings that tell the cells apart; chosen rates follow from data set and algorithm and tell nothing."""
    rows = []
    for cell in cells:
        given = any(key in cell.part.settings for key in KEYS)
        hidden = (*LOOSE, *(() if given else KEYS))
        own = {name: value for name, value in cell.settings.items() if name not in hidden}
        rows.append({**own, "rates": cell.part.rates})
    names = telling_names(rows)
    return [{name: row.get(name) for name in names} for row in rows]
