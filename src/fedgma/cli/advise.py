"""`fedgma advise`: which rule and which rates for this federation, found within some minutes."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedgma.cli import play

if TYPE_CHECKING:
    from rich.console import Console

    from fedgma.cli.bars import Display
    from fedgma.experiments.advise.advice import Advice
    from fedgma.experiments.advise.search import Findings
    from fedgma.experiments.materials import Materials
    from fedgma.experiments.plan import Planned
    from fedgma.experiments.play import Played

MOST_MINUTES = 60 * 24 * 7


def advise(
    words: play.Words = None,
    minutes: Annotated[float, typer.Option(min=0.01, max=MOST_MINUTES, help="The time that it may take.")] = 5.0,
    rules: Annotated[
        str | None, typer.Option(help="Rules to try, such as gma,ties (default: those that expect no attackers).")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the advice, its pictures and the run folders.")] = Path(
        "advice"
    ),
    device: play.Device = "auto",
    precision: play.Precision = "fp32",
    quiet: play.Quiet = False,
    as_json: play.Json = False,
    model_version: play.Version = None,
) -> None:
    """Find the rule and the learning rates that suit a federation, by trying several within some minutes.

    Rules and rates are chosen on validation samples by successive halving. The finalists are then compared with the
    plain mean at its own best rates on test samples and paired seeds. The advice is a settings file, advice.toml. If
    it was stopped, the same command goes on.
    """
    from fedgma.cli.signals import obeying_signals

    options = play.Options(out, device, precision, quiet, as_json, version=model_version)
    began = time.monotonic()
    with obeying_signals(training=True) as stopping:
        from fedgma.experiments.advise.advice import conclude
        from fedgma.experiments.advise.question import ask
        from fedgma.experiments.advise.search import Trainer, search_and_test
        from fedgma.experiments.materials import Materials

        grid = play.grid_of_words(words)
        materials = Materials(device, folder=grid.folder, precision=precision, version=model_version)
        question = ask(grid, materials, [name.strip() for name in (rules or "").split(",") if name.strip()])
        for remark in materials.remarks:
            options.console.print(remark, soft_wrap=True)
        shown = Shown(options.console, quiet=options.silent)
        spent = time.monotonic() - began  # on imports and data
        trainer = Trainer(question, materials, out, time.monotonic, shown, stopping)
        try:
            findings = search_and_test(trainer, 60 * minutes, spent=spent)
        finally:
            shown.close()
    play.leave_if_stopped(stopping, out)
    if findings is not None:
        advice = conclude(findings)
        write(findings, advice, materials, out)
        say(advice, options, time.monotonic() - began)


class Shown:
    """Prints a line for each stage, and shows bars while it trains."""

    def __init__(self, console: "Console", *, quiet: bool) -> None:
        self._console, self._quiet = console, quiet
        self._watch: Display | None = None

    def stage(self, words: str, planned: "Sequence[Planned]") -> None:
        """A stage starts."""
        from fedgma.cli.bars import Display
        from fedgma.experiments.progress import arm_names

        self.close()
        self._console.print(words, soft_wrap=True)
        self._watch = Display(self._console, quiet=self._quiet, names=arm_names(planned))
        self._watch.bars.start()

    def begin(self, members: "Sequence[Planned]", name: str) -> None:
        """A fleet starts."""
        if self._watch is not None:
            self._watch.begin(members, name)

    def see(self, played: "Played") -> None:
        """Show a round that was completed."""
        if self._watch is not None:
            self._watch.see(played)

    def close(self) -> None:
        """End the bars of the last stage."""
        if self._watch is not None:
            self._watch.bars.stop()


def write(findings: "Findings", advice: "Advice", materials: "Materials", out: Path) -> None:
    """Write advice.toml, advice.md and the pictures."""
    from fedgma.experiments.advise.advice import settings_file
    from fedgma.experiments.advise.pictures import pictures_of
    from fedgma.reports.plots.style import save

    (out / "pictures").mkdir(parents=True, exist_ok=True)
    for name, figure in pictures_of(findings, advice).items():
        for ending in ("png", "svg"):
            save(figure, out / "pictures" / f"{name}.{ending}")
    (out / "advice.toml").write_text(settings_file(findings, advice, materials), encoding="utf-8")
    text = "\n".join([f"# {advice.headline}", "", *(f"- {line}." for line in (*advice.reasons, *advice.notes))])
    (out / "advice.md").write_text(text + "\n", encoding="utf-8")


def say(advice: "Advice", options: play.Options, seconds: float) -> None:
    """Print the advice in words, or as a JSON object."""
    from rich.text import Text

    from fedgma.statistics.labels import duration
    from fedgma.statistics.verdicts import as_object

    settings = options.out / "advice.toml"
    if options.as_json:
        gain = None if advice.gain is None else as_object(advice.gain)
        rule, (client, server) = advice.chosen
        rates = {"client_learning_rate": client, "server_learning_rate": server}
        words = {"advice": advice.headline, "reasons": advice.reasons, "notes": advice.notes}
        arms = [
            {
                "name": contender.name,
                "rates": contender.candidate[1],
                "accuracy": contender.mean,
                "seeds": len(contender.scores),
            }
            | {"verdict": None if contender.verdict is None else as_object(contender.verdict)}
            for contender in advice.contenders
        ]
        chosen = {"rule": rule, **rates, "gain": gain, "arms": arms, "settings": str(settings)}
        typer.echo(json.dumps({**words, **chosen}))
        return
    console = options.console
    console.print(Text(f"{advice.headline}.", "bold"), soft_wrap=True)
    for line in advice.reasons:
        console.print(f"{line}.", soft_wrap=True)
    for line in advice.notes:
        console.print(f"note: {line}", soft_wrap=True)
    console.print(f"{duration(seconds)}; settings: {settings}; pictures: {options.out / 'pictures'}", soft_wrap=True)
