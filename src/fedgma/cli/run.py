"""`fedgma run`: play a settings file, or the embedded comparison, and say what came out."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from fedgma.cli.live import Stopping, Watch
    from fedgma.experiments.grids import Grid
    from fedgma.experiments.materials import Materials
    from fedgma.experiments.play import Outcome, Planned

Words = Annotated[
    list[str] | None, typer.Argument(metavar="[FILE] [KEY=VALUE]...", help="A settings file, and settings on top.")
]
Out = Annotated[Path, typer.Option(help="Folder for the run folders.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Checkpoints = Annotated[
    float, typer.Option("--checkpoint-seconds", min=0.0, help="Least time between checkpoints of a run.")
]


def run(
    words: Words = None,
    show: Annotated[bool, typer.Option("--show", help="Print every setting, and stop.")] = False,
    out: Out = Path("runs"),
    device: Device = "auto",
    quiet: Quiet = False,
    as_json: Json = False,
    checkpoint_seconds: Checkpoints = 10.0,
) -> None:
    """Train with and without the mask on paired seeds and give a verdict.

    Without a FILE: embedded images, 100 clients with two classes each, LeNet, FedAvg, the plain mean against GMA. Lists
    make a sweep, e.g. tau=0.2,0.4. Finished runs are not repeated; a stopped one goes on where it was.
    """
    grid = grid_of_words(words)
    if show:
        from fedgma.cli.settings import show_settings

        typer.echo(show_settings(grid))
        return
    from rich.console import Console

    silent = quiet or as_json
    console = Console(quiet=silent, highlight=False, markup=False)
    outcome = play_grid(grid, out, device, console, silent=silent, checkpoint_seconds=checkpoint_seconds)
    if as_json:
        typer.echo(json.dumps(as_object(outcome, out)))
    else:
        print_outcome(console, outcome, out)


def grid_of_words(words: list[str] | None) -> "Grid":
    """The runs of the words on a command line: at most one file, then key=value."""
    from fedgma.errors import ConfigError
    from fedgma.experiments.grids import read_grid

    files = [word for word in words or [] if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"expected one settings file and key=value settings, got {' and '.join(map(repr, files))}")
    return read_grid(Path(files[0]) if files else None, [word for word in words or [] if "=" in word])


def play_grid(
    grid: "Grid", out: Path, device: str, console: "Console", *, silent: bool, checkpoint_seconds: float
) -> "Outcome":
    """Play what is missing of a grid, visibly; a signal leaves resumable folders and ends the process."""
    from fedgma.cli.live import Watch, obeying_signals

    with obeying_signals() as stopping:
        from fedgma.experiments.materials import Materials
        from fedgma.experiments.play import conclude, missing, pack, plan

        materials = Materials(device, folder=grid.folder)
        planned = plan(grid, materials, out)
        left = missing(planned)
        packed = pack(left, materials)
        say_plan(console, planned, left, packed, materials)
        watch = Watch(console, quiet=silent, axes=grid.axes)
        play_fleets(packed, materials, watch, stopping, checkpoint_seconds=checkpoint_seconds)
    leave_if_stopped(stopping, out)
    return conclude(planned, grid.axes)


def play_fleets(
    packed: "Sequence[Sequence[Planned]]",
    materials: "Materials",
    watch: "Watch",
    stopping: "Stopping",
    *,
    checkpoint_seconds: float,
) -> None:
    """Play fleets one after the other, with a bar for each, until all are done or somebody stops it."""
    from fedgma.experiments.play import play_fleet

    with watch.bars:
        for place, members in enumerate(packed):
            watch.begin(members, "training" if len(packed) == 1 else f"fleet {place + 1} of {len(packed)}")
            for played in play_fleet(members, materials, checkpoint_seconds=checkpoint_seconds, stop=stopping):
                watch.see(played)
            if stopping():
                break


def leave_if_stopped(stopping: "Stopping", out: Path) -> None:
    """End the process with the signal's code, and say that the same command goes on."""
    if stopping.code is not None:
        typer.echo(f"fedgma: stopped; what was played is in {out}, the same command goes on from there", err=True)
        raise typer.Exit(stopping.code)


def say_plan(
    console: "Console",
    planned: "list[Planned]",
    left: "list[Planned]",
    packed: "list[list[Planned]]",
    materials: "Materials",
) -> None:
    """One line on what will happen."""
    done = len(planned) - len(left)
    if not left:
        console.print(f"all {len(planned)} runs were done before")
        return
    fleets = "one fleet" if len(packed) == 1 else f"{len(packed)} fleets"
    before = f", {done} done before" if done else ""
    console.print(f"{len(left)} runs in {fleets} on {materials.device}{before}")


def print_outcome(console: "Console", outcome: "Outcome", out: Path) -> None:
    """The table of arms, the verdicts, and where to look further."""
    from rich.table import Table
    from rich.text import Text

    table = Table("test accuracy, %", "best", "last 10 rounds", "final", "seeds", box=None, header_style="bold")
    for arm in outcome.arms:
        cells = ["{:.2f} ± {:.2f}".format(*arm.spread(name)) for name in ("best", "last10", "final")]
        table.add_row(Text(arm.label), *cells, str(len(arm.runs)))
    console.print(table)
    for comparison in outcome.comparisons:
        where = f"{comparison.where}: " if comparison.where else ""
        verdict = Text.assemble(where, (comparison.verdicts["last10"].text, "bold"), " (last 10 rounds)")
        console.print(verdict, soft_wrap=True)
    folders = f"{len(outcome.runs)} run folders in {out}"
    console.print(f"{folders}; look further with: fedgma report {out}", soft_wrap=True)


def as_object(outcome: "Outcome", out: Path) -> dict[str, Any]:
    """The outcome for programs."""
    from fedgma.experiments.outcomes import summarise

    runs = []
    for run, lines in outcome.runs:
        summary = summarise(lines)
        figures = None if summary is None else summary._asdict()
        runs.append({"fingerprint": run.fingerprint, "settings": run.recorded, "summary": figures})
    verdicts = [
        {"where": one.where, "first": one.first.label, "second": one.second.label}
        | {name: _finite(verdict._asdict()) for name, verdict in one.verdicts.items()}
        for one in outcome.comparisons
    ]
    return {"out": str(out), "runs": runs, "verdicts": verdicts}


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    infinite = (float("inf"), float("-inf"))
    return {name: None if value in infinite else value for name, value in figures.items()}
