"""`fedgma sweep`: as `fedgma run`, and lists which runs are done, running and missing; on this machine or on Ray."""

import json
from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from fedgma.cli import play
from fedgma.cli.options import taking

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from fedgma.experiments.plan import Planned

On = Annotated[
    str,
    typer.Option(
        help="`here` (this machine), `ray` (the cluster of RAY_ADDRESS, or a new local one) or ray:HOST:PORT."
    ),
]


@taking(play.Options)
def sweep(
    words: play.Words = None,
    status: Annotated[bool, typer.Option("--status", help="Only show what is done, running and missing.")] = False,
    on: On = "here",
    *,
    options: play.Options,
) -> None:
    """List every combination of the lists in a settings file, then train what is missing, here or on Ray."""
    from fedgma.experiments.materials import Materials
    from fedgma.experiments.plan import plan

    grid = play.grid_of_words(words)
    materials = Materials("cpu", folder=grid.folder, precision=options.precision, version=options.version)
    planned = plan(grid, materials, options.out)
    states = {run.fingerprint: state_of(run) for run in planned}
    if status and options.as_json:
        typer.echo(json.dumps({"out": str(options.out), "runs": states}))
        return
    print_states(options.console, planned, states)
    if status:
        return
    if on == "here" or options.dry:
        play.play_grid(grid, options)
    else:
        from fedgma.cli.on_ray import spread_grid

        spread_grid(grid, planned, options, on)


def state_of(run: "Planned") -> str:
    """done, running, stopped (it will be resumed), unknown (another machine wrote it last), or missing."""
    from fedgma.records.state import state_of as state_of_folder

    if run.folder is None or not (run.folder / "run.json").exists():
        return "missing"
    return state_of_folder(run.folder)


def print_states(console: "Console", planned: "Sequence[Planned]", states: dict[str, str]) -> None:
    """Print one line for each arm, with the number of its seeds in each state."""
    from rich.table import Table
    from rich.text import Text

    from fedgma.experiments.progress import arm_names

    names = arm_names(planned)
    table = Table("arm", "seeds", "state", box=None, header_style="bold")
    for name in dict.fromkeys(names.values()):
        of_arm = [states[fingerprint] for fingerprint in names if names[fingerprint] == name]
        counts = ", ".join(f"{number} {state}" for state, number in Counter(of_arm).items())
        table.add_row(Text(name), str(len(of_arm)), counts)
    console.print(table)
