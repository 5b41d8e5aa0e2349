"""Write the table of faults in docs/faults.md from the tests in tests/faults.

python tools/write_faults.py
"""

import importlib
import sys
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "faults.md"
BEGIN, END = "<!-- faults: written by tools/write_faults.py -->", "<!-- end of faults -->"
SECTIONS = {
    "A": "Updates that reach the aggregator",
    "B": "Participation",
    "C": "Crash, resume, storage",
    "D": "Files, settings, data sets",
    "E": "Determinism",
    "F": "Deployment, network, identity",
    "G": "Attacks and privacy",
}


def tables() -> str:
    """One table a section, in the order of the numbers."""
    sys.path[:0] = [str(ROOT / "tests" / "faults"), str(ROOT / "tests" / "helpers"), str(ROOT / "src")]
    for module in sorted((ROOT / "tests" / "faults").glob("test_*.py")):
        importlib.import_module(module.stem)
    from rows import ROWS

    numbers = sorted(ROWS, key=lambda number: (number[0], int(number[1:])))
    parts = []
    for letter, group in groupby(numbers, key=lambda number: number[0]):
        parts += [f"### {letter}. {SECTIONS[letter]}", ""]
        parts += ["| row | fault | what happens | what you see |", "| --- | --- | --- | --- |"]
        for number in group:
            row = ROWS[number]
            happens = f"does not apply: {row.why_not}" if row.why_not else row.happens
            cells = (cell.replace("|", "\\|") for cell in (number, row.fault, happens, row.seen))
            parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts).rstrip()


def page(text: str) -> str:
    """The page with the tables renewed."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
