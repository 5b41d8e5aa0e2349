"""`fedgma paper`: the paper's tables and figures: list them, run them, put them beside the printed numbers."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgma.cli.run import Device

if TYPE_CHECKING:
    from rich.console import Console

    from fedgma.experiments.play import Planned
    from fedgma.paper.catalogue import Experiment
    from fedgma.paper.plans import Cut, Plan

app = typer.Typer(no_args_is_help=True, help="The paper's experiments: list, search, run, compare, all, results.")

Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="E1 to E18; `fedgma paper list` names them.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Play so many rounds instead of the experiment's own.")]
Seeds = Annotated[int | None, typer.Option(min=1, help="Play so many seeds instead of the experiment's own.")]
Cells = Annotated[str, typer.Option(help="Only these cells, e.g. 'dataset=mnist|fmnist,partition.clients=100'.")]
Out = Annotated[Path, typer.Option(help="Folder for the run folders; experiments share runs there.")]
Precision = Annotated[str, typer.Option(help="On a GPU: fp32, tf32 or bf16.")]
Rates = Annotated[Path | None, typer.Option(help="Chosen learning rates (default: those of the package).")]
Estimate = Annotated[bool, typer.Option(help="Measure for a few rounds how long it will take.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Embedded images in place of the data sets: to see that it works.")
]
Checkpoints = Annotated[
    float, typer.Option("--checkpoint-seconds", min=0.0, help="Least time between checkpoints of a run.")
]
RUNS = Path("runs/paper")


@app.command("list")
def list_experiments(rates: Rates = None) -> None:
    """Name every experiment: how many runs it has, how many samples they train on, whether its data are here."""
    from rich.console import Console
    from rich.table import Table

    from fedgma.paper.catalogue import catalogue
    from fedgma.paper.plans import absent_data, plan_runs, samples
    from fedgma.paper.rates import read_chosen

    chosen = read_chosen(rates)
    table = Table("id", "what", "printed in", "runs", "samples", "data", box=None, header_style="bold")
    for one in catalogue().values():
        runs = plan_runs(one, chosen).grid.runs
        absent = absent_data(run.dataset for run in runs)
        data = "an analysis" if not runs else "here" if not absent else f"absent: {', '.join(absent)}"
        total = sum(samples(run) for run in runs)
        count = (str(len(runs)), f"{total / 1e6:,.0f} M") if runs else ("", "")
        table.add_row(one.id, one.title, one.source, *count, data)
    Console(highlight=False).print(table)


@app.command()
def run(
    ids: Ids,
    rounds: Rounds = None,
    seeds: Seeds = None,
    cells: Cells = "",
    quick: Quick = False,
    out: Out = RUNS,
    device: Device = "auto",
    precision: Precision = "fp32",
    rates: Rates = None,
    estimate: Estimate = True,
    checkpoint_seconds: Checkpoints = 300.0,
) -> None:
    """Play an experiment's runs, all or cut; what is done is not repeated, a stopped run goes on where it was."""
    from fedgma.paper.catalogue import experiment
    from fedgma.paper.plans import Cut

    cut = Cut(rounds, seeds, cells, quick)
    for one in [experiment(name) for name in ids]:
        _play(one, cut, out, device, precision, rates, estimate=estimate, checkpoint_seconds=checkpoint_seconds)


@app.command("all")
def run_all(
    rounds: Rounds = None,
    seeds: Seeds = None,
    cells: Cells = "",
    quick: Quick = False,
    out: Out = RUNS,
    device: Device = "auto",
    precision: Precision = "fp32",
    rates: Rates = None,
    estimate: Estimate = True,
    checkpoint_seconds: Checkpoints = 300.0,
) -> None:
    """Play every experiment in order, all or cut; those of which no cell is left are passed over."""
    from fedgma.paper.catalogue import catalogue
    from fedgma.paper.plans import Cut, plan_runs
    from fedgma.paper.rates import Chosen

    cut = Cut(rounds, seeds, cells, quick)
    for one in catalogue().values():
        if not cells or plan_runs(one, Chosen(), cut).runs:
            _play(one, cut, out, device, precision, rates, estimate=estimate, checkpoint_seconds=checkpoint_seconds)


