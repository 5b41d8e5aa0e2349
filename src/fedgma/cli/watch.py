"""`fedgma watch`: a local page that shows runs while they train."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgma.cli.runs import folders_of

if TYPE_CHECKING:
    from fedgma.reports.live.runs import LiveRuns


def watch(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Folders of run folders (default: runs).")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port of the page; 0 takes any free one.")] = 0,
    browse: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print how far the runs are, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: the address, or with --once the runs.")] = False,
) -> None:
    """Serve a local page with progress, curves and masks of all runs in a folder while they train, until Ctrl-C.

    Runs may be begun later, also in a folder that does not exist yet. Only this machine can open the page. Nothing is
    written.
    """
    from fedgma.errors import DataError
    from fedgma.reports.live.runs import LiveRuns

    paths = folders_of(folders)
    for path in paths:
        if path.exists() and not path.is_dir():
            raise DataError(f"{str(path)!r} is a file; give a folder that `fedgma run` writes to")
    if once:
        _say_once(LiveRuns(paths), as_json=as_json)
    else:
        _serve(LiveRuns(paths), port, browse=browse, as_json=as_json)


def _say_once(runs: "LiveRuns", *, as_json: bool) -> None:
    from fedgma.cli.tables import say_runs
    from fedgma.records.reader import run_folders

    run_folders(runs.paths)  # an error if there are none
    say_runs(runs.table(whole=True), as_json=as_json)


def _serve(runs: "LiveRuns", port: int, *, browse: bool, as_json: bool) -> None:
    import webbrowser

    from fedgma.reports.live.server import LiveServer

    names = ", ".join(map(str, runs.paths))
    with LiveServer(runs, port) as server:
        if as_json:
            typer.echo(json.dumps({"address": server.address, "folders": list(map(str, runs.paths))}))
        else:
            typer.echo(f"watching {names} at {server.address} (Ctrl-C to stop)")
            for path in runs.paths:
                if not path.exists():
                    typer.echo(f"{path} does not exist yet; the page fills when runs begin there")
        if browse:
            webbrowser.open(server.address)
        server.serve_forever(poll_interval=0.2)
