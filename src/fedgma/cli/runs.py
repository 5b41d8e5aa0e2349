"""What the commands on run folders share: how a run is named on the command line, and questions."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def complete_run(incomplete: str) -> list[str]:
    """Ids of the runs in the folder `runs`, for shell completion."""
    return sorted(path.parent.name for path in Path("runs").glob(f"{incomplete}*/run.json"))


Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="A run folder, the first digits of an id, or a name.", autocompletion=complete_run
    ),
]
Runs = Annotated[
    list[str],
    typer.Argument(metavar="RUN...", help="Run folders, first digits of ids, or names.", autocompletion=complete_run),
]
Folders = Annotated[
    list[Path] | None, typer.Option("--runs", help="Folders to search for ids and names (default: runs).")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def folders_of(folders: list[Path] | None) -> list[Path]:
    """The folders to search."""
    return folders or [Path("runs")]


def at_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty() and sys.stdout.isatty()
