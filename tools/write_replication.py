"""Write docs/replication.md, the pages behind it, and tables and figures in results/, all from the exported runs.

python tools/write_replication.py            # pages, the picture, tables and figures of all experiments
python tools/write_replication.py --tables   # without the figures of experiments, which take minutes
python tools/write_replication.py --page     # the pages and the picture alone

The words are in tools/replication/; a field such as {C6/0} becomes what the runs say to the first claim of C6.
"""

import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import NamedTuple

from fedgma.paper import overview
from fedgma.paper.catalogue import asks_again, catalogue
from fedgma.paper.claims import Answer, is_about
from fedgma.paper.compare import Compared, Comparison
from fedgma.paper.entries import Entry, merged
from fedgma.paper.multiverse import choices_table, most_telling, multiverse_of, sentences, specifications
from fedgma.paper.outdated import why_outdated
from fedgma.paper.plots.forest import draw_forest
from fedgma.paper.rates import read_chosen
from fedgma.paper.results import answers_to, comparisons_in, findings_of, make_report, write_comparison
from fedgma.paper.tables import CLAIMS
from fedgma.reports.plots.specifications import draw_specifications
from fedgma.reports.plots.style import plain_text, save
from fedgma.reports.report import write_tables
from fedgma.reports.tables import Table, markdown
from fedgma.statistics.comparisons import over_seeds
from fedgma.statistics.labels import capitalised, counted, plain, short
from fedgma.statistics.verdicts import from_interval, paired

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
DOCS = ROOT / "docs"
WORDS = ROOT / "tools" / "replication"
PICTURE = DOCS / "pictures" / "replication.png"
MULTIVERSE = DOCS / "pictures" / "multiverse.png"
MOST_CELLS = 60  # of a page; longer tables are in results/ alone


class Replication(NamedTuple):
    """Everything that the pages are written from."""

    comparisons: Mapping[str, Comparison]
    answers: Mapping[str, Sequence[Answer]]

    @property
    def entries(self) -> list[Entry]:
        """Every exported run once."""
        return merged(entry for one in self.comparisons.values() for entry in one.entries)


def read() -> Replication:
    """What the exported runs say."""
    comparisons = comparisons_in(RESULTS, read_chosen())
    return Replication(comparisons, answers_to(comparisons, RESULTS))


def pages(replication: Replication) -> dict[Path, str]:
    """Every page with its text."""
    written = {DOCS / "replication.md": filled(WORDS / "page.md", replication, _page_fields(replication))}
    written[DOCS / "replication" / "record.md"] = filled(WORDS / "record.md", replication, _record_fields(replication))
    written[DOCS / "replication" / "changes.md"] = filled(
        WORDS / "changes.md", replication, _change_fields(replication)
    )
    for name in catalogue():
        if replication.comparisons[name].entries or any(replication.answers.get(name, ())):
            written[DOCS / "replication" / f"{name}.md"] = experiment_page(name, replication)
    return written


