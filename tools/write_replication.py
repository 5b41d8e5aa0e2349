"""Writes the table of claims in docs/replication.md from the exported runs in results/.

python tools/write_replication.py
"""

from pathlib import Path

from fedgma.paper.rates import read_chosen
from fedgma.paper.results import answers_in
from fedgma.paper.tables import summary_table
from fedgma.reports.tables import markdown

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "replication.md"
BEGIN, END = "<!-- claims: written by tools/write_replication.py -->", "<!-- end of claims -->"


def claims() -> str:
    """The table as Markdown, without its heading."""
    answers = answers_in(ROOT / "results", read_chosen())
    return markdown(summary_table(answers)).split("\n\n", 1)[1]


def page_with(table: str, page: str) -> str:
    """The page with the table in its place."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page_with(claims(), PAGE.read_text()))
