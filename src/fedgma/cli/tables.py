"""How commands print a table: fitted to a terminal, as plain columns into a pipe or a log file, or as JSON."""

import json
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

    from fedgma.reports.tables import Table

ANY = 10_000  # columns: more than any table has


def say_table(table: "Table", *, as_json: bool = False) -> None:
    """Print a table; as JSON a list with an object for each row."""
    from rich.console import Console

    from fedgma.reports.tables import text

    console = Console(highlight=False, markup=False)
    if as_json:
        typer.echo(json.dumps(objects(table)))
    elif console.is_terminal and _narrowest(fitted := _fitted(table), console) <= console.width:
        console.print(fitted)
    else:  # a terminal that is too narrow for the words breaks the lines, and nothing is cut off
        typer.echo(text(table))


def objects(table: "Table") -> list[dict[str, object]]:
    """The rows of a table as JSON objects; a mean with a deviation is an object too."""
    from fedgma.statistics.arms import Spread

    return [
        {
            name: value._asdict() if isinstance(value, Spread) else value
            for name, value in zip(table.header, row, strict=True)
        }
        for row in table.rows
    ]


def _narrowest(fitted: "RichTable", console: "Console") -> int:
    """The width at which no word of a table is cut."""
    return console.measure(fitted, options=console.options.update(max_width=ANY)).minimum


def _fitted(table: "Table") -> "RichTable":
    from rich.table import Column
    from rich.table import Table as RichTable
    from rich.text import Text

    from fedgma.reports.tables import cells, numeric, printable

    columns = [
        Column(name, justify="right" if right else "left")
        for name, right in zip(table.header, numeric(table), strict=True)
    ]
    fitted = RichTable(*columns, box=None, header_style="bold")
    for row in cells(table):
        fitted.add_row(*(Text(printable(cell)) for cell in row))
    return fitted
