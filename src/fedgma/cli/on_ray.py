"""`fedgma sweep --on ray`: train the fleets of a sweep as tasks of a Ray cluster, and show their progress."""

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedgma.cli.bars import Pace
from fedgma.cli.play import Options, end, put_label, say_plan
from fedgma.cli.signals import Stopping, obeying_signals
from fedgma.errors import ConfigError, FedgmaError
from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import missing
from fedgma.experiments.ray import Progress, Share, connected, play_on, progress, spread, standing

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.progress import Progress as Bars

    from fedgma.experiments.grid import Grid
    from fedgma.experiments.plan import Planned


def spread_grid(grid: "Grid", planned: "Sequence[Planned]", options: Options, address: str) -> None:
    """Train the missing runs on a cluster and print the outcome; after a signal every fleet writes a checkpoint."""
    if not re.fullmatch(r"ray(:[^:/]+:\d+)?", address):
        raise ConfigError(f"--on: expected here, ray or ray:HOST:PORT, got {address!r}")
    put_label(planned, options.label)
    with obeying_signals() as stopping:
        errors = _play(grid, planned, options, address, stopping) if missing(planned) else []
    if errors and not stopping():
        raise _error(errors)
    end(planned, options, stopping)


def _play(grid: "Grid", planned: "Sequence[Planned]", options: Options, address: str, stopping: Stopping) -> list[str]:
    errors: list[str] = []
    left = missing(planned)
    console = options.console  # before Ray takes the standard output
    with connected(address) as cluster, standing(options.out) as token:
        shares = [_share(members, grid, options, token) for members in spread(left, cluster.fleets)]
        nodes = cluster.nodes
        say_plan(console, planned, left, len(shares), f"Ray, {'one node' if nodes == 1 else f'{nodes} nodes'}")
        bars = _bars(console, off=options.silent)
        with bars:
            bar, pace = bars.add_task("", total=None), Pace()
            for alive, came in play_on(cluster, shares):
                errors += came
                if alive < nodes:
                    console.print(f"{nodes - alive} of {nodes} nodes died; their fleets continue on other nodes")
                nodes = alive
                state = progress(left)
                bars.update(bar, description=_words(state), completed=state.rounds, total=state.total)
                if bars.disable and pace.is_due():
                    console.print(f"{_words(state)}; {state.rounds} of {state.total} rounds saved", soft_wrap=True)
                if stopping():
                    token.unlink(missing_ok=True)
    return errors


def _share(members: "Sequence[Planned]", grid: "Grid", options: Options, token: "Path") -> Share:
    materials = Materials("cpu", folder=grid.folder)
    return Share(
        settings=tuple(materials.located(run.settings) for run in members),
        fingerprints=tuple(run.fingerprint for run in members),
        out=options.out.absolute(),
        token=token,
        device=options.device,
        precision=options.precision,
        checkpoint_seconds=options.checkpoint_seconds,
        keep_state=options.keep_state,
        version=options.version,
    )


def _bars(console: "Console", *, off: bool) -> "Bars":
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    rounds = TextColumn("{task.completed:.0f}/{task.total:.0f} rounds saved")
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), rounds, TimeRemainingColumn(compact=True))
    return Progress(*columns, console=console, disable=off or not console.is_terminal, transient=True)


def _words(seen: Progress) -> str:
    return f"{seen.done} done, {seen.running} running, {seen.missing} missing"


def _error(answers: list[str]) -> FedgmaError:
    """The first error that a task returned, with the number of the others."""
    first = json.loads(answers[0])
    more = f" (and {len(answers) - 1} more fleets failed)" if len(answers) > 1 else ""
    error = FedgmaError(f"{first['error']}{more}")
    error.exit_code = first["exit_code"]
    return error