@app.command()
def search(
    datasets: Annotated[
        list[str] | None, typer.Argument(metavar="[DATASET]...", help="Default: all that are here.")
    ] = None,
    rounds: Rounds = None,
    seeds: Seeds = None,
    cells: Cells = "",
    quick: Quick = False,
    out: Out = RUNS,
    to: Annotated[Path, typer.Option(help="Folder for rates.csv and chosen.toml.")] = Path("rates"),
    device: Device = "auto",
    precision: Precision = "fp32",
    rates: Rates = None,
    estimate: Estimate = True,
    checkpoint_seconds: Checkpoints = 300.0,
) -> None:
    """Search the learning rates over the paper's grid, on samples held out of every client (E15)."""
    from fedgma.paper.catalogue import experiment
    from fedgma.paper.compare import compare as compare_runs
    from fedgma.paper.entries import read_entries
    from fedgma.paper.plans import Cut
    from fedgma.paper.rates import read_chosen
    from fedgma.paper.search import write_search

    one, chosen = experiment("E15"), read_chosen(rates)
    only = [f"dataset={'|'.join(datasets)}"] if datasets else []
    cut = Cut(rounds, seeds, ",".join([*only, *([cells] if cells else [])]), quick)
    _play(one, cut, out, device, precision, rates, estimate=estimate, checkpoint_seconds=checkpoint_seconds)
    entries, unfinished = read_entries([out])
    found = write_search(compare_runs(one, entries, chosen, cut, unfinished=unfinished), chosen, to)
    for (dataset, algorithm, rule), (client, server) in found.items():
        typer.echo(f"{dataset} {algorithm} {rule}: client {client:g}, server {server:g}")
    typer.echo(f"written: {to / 'rates.csv'}, {to / 'chosen.toml'}")


@app.command()
def compare(
    name: Annotated[str, typer.Argument(metavar="ID", help="E1 to E18.")],
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders, or exported results.")] = None,
    cells: Cells = "",
    quick: Quick = False,
    statistic: Annotated[str | None, typer.Option(help="best, last10 or final; default: what is printed.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for page, tables and figures (default: paper/ID).")] = None,
    rates: Rates = None,
) -> None:
    """Put our runs beside the printed numbers, cell by cell and claim by claim."""
    from fedgma.errors import DataError
    from fedgma.paper.catalogue import experiment
    from fedgma.paper.compare import compare as compare_runs
    from fedgma.paper.entries import read_entries
    from fedgma.paper.plans import Cut
    from fedgma.paper.rates import read_chosen
    from fedgma.paper.results import find_analysis, write_comparison
    from fedgma.reports.tables import text

    one, paths = experiment(name), runs or [RUNS]
    if statistic is not None:
        one = one._replace(statistic=statistic)
    analysis = find_analysis(one, paths)
    if analysis is not None:
        typer.echo((analysis / "README.md").read_text(encoding="utf-8"))
    if not one.parts:
        if analysis is None:
            raise DataError(f"no analysis of {one.id} in {', '.join(map(str, paths))}; run: fedgma paper run {one.id}")
        return
    entries, unfinished = read_entries(paths)
    made = compare_runs(one, entries, read_chosen(rates), Cut(cells=cells, quick=quick), unfinished=unfinished)
    if not made.entries:
        raise DataError(f"no finished run of {one.id} in {', '.join(map(str, paths))}; run: fedgma paper run {one.id}")
    folder = Path("paper") / one.id if out is None else out
    report = write_comparison(made, folder)
    for line in [*report.verdicts, *report.notes]:
        typer.echo(f"{line}.")
    for table in report.tables:
        typer.echo(f"\n{table.title}\n{text(table)}")
    typer.echo(f"\npage: {folder / 'report.html'}\ntables and figures: {folder}")


