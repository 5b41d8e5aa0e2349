"""`fedgma run --on torchrun`: one run or fleet over several processes (ranks), GPUs or machines."""

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedgma.cli import play
from fedgma.cli.signals import end_now
from fedgma.errors import ConfigError, FedgmaError, RankLost

if TYPE_CHECKING:
    from fedgma.experiments.grid import Grid
    from fedgma.experiments.ranks.places import Place


def on_ranks(on: str, ranks: int | None, replace: bool) -> bool:
    """Whether several processes were asked for; checks the options."""
    if on not in ("here", "torchrun"):
        raise ConfigError(f"--on: expected here or torchrun, got {on!r}; for sweeps on Ray use `fedgma sweep --on ray`")
    if on == "here" and (ranks is not None or replace):
        raise ConfigError(f"--{'ranks' if ranks is not None else 'replace-lost'} needs --on torchrun")
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks must be at least 1, got {ranks}")
    return on == "torchrun"


def play_on_ranks(grid: "Grid", options: play.Options, ranks: int | None, *, replace: bool) -> None:
    """Train as one of the ranks that were started; if none were, start them and wait until they have ended."""
    from fedgma.experiments.ranks.places import find_place

    place = find_place(os.environ, ranks)
    if place is not None:
        _play(grid, options, place)
        return
    from fedgma.experiments.ranks.launch import launch

    ranks = ranks or _gpus()
    _check_number(grid, ranks)
    module = ["-m"] if Path(sys.argv[0]).name == "__main__.py" else ["-P", "-m"]  # -P: as the script, which has no "."
    command = [sys.executable, *module, "fedgma", *sys.argv[1:]]
    code = launch(command, ranks, replace=replace, say=lambda text: typer.echo(f"fedgma: {text}", err=True))
    raise typer.Exit(code)


def _check_number(grid: "Grid", ranks: int) -> None:
    """Refuse more ranks than clients before any is started; those of a fleet, which may be fewer, are counted later."""
    most = sum(settings.clients_per_round or 10 for settings in grid.runs)
    if ranks > most:
        raise ConfigError(f"{ranks} ranks are more than the {most} clients that train in a round; use --ranks {most}")


def _gpus() -> int:
    import torch

    if (gpus := torch.cuda.device_count()) == 0:
        raise ConfigError(
            "--on torchrun starts one process for each GPU, and there is none; set their number by --ranks"
        )
    return gpus


def _play(grid: "Grid", options: play.Options, place: "Place") -> None:
    """Train as one rank; an error is said once, and ends this process without waiting for the others."""
    from fedgma.experiments.ranks.launch import end_with_launcher

    end_with_launcher(os.environ)
    if place.rank:
        options = options._replace(quiet=True, as_json=False, name=None, note=None)
        logging.disable(logging.WARNING)  # the first rank warns for all
    try:
        play.play_grid(grid, options, place)
    except FedgmaError as error:
        if not isinstance(error, RankLost) or not (place.rank or place.store):  # its launcher says it
            typer.echo(f"fedgma: {error}", err=True)
        end_now(error.exit_code)