def filled(template: Path, replication: Replication, fields: Mapping[str, str]) -> str:
    """A template with its fields replaced."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        return fields[name] if name in fields else _claim_field(name, replication)

    text = re.sub(r"\{([^{}]+)\}", value, template.read_text(encoding="utf-8"))
    return "\n\n".join(wrapped(block) for block in text.split("\n\n"))


def wrapped(block: str) -> str:
    """A paragraph or a list of Markdown in lines of at most 120 characters; other blocks as they are."""
    if block.startswith(("|", "#", "!")):
        return block
    items = re.split(r"\n(?=- )", block.rstrip("\n"))
    options = {"width": 120, "break_on_hyphens": False, "break_long_words": False}
    lines = [fill(" ".join(item.split()), subsequent_indent="  " * item.startswith("- "), **options) for item in items]
    return "\n".join(lines) + "\n" * block.endswith("\n")


def _claim_field(name: str, replication: Replication) -> str:
    """A field such as C6/0, C6/0/p, C6/0/printed, C6/0/verdict, E1/0/apart or E1/0/cifar10 (a group of data sets).

    C6/0/flat is the difference over the cells that rise by at most half a point, C17/0/last10 and C17/0/best are the
    level of the plain mean, C17/0/seeds how many seeds there are.
    """
    experiment, number, what = f"{name}/".split("/")[:3]
    answer = replication.answers[experiment][int(number)]
    look = answer.looks.get(what, overview.main_look(answer))
    match what:
        case "p":
            return look.test.correction
        case "printed":
            return f"{look.printed:+.2f}"
        case "verdict":
            return str(look.verdict)
        case "last10" | "best":
            levels = [
                compared.restated(what).levels[0] for compared in _cells_of(answer, replication.comparisons[experiment])
            ]
            return f"{mean(level.mean for level in levels if level is not None):.1f}"
        case "seeds":
            return str(
                max(len(compared.differences) for compared in _cells_of(answer, replication.comparisons[experiment]))
            )
        case "flat":
            flat = [compared for compared in _cells_of(answer, replication.comparisons[experiment]) if compared.is_flat]
            said = overview.in_words(paired(over_seeds([compared.differences for compared in flat])))
            return f"{said} in {len(flat)} cells"
        case "apart":
            aside = look.apart["not converged"]
            return f"{overview.in_words(aside.difference)} in {counted(aside.cells, 'unconverged cell')}"
        case _:
            return overview.in_words(look.shown, look.unit)


def _cells_of(answer: Answer, comparison: Comparison) -> list[Compared]:
    """The cells of a claim that were run in both arms."""
    return [
        compared
        for compared in comparison.on(answer.claim.split)
        if is_about(answer.claim, compared) and compared.differences
    ]


def _page_fields(replication: Replication) -> dict[str, str]:
    names = [name for name in catalogue() if name[0] == "E" or _is_asked_again(name)]
    table = _bare(overview.claims_in_lines(replication.answers, names))
    table = re.sub(r"^\| ([EC]\d+) \|", r"| [\1](replication/\1.md) |", table, flags=re.MULTILINE).replace(" | ", "|")
    steps = dict(sorted(overview.distances(replication.comparisons["C8"], "local_steps").items()))
    looks = [look for listed in replication.answers.values() for answer in listed for look in answer.looks.values()]
    fields = {
        "claims": table,
        "steps": overview.near_print(steps, "local steps"),
        "readings": _readings(replication.comparisons["C8"], {"local_steps": 6}),
        "tests": str(max(look.test.tests for look in looks if look.test is not None)),
        "outdated": str(sum(bool(why_outdated(entry.settings, entry.facts)) for entry in replication.entries)),
        "C35 apart": _finding("C35", "separate/5/non_participating", replication),
        "C39 best": _level_of_mean("C39", replication),
        "C16 0.005": _cell("C16", {"server_learning_rate": 0.005}, replication),
        "seeds C8": str(len({entry.seed for entry in replication.comparisons["C8"].entries})),
    }
    for name in ("E1", "E2", "E8", "E9", "C6"):
        levels = overview.levels_of(replication.comparisons[name])
        fields |= {f"{what} {name}": str(getattr(levels, what)) for what in ("converged", "run", "above")}
        fields |= {
            f"cells {name}": f"{levels.run} of {levels.of}",
            f"near {name}": f"{levels.near} of {levels.printed}",
        }
    return fields


def _level_of_mean(name: str, replication: Replication) -> str:
    """The best evaluation of the plain mean, averaged over seeds, of an experiment with one cell."""
    [cell] = replication.comparisons[name].on("test")
    level = cell.restated("best").levels[0]
    assert level is not None
    return f"{level.mean:.1f}"


def _cell(name: str, where: Mapping[str, object], replication: Replication) -> str:
    """The difference in the cell of an experiment with these settings, in words."""
    [cell] = [
        compared
        for compared in replication.comparisons[name].on("test")
        if compared.differences and all(compared.cell.settings.get(key) == value for key, value in where.items())
    ]
    return overview.in_words(paired(list(cell.differences.values())))


def _is_asked_again(name: str) -> bool:
    """Whether an experiment asks claims of the paper once more, and was run."""
    return asks_again(catalogue()[name]) and (RESULTS / name).is_dir()


def _readings(comparison: Comparison, where: Mapping[str, object]) -> str:
    """In how many cells every arm is near the printed masked level, in words: the mean in 11 of 19 cells, GMA in 2."""
    (first, most, cells), *others = overview.nearest_readings(comparison, where)
    rest = [f"{arm} in {number or 'none'}" for arm, number, _ in others]
    return ", ".join([f"{first} in {most} of {cells} cells", *rest])


def _finding(name: str, path: str, replication: Replication) -> str:
    """The estimate of a finding with its interval."""
    findings = {finding.id: finding for finding in findings_of(replication.comparisons[name].experiment, [RESULTS])}
    verdict = from_interval(findings[path].estimate, findings[path].interval, findings[path].n)
    return overview.in_words(verdict)


def _record_fields(replication: Replication) -> dict[str, str]:
    compute = overview.compute_table(replication.entries)
    hours = {True: 0.0, False: 0.0}
    for device, *_, spent in compute.rows:
        hours[str(device).startswith("cpu")] += float(spent)
    return {
        "runs": _bare(overview.runs_table(replication.comparisons)),
        "compute": _bare(compute),
        "gpu": f"{hours[False]:.1f}",
        "cpu": f"{hours[True]:.1f}",
        "defaults": overview.defaults(),
        "settings": _bare(overview.settings_table(replication.comparisons)),
        "rates": _bare(overview.rates_table(read_chosen())),
        "commands": _bare(commands()),
        "evidence": _bare(overview.evidence_table(replication.comparisons, replication.answers)),
    }


def _change_fields(replication: Replication) -> dict[str, str]:
    """Every claim that had a verdict by the first rules, with that of today and the reason for the change."""
    first = tomllib.loads((WORDS / "before.toml").read_text(encoding="utf-8"))
    rows = []
    for name, verdicts in first.items():
        for answer, before in zip(replication.answers[name], verdicts, strict=True):
            changed = before != answer.verdict
            rows.append((name, answer.claim.text, before, answer.verdict, overview.reason(answer) if changed else None))
    table = _bare(Table("", "", ("experiment", "claim", "before", "now", "why"), tuple(rows)))
    return {"table": table, "claims": str(len(rows)), "changed": str(sum(row[-1] is not None for row in rows))}


def commands() -> Table:
    """For each experiment the commands that make its runs and compare them."""
    rows = []
    for name, experiment in catalogue().items():
        make = (
            f"fedgma paper search --plan {name}" if experiment.splits == ("validation",) else f"fedgma paper run {name}"
        )
        rows.append((experiment.source.partition(";")[0], name, make, f"fedgma paper compare {name} results/{name}"))
    return Table("commands", "", ("printed in", "experiment", "make the runs", "compare"), tuple(rows))


def experiment_page(name: str, replication: Replication) -> str:
    """The page of one experiment: its claims, what was run, its cells, where the rest is."""
    comparison, answers = replication.comparisons[name], replication.answers.get(name, ())
    experiment = comparison.experiment
    where = f"All of it: `results/{name}/`." if (RESULTS / name).is_dir() else "Planned, not run."
    parts = [f"# {name}: {experiment.title}", f"Printed in: {experiment.source}. {where}"]
    claims = Table("", "", ("claim", "verdict", "result"), tuple((a.claim.text, a.verdict, a.text) for a in answers))
    if answers:
        parts += ["## Claims", _bare(claims), CLAIMS.replace("this page", "the replication")]
    parts += ["## Notes", "\n".join(f"- {capitalised(note)}." for note in comparison.notes)] * bool(comparison.notes)
    parts += universes_of(comparison)
    if cells := _cells(comparison):
        parts += [
            "## Cells",
            cells,
            f"Accuracy in percent, mean of the last ten rounds; more in `results/{name}/report.md`.",
        ]
    make = commands().rows[list(catalogue()).index(name)]
    parts += [
        "## Again",
        f"Runs: `{make[2]}`. Comparison: `{make[3]}`.",
        "[Back to the replication](../replication.md)",
    ]
    return "\n\n".join(parts) + "\n"


def universes_of(comparison: Comparison) -> list[str]:
    """What the universes of a multiverse say, as Markdown; empty for other experiments."""
    multiverse = multiverse_of(comparison) if comparison.experiment.universes else None
    if multiverse is None:
        return []
    said = "\n".join(
        wrapped(f"- {sentence[0].upper()}{sentence[1:]}.")
        for sentence in [*sentences(multiverse), *most_telling(multiverse)]
    )
    alt = "Differences in all universes, sorted, above the choices of each"
    parts = ["## Universes", said, f"![{alt}](../pictures/{MULTIVERSE.name})"]
    table = choices_table(multiverse)
    return parts if table is None else [*parts, f"## {table.title}", _bare(table), wrapped(table.note)]


def draw_multiverse(replication: Replication) -> None:
    """The specification curve of the multiverse, if it was run."""
    comparisons = [comparison for comparison in replication.comparisons.values() if comparison.experiment.universes]
    for multiverse in filter(None, map(multiverse_of, comparisons)):
        with plain_text():
            save(draw_specifications(specifications(multiverse)), MULTIVERSE)


def _cells(comparison: Comparison) -> str:
    """The cells that were run in both arms as a table; empty if there are none, or too many."""
    cells = [compared for compared in comparison.on(comparison.experiment.splits[0]) if compared.differences]
    if not 0 < len(cells) <= MOST_CELLS:
        return ""
    names = list(cells[0].cell.label)
    rows = []
    for compared in cells:
        printed = compared.printed_difference
        rows.append(
            (
                *(plain(compared.cell.label[name]) for name in names),
                compared.played,
                *(f"{level.mean:.1f}" for level in compared.levels if level is not None),
                overview.in_words(compared.verdict),
                None if printed is None else f"{printed:+.2f}",
                "yes" if compared.converged else "no",
                str(compared.agreement),
            )
        )
    header = (*map(short, names), "rounds", "mean", "masked", "difference (95 % CI)", "printed", "converged", "verdict")
    return _bare(Table("", "", header, tuple(rows)))


def _bare(table: Table) -> str:
    """A table as Markdown without its heading and note."""
    text = markdown(table._replace(title="", note=""))
    return text[text.index("|") :].strip()


def write_results(replication: Replication, *, figures: bool) -> None:
    """Tables and figures of every experiment with exported runs."""
    for name, comparison in replication.comparisons.items():
        if comparison.entries:
            findings = findings_of(comparison.experiment, [RESULTS])
            if figures:
                write_comparison(comparison, RESULTS / name, html=False, findings=findings)
            else:
                write_tables(make_report(comparison, findings), RESULTS / name)


if __name__ == "__main__":
    everything = read()
    (DOCS / "replication").mkdir(exist_ok=True)
    for path, text in pages(everything).items():
        path.write_text(text, encoding="utf-8")
    save(draw_forest(overview.differences(everything.answers)), PICTURE)
    draw_multiverse(everything)
    if "--page" not in sys.argv:
        write_results(everything, figures="--tables" not in sys.argv)
