"""Run notebooks without Jupyter, and keep what their cells print: text, no pictures.

    python tools/notebooks.py examples/notebooks/*.ipynb

A cell with the tag "parameters" holds the sizes; whoever runs a notebook from Python can give others.
"""

import ast
import contextlib
import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def run(notebook: dict[str, Any], **parameters: Any) -> dict[str, Any]:
    """Run all code cells in order, in one namespace, and return it; the notebook's cells get their outputs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        cell["execution_count"] = number
        cell["outputs"] = outputs_of("".join(cell["source"]), names, number)
        if "parameters" in cell["metadata"].get("tags", []):
            if unknown := set(parameters) - set(names):
                raise ValueError(f"the notebook has no parameter {', '.join(sorted(unknown))}")
            names.update(parameters)
    return names


def outputs_of(source: str, names: dict[str, Any], number: int) -> list[Cell]:
    """What a cell prints, and the value of its last expression."""
    body = ast.parse(source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) and not source.rstrip().endswith(";") else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(ast.Module(body, []), f"<cell {number}>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), names)
    streams = [{"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())}]
    results = [{"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": shown(value)}]
    return (streams if printed.getvalue() else []) + (results if value is not None else [])


def shown(value: Any) -> Mapping[str, list[str]]:
    """A value as a notebook shows it: as HTML if it can, and as text."""
    html = getattr(value, "_repr_html_", lambda: None)()
    return {**({"text/html": lines(html)} if html else {}), "text/plain": lines(repr(value))}


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main(paths: list[str]) -> None:
    """Run each notebook in its folder and write it with its outputs."""
    for path in map(Path, paths):
        notebook = json.loads(path.read_text())
        with contextlib.chdir(path.parent):
            run(notebook)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        os.replace(temporary, path)
        print(f"{path}: {sum(cell['cell_type'] == 'code' for cell in notebook['cells'])} cells run")


if __name__ == "__main__":
    main(sys.argv[1:])
