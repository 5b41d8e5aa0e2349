"""Make a report from run folders: the verdict first, then tables, figures, settings and provenance."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedgma.aggregation.rules import BASELINE
from fedgma.documents import PathLike
from fedgma.records.reader import Run, read_runs
from fedgma.reports.result_tables import (
    apart_table,
    differences_table,
    results_table,
    splits_table,
    unfinished_table,
)
from fedgma.reports.tables import WRITERS, Table, markdown
from fedgma.reports.targets import targets_table
from fedgma.statistics.arms import Row, common, last_rounds, rows, telling, without_extended
from fedgma.statistics.baseline import against_baseline
from fedgma.statistics.comparisons import Comparison
from fedgma.statistics.labels import NAMES, capitalised, counted, is_rule, plain, short, sortable
from fedgma.statistics.metrics import metric_of
from fedgma.statistics.selection import finished_of
from fedgma.statistics.selection import where as filtered


class Report(NamedTuple):
    """The contents of a report, before they are written to files."""

    title: str
    verdicts: tuple[str, ...]
    runs: tuple[Run, ...]
    rows: tuple[Row, ...]
    comparisons: tuple[Comparison, ...]
    tables: tuple[Table, ...]
    notes: tuple[str, ...]


def make_report(
    paths: PathLike | Iterable[PathLike],
    *,
    metric: str = "last10",
    split: str = "test",
    where: str | Sequence[str] = (),
    of: str | None = None,
    targets: Sequence[float] = (),
) -> Report:
    """Read run folders and compute the report; `where` takes filters such as `dataset=t.npz` or `model=lenet,cnn`.

    `of` names what is scored, such as "mae"; by default the first metric that the runs record. `targets` are scores,
    shares in percent, for the table of rounds and time to a target; runs with a clock have one without them too.
    """
    runs, extended = without_extended(filtered(read_runs(paths), where))
    finished = finished_of(runs)
    known = [run for run in finished if is_rule(str(run.settings["aggregator"]))]
    score = metric_of(finished, of)
    comparisons = against_baseline(known, metric=metric, split=split, of=score.name)
    shown, apart = _set_apart(rows(finished, score), comparisons)
    versions = list(dict.fromkeys(words for pair in comparisons if pair.cells for words in pair.versions))
    optional = [
        targets_table(shown, targets, split),
        splits_table(shown),
        apart_table(apart, versions),
        unfinished_table(runs),
    ]
    return Report(
        title=title(runs),
        verdicts=tuple(verdict_of(pair, alone=len(comparisons) == 1) for pair in comparisons)
        or (_without_pair(finished),),
        runs=tuple(runs),
        rows=tuple(shown),
        comparisons=tuple(comparisons),
        tables=(
            results_table(shown),
            *(differences_table(pair) for pair in comparisons if pair.cells),
            *(table for table in optional if table),
        ),
        notes=(
            *_notes(runs, [*shown, *apart], comparisons, metric, split),
            *(f"{words} and are listed apart" for words in versions),
            *_unknown(finished),
            *_replaced(extended),
        ),
    )


def _set_apart(groups: Sequence[Row], comparisons: Sequence[Comparison]) -> tuple[list[Row], list[Row]]:
    """Split rows into those to show, and those that have partners only in another version of data or model.

    If no two runs can be paired at all, no row is set apart: verdict and labels then state the versions.
    """
    other = {id(run) for pair in comparisons if pair.cells for run in pair.apart}
    apart = [row for row in groups if all(id(run) in other for run in row.runs)]
    kept = [row for row in groups if not all(id(run) in other for run in row.runs)]
    return kept, apart


def _unknown(finished: Sequence[Run]) -> list[str]:
    """Runs of rules that this version does not know: they are listed, and in no verdict."""
    names = [str(run.settings["aggregator"]) for run in finished if not is_rule(str(run.settings["aggregator"]))]
    if not names:
        return []
    return [f"{len(names)} runs name an unknown rule ({_listed(set(names))}) and are in no verdict"]


def _replaced(extended: Sequence[Run]) -> list[str]:
    if not extended:
        return []
    words = "1 run was" if len(extended) == 1 else f"{len(extended)} runs were"
    return [f"{words} extended to more rounds; of these only the longer runs are shown"]


def title(runs: Sequence[Run]) -> str:
    """The title of a report, e.g. "fmnist-mini, label_skew: GMA and mean"."""
    about = [
        {plain(run.settings[name]) for run in runs if run.settings.get(name) is not None}
        for name in ("dataset", "partition.name")
    ]
    rules = {str(run.settings["aggregator"]) for run in runs}
    arms = {NAMES.get(rule, rule) for rule in rules if is_rule(rule)} or rules
    return f"{', '.join(_listed(values) for values in about if values)}: {_listed(arms)}"


def common_settings(runs: Sequence[Run]) -> dict[str, Any]:
    """The settings that all runs share."""
    return common([run.settings for run in runs])


def varied_settings(runs: Sequence[Run]) -> dict[str, str]:
    """The settings that vary, with their values: first those that tell the runs apart, then those implied by them."""
    settings = dict.fromkeys(name for run in runs for name in run.settings)
    telling_first = dict.fromkeys((*(name for name in telling(runs, without=()) if name in settings), *settings))
    shared = common_settings(runs)
    return {
        name: ", ".join(sorted({plain(run.settings.get(name)) for run in runs}, key=sortable))
        for name in telling_first
        if name not in shared
    }


def in_markdown(report: Report) -> str:
    """The whole report as one Markdown text."""
    lines = [f"# {report.title}", "", *(f"**{verdict}.**\n" for verdict in report.verdicts)]
    lines += [f"- {note}." for note in report.notes]
    settings = {name: plain(value) for name, value in common_settings(report.runs).items() if value is not None}
    shared = "\n".join(f"- {name}: {value}" for name, value in settings.items())
    varied = "\n".join(f"- {name}: {values}" for name, values in varied_settings(report.runs).items()) or "- nothing"
    parts = ["\n".join(lines).strip(), *map(markdown, report.tables)]
    parts += [f"## Settings\n\nVaried:\n\n{varied}\n\nShared by all runs:\n\n{shared}"]
    return ("\n\n".join(parts) + "\n").replace("<", "&lt;")


def write_tables(report: Report, out: PathLike) -> list[Path]:
    """Every table as Markdown, LaTeX and CSV under `out/tables`, and the text as report.md."""
    out = Path(out)
    folder = out / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    written = [_write(out / "report.md", in_markdown(report))]
    for table in report.tables:
        for ending, writer in WRITERS.items():
            written.append(_write(folder / f"{table.name}.{ending}", writer(table).rstrip("\n") + "\n"))
    return written


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def verdict_of(comparison: Comparison, *, alone: bool) -> str:
    """The verdict as a sentence; unless it stands `alone`, the names of the arms come first."""
    first, second = comparison.names
    text = comparison.text if alone and comparison.cells else f"{first} against {second}: {comparison.text}"
    return capitalised(text)


def with_limits(verdict: str) -> tuple[str, str]:
    """What a verdict says, and what limits it.

    >>> with_limits("GMA ahead in 2 of 2 settings; over all settings: ahead by 1.00 points; not converged: 20 rounds")
    ('GMA ahead in 2 of 2 settings; over all settings: ahead by 1.00 points', 'not converged: 20 rounds')
    """
    parts = verdict.split("; ")
    count = 2 if len(parts) > 1 and parts[1].startswith("over ") else 1  # the verdict over several settings
    return "; ".join(parts[:count]), "; ".join(parts[count:])


def _without_pair(runs: Sequence[Run]) -> str:
    arms = _listed({str(run.settings["aggregator"]) for run in runs})
    return f"Nothing to compare: the finished runs aggregate by {arms}; a verdict needs `{BASELINE}` and another rule"


def _notes(
    runs: Sequence[Run], groups: Sequence[Row], comparisons: Sequence[Comparison], metric: str, split: str
) -> list[str]:
    finished = sum(run.finished for run in runs)
    used = sum(len(row.runs) for row in groups)
    seeds = _listed({str(run.seed) for run in runs})
    notes = [f"{finished} of {len(runs)} runs finished; seeds {seeds}"]
    if used < finished:
        notes.append(f"{finished - used} runs repeat the settings and seed of another; the first of each is used")
    if comparisons:
        late = last_rounds([run for row in groups for run in row.runs])
        summary = {"last10": f"mean of the {late}", "best": "best round", "final": "last round"}[metric]
        score = comparisons[0].score
        what = f"Points of {split} {score.words}" if score.share else f"Differences in {split} {score.label}"
        way = "" if score.better == "higher" else ", lower is better"
        notes.insert(0, f"{what} ({summary}){way}, runs paired by seed and settings, 95 % CI")
    for comparison in comparisons:
        first, second = comparison.names
        if comparison.alone:
            has = "has" if comparison.alone == 1 else "have"
            alone = counted(comparison.alone, "finished run")
            notes.append(f"{alone} of {first} or {second} {has} no partner with the same seed and settings")
        more = [short(name) for name in comparison.differ if name != "aggregator"]
        if more:
            notes.append(f"{first} and {second} differ in {', '.join(more)} too")
    listed = [record.get("refused") for run in runs for record in run.rounds]
    refused = sum(len(clients) for clients in listed if isinstance(clients, list))
    if refused:
        notes.append(f"The gate refused {refused} client updates")
    return notes


def _listed(values: set[str]) -> str:
    """At most six values as a phrase.

    >>> _listed({"b", "a"}), _listed({str(n) for n in range(20)})
    ('a and b', '0, 1, 10, 11, 12 and 15 more')
    """
    ordered = sorted(values)
    if len(ordered) > 6:
        return f"{', '.join(ordered[:5])} and {len(ordered) - 5} more"
    return " and ".join(part for part in (", ".join(ordered[:-1]), ordered[-1]) if part)