@app.command()
def results(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold them.")],
    out: Annotated[Path, typer.Option(help="Folder for the export.")] = Path("results"),
    only: Annotated[list[str] | None, typer.Option(help="Only these experiments.")] = None,
    rates: Rates = None,
) -> None:
    """Export runs, thinned, with tables and figures: small enough to keep, enough to compare again."""
    from fedgma.paper.catalogue import catalogue, experiment
    from fedgma.paper.entries import read_entries
    from fedgma.paper.rates import read_chosen
    from fedgma.paper.results import export, export_analysis

    entries, unfinished = read_entries(runs)
    chosen = read_chosen(rates)
    for one in [experiment(name) for name in only] if only else catalogue().values():
        count = export(one, entries, chosen, out)
        analysed = export_analysis(one, runs, out)
        if count or analysed:
            typer.echo(f"{one.id}: {count} runs{' and the analysis' if analysed else ''} in {out / one.id}")
    if unfinished:
        typer.echo(f"{unfinished} unfinished runs were left out")


def _play(
    one: "Experiment",
    cut: "Cut",
    out: Path,
    device: str,
    precision: str,
    rates: Path | None,
    *,
    estimate: bool,
    checkpoint_seconds: float,
) -> None:
    """One experiment: its plan in words, its runs, its analysis."""
    from rich.console import Console

    from fedgma.errors import ConfigError
    from fedgma.paper.plans import plan_runs
    from fedgma.paper.rates import read_chosen

    console = Console(highlight=False, markup=False)
    console.print(f"{one.id}: {one.title} ({one.source})", soft_wrap=True)
    plan = plan_runs(one, read_chosen(rates), cut)
    if cut.cells and not plan.runs:
        raise ConfigError(f"no cell of {one.id} fits --cells {cut.cells!r}")
    if plan.unrated:
        console.print(f"no chosen rates for {', '.join(plan.unrated)}: the defaults are used", soft_wrap=True)
    if plan.runs:
        _play_runs(plan, out, device, precision, console, estimate=estimate, checkpoint_seconds=checkpoint_seconds)
        console.print(f"compare with: fedgma paper compare {one.id} {out}", soft_wrap=True)
    if one.analysis:
        from fedgma.paper.results import run_analysis

        for line in run_analysis(one, cut, out, device=device):
            console.print(line, soft_wrap=True)


def _play_runs(
    plan: "Plan",
    out: Path,
    device: str,
    precision: str,
    console: "Console",
    *,
    estimate: bool,
    checkpoint_seconds: float,
) -> None:
    """What is missing of a plan, visibly; data sets that are not here are left out and named."""
    from fedgma.cli.live import Watch, obeying_signals
    from fedgma.cli.run import leave_if_stopped, play_fleets
    from fedgma.experiments import play
    from fedgma.paper import fleets

    with obeying_signals() as stopping:
        from fedgma.experiments.materials import Materials

        materials = Materials(device, precision=precision)
        grid = plan.grid
        planned = _with_data(play.plan(grid, materials, out), console)
        left = play.missing(planned)
        packed = fleets.pack_alike(left, materials)
        _say_plan(console, planned, left, packed, f"{materials.device}, {precision}")
        seconds = fleets.estimate(packed, materials) if estimate and packed and not stopping() else None
        if seconds is not None:
            console.print(f"about {fleets.spoken(seconds)} at the rate of the first rounds")
        watch = Watch(console, quiet=False, axes=grid.axes)
        play_fleets(packed, materials, watch, stopping, checkpoint_seconds=checkpoint_seconds)
    leave_if_stopped(stopping, out)


def _with_data(planned: "list[Planned]", console: "Console") -> "list[Planned]":
    """The runs whose data set is on this machine; the others are named."""
    from fedgma.paper.plans import absent_data

    absent = absent_data(run.settings.dataset for run in planned)
    for name in absent:
        count = sum(run.settings.dataset == name for run in planned)
        console.print(f"{name} is not here: {count} runs are left out (`fedgma data list` says what to do)")
    return [run for run in planned if run.settings.dataset not in absent]


def _say_plan(
    console: "Console",
    planned: "list[Planned]",
    left: "list[Planned]",
    packed: "list[list[Planned]]",
    where: str,
) -> None:
    from fedgma.paper.plans import samples

    if not left:
        console.print(f"all {len(planned)} runs were done before")
        return
    before = f", {len(planned) - len(left)} done before" if len(left) < len(planned) else ""
    total = sum(samples(run.settings) for run in left) / 1e6
    fleets = "one fleet" if len(packed) == 1 else f"{len(packed)} fleets"
    console.print(f"{len(left)} runs in {fleets} on {where}, {total:,.1f} million samples{before}", soft_wrap=True)
