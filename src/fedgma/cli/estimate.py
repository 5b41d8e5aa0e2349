"""What `fedgma run` says before a long job, and `--dry-run`: samples, time and memory of the runs to train."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from fedgma.cli.runs import at_terminal

if TYPE_CHECKING:
    from rich.console import Console

    from fedgma.experiments.estimate import Estimate
    from fedgma.experiments.materials import Materials
    from fedgma.experiments.plan import Planned

Facts = dict[str, object]
VERY_LONG = 1800.0  # seconds; a longer job is begun at a terminal only if the user agrees


def say_estimate(
    console: "Console",
    packed: "Sequence[Sequence[Planned]]",
    materials: "Materials",
    *,
    facts: Facts | None,
) -> None:
    """`--dry-run`: print what the missing runs would take; with `facts`, as a JSON object beside them."""
    from fedgma.experiments.estimate import estimate

    guess = estimate(packed, materials)
    if facts is not None:
        typer.echo(json.dumps({**facts, "missing": sum(map(len, packed)), "fleets": len(packed), **guess._asdict()}))
    elif packed:
        console.print(in_words(guess), soft_wrap=True)


def agreed(console: "Console", packed: "Sequence[Sequence[Planned]]", materials: "Materials") -> bool:
    """Print how long a long job will take; at a terminal, ask before a very long one."""
    from fedgma.experiments.estimate import estimate, is_long

    if not is_long(packed, materials):
        return True
    guess = estimate(packed, materials)
    console.print(in_words(guess), soft_wrap=True)
    return guess.seconds < VERY_LONG or not at_terminal() or typer.confirm("begin?", default=True)


def in_words(guess: "Estimate") -> str:
    """An estimate in words."""
    from fedgma.statistics.labels import duration

    many = guess.samples >= 1e5
    samples = f"{guess.samples / 1e6:,.1f} million samples" if many else f"{guess.samples:,.0f} samples"
    large = guess.memory >= 2**30 / 10
    memory = f"{guess.memory / 2**30:.1f} GiB" if large else f"{max(1.0, guess.memory / 2**20):.0f} MiB"
    return f"{samples}, about {duration(guess.seconds)}, about {memory} for data, models and training"
