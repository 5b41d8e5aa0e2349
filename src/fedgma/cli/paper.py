"""`fedgma paper list | search | run | all`: run the experiments behind the paper's tables and figures."""

import json
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fedgma.cli.options import taking
from fedgma.cli.paper_compare import RUNS, Cells, Quick, Rates, compare, results
from fedgma.cli.paper_queue import queue
from fedgma.cli.play import Checkpoints, Device, Precision, Quiet, say_plan
from fedgma.cli.runs import Json

if TYPE_CHECKING:
    from rich.console import Console

    from fedgma.cli.signals import Stopping
    from fedgma.experiments.grid import Grid
    from fedgma.experiments.materials import Materials
    from fedgma.experiments.plan import Planned
    from fedgma.paper.catalogue import Experiment
    from fedgma.paper.plans import Cut, Plan

app = typer.Typer(
    no_args_is_help=True, help="The paper's experiments: list, queue, search, run, compare, all, results."
)
app.command()(queue)
app.command()(compare)
app.command()(results)

Ids = Annotated[
    list[str], typer.Argument(metavar="ID...", help="E1 to E18, or 'Table 2'; `fedgma paper list` names them.")
]
Rounds = Annotated[int | None, typer.Option(min=1, help="Number of rounds (default: the experiment's own).")]
Seeds = Annotated[int | None, typer.Option(min=1, help="Number of seeds (default: the experiment's own).")]
Out = Annotated[Path, typer.Option(help="Folder for the run folders; experiments share runs there.")]
Estimate = Annotated[bool, typer.Option(help="Train a few rounds first, to estimate how long all will take.")]
Fleet = Annotated[
    int | None, typer.Option(min=1, help="Largest number of runs in a fleet (default: what fits into memory).")
]
Keep = Annotated[bool, typer.Option(help="Keep the final state of every run, to extend the run or to attack it (E16).")]
Minutes = Annotated[
    float | None, typer.Option(min=0.0, help="Time limit in minutes: start no fleet that is expected to end later.")
]

Done = Annotated[
    list[Path] | None,
    typer.Option(help="Exported results or run folders of another machine: their runs are not made again."),
]


class Options(NamedTuple):
    """Which part of an experiment to train, and how: the options that all commands which train take."""

    rounds: Rounds = None
    seeds: Seeds = None
    cells: Cells = ""
    quick: Quick = False
    out: Out = RUNS
    device: Device = "auto"
    precision: Precision = "fp32"
    rates: Rates = None
    estimate: Estimate = True
    fleet: Fleet = None
    minutes: Minutes = None
    checkpoint_seconds: Checkpoints = 300.0
    keep: Keep = False
    done: Done = None
    quiet: Quiet = False

    @property
    def cut(self) -> "Cut":
        """Which part of an experiment."""
        from fedgma.paper.plans import Cut

        return Cut(self.rounds, self.seeds, self.cells, self.quick)


@app.command("list")
def list_experiments(rates: Rates = None, as_json: Json = False) -> None:
    """List every experiment: its number of runs, the samples they train on, and whether this machine has the data."""
    from fedgma.cli.tables import say_table
    from fedgma.paper.catalogue import catalogue
    from fedgma.paper.plans import Cut, absent_data, plan_runs, samples
    from fedgma.paper.rates import read_chosen
    from fedgma.reports.tables import Table

    chosen = read_chosen(rates)
    rows = []
    for experiment in catalogue().values():
        runs = plan_runs(experiment, chosen, Cut(seeds=1)).grid.runs  # every seed has the same ones
        absent = absent_data(run.dataset for run in runs)
        data = "an analysis" if not runs else "here" if not absent else f"absent: {', '.join(absent)}"
        total = experiment.seeds * sum(samples(run) for run in runs)
        count = (str(experiment.seeds * len(runs)), f"{total / 1e6:,.0f} M") if runs else ("", "")
        rows.append((experiment.id, experiment.title, experiment.source, *count, data))
    header = ("id", "what", "printed in", "runs", "samples", "data")
    say_table(Table("experiments", "", header, tuple(rows)), as_json=as_json)


@app.command()
@taking(Options)
def run(ids: Ids, *, options: Options) -> None:
    """Train the runs of experiments, or part of them. Finished runs are not repeated; stopped runs are resumed.

    Runs whose data set is not on this machine are left out, and the exit code is then 3.
    """
    from fedgma.paper.catalogue import experiment as look_up

    _check_data([name for experiment in [look_up(name) for name in ids] for name in _play(experiment, options)])


