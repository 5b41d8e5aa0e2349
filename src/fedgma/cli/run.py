"""`fedgma run`: train the runs of a settings file, or the embedded comparison, and print the outcome."""

from typing import Annotated

import typer

from fedgma.cli import play
from fedgma.cli.on_ranks import on_ranks, play_on_ranks
from fedgma.cli.options import taking

On = Annotated[
    str, typer.Option(help="`here`: one process; `torchrun`: several, which share the clients of each round.")
]
Ranks = Annotated[
    int | None,
    typer.Option(help="With --on torchrun: the number of processes to start; by default one for each GPU."),
]
Replace = Annotated[
    bool, typer.Option("--replace-lost", help="With --on torchrun: go on with as many processes when one is killed.")
]


@taking(play.Options)
def run(
    words: play.Words = None,
    show: Annotated[bool, typer.Option("--show", help="Print every setting without training.")] = False,
    on: On = "here",
    ranks: Ranks = None,
    replace: Replace = False,
    *,
    options: play.Options,
) -> None:
    """Train with and without the mask on paired seeds and give a verdict.

    By default the plain mean and GMA train LeNet by FedAvg on embedded images, among 100 clients with two classes each.
    Without any words, an average of the server's models is a third arm.

    A list of values makes a sweep, e.g. tau=0.2,0.4. Finished runs are not repeated, and stopped runs are resumed. With
    a larger rounds=, finished runs are extended.
    """
    grid = play.grid_of_words(words)
    if show:
        from fedgma.cli.show_settings import show_settings

        typer.echo(show_settings(grid))
        return
    if not words:
        from fedgma.experiments.grid import embedded_comparison

        grid = embedded_comparison()
    if options.dry or not on_ranks(on, ranks, replace):
        play.play_grid(grid, options)
    else:
        play_on_ranks(grid, options, ranks, replace=replace)
