"""What `fedgma run` and `fedgma sweep` share: options, training with progress bars, printing the outcome."""

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fedgma.cli.estimate import agreed, say_estimate
from fedgma.cli.runs import Yes

if TYPE_CHECKING:
    from rich.console import Console

    from fedgma.cli.bars import Display
    from fedgma.cli.signals import Stopping
    from fedgma.experiments.grid import Grid
    from fedgma.experiments.materials import Materials
    from fedgma.experiments.outcome import Outcome
    from fedgma.experiments.plan import Planned
    from fedgma.experiments.ranks.places import Place
    from fedgma.records.label import Label
    from fedgma.records.reader import Run
    from fedgma.statistics.comparisons import Comparison


def complete_word(incomplete: str) -> list[str]:
    """Settings files and names of settings, for shell completion."""
    from fedgma.experiments.grid import every_name

    files = sorted(str(path) for path in Path().glob(f"{incomplete}*.toml"))
    return [*files, *(f"{name}=" for name in every_name() if name.startswith(incomplete))]


Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE] [KEY=VALUE]...",
        help="A settings file, and settings that override it; `fedgma run --show` lists them all.",
        autocompletion=complete_word,
    ),
]
Out = Annotated[Path, typer.Option(help="Folder for the run folders.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Precision = Annotated[str, typer.Option(help="On a GPU: fp32, tf32 or bf16.")]
Version = Annotated[
    str | None,
    typer.Option(
        "--model-version", help="A name for this version of your model's code, if it cannot be fingerprinted."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Checkpoints = Annotated[
    float, typer.Option("--checkpoint-seconds", min=0.0, help="Least number of seconds between checkpoints of a run.")
]
Name = Annotated[str | None, typer.Option("--name", help="A name for these runs, shown by ls, show and reports.")]
Note = Annotated[str | None, typer.Option("--note", help="A note on these runs; neither changes which run it is.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Train nothing; print the runs, their samples, and about what they will take.")
]
State = Annotated[
    bool,
    typer.Option(
        "--state/--no-state", help="Keep the final state of a finished run, so that it can be extended to more rounds."
    ),
]


LOG_WIDTH = 200  # characters


class Options(NamedTuple):
    """How to train and report, whichever the runs: the options that both commands take."""

    out: Out = Path("runs")
    device: Device = "auto"
    precision: Precision = "fp32"
    quiet: Quiet = False
    as_json: Json = False
    checkpoint_seconds: Checkpoints = 10.0
    keep_state: State = True
    version: Version = None
    name: Name = None
    note: Note = None
    dry: DryRun = False
    yes: Yes = False

    @property
    def label(self) -> "Label":
        """Name and note of the runs, checked."""
        from fedgma.records.label import make_label

        return make_label(self.name, self.note)

    @property
    def silent(self) -> bool:
        """Whether to print nothing while runs train."""
        return self.quiet or self.as_json

    @property
    def console(self) -> "Console":
        """The console to print to; a log file is as wide as its lines."""
        from rich.console import Console

        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else LOG_WIDTH
        return Console(file=sys.stdout, quiet=self.silent, highlight=False, markup=False, width=width)


def grid_of_words(words: list[str] | None) -> "Grid":
    """The runs that the words of a command line describe: at most one file, and key=value settings."""
    from fedgma.data.files.own.folders import SUFFIXES
    from fedgma.errors import ConfigError
    from fedgma.experiments.grid import every_name, read_grid

    _check_dashes(words or [])
    files = [word for word in words or [] if "=" not in word]
    if "=" in (words or []):
        raise ConfigError("expected key=value without spaces around '=', such as rounds=100")
    if len(files) > 1:
        raise ConfigError(f"expected one settings file and key=value settings, got {' and '.join(map(repr, files))}")
    if files and files[0] in every_name() and not Path(files[0]).exists():
        raise ConfigError(f"expected a value for the setting {files[0]!r}; write {files[0]}=VALUE")
    if files and (Path(files[0]).is_dir() or files[0].lower().endswith((*SUFFIXES, ".txt"))):
        raise ConfigError(
            f"expected a settings file, got {files[0]!r}; data are a setting: dataset={shlex.quote(files[0])}"
        )
    if files and ".py" in Path(files[0]).suffix.partition(":")[0]:
        raise ConfigError(f"expected a settings file, got {files[0]!r}; a model is a setting: model=net.py:Net")
    return read_grid(Path(files[0]) if files else None, [word for word in words or [] if "=" in word])


def _check_dashes(words: list[str]) -> None:
    """Refuse an unknown option; a setting that was written as one is told apart."""
    import click

    from fedgma.errors import ConfigError, nearest
    from fedgma.experiments.grid import every_name

    for word in words:
        option = word.partition("=")[0]
        name = option.lstrip("-").replace("-", "_")
        if name in every_name() and word.startswith("--"):
            raise ConfigError(f"{name} is a setting, not an option; write {name}=VALUE")
        if word.startswith("-"):
            known = [name for option in click.get_current_context().command.params for name in option.opts]
            raise click.NoSuchOption(option, possibilities=nearest(option, known, most=3))


def play_grid(grid: "Grid", options: Options, place: "Place | None" = None) -> None:
    """Train the missing runs of a grid and print the outcome; after a signal they can be resumed.

    A long job is estimated first; at a terminal, a very long one is begun only if the user agrees. `place` is that of
    this process among several (ranks), of which the first speaks and writes.
    """
    from fedgma.cli.bars import Display
    from fedgma.cli.signals import obeying_signals

    console, label, speaks = options.console, options.label, place is None or place.rank == 0
    with obeying_signals(training=True, following=not speaks) as stopping, contextlib.ExitStack() as opened:
        from fedgma.experiments.materials import Materials
        from fedgma.experiments.plan import plan
        from fedgma.experiments.progress import arm_names
        from fedgma.experiments.ranks.agreement import fleets_of
        from fedgma.experiments.ranks.rendezvous import joined
        from fedgma.training.ranks import agreed as asked_first

        ranks, device = opened.enter_context(joined(place, options.device))
        materials = Materials(device, folder=grid.folder, precision=options.precision, version=options.version)
        planned = plan(grid, materials, options.out)
        packed = fleets_of(planned, materials, ranks)
        left = [run for members in packed for run in members]
        for remark in materials.remarks:
            console.print(remark, soft_wrap=True)
        over = f", {ranks.size} ranks" if ranks.size > 1 else ""
        say_plan(console, planned, left, len(packed), f"{materials.device}{over}")
        if options.dry:
            facts = {"out": str(options.out), "runs": len(planned), "device": str(materials.device)}
            say_estimate(console, packed, materials, facts=facts if options.as_json else None)
            return
        if not (options.silent or options.yes or agreed(console, packed, materials)):
            return
        put_label(planned, label)
        watch = Display(console, quiet=options.silent, names=arm_names(planned))
        training = {"checkpoint_seconds": options.checkpoint_seconds, "keep_state": options.keep_state, "ranks": ranks}
        play_fleets(packed, materials, watch, asked_first(ranks, stopping), **training)
    if speaks:
        end(planned, options, stopping)


def put_label(planned: "Sequence[Planned]", label: "Label") -> None:
    """Give the runs a name and a note."""
    from fedgma.records.label import write_label

    for run in planned:
        if any(label) and run.folder is not None:
            write_label(run.folder, label)


def play_fleets(
    packed: "Sequence[Sequence[Planned]]",
    materials: "Materials",
    watch: "Display",
    stopping: Callable[[], bool],
    **options: Any,
) -> None:
    """Train fleets one after the other, with a bar for each, until all are done or a signal arrives.

    Options are those of `play_fleet`.
    """
    from fedgma.experiments.play import play_fleet

    with watch.bars:
        for number, members in enumerate(packed, 1):
            watch.begin(members, "training" if len(packed) == 1 else f"fleet {number} of {len(packed)}")
            for played in play_fleet(members, materials, stop=stopping, **options):
                watch.see(played)
            if stopping():
                break


def leave_if_stopped(stopping: "Stopping", out: Path) -> None:
    """If a signal arrived, exit with its code and tell the user how to resume."""
    if stopping.code is not None:
        typer.echo(
            f"fedgma: stopped; the completed rounds are in {out}; run the same command again to resume", err=True
        )
        raise typer.Exit(stopping.code)


def end(planned: "Sequence[Planned]", options: Options, stopping: "Stopping") -> None:
    """Print the outcome, or that the command was stopped."""
    from fedgma.experiments.play import conclude

    leave_if_stopped(stopping, options.out)
    outcome = conclude(planned)
    if options.as_json:
        typer.echo(json.dumps(as_object(outcome, options.out)))
    else:
        print_outcome(options.console, outcome, options.out)


def say_plan(
    console: "Console", planned: "Sequence[Planned]", left: "Sequence[Planned]", fleets: int, where: str
) -> None:
    """Print one line on the runs that will be trained."""
    from fedgma.statistics.labels import counted

    done = len(planned) - len(left)
    if not left:
        console.print("the run is already done" if len(planned) == 1 else f"all {len(planned)} runs are already done")
        return
    before = f", {done} already done" if done else ""
    packed = "one fleet" if fleets == 1 else f"{fleets} fleets"
    console.print(f"{counted(len(left), 'run')} in {packed} on {where}{before}", soft_wrap=True)


def print_outcome(console: "Console", outcome: "Outcome", out: Path) -> None:
    """Print the table of arms, the verdicts, and the command for a full report."""
    from rich.table import Column, Table
    from rich.text import Text

    from fedgma.reports.tables import value_text
    from fedgma.statistics.arms import last_rounds
    from fedgma.statistics.labels import counted

    late = last_rounds(outcome.runs)
    labels = " or ".join(dict.fromkeys(arm.metric.label for arm in outcome.arms)) or "accuracy, %"
    names = Column(f"test {labels}", overflow="fold")
    table = Table(names, "best", late, "final", "seeds", box=None, header_style="bold")
    for arm in outcome.arms:
        digits = arm.metric.decimals(*(spread.mean for spread in arm.scores.values()))
        scores = [value_text(spread, decimals=digits) for spread in arm.scores.values()]
        table.add_row(Text(arm.name), *scores, str(len(arm.runs)))
    console.print(table)
    for comparison in outcome.comparisons:
        against = f", {' against '.join(comparison.names)}" if len(outcome.comparisons) > 1 else ""
        _say_comparison(console, comparison, f"{late}{against}")
    for note in outcome.notes:
        console.print(f"note: {note}", soft_wrap=True)
    folders = f"{counted(len(outcome.runs), 'run folder')} in {out}"
    console.print(f"{folders}; for a full report: fedgma report {shlex.quote(str(out))}", soft_wrap=True)


def _say_comparison(console: "Console", comparison: "Comparison", what: str) -> None:
    """Print the verdict of a comparison in bold, after those of its single settings."""
    from rich.text import Text

    from fedgma.reports.report import with_limits

    if len(comparison.cells) > 1:
        for cell in comparison.cells:
            console.print(f"{cell.where}: {cell.verdict.text}", soft_wrap=True)
    if comparison.cells:
        verdict, limits = with_limits(comparison.text)
        console.print(Text.assemble(f"{what}: ", (verdict, "bold"), f"; {limits}" if limits else ""), soft_wrap=True)
    if more := [name for name in comparison.differ if name != "aggregator"]:
        console.print(f"{' and '.join(comparison.names)} differ in {', '.join(more)} too", soft_wrap=True)


def as_object(outcome: "Outcome", out: Path) -> dict[str, Any]:
    """The outcome as a JSON object, for programs."""
    from fedgma.statistics.arms import Summary
    from fedgma.statistics.baseline import against_baseline
    from fedgma.statistics.verdicts import as_object as verdict_object

    by_metric = {name: against_baseline(_scored(outcome), metric=name) for name in Summary._fields}
    verdicts = [
        {"where": cell.where, "first": comparison.names[0], "second": comparison.names[1]}
        | {name: verdict_object(by_metric[name][which].cells[row].verdict) for name in by_metric}
        for which, comparison in enumerate(outcome.comparisons)
        for row, cell in enumerate(comparison.cells)
    ]
    runs = [{**run.head, "summary": _summary(run)} for run in outcome.runs]
    return {"out": str(out), "runs": runs, "verdicts": verdicts, "notes": list(outcome.notes)}


def _scored(outcome: "Outcome") -> "list[Run]":
    return [run for run in outcome.runs if _summary(run) is not None]


def _summary(run: "Run") -> dict[str, float] | None:
    from fedgma.statistics.arms import summary_of

    summary = summary_of(run)
    return None if summary is None else summary._asdict()
