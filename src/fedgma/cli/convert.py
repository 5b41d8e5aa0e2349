"""`fedgma convert`: rewrite run folders of an older format in the current one."""

from pathlib import Path
from typing import Annotated

import typer


def convert(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Run folders, or folders that hold them.")],
) -> None:
    """Rewrite run folders of an older format in place. Rounds, checkpoints and results are not changed.

    Reports can read older folders without this. After it, `fedgma run` also counts them as done and can extend them.
    """
    from fedgma.errors import DataError
    from fedgma.records.convert import convert as convert_folders
    from fedgma.records.format import FORMAT

    converted = convert_folders(folders)
    failed = [run for run in converted if run.problem]
    rewritten = [run for run in converted if run.rewritten]
    same = len(converted) - len(rewritten) - len(failed)
    typer.echo(
        f"{len(rewritten)} of {len(converted)} run folders were rewritten to format {FORMAT}; {same} were already."
    )
    if renamed := sum(run.renamed for run in converted):
        typer.echo(f"{renamed} folders were renamed after the new fingerprint of their run.")
    if unknown := sum(not run.known for run in rewritten):
        typer.echo(
            f"{unknown} rewritten runs do not record their code or data; they are compared only with each other."
        )
    for run in failed:
        typer.echo(f"left as it was: {run.folder.name}: {run.problem}")
    if failed:
        raise DataError(f"{len(failed)} run folders could not be converted; they were left as they were")
