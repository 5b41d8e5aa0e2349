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
    elif console.is_terminal and (fitted := _fits(table, console)) is not None:
        console.print(fitted)
    else:  # a terminal that is too narrow for the words breaks the lines, and nothing is cut off
        typer.echo(text(table))


def say_runs(table: "Table", *, as_json: bool = False) -> None:
    """Print a table of runs; the advice in its last column below it, each once, and in JSON with its run."""
    from fedgma.reports.unfinished import together

    if as_json:
        say_table(table, as_json=True)
        return
    state = table.header.index("state")
    say_table(
        table._replace(
            header=table.header[:-1], rows=tuple(row[:-1] for row in table.rows), decimals=table.decimals[:-1]
        )
    )
    for words in together((str(row[state]), str(row[-1])) for row in table.rows):
        typer.echo(words, err=True)


def objects(table: "Table") -> list[dict[str, object]]:
    """The rows of a table as JSON objects; a mean with a deviation is an object too, what is not finite is null."""
    return [{name: _plain(value) for name, value in zip(table.header, row, strict=True)} for row in table.rows]


def _plain(value: object) -> object:
    from fedgma.statistics.arms import Spread
    from fedgma.statistics.metrics import is_lost

    if isinstance(value, Spread):
        return {name: _plain(part) for name, part in value._asdict().items()}
    return None if isinstance(value, float) and is_lost(value) else value


def _fits(table: "Table", console: "Console") -> "RichTable | None":
    """The table with no line broken, else a tight one with no word cut; None if the terminal is too narrow."""
    roomy, tight = _fitted(table), _fitted(table, tight=True)
    whole, least = (console.measure(each, options=console.options.update(max_width=ANY)) for each in (roomy, tight))
    if whole.maximum <= console.width:
        return roomy
    return tight if least.minimum <= console.width else None


def _fitted(table: "Table", *, tight: bool = False) -> "RichTable":
    """The table for a terminal; a `tight` one has one blank between its columns."""
    from rich.table import Column
    from rich.table import Table as RichTable
    from rich.text import Text

    from fedgma.reports.tables import cells, numeric, printable

    rows = [[printable(cell) for cell in row] for row in cells(table)]
    words = [not any(" " in cell for cell in column) for column in zip(*rows, strict=True)] or [False] * len(
        table.header
    )
    columns = [
        Column(name, justify="right" if right else "left", no_wrap=word)  # a number or an id is never cut
        for name, right, word in zip(table.header, numeric(table), words, strict=True)
    ]
    fitted = RichTable(*columns, box=None, header_style="bold", pad_edge=not tight, collapse_padding=tight)
    for row in rows:
        fitted.add_row(*map(Text, row))
    return fitted
