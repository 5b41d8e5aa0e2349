"""Write the results of an experiment: tables, figures and a page; the thinned runs; a copy of its analysis."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedgma.paper.analyses import ANALYSES, AnalysisRequest, Follow, unseen
from fedgma.paper.catalogue import Experiment, catalogue
from fedgma.paper.claims import Answer, correct_answers, look_at
from fedgma.paper.compare import Comparison, compare
from fedgma.paper.entries import ANALYSES_FOLDER, Entry, merged, read_export, write_export
from fedgma.paper.figures import draw
from fedgma.paper.findings import FILE, Finding, read_findings
from fedgma.paper.multiverse import choices_table, multiverse_of, universes_table
from fedgma.paper.plans import Cut
from fedgma.paper.printed import read_printed
from fedgma.paper.rates import Chosen
from fedgma.paper.sensitivity import sensitivity_table
from fedgma.paper.tables import cells_table, claims_table, taus_note
from fedgma.reports.pages import page
from fedgma.reports.plots.style import save
from fedgma.reports.report import Report, write_tables
from fedgma.reports.tables import Table


def make_report(comparison: Comparison, findings: Sequence[Finding] = ()) -> Report:
    """A `Report` of claims, cells of every split and notes; `findings` are those of the analysis."""
    experiment, answers = comparison.experiment, look_at(comparison, findings)
    splits = dict.fromkeys(compared.split for compared in comparison.compared)
    sensitivity = sensitivity_table(comparison)
    tables = [claims_table(answers), *([sensitivity] if sensitivity else [])]
    tables += [cells_table(comparison, split) for split in splits]
    tables += _of_universes(comparison)
    note = "" if experiment.universes else taus_note(comparison)
    return Report(
        title=f"{experiment.id}: {experiment.title} ({experiment.source})",
        verdicts=tuple(f"{answer.claim.text}: {answer.verdict}" for answer in answers),
        runs=tuple(entry.run for entry in comparison.entries),
        rows=(),
        comparisons=(),
        tables=tuple(tables),
        notes=(*comparison.notes, *([note] if note else [])),
    )


def _of_universes(comparison: Comparison) -> list[Table]:
    """The tables of a multiverse; empty for other experiments."""
    multiverse = multiverse_of(comparison) if comparison.experiment.universes else None
    tables = [] if multiverse is None else [choices_table(multiverse), universes_table(multiverse)]
    return [table for table in tables if table is not None]


def write_comparison(
    comparison: Comparison, out: Path, *, html: bool = True, findings: Sequence[Finding] = ()
) -> Report:
    """Write the tables (Markdown, LaTeX, CSV), the figures and, on request, the page of a comparison."""
    report = make_report(comparison, findings)
    pictures = draw(comparison)
    write_tables(report, out)
    (out / "pictures").mkdir(exist_ok=True)
    for picture in pictures:
        save(picture.figure, out / "pictures" / f"{picture.name}.png")
    if html:
        (out / "report.html").write_text(page(report, pictures), encoding="utf-8")
    return report


def export(
    experiment: Experiment,
    entries: Sequence[Entry],
    chosen: Chosen,
    out: Path,
    *,
    findings: Sequence[Finding] = (),
) -> int:
    """Write thinned runs, tables and figures of an experiment to `out/<ID>/`; return the number of runs there.

    Runs that an earlier export to this folder holds are kept, also those that the comparison does not use.
    """
    folder = out / experiment.id
    before = read_export(folder) if (folder / "runs.jsonl").is_file() else []
    comparison = compare(experiment, merged([*entries, *before]), chosen)
    if not comparison.entries:
        return len(before)
    kept = merged([*comparison.entries, *before])
    write_comparison(comparison, folder, html=False, findings=findings)
    write_export(kept, folder, experiment.splits)
    return len(kept)


def comparisons_in(results: Path, chosen: Chosen) -> dict[str, Comparison]:
    """Every experiment compared over the exported runs in a folder; those without runs have no entries."""
    there = [name for name in catalogue() if (results / name / "runs.jsonl").is_file()]
    read = {name: read_export(results / name) for name in there}
    return {name: compare(experiment, read.get(name, []), chosen) for name, experiment in catalogue().items()}


def answers_to(comparisons: Mapping[str, Comparison], results: Path) -> dict[str, list[Answer]]:
    """The verdict on every claim of these experiments, all corrected together; absent ones are not run."""
    names, answers = [], []
    for name, comparison in comparisons.items():
        of_experiment = look_at(comparison, findings_of(comparison.experiment, [results]))
        names += [name] * len(of_experiment)
        answers += of_experiment
    page: dict[str, list[Answer]] = {}
    for name, answer in zip(names, correct_answers(answers), strict=True):
        page.setdefault(name, []).append(answer)
    return page


def find_analysis(experiment: Experiment, paths: Sequence[Path]) -> Path | None:
    """The folder with the results of an experiment's analysis, below `paths`; None if there is none."""
    if not experiment.analysis:
        return None
    below = [path / inner for path in paths for inner in (ANALYSES_FOLDER, ".")]
    folders = [*(folder / experiment.id for folder in below), *(path for path in paths if path.name == experiment.id)]
    return next((folder for folder in folders if (folder / FILE).is_file()), None)


def findings_of(experiment: Experiment, paths: Sequence[Path]) -> list[Finding]:
    """The findings of an experiment's analysis below `paths`; empty if there are none."""
    folder = find_analysis(experiment, paths)
    return [] if folder is None else read_findings(folder)


def export_analysis(experiment: Experiment, paths: Sequence[Path], out: Path) -> bool:
    """Copy the files of an analysis without its run folders; return whether there was one."""
    source = find_analysis(experiment, paths)
    if source is None:
        return False
    target = out / experiment.id
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and source.resolve() != target.resolve():
            shutil.copyfile(file, target / file.name)
    return True


def run_analysis(experiment: Experiment, cut: Cut, out: Path, *, device: str, follow: Follow = unseen) -> list[str]:
    """Run the analysis of an experiment and save it; return its findings as sentences."""
    from fedgma.paper.analyses.saving import save as save_analysis

    folder = out / ANALYSES_FOLDER / experiment.id
    folder.mkdir(parents=True, exist_ok=True)
    seeds = cut.seeds or experiment.seeds
    first = experiment.first_seed
    request = AnalysisRequest(device, folder, seeds, first, rounds=cut.rounds, quick=cut.quick, follow=follow)
    result = ANALYSES[experiment.id](request)
    save_analysis(result, folder, f"{experiment.id}: {experiment.title}")
    for name, table in printed_tables(experiment).items():
        (folder / f"printed-{name}.csv").write_text(table, encoding="utf-8")
    return [*(finding.text for finding in result.findings), f"tables and pictures of the analysis: {folder}"]


def printed_tables(experiment: Experiment) -> dict[str, str]:
    """The printed tables of an experiment as CSV, for experiments without cells."""
    from fedgma.reports.tables import comma_separated

    tables = {}
    for table in experiment.printed:
        rows = [row for row in read_printed(table.file) if all(row[k] == v for k, v in table.where.items())]
        header = tuple(rows[0])
        body = tuple(tuple(row[name] for name in header) for row in rows)
        name = table.file.removesuffix(".csv")
        tables[name] = comma_separated(Table(name, name, header, body))
    return tables
