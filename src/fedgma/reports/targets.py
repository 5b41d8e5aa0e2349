"""The table of rounds and simulated time to a target."""

from collections.abc import Callable, Sequence

from fedgma.records.reader import Run
from fedgma.reports.tables import Table, Value
from fedgma.statistics.arms import Row
from fedgma.statistics.labels import plain, short
from fedgma.statistics.targets import lost_share, mean_staleness, reach, times, usual_target


def targets_table(rows: Sequence[Row], targets: Sequence[float] = (), split: str = "test") -> Table | None:
    """Rounds and simulated seconds until every row reaches each target; None without targets and without clocks."""
    clocked = any(times(run) for row in rows for run in row.runs)
    usual = usual_target(rows) if clocked and not targets else None
    wanted = list(targets) if usual is None else [usual]
    if not rows or not wanted:
        return None
    body = [_reached(row, target, split, clocked=clocked) for target in wanted for row in rows]
    metric = rows[0].metric
    timed = ("seconds", "whole run, s", "lost, %", "staleness") if clocked else ()
    header = (*map(short, rows[0].label), f"target, {metric.unit}".rstrip(", "), "reached", "rounds", *timed)
    note = (
        f"When the {split} {metric.words} first reaches the target: median over seeds; a run that does not reach it is "
        "later than any other."
    )
    if usual is not None:
        note += " The target is the worst `last10` of the arms."
    if clocked:
        note += (
            " `seconds` are simulated. `lost`: clients that were asked and answered too late or never. `staleness`: "
            "mean age of the updates in versions of the model."
        )
    return Table(
        "targets", "Rounds and time to a target" if clocked else "Rounds to a target", header, tuple(body), note
    )


def _reached(row: Row, target: float, split: str, *, clocked: bool) -> tuple[Value, ...]:
    reached = reach(row, target, split)
    rounds = None if reached.rounds is None else f"{reached.rounds:g}"
    cells = (*map(plain, row.label.values()), target, f"{reached.runs} of {reached.of}", rounds)
    return (*cells, reached.seconds, *_of_clock(row)) if clocked else cells


def _of_clock(row: Row) -> tuple[Value, Value, Value]:
    """Length of the whole run, percent of clients lost, age of updates; mean over seeds."""
    end = _mean(row, lambda run: max(times(run).values(), default=None))
    lost = _mean(row, lost_share)
    return end, None if lost is None else 100 * lost, _mean(row, mean_staleness)


def _mean(row: Row, figure: Callable[[Run], float | None]) -> float | None:
    values = [value for run in row.runs if (value := figure(run)) is not None]
    return sum(values) / len(values) if values else None
