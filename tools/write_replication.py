"""Writes the table of claims in docs/replication.md, and tables and figures in results/, from the exported runs there.

python tools/write_replication.py            # the page and all experiments
python tools/write_replication.py --tables   # without the figures, which take minutes
python tools/write_replication.py --page     # the page alone
"""

import sys
from pathlib import Path

from fedgma.paper.catalogue import catalogue
from fedgma.paper.compare import compare
from fedgma.paper.entries import read_export
from fedgma.paper.rates import read_chosen
from fedgma.paper.results import answers_in, findings_of, make_report, write_comparison
from fedgma.paper.tables import summary_table
from fedgma.reports.report import write_tables
from fedgma.reports.tables import markdown

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGE = ROOT / "docs" / "replication.md"
BEGIN, END = "<!-- claims: written by tools/write_replication.py -->", "<!-- end of claims -->"


def claims() -> str:
    """The table as Markdown, without its heading."""
    answers = answers_in(RESULTS, read_chosen())
    return markdown(summary_table(answers)).split("\n\n", 1)[1]


def page_with(table: str, page: str) -> str:
    """The page with the table in its place."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


def write_results(*, figures: bool) -> None:
    """Tables and figures of every experiment with exported runs."""
    for name, experiment in catalogue().items():
        if (RESULTS / name / "runs.jsonl").is_file():
            comparison = compare(experiment, read_export(RESULTS / name), read_chosen())
            findings = findings_of(experiment, [RESULTS])
            if figures:
                write_comparison(comparison, RESULTS / name, html=False, findings=findings)
            else:
                write_tables(make_report(comparison, findings), RESULTS / name)


if __name__ == "__main__":
    PAGE.write_text(page_with(claims(), PAGE.read_text()))
    if "--page" not in sys.argv:
        write_results(figures="--tables" not in sys.argv)
