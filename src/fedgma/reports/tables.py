"""Tables, and how to write them as Markdown, LaTeX, CSV and plain text."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from fedgma.records.reader import Run, curve
from fedgma.statistics.arms import Row, Spread, Summary, last_rounds, spread, summarise, telling, trait
from fedgma.statistics.comparisons import Comparison
from fedgma.statistics.convergence import converge
from fedgma.statistics.labels import plain, short
from fedgma.statistics.metrics import ACCURACY, Metric, course, metrics_of
from fedgma.statistics.power import LEAST_SEEDS

Value = str | float | int | Spread | None

FORMULA = re.compile(r"[\s\x00-\x1f\ufeff]*[=+\-@＝＋－＠]")  # begins a formula in some spreadsheet
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class Table(NamedTuple):
    """A titled table; every row has as many values as the header has names."""

    name: str  # stem of its file names
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""
    decimals: tuple[int, ...] = ()  # of the numbers in each column; two where nothing is said


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
    curves = [course(run, "test", metric) for run in row.runs]
    scored = [(summarise(values, metric), values) for values in curves if values]
    convergence, _ = converge([scored], row.runs[0].planned, metric)
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
        numbers = (verdict.mean, *(verdict.interval or (None, None)), signs)
        tested = (verdict.p, verdict.corrected) if verdict.of >= LEAST_SEEDS else (None, None)
        course = cell.convergence
        further = (course.rounds, "yes" if course.converged else "no", sum(course.diverged), cell.best.mean)
        settled = None if cell.settled is None else cell.settled.mean
        body.append((*(cell.label[name] for name in names), cell.says, *numbers, *tested, *further, settled))
    tested_names = ("verdict", "difference", "CI low", "CI high", "seeds ahead", "p", "p (Holm)")
    header = (*map(short, names), *tested_names, "rounds", "converged", "diverged", "best", "without diverged")
    note = (
        f"{_what_is_compared(comparison)} ({comparison.metric}), paired by seed; "
        f"95 % CI and p of the paired t test. Fewer than {LEAST_SEEDS} seeds are preliminary. `best`: the difference "
        "of the best evaluations, over the rounds that both arms evaluated. `without diverged`: the difference without "
        "the pairs in which a run diverged."
    )
    if len(comparison.cells) > 1:
        note += f" p (Holm) is corrected for {comparison.tests} tests." if comparison.tests else ""
        note += f" {comparison.signs[0].upper()}{comparison.signs[1:]}."
    return Table(
        f"differences-{slug(first)}-{slug(second.removeprefix('the '))}",
        f"{first} against {second}",
        header,
        tuple(body),
        note,
        _decimals_of_differences(comparison, header),
    )


def _what_is_compared(comparison: Comparison) -> str:
    """The sign and the unit of the differences."""
    (first, second), score = comparison.names, comparison.score
    if score.better == "lower":
        first, second = second, first
    unit = f"points of {comparison.split} {score.name}" if score.share else f"{comparison.split} {score.label}"
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
    named = {path: " ".join(path).replace("_", " ") for path in paths}
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


def slug(text: str) -> str:
    """A text as a file name.

    >>> slug("GMA, tau 0.4")
    'gma-tau-0.4'
    """
    kept = "".join(char if char.isalnum() or char == "." else " " for char in text.lower())
    return "-".join(kept.split())[:100] or "arm"


def said(value: Value, deviation: str = " ± ", decimals: int = 2) -> str:
    """A value as text: two decimals or as many as asked for, or two significant digits if it is smaller.

    >>> said(Spread(74.126, 0.31, 3)), said(0.00012), said(None), said(1.5)
    ('74.13 ± 0.31', '0.00012', '', '1.50')
    """
    if isinstance(value, Spread):
        after = "" if value.deviation is None else f"{deviation}{value.deviation:.{decimals}f}"
        return f"{value.mean:.{decimals}f}{after}"
    if isinstance(value, float):
        return f"{value:.2g}" if 0 < abs(value) < 10**-decimals else f"{value:.{decimals}f}"
    return "" if value is None else str(value)


def cells(table: Table) -> list[list[str]]:
    """The rows of a table as text.

    >>> cells(Table("t", "T", ("arm", "mse"), (("GMA", 0.01234),), "", (2, 4)))
    [['GMA', '0.0123']]
    """
    decimals = table.decimals or (2,) * len(table.header)
    return [[said(value, decimals=d) for value, d in zip(row, decimals, strict=True)] for row in table.rows]


def markdown(table: Table) -> str:
    """A table as a Markdown section.

    >>> print(markdown(Table("t", "T", ("a|b", "n"), (("x", 1),), "Note.")))
    ## T
    <BLANKLINE>
    | a\\|b | n |
    | --- | ---: |
    | x | 1 |
    <BLANKLINE>
    Note.
    """
    lines = [[_in_markdown(name) for name in table.header], ["---:" if n else "---" for n in numeric(table)]]
    lines += [[_in_markdown(cell) for cell in row] for row in cells(table)]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"## {table.title}\n\n{body}" + (f"\n\n{table.note}" if table.note else "")


def latex(table: Table) -> str:
    """A table as a LaTeX tabular with booktabs rules."""
    places = "".join("r" if right else "l" for right in numeric(table))
    lines = [" & ".join(_in_latex(name) for name in table.header) + r" \\"]
    lines += [" & ".join(_in_latex(cell) for cell in row) + r" \\" for row in cells(table)]
    inside = "\n".join([r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"])
    note = f"% {' '.join(table.note.split())}\n" if table.note else ""
    return f"{note}\\begin{{tabular}}{{{places}}}\n{inside}\n\\end{{tabular}}\n"


def comma_separated(table: Table) -> str:
    """A table as CSV at full precision; a mean with a deviation takes two columns.

    >>> print(comma_separated(Table("t", "T", ("arm", "best"), (("GMA", Spread(74.5, 0.25, 3)),))), end="")
    arm,best,best sd
    GMA,74.5,0.25
    """
    wide = [any(isinstance(row[column], Spread) for row in table.rows) for column in range(len(table.header))]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(
        [
            _cell(text)
            for name, with_deviation in zip(table.header, wide, strict=True)
            for text in ([name, f"{name} sd"] if with_deviation else [name])
        ]
    )
    for row in table.rows:
        writer.writerow(
            [cell for value, with_deviation in zip(row, wide, strict=True) for cell in _raw(value, with_deviation)]
        )
    return out.getvalue()


def text(table: Table) -> str:
    """A table as aligned columns for a terminal; a record may hold any text, so what a terminal would obey is cut."""
    lines = [list(table.header), *([printable(cell) for cell in row] for row in cells(table))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]
    right = numeric(table)
    padded = [
        "  ".join(
            cell.rjust(width) if last else cell.ljust(width)
            for cell, width, last in zip(line, widths, right, strict=True)
        )
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in padded)


def printable(text: str) -> str:
    """A text on one line, without characters that control a terminal.

    >>> printable("a\\x1b[31m\\nb")
    'a?[31m?b'
    """
    return "".join(char if char.isprintable() else "?" for char in text)


def html(table: Table) -> str:
    """A table as an HTML table.

    >>> html(Table("t", "T", ("a & b",), ((1,),))).splitlines()[1]
    '<thead><tr><th class="n">a &amp; b</th></tr></thead>'
    """
    right = numeric(table)
    head = "".join(f"<th{_place(n)}>{escape(name)}</th>" for name, n in zip(table.header, right, strict=True))
    body = "".join(
        f"<tr>{''.join(_in_html(cell, n) for cell, n in zip(row, right, strict=True))}</tr>\n" for row in cells(table)
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table>"


def _in_html(text: str, right: bool) -> str:
    attribute = ' class="long"' if len(text) > 40 else _place(right)
    return f"<td{attribute}>{escape(text)}</td>"


def _place(right: bool) -> str:
    return ' class="n"' if right else ""


WRITERS: dict[str, Callable[[Table], str]] = {"md": markdown, "tex": latex, "csv": comma_separated}


def numeric(table: Table) -> list[bool]:
    """Which columns hold numbers and are right-aligned."""
    return [
        any(isinstance(row[column], int | float | Spread) for row in table.rows) for column in range(len(table.header))
    ]


def _raw(value: Value, with_deviation: bool) -> list[str]:
    if isinstance(value, Spread):
        return [repr(value.mean), "" if value.deviation is None else repr(value.deviation)]
    number = isinstance(value, float)  # numpy floats too, whose repr names their type
    written = "" if value is None else repr(float(value)) if number else _cell(str(value))
    return [written, ""] if with_deviation else [written]


def _cell(text: str) -> str:
    """A text that no spreadsheet runs as a formula; a number stays a number.

    >>> _cell("=1+1"), _cell("-0.5"), _cell("-cmd"), _cell("tau")
    ("'=1+1", '-0.5', "'-cmd", 'tau')
    """
    written = " ".join(text.splitlines())
    return f"'{written}" if FORMULA.match(written) and not NUMBER.fullmatch(written) else written


def _in_markdown(value: str) -> str:
    for mark in "\\`*_|[]":
        value = value.replace(mark, f"\\{mark}")
    return " ".join(value.split())


LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
LATEX |= {mark: f"\\{mark}" for mark in "&%$#_{}"}


def _in_latex(value: str) -> str:
    return " ".join("".join(LATEX.get(char, char) for char in value).split())