@app.command("all")
@taking(Options)
def run_all(*, options: Options) -> None:
    """Run every experiment in order, or part of each. Experiments without a cell that fits --cells are skipped."""
    from fedgma.paper.catalogue import catalogue
    from fedgma.paper.plans import plan_runs
    from fedgma.paper.rates import Chosen

    absent = []
    for experiment in catalogue().values():
        if not options.cells or plan_runs(experiment, Chosen(), options.cut).runs:
            absent += _play(experiment, options, all_of_them=True)
    _check_data(absent)


@app.command()
@taking(Options)
def search(
    datasets: Annotated[
        list[str] | None, typer.Argument(metavar="[DATASET]...", help="Data sets (default: all that this machine has).")
    ] = None,
    to: Annotated[Path, typer.Option(help="Folder for rates.csv and chosen.toml.")] = Path("rates"),
    plan: Annotated[
        str, typer.Option(metavar="ID", help="The search: E15 as in the paper, or C5, C9, C11 for each setting alone.")
    ] = "",
    by_setting: Annotated[
        bool, typer.Option(help="Search separately for each partition and number of clients: the same as --plan C5.")
    ] = False,
    as_json: Json = False,
    *,
    options: Options,
) -> None:
    """Search the learning rates over the paper's grid, on samples held out of every client (E15)."""
    from fedgma.errors import ConfigError
    from fedgma.paper.catalogue import experiment as look_up
    from fedgma.paper.compare import compare as compare_runs
    from fedgma.paper.entries import merged, read_entries
    from fedgma.paper.rates import read_chosen
    from fedgma.paper.search import SPLIT, doubts, write_search

    experiment, chosen = look_up(plan or ("C5" if by_setting else "E15")), read_chosen(options.rates)
    if experiment.splits != (SPLIT,):
        raise ConfigError(
            f"--plan expects a search of learning rates, such as E15 or C5, got {experiment.id}: {experiment.title}"
        )
    by_setting = experiment.id != "E15"
    only = [f"dataset={'|'.join(datasets)}"] if datasets else []
    cells = ",".join([*only, *([options.cells] if options.cells else [])])
    options = options._replace(cells=cells, quiet=options.quiet or as_json)
    _play(experiment, options)
    out = options.out
    entries, unfinished = read_entries([*([out] if out.is_dir() else []), *(options.done or ())])
    searched = compare_runs(experiment, merged(entries), chosen, options.cut, unfinished=unfinished)
    best_pairs = write_search(searched, chosen, to, by_setting=by_setting)
    doubtful = doubts(searched, by_setting=by_setting)
    written = [str(to / "rates.csv"), str(to / "chosen.toml")]
    names = ("dataset", "algorithm", "rule", "client", "server")
    chosen_rates = [dict(zip(names, (*key, *rates), strict=True)) for key, rates in best_pairs.items()]
    if as_json:
        typer.echo(json.dumps({"rates": chosen_rates, "in doubt": doubtful, "written": written}))
    elif not options.quiet:
        _say_search(chosen_rates, doubtful, written)


def _say_search(rates: "list[dict[str, Any]]", doubtful: "Sequence[str]", written: list[str]) -> None:
    for row in rates:
        typer.echo("{dataset} {algorithm} {rule}: client {client:g}, server {server:g}".format(**row))
    for doubt in doubtful:
        typer.echo(f"in doubt: {doubt}")
    typer.echo(f"written: {', '.join(written)}")


def _check_data(absent: list[str]) -> None:
    """Raise an error if data sets were missing."""
    from fedgma.errors import DataError

    if absent:
        names = ", ".join(dict.fromkeys(absent))
        raise DataError(
            f"runs were left out because these data sets are missing: {names}; `fedgma data list` says how to get each"
        )


def _play(experiment: "Experiment", options: Options, *, all_of_them: bool = False) -> list[str]:
    """Run one experiment: print its plan, train its runs, do its analysis; return the data sets that are missing.

    An experiment whose learning rates have to be searched first is an error, or left out if all are to be run.
    """
    from rich.console import Console

    from fedgma.errors import ConfigError
    from fedgma.paper.plans import check_cells, plan_runs
    from fedgma.paper.rates import read_chosen

    console, cut = Console(highlight=False, markup=False, quiet=options.quiet), options.cut
    console.print(f"{experiment.id}: {experiment.title} ({experiment.source})", soft_wrap=True)
    chosen = read_chosen(options.rates)
    check_cells(experiment, chosen, cut)
    plan = plan_runs(experiment, chosen, cut)
    if plan.unsearched and not cut.quick:
        needed = f"{experiment.id} needs learning rates for {', '.join(plan.unsearched)}"
        if not all_of_them:
            search = f"fedgma paper search --plan {experiment.search}"
            raise ConfigError(f"{needed}; run {search} first and give the file that it writes as --rates")
        console.print(f"{needed}: left out", soft_wrap=True)
        return []
    if plan.unrated:
        console.print(f"no chosen rates for {', '.join(plan.unrated)}: the defaults are used", soft_wrap=True)
    absent = _play_runs(plan, options, console) if plan.runs else []
    if plan.runs:
        again = f"fedgma paper compare {experiment.id} {shlex.quote(str(options.out))}{' --quick' if cut.quick else ''}"
        console.print(f"compare with: {again}", soft_wrap=True)
    if experiment.analysis:
        from fedgma.cli.bars import follow
        from fedgma.paper.results import run_analysis

        shown = partial(follow, console)
        for line in run_analysis(experiment, cut, options.out, device=options.device, follow=shown):
            console.print(line, soft_wrap=True)
    return absent


