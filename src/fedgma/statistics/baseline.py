"""Every arm of a sweep against the plain mean: other rules, and an average of the mean's models."""

from collections.abc import Sequence
from typing import cast

from fedgma.aggregation.rules import BASELINE
from fedgma.records.reader import Run
from fedgma.statistics.comparisons import Cell, Comparison, compare
from fedgma.statistics.labels import in_sentence
from fedgma.statistics.metrics import by_metric
from fedgma.statistics.verdicts import Verdict, correct

AVERAGE_OF_MODELS = "the average of models"


def against_baseline(
    runs: Sequence[Run], *, metric: str = "last10", split: str = "test", of: str | None = None
) -> list[Comparison]:
    """Compare every other aggregator with the plain mean, GMA first, if they share seeds and settings.

    An average of the mean's models (`server_average`) is compared with the mean too. Runs that are scored by different
    metrics are compared apart, unless `of` names one.
    """
    groups = by_metric(runs) if of is None else [list(runs)]
    compared = [comparison for group in groups for comparison in _against_baseline(group, metric, split, of)]
    tested = [comparison for comparison in compared if comparison.overall is not None]
    verdicts = correct([comparison.overall for comparison in tested if comparison.overall is not None])
    alone = correct([_of_page(comparison) for comparison in tested])
    corrected = iter(
        comparison._replace(overall=verdict, cells=_with_verdict(comparison.cells, single))
        for comparison, verdict, single in zip(tested, verdicts, alone, strict=True)
    )
    return [comparison if comparison.overall is None else next(corrected) for comparison in compared]


def _of_page(comparison: Comparison) -> Verdict:
    """The verdict of a comparison's only cell, diverged runs included; that over its cells, if there are several."""
    overall = cast(Verdict, comparison.overall)
    return comparison.cells[0].verdict if len(comparison.cells) == 1 else overall


def _with_verdict(cells: tuple[Cell, ...], verdict: Verdict) -> tuple[Cell, ...]:
    """The cells; an only one has the verdict that is corrected with the page, so that table and sentence agree."""
    return (cells[0]._replace(verdict=verdict),) if len(cells) == 1 else cells


def _against_baseline(runs: Sequence[Run], metric: str, split: str, of: str | None) -> list[Comparison]:
    base = [run for run in runs if run.settings["aggregator"] == BASELINE]
    others = sorted(
        {str(run.settings["aggregator"]) for run in runs} - {BASELINE}, key=lambda name: (name != "gma", name)
    )
    arms = {name: [run for run in runs if run.settings["aggregator"] == name] for name in others if base}
    pairs = [(in_sentence(name), arm, _averaged_alike(base, arm)) for name, arm in arms.items()]
    averages, last = [run for run in base if _average(run)], [run for run in base if not _average(run)]
    if averages and last:
        pairs.append((AVERAGE_OF_MODELS, averages, last))
    compared = [
        compare(arm, other, (name, in_sentence(BASELINE)), metric=metric, split=split, of=of, apart=["aggregator"])
        for name, arm, other in pairs
    ]
    return [_without_what_names_it(comparison) for comparison in compared]


def _without_what_names_it(comparison: Comparison) -> Comparison:
    """The average of models is named after the setting in which it differs, so that is no further difference."""
    if comparison.names[0] != AVERAGE_OF_MODELS:
        return comparison
    return comparison._replace(differ=tuple(name for name in comparison.differ if name != "server_average"))


def _average(run: Run) -> float:
    """The weight of the models before in the average that the run was evaluated by; 0 without an average."""
    return float(run.settings.get("server_average") or 0.0)


def _averaged_alike(base: Sequence[Run], arm: Sequence[Run]) -> list[Run]:
    """The runs that were evaluated by an average as the arm's were; all if there are none."""
    known = {_average(run) for run in arm}
    return [run for run in base if _average(run) in known] or list(base)
