"""`fedgma export`: the trained model of a run as a file that plain torch can load."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedgma.cli.runs import Folders, Json, Run, folders_of


def export(
    run: Run,
    out: Annotated[Path | None, typer.Option(help="The file to write (default: ID.safetensors).")] = None,
    runs: Folders = None,
    as_json: Json = False,
) -> None:
    """Write the trained model of a run as a safetensors file, for `load_state_dict` in plain torch.

    Of an unfinished run, the model of its newest checkpoint is written.
    """
    from fedgma.records.lookup import find_run
    from fedgma.records.trained import metadata, read_model, write_model

    folder = find_run(run, folders_of(runs))
    model = read_model(folder)
    file = write_model(model, Path(f"{folder.name}.safetensors") if out is None else out)
    entries = sum(array.size for array in model.arrays.values())
    if as_json:
        typer.echo(json.dumps({"file": str(file), "arrays": len(model.arrays), "entries": entries, **metadata(model)}))
        return
    planned = model.head["settings"].get("rounds")
    of = "" if planned is None else f" of {planned}"  # a Flower app does not say
    typer.echo(f"{file}: {len(model.arrays)} arrays, {entries:,} numbers, after round {model.round}{of}")
    typer.echo(f'load it with: net.load_state_dict(safetensors.torch.load_file("{file}"))')
