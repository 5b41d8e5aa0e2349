"""`fedgma sweep`: the same runs as `fedgma run`, with a list of what is done, running and missing."""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgma.cli.run import (
    Checkpoints,
    Device,
    Json,
    Out,
    Quiet,
    Words,
    as_object,
    grid_of_words,
    play_grid,
    print_outcome,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from fedgma.experiments.play import Planned


def sweep(
    words: Words = None,
    status: Annotated[bool, typer.Option("--status", help="Only show what is done, running and missing.")] = False,
    out: Out = Path("runs"),
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
    checkpoint_seconds: Checkpoints = 10.0,
) -> None:
    """Play every combination of the lists in a settings file; show first what is there already."""
    from rich.console import Console

    from fedgma.experiments.materials import Materials
    from fedgma.experiments.play import plan

    grid = grid_of_words(words)
    silent = quiet or as_json
    console = Console(quiet=silent, highlight=False, markup=False)
    planned = plan(grid, Materials("cpu", folder=grid.folder), out)
    states = {run.fingerprint: state_of(run) for run in planned}
    if status and as_json:
        typer.echo(json.dumps({"out": str(out), "runs": states}))
        return
    print_states(console, planned, states, grid.axes)
    if status:
        return
    outcome = play_grid(grid, out, device, console, silent=silent, checkpoint_seconds=checkpoint_seconds)
    if as_json:
        typer.echo(json.dumps(as_object(outcome, out)))
    else:
        print_outcome(console, outcome, out)


def state_of(run: "Planned") -> str:
    """done, running, stopped (it will go on), or missing."""
    from fedgma.experiments.records import is_done, is_running

    if run.folder is None or not (run.folder / "run.json").exists():
        return "missing"
    if is_done(run.folder):
        return "done"
    return "running" if is_running(run.folder) else "stopped"


def print_states(
    console: "Console", planned: "Sequence[Planned]", states: dict[str, str], axes: "Sequence[str]"
) -> None:
    """One line an arm with the number of its seeds in each state."""
    from rich.table import Table
    from rich.text import Text

    from fedgma.experiments.outcomes import Summary, gather

    nothing = Summary(0.0, 0.0, 0.0)
    table = Table("arm", "seeds", "state", box=None, header_style="bold")
    for arm in gather([(run.recorded, nothing) for run in planned], axes):
        own = [run for run in planned if arm.label == gather([(run.recorded, nothing)], axes)[0].label]
        counts = Counter(states[run.fingerprint] for run in own)
        table.add_row(
            Text(arm.label), str(len(own)), ", ".join(f"{number} {state}" for state, number in counts.items())
        )
    console.print(table)
