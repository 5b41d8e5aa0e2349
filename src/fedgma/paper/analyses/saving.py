"""Save the result of an analysis: findings as JSON, tables as CSV, figures as PNG, and a Markdown page.

The page is for readers only; no code parses it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from fedgma.paper.analyses import AnalysisResult
from fedgma.paper.findings import write_findings
from fedgma.reports.plots.style import save as save_figure
from fedgma.reports.tables import Table, comma_separated, markdown

LINES = 60  # rows of a table in the Markdown page; longer tables are only in their CSV file


def save(result: AnalysisResult, folder: Path, title: str) -> list[Path]:
    """Write a result into a folder; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    tables = {name: as_table(name, rows) for name, rows in result.tables.items() if rows}
    files = [write_findings(result.findings, folder)]
    for name, table in tables.items():
        files.append(folder / f"{name}.csv")
        files[-1].write_text(comma_separated(table))
    for name, figure in result.figures.items():
        files.append(save_figure(figure, folder / f"{name}.png"))
        _shrink(files[-1])
    files.append(folder / "README.md")
    files[-1].write_text(page(result, tables, title))
    return files


def _shrink(picture: Path) -> None:
    """Reduce a PNG to a palette: line drawings need few colours, and a third of the bytes remains."""
    with Image.open(picture) as drawn:
        few = drawn.convert("RGB").quantize(64)
    few.save(picture, optimize=True)


def as_table(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Rows as a table; missing values are left empty.

    >>> as_table("some_rows", [{"a": 1}, {"a": 2, "b": 0.5}]).rows
    ((1, None), (2, 0.5))
    """
    header = tuple(dict.fromkeys(key for row in rows for key in row))
    return Table(name, name.replace("_", " ").capitalize(), header, tuple(tuple(map(row.get, header)) for row in rows))


def page(result: AnalysisResult, tables: dict[str, Table], title: str) -> str:
    """Findings, pictures and the tables that are short enough to read."""
    parts = [f"# {title}", "\n".join(f"- {finding.text}" for finding in result.findings)]
    parts += [f"![{name.replace('_', ' ')}]({name}.png)" for name in result.figures]
    for name, table in tables.items():
        long = len(table.rows) > LINES
        section = f"## {table.title}\n\n{len(table.rows)} rows: [{name}.csv]({name}.csv)" if long else markdown(table)
        parts.append(section)
    return "\n\n".join(part for part in parts if part) + "\n"
