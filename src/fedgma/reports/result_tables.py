"""The tables of a report: results of arms, differences of two arms, other splits, other versions, unfinished runs."""

from collections.abc import Sequence

from fedgma.records.reader import Run, curve
from fedgma.reports.tables import Table, Value, slug
from fedgma.statistics.arms import Row, Spread, Summary, last_rounds, spread, summarise, telling, trait
from fedgma.statistics.comparisons import Comparison
from fedgma.statistics.convergence import converge, is_dead
from fedgma.statistics.labels import CLIENTS, capitalised, plain, short
from fedgma.statistics.metrics import ACCURACY, Metric, course, metrics_of
from fedgma.statistics.power import LEAST_SEEDS

ROUNDED = 1e-4  # points: what is below is the rounding of shares that were recorded in float32


def results_table(rows: Sequence[Row]) -> Table:
    """Best, last10 and final test score of every row, mean and standard deviation over seeds."""
    metric = rows[0].metric if rows else ACCURACY
    names = list(rows[0].label) if rows else []
    body: list[tuple[Value, ...]] = [
        (*map(plain, row.label.values()), len(row.runs), row.runs[0].planned, *row.scores.values(), _rises(row))
        for row in rows
    ]
    rising = metric.better == "higher"
    still = "still rises" if rising and metric.share else "still improves"
    note = (
        f"Test {metric.in_words}, {mean_over_seeds(rows)}. `last10`, the mean over the "
        f"{last_rounds([run for row in rows for run in row.runs])}, is what verdicts are about. `best`, the "
        f"{'highest' if rising else 'lowest'} of a run's evaluations, is selected on the test data: it lies "
        f"{'above' if rising else 'below'} `last10` by more, the more a curve fluctuates. `{still}`: {_STILL[still]}."
    )
    header = (*map(short, names), "seeds", "rounds", *Summary._fields, still)
    digits = metric.decimals(*(scores.mean for row in rows for scores in row.scores.values()))
    decimals = (*(2,) * (len(names) + 2), *(digits,) * (len(Summary._fields) + 1))
    return Table("results", metric.title, header, tuple(body), note, decimals)


_STILL = {
    "still rises": "mean of the last quarter of the rounds minus that of the quarter before, in points",
    "still improves": "by how much the mean of the last quarter of the rounds is better than that of the one before",
}


def _rises(row: Row) -> float | None:
    """By how much an arm still rises, without its diverged runs."""
    metric = row.metric
    curves = [(run, course(run, "test", metric)) for run in row.runs]
    scored = [(summarise(values, metric), values) for _, values in curves if values]
    dead = [is_dead(run) for run, values in curves if values]
    convergence, _ = converge([scored], row.runs[0].planned, metric, [dead])
    return convergence.rises[0]


def apart_table(rows: Sequence[Row], notes: Sequence[str]) -> Table | None:
    """Arms whose only partners used other data or another model; None if there are none."""
    if not rows:
        return None
    note = f"{'; '.join(notes)}. Only runs of one version are compared, so these are in no figure or verdict above."
    return results_table(rows)._replace(name="apart", title="Other versions of data or model", note=note)


def differences_table(comparison: Comparison) -> Table:
    """Every cell of a comparison: mean difference, interval, signs, p and corrected p."""
    first, second = comparison.names
    names = list(comparison.cells[0].label)
    body = []
    for cell in comparison.cells:
        verdict = cell.verdict
        signs = f"{verdict.ahead} of {verdict.of}"
        numbers = (*_shown(comparison, verdict.mean, *(verdict.interval or (None, None))), signs)
        tested = (verdict.p, verdict.corrected) if verdict.of >= LEAST_SEEDS else (None, None)
        course = cell.convergence
        further = (course.rounds, "yes" if course.converged else "no", sum(course.diverged))
        means = _shown(comparison, cell.best.mean, None if cell.settled is None else cell.settled.mean)
        body.append((*(cell.label[name] for name in names), cell.says, *numbers, *tested, *further, *means))
    tested_names = ("verdict", "difference", "CI low", "CI high", "seeds ahead", "p", "p (Holm)")
    header = (*map(short, names), *tested_names, "rounds", "converged", "diverged", "best", "without diverged")
    note = (
        f"{capitalised(_what_is_compared(comparison))} ({comparison.metric}), paired by seed; "
        f"95 % CI and p of the paired t test. Fewer than {LEAST_SEEDS} seeds are preliminary. `best`: the difference "
        "of the best evaluations, over the rounds that both arms evaluated. `without diverged`: the difference without "
        "the pairs in which a run diverged."
    )
    tests = comparison.cells[0].verdict.tests if len(comparison.cells) == 1 else comparison.tests
    if len(comparison.cells) > 1 or tests > 1:
        note += f" p (Holm) is corrected for {tests} tests." if tests else ""
    if len(comparison.cells) > 1:
        note += f" {capitalised(comparison.signs)}."
    return Table(
        f"differences-{slug(first)}-{slug(second.removeprefix('the '))}",
        capitalised(f"{first} against {second}"),
        header,
        tuple(body),
        note,
        _decimals_of_differences(comparison, header),
    )


