"""`fedgma rm`: delete run folders."""

import typer

from fedgma.cli.runs import Folders, Runs, Yes, at_terminal, folders_of


def rm(runs: Runs, folders: Folders = None, yes: Yes = False) -> None:
    """Delete run folders, with their records and models. Asks at a terminal; elsewhere --yes is needed.

    Refuses a run that is running, and any folder that holds something else than a run.
    """
    from fedgma.errors import ConfigError
    from fedgma.records.lookup import check_removable, find_runs, remove_run

    run_folders = list(dict.fromkeys(path for word in runs for path in find_runs(word, folders_of(folders))))
    for folder in run_folders:  # before anything is deleted
        check_removable(folder)
    what = f"run {run_folders[0].name}" if len(run_folders) == 1 else f"{len(run_folders)} runs"
    if not yes and not at_terminal():
        raise ConfigError(f"to delete {what}, give --yes: there is no terminal to ask at")
    if not yes and not typer.confirm(f"delete {what}, with records and models?"):
        typer.echo("nothing was deleted")
        raise typer.Exit(0)
    for folder in run_folders:
        remove_run(folder)
    typer.echo(f"deleted {what}")
