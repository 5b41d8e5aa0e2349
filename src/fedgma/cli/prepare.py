"""`fedgma data prepare`: a table as it is, with texts and empty cells, becomes a file for `fedgma run`."""

import io
import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgma.cli.play import Quiet
from fedgma.cli.runs import Json

if TYPE_CHECKING:
    from fedgma.data.files.own.prepare import Feature
    from fedgma.data.files.own.prepare_table import PreparedTable
    from fedgma.reports.tables import Table

Names = list[str] | None


def prepare(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A .csv, .tsv or .parquet file.")],
    label: Annotated[str | None, typer.Option(help="The column to predict (default: label, target, ...).")] = None,
    client: Annotated[str | None, typer.Option(help="The column of clients (default: client, user, ...).")] = None,
    out: Annotated[Path | None, typer.Option(help="The .npz file to write (default: named as the table).")] = None,
    test: Annotated[Path | None, typer.Option(help="A table to test on (default: a fifth of each class).")] = None,
    drop: Annotated[Names, typer.Option(help="Columns to leave out: a,b.")] = None,
    keep: Annotated[Names, typer.Option(help="Columns to use although they look like ids: a,b.")] = None,
    as_text: Annotated[Names, typer.Option(help="Columns of numbers that stand for names, such as codes: a,b.")] = None,
    regression: Annotated[bool, typer.Option("--regression", help="The label is a number to predict.")] = False,
    standardise: Annotated[bool, typer.Option(help="Scale numbers to mean 0 and deviation 1.")] = True,
    most_values: Annotated[int, typer.Option(help="Values of a column of texts that get a feature each.")] = 20,
    drop_incomplete: Annotated[
        bool, typer.Option("--drop-incomplete", help="Leave out rows without a label or a client.")
    ] = False,
    decimal_comma: Annotated[
        bool, typer.Option("--decimal-comma", help="Numbers are written as 1.234,5: for .csv and .tsv files.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Replace files that exist.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Prepare a table for `fedgma run`: fill empty cells, scale numbers, make features of texts.

    Writes an .npz file, and beside it a .json file with what is needed to prepare new rows in the same way.
    """
    from fedgma.data.files.own.prepare_table import Wanted, prepare_table, read_table

    files = _files(table, out, replace=yes)
    columns = read_table(table, decimal_comma=decimal_comma)
    dropped, kept, texts = (_split(names, columns) for names in (drop, keep, as_text))
    wanted = Wanted(label, client, dropped, kept, texts, regression, standardise, most_values, drop_incomplete)
    tested = None if test is None else read_table(test, decimal_comma=decimal_comma)
    made = prepare_table(columns, wanted, table.name, tested)
    _write(made, *files)
    if as_json:
        typer.echo(json.dumps(_summary(made, list(columns), files)))
    elif not quiet:
        _say(made, list(columns), files)


def _files(table: Path, out: Path | None, *, replace: bool) -> tuple[Path, Path]:
    """The two files to write."""
    from fedgma.errors import ConfigError

    file = Path(f"{table.stem}.npz") if out is None else out
    if file.suffix != ".npz":
        raise ConfigError(f"--out must be a file that ends in .npz, got {str(file)!r}")
    files = file, file.with_suffix(".json")
    for path in files:
        if path.exists() and not replace:
            raise ConfigError(f"{str(path)!r} exists; give --yes to replace it, or another file with --out")
    return files


def _split(given: Names, columns: Iterable[str]) -> tuple[str, ...]:
    """Names of columns from words such as a,b; a name may hold a comma itself."""
    known = set(columns)
    return tuple(name.strip() for word in given or [] for name in ([word] if word in known else word.split(",")))


def _write(made: "PreparedTable", file: Path, beside: Path) -> None:
    import numpy as np

    from fedgma.data.files.own.prepare import as_json
    from fedgma.records.checkpoints import write_atomic, written_to

    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **made.arrays)
    with written_to(file.parent):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(beside, as_json(made.prepared).encode())
        write_atomic(file, content.getvalue())


def _summary(made: "PreparedTable", columns: list[str], files: tuple[Path, Path]) -> dict[str, Any]:
    arrays, prepared = made.arrays, made.prepared
    return {
        "columns": [{"column": name, "use": use, "features": count} for name, use, count in _uses(made, columns).rows],
        "rows": {"train": len(arrays["y"]), "test": len(arrays["y_test"]), "left_out": made.incomplete},
        "features": prepared.names,
        "target": made.target,
        "classes": prepared.classes,
        "remarks": made.remarks,
        "clients": len(set(arrays["client"].tolist())) if "client" in arrays else None,
        "files": list(map(str, files)),
        "next": _next(made, files[0]),
    }


def _uses(made: "PreparedTable", columns: list[str]) -> "Table":
    """What became of each column."""
    from fedgma.reports.tables import Table

    prepared = made.prepared
    uses: dict[str, tuple[str, int]] = {name: (f"left out: {why}", 0) for name, why in prepared.left_out.items()}
    uses |= {feature.name: (_use(feature), len(feature.names)) for feature in prepared.features}
    uses[prepared.label] = ("label" if prepared.classes is not None else "label, a number that is not scaled", 0)
    if prepared.client is not None:
        uses[prepared.client] = ("client", 0)
    rows = tuple((name, *uses[name]) for name in columns)
    return Table("columns", "", ("column", "becomes", "features"), rows)


def _use(feature: "Feature") -> str:
    kinds = {"number": "number", "truth": "0 or 1", "missing": "whether it is missing, since it is constant otherwise"}
    parts = [kinds.get(feature.kind, f"one feature for each of {len(feature.values)} texts")]
    parts += ["standardised"] if feature.mean is not None else []
    parts += ["one for all others"] if feature.other else []
    if feature.missing and feature.kind != "missing":
        parts += ["one for missing cells" if feature.kind == "text" else f"missing cells filled with {feature.fill:g}"]
    return ", ".join(parts)


def _next(made: "PreparedTable", file: Path) -> str:
    task = "" if made.target == "class" else "task=regression "
    return f"fedgma run {task}dataset={shlex.quote(str(file))}"


def _say(made: "PreparedTable", columns: list[str], files: tuple[Path, Path]) -> None:
    from fedgma.cli.tables import say_table

    said: Mapping[str, Any] = _summary(made, columns, files)
    say_table(_uses(made, columns))
    counts = [f"{said['rows']['train']} training and {said['rows']['test']} test rows"]
    counts += [f"{len(said['features'])} features"]
    counts += ["numbers to predict" if said["classes"] is None else f"{len(said['classes'])} classes"]
    counts += [] if said["clients"] is None else [f"{said['clients']} clients"]
    typer.echo(f"\n{', '.join(counts)}")
    for remark in said["remarks"]:
        typer.echo(remark)
    if made.incomplete:
        typer.echo(f"left out: {made.incomplete} rows without a label or a client")
    typer.echo(f"written: {', '.join(said['files'])}")
    typer.echo(f"next: {said['next']}")