def _shown(comparison: Comparison, *differences: float | None) -> tuple[float | None, ...]:
    """Differences without those of shares that come from the rounding of float32 alone."""
    least = ROUNDED if comparison.score.share else 0.0
    return tuple(0.0 if value is not None and abs(value) < least else value for value in differences)


def _what_is_compared(comparison: Comparison) -> str:
    """The sign and the unit of the differences."""
    (first, second), score = comparison.names, comparison.score
    if score.better == "lower":
        first, second = second, first
    unit = f"points of {comparison.split} {score.words}" if score.share else f"{comparison.split} {score.label}"
    return f"{first} minus {second}, {unit}" + (" where lower is better" if score.better == "lower" else "")


def _decimals_of_differences(comparison: Comparison, header: Sequence[str]) -> tuple[int, ...]:
    digits = comparison.score.decimals(*(cell.verdict.mean for cell in comparison.cells))
    differences = ("difference", "CI low", "CI high", "best", "without diverged")
    return tuple(digits if name in differences else 2 for name in header)


def splits_table(rows: Sequence[Row]) -> Table | None:
    """Last10 of every metric on every split that was measured and over clients; None if that is the test alone."""
    paths = _measured([run for row in rows for run in row.runs])
    only_accuracy = set(paths.values()) <= {ACCURACY}
    if only_accuracy and not {path[0] for path in paths} - {"test", "train"}:
        return None
    body = [(row.name, *(_last10(row, path, metric) for path, metric in paths.items())) for row in rows]
    columns = list(zip(*body, strict=True))[1:]
    decimals = [
        metric.decimals(*(cell.mean for cell in column if isinstance(cell, Spread)))
        for metric, column in zip(paths.values(), columns, strict=True)
    ]
    named = {path: _split_in_words(path, metric) for path, metric in paths.items()}
    if only_accuracy:
        title, unit, header = (
            "Other splits and clients",
            " in percent",
            [n.replace(" accuracy", "") for n in named.values()],
        )
    else:
        title, unit = "All metrics, splits and clients", ""
        header = [f"{named[path]}, {metric.unit}" if metric.unit else named[path] for path, metric in paths.items()]
    note = f"last10{unit}, {mean_over_seeds(rows)}."
    return Table("splits", title, ("arm", *header), tuple(body), note, (2, *decimals))


def _split_in_words(path: tuple[str, str], metric: Metric) -> str:
    split, what = path
    if split == "clients" and what in CLIENTS:
        return CLIENTS[what]
    return f"{split.replace('_', ' ')} {metric.words if what == metric.name else what.replace('_', ' ')}"


def _last10(row: Row, path: tuple[str, str], metric: Metric) -> Spread | None:
    curves = [curve(run, *path) for run in row.runs]
    scores = [summarise(measured, metric).last10 for measured in curves if measured]
    return spread(scores) if scores else None


def unfinished_table(runs: Sequence[Run]) -> Table | None:
    """The unfinished runs; None if all are finished."""
    names = telling(runs, without=())
    late = [run for run in runs if not run.finished]
    if not late:
        return None
    body = [
        (
            run.folder.name[:12],
            *(plain(trait(run, name)) for name in names),
            f"{len(run.rounds)} of {run.planned}",
        )
        for run in late
    ]
    note = "These runs are left out above. Run the same command again to continue them."
    return Table("unfinished", "Unfinished runs", ("run", *map(short, names), "rounds"), tuple(body), note)


def _measured(runs: Sequence[Run]) -> dict[tuple[str, str], Metric]:
    """Paths to the scores that any run measured, each with its metric."""
    paths: dict[tuple[str, str], Metric] = {}
    for run in runs:
        metrics = metrics_of(run)
        for record in run.rounds:
            scored = {split: values for split, values in record.items() if isinstance(values, dict)}
            paths.update({(split, m.name): m for split, values in scored.items() for m in metrics if m.name in values})
            paths.update({("clients", name): metrics[0] for name in scored.get("clients", {})})
    return {path: metric for path, metric in paths.items() if any(curve(run, *path) for run in runs)}


def mean_over_seeds(rows: Sequence[Row]) -> str:
    """The unit of a table of scores, in words; one seed has no deviation."""
    several = any(len(row.runs) > 1 for row in rows)
    return "mean ± standard deviation over seeds" if several else "one seed"
