"""What a table is, and how to write one as Markdown, LaTeX, CSV, HTML and plain text."""

import csv
import io
import re
from collections.abc import Callable
from html import escape
from typing import NamedTuple

from fedgma.statistics.arms import Spread
from fedgma.statistics.metrics import is_lost

Value = str | float | int | Spread | None

FORMULA = re.compile(r"[\s\x00-\x1f\ufeff]*[=+\-@＝＋－＠]")  # begins a formula in some spreadsheet
WIDE = 1e7  # numbers from here on are written with an exponent
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


class Table(NamedTuple):
    """A titled table; every row has as many values as the header has names."""

    name: str  # stem of its file names
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""
    decimals: tuple[int, ...] = ()  # of the numbers in each column; two where nothing is said


def slug(text: str) -> str:
    """A text as a file name.

    >>> slug("GMA, tau 0.4")
    'gma-tau-0.4'
    """
    kept = "".join(char if char.isalnum() or char == "." else " " for char in text.lower())
    return "-".join(kept.split())[:100] or "arm"


def value_text(value: Value, deviation: str = " ± ", decimals: int = 2) -> str:
    """A value as text: two decimals or as many as asked for, or two significant digits if it is smaller.

    >>> [value_text(value) for value in (Spread(74.126, 0.31, 3), 0.00012, None, 1.5, 2.5e12, 3e38)]
    ['74.13 ± 0.31', '0.00012', '', '1.50', '2.5e+12', 'not finite']
    """
    if isinstance(value, Spread):
        after = "" if value.deviation is None else f"{deviation}{_fixed(value.deviation, decimals)}"
        return _fixed(value.mean, decimals) + ("" if is_lost(value.mean) else after)
    if isinstance(value, float):
        return f"{value:.2g}" if 0 < abs(value) < 10**-decimals else _fixed(value, decimals)
    return "" if value is None else str(value)


def _fixed(value: float, decimals: int) -> str:
    if is_lost(value):
        return "not finite"
    return f"{value:.{decimals}f}" if abs(value) < WIDE else f"{value:.3g}"


def cells(table: Table) -> list[list[str]]:
    """The rows of a table as text.

    >>> cells(Table("t", "T", ("arm", "mse"), (("GMA", 0.01234),), "", (2, 4)))
    [['GMA', '0.0123']]
    """
    decimals = table.decimals or (2,) * len(table.header)
    return [[value_text(value, decimals=d) for value, d in zip(row, decimals, strict=True)] for row in table.rows]


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