def _play_runs(plan: "Plan", options: Options, console: "Console") -> list[str]:
    """Train the missing runs of a plan, with progress bars; return the data sets that this machine does not have."""
    from fedgma.cli.play import leave_if_stopped
    from fedgma.cli.signals import obeying_signals
    from fedgma.experiments import plan as plans
    from fedgma.paper import fleets
    from fedgma.paper.plans import samples
    from fedgma.statistics.labels import duration

    with obeying_signals(training=True) as stopping:
        from fedgma.experiments.materials import Materials

        materials = Materials(options.device, precision=options.precision)
        grid, absent = _with_data(_without_done(plan.grid, options, console), console)
        planned = plans.plan(grid, materials, options.out)
        undone = plans.missing(planned)
        left, reasons = fleets.playable(undone, materials)
        for reason in reasons:
            console.print(reason, soft_wrap=True)
        packed = fleets.pack_alike(left, materials, options.fleet)
        if left or (planned and not undone):
            total = sum(samples(run.settings) for run in left) / 1e6
            where = f"{materials.device}, {options.precision}, {total:,.1f} million samples"
            say_plan(console, planned, left, len(packed), where)
        else:
            console.print("no run to train")
        seconds = fleets.estimate(packed, materials) if options.estimate and packed and not stopping() else None
        if seconds is not None:
            console.print(f"about {duration(seconds)} at the rate of the first rounds")
        _play_fleets(packed, materials, options, stopping, console)
    leave_if_stopped(stopping, options.out)
    return absent


def _play_fleets(
    packed: "list[list[Planned]]", materials: "Materials", options: Options, stopping: "Stopping", console: "Console"
) -> None:
    """Train fleet after fleet and print a line for each; stop before one that is not expected to end in time."""
    from fedgma.cli.bars import Display
    from fedgma.cli.play import play_fleets
    from fedgma.experiments.progress import arm_names
    from fedgma.paper import fleets

    clock = fleets.Clock()
    for number, members in enumerate(packed, 1):
        if stopping():
            return
        if options.minutes is not None and clock.expected(members) > 60 * options.minutes:
            console.print(
                f"{len(packed) - number + 1} fleets were not started: they would end after {options.minutes:g} minutes"
            )
            return
        watch = Display(console, quiet=options.quiet, names=arm_names(members))
        training = {"checkpoint_seconds": options.checkpoint_seconds, "keep_state": options.keep}
        play_fleets([members], materials, watch, stopping, **training)
        if not stopping():  # a fleet that was stopped has not trained all of its samples
            console.print(f"fleet {number} of {len(packed)}: {clock.played(members)}", soft_wrap=True)


def _without_done(grid: "Grid", options: Options, console: "Console") -> "Grid":
    """The runs that were not made elsewhere; says how many were."""
    if not options.done:
        return grid
    from fedgma.paper.entries import merged, read_entries
    from fedgma.paper.queue import not_made
    from fedgma.statistics.labels import counted

    left = not_made(grid.runs, merged(read_entries(options.done)[0]))
    made = counted(len(grid.runs) - len(left), "run")
    console.print(f"done in {', '.join(map(str, options.done))}: {made}", soft_wrap=True)
    return grid._replace(runs=tuple(left))


def _with_data(grid: "Grid", console: "Console") -> "tuple[Grid, list[str]]":
    """The runs whose data set is on this machine, and the absent data sets, which are reported."""
    from fedgma.paper.plans import absent_data

    absent = absent_data(run.dataset for run in grid.runs)
    for name in absent:
        count = sum(run.dataset == name for run in grid.runs)
        console.print(f"data set {name} is missing: {count} runs are left out (see `fedgma data list`)")
    return grid._replace(runs=tuple(run for run in grid.runs if run.dataset not in absent)), absent
