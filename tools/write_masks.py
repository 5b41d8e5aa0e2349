"""Write the measured parts of docs/masks.md and docs/advise.md, and their pictures, from the exported runs in results/.

python tools/write_masks.py
"""

import csv
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from fedgma.paper.catalogue import experiment
from fedgma.paper.compare import compare
from fedgma.paper.contest import (
    SERVERS,
    SETS,
    Arm,
    Gain,
    Pooled,
    earns,
    gains_of,
    is_candidate,
    label,
    pooled,
    ranked,
    rising,
    scores_of,
    short,
)
from fedgma.paper.entries import Entry, read_export
from fedgma.paper.findings import read_findings
from fedgma.paper.multiverse import most_telling, multiverse_of, sentences
from fedgma.paper.plots.contest import draw_gains
from fedgma.paper.rates import read_chosen, setting_of
from fedgma.reports.plots.style import save
from fedgma.statistics.comparisons import over_seeds
from fedgma.statistics.labels import NAMES, capitalised, in_sentence
from fedgma.statistics.verdicts import Verdict, correct, paired

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "masks.md"
ADVICE = ROOT / "docs" / "advise.md"
PICTURES = ROOT / "docs" / "pictures"
RESULTS = ROOT / "results"
SEARCH, WHY, UNIVERSES = "C21", "C25", "C24"
CONFIRMATION = ("C23", "C31")  # small networks, and ResNet18 on CIFAR-10
CLAIMED = ("trained/uniform", "trained/saved")
FEDADAM, FEDERATIONS = "C27", "C29"
SCORES, SAME_RATES = (ROOT / "benchmarks" / "languages" / f"{name}.csv" for name in ("scores", "same_rates"))
ON_TEXT: tuple[Arm, ...] = (
    ("fedavg", "gma"),
    ("fedavg", "mean, server average 0.9"),
    ("fedadam", "gma"),
    ("fedadam", "magnitude_agreement"),
)
Lengths = dict[int, dict[str, dict[Arm, dict[int, float]]]]  # rounds, setting, arm, seed: percent
NOT_YET = "Not measured yet."


def exported(*names: str) -> list[Entry]:
    """The exported runs of experiments; those that have none are left out."""
    there = [RESULTS / name for name in names if (RESULTS / name / "runs.jsonl").is_file()]
    return [entry for folder in there for entry in read_export(folder)]


def gains(*names: str, diverged: bool = False) -> list[Gain]:
    """What the arms of a contest gain; tests of all its experiments are corrected together."""
    return gains_of(scores_of(exported(*names)), diverged=diverged)


def answer() -> str:
    """The verdict on every arm of the confirmation by the criterion written beforehand; the finalists first."""
    without_diverged, all_seeds = gains(*CONFIRMATION), gains(*CONFIRMATION, diverged=True)
    arms = sorted(dict.fromkeys(gain.arm for gain in without_diverged), key=lambda arm: not is_candidate(arm))
    if not arms:
        return NOT_YET
    header = ("", "criterion", "ahead, behind", "mean gain", "lowest bound", "second highest")
    rows = [(f"**{label(arm)}**", *_verdict(without_diverged, arm), *_verdict(all_seeds, arm)[:2]) for arm in arms]
    return _rows((*header, "all seeds: criterion", "ahead, behind"), rows)


def _verdict(gained: Sequence[Gain], arm: Arm) -> tuple[str, ...]:
    gains_of_arm = [gain for gain in gained if gain.arm == arm]
    ahead, behind = (
        sum(gain.verdict.outcome == side for gain in gains_of_arm) for side in ("first ahead", "second ahead")
    )
    earned = "met" if earns(gained, arm) else "missed"
    mean = sum(gain.verdict.mean for gain in gains_of_arm) / len(gains_of_arm)
    starts = sorted(gain.interval[0] for gain in gains_of_arm)
    return earned, f"{ahead}, {behind}", f"{mean:+.2f}", f"{starts[0]:+.2f}", f"{starts[-SETS]:+.2f}"


def _rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; numbers stand at the right."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    return "\n".join([lines[0], "| --- |" + " ---: |" * (len(header) - 1), *lines[1:]])


def fedadam() -> str:
    """FedAdam with the mask after the preconditioner: three differences at two lengths, corrected together."""
    lengths: Lengths = {}
    for entry in exported(FEDADAM):
        arms = lengths.setdefault(int(entry.settings["rounds"]), {}).setdefault(setting_of(entry.settings), {})
        arm = str(entry.settings["algorithm"]), str(entry.settings["aggregator"])
        arms.setdefault(arm, {})[entry.seed] = float(entry.scores["test"].last10)
    pairs = (("gma", "mean"), ("damped_mean", "mean"), ("gma", "damped_mean"))
    keys = [(pair, rounds) for pair in pairs for rounds in sorted(lengths)]
    differences = {key: apart for key in keys if (apart := _lengths_apart(lengths, *key)) is not None}
    if not differences:
        return NOT_YET
    verdicts = _corrected(differences)
    rows = [
        (_apart(pair), *(_pooled(differences[key], verdicts[key]) for key in keys if key[0] == pair)) for pair in pairs
    ]
    table = _rows(["", *(f"{rounds} rounds" for rounds in sorted(lengths))], rows)
    return f"{table}\n\n{_by_convergence(max(lengths))}\n\n{_with_diverged(lengths, differences)}"


def _lengths_apart(lengths: Lengths, pair: tuple[str, str], rounds: int, *, diverged: bool = False) -> Pooled | None:
    return pooled(lengths[rounds], *(("fedadam", rule) for rule in pair), diverged=diverged)


def _corrected(found: Mapping[Any, Pooled]) -> dict[Any, Verdict]:
    return dict(zip(found, correct([apart.verdict for apart in found.values()]), strict=True))


def _with_diverged(lengths: Lengths, found: Mapping[Any, Pooled]) -> str:
    """The differences that left out a diverged run, with it; corrected among as many tests."""
    with_all = {key: apart for key in found if (apart := _lengths_apart(lengths, *key, diverged=True)) is not None}
    verdicts = [verdict for key, verdict in _corrected(with_all).items() if found[key].lost]
    if not verdicts:
        return ""
    sure = sum(verdict.significant for verdict in verdicts)
    means = ", ".join(f"{verdict.mean:+.2f}" for verdict in verdicts)
    return f"With the diverged runs, the differences without them above are {means}; {sure or 'none'} significant."


def _by_convergence(rounds: int) -> str:
    """Masked minus plain averaging in the settings that have converged, and in the others."""
    cells = compare(experiment(FEDADAM), exported(FEDADAM), read_chosen()).on()
    masked = [cell for cell in cells if cell.cell.arm == "gma" and cell.rounds == (rounds,)]
    said = []
    for words, converged in (("converged", True), ("other", False)):
        rows = [cell.differences for cell in masked if cell.converged is converged]
        if values := over_seeds(rows):
            verdict = paired(values)
            said.append(f"{verdict.mean:+.2f}{_between(verdict)} in the {len(rows)} {words} settings")
    return f"GMA minus the mean after {rounds} rounds: {', '.join(said)}."


def _apart(pair: tuple[str, str]) -> str:
    return f"{NAMES[pair[0]]} minus {in_sentence(pair[1])}"


def _pooled(apart: Pooled, verdict: Verdict) -> str:
    said = f"**{verdict.mean:+.2f}**" if verdict.significant else f"{verdict.mean:+.2f}"
    lost = f"; {apart.lost} diverged" if apart.lost else ""
    return f"{said}{_between(verdict)}; {apart.ahead} of {apart.of}{lost}"


def text() -> str:
    """What the arms gain on text by language, in points of the next byte."""
    arms = _scores(SCORES)
    if not arms:
        return NOT_YET
    plain = arms["fedavg", "mean"].values()
    said = [f"over the mean of the same server (FedAvg: {sum(plain) / len(plain):.1f} %): {_on_text(arms)}"]
    if same := _scores(SAME_RATES):
        said.append(f"with FedAvg at the rates of the mean: {_on_text(same)}")
    return "\n".join(f"- {capitalised(one)}." for one in said)


def _scores(file: Path) -> dict[Arm, dict[int, float]]:
    """The scores of a file by arm and seed; empty if it is not there."""
    arms: dict[Arm, dict[int, float]] = {}
    if file.is_file():
        for row in csv.DictReader(file.read_text().splitlines()):
            server, comma, rule = row["arm"].partition(", ")
            arm = (server, rule) if comma and server in SERVERS else ("fedavg", row["arm"])
            arms.setdefault(arm, {})[int(row["seed"])] = float(row["accuracy"])
    return arms


def _on_text(arms: dict[Arm, dict[int, float]]) -> str:
    shown = [gain for gain in gains_of({"text": arms}) if gain.arm in ON_TEXT or gain.verdict.significant]
    return "; ".join(f"{label(gain.arm)} {_cell(gain)}" for gain in shown)


def finalists() -> str:
    """The candidates of the search, the best first."""
    best = ranked(gains(SEARCH))
    if not best:
        return NOT_YET
    words = ", ".join(f"{label(arm)} {gain:+.2f}" for arm, gain in best[:3])
    return f"The best candidates by their mean gain over their server's mean, in points: {words}."


def table(*names: str) -> str:
    """Gain of every arm in every setting, with its 95 % CI; bold where it holds after the correction."""
    gained = gains(*names)
    if not gained:
        return NOT_YET
    settings = list(dict.fromkeys(gain.setting for gain in gained))
    cells = {(gain.arm, gain.setting): gain for gain in gained}
    arms = dict.fromkeys(gain.arm for gain in gained)
    rows = [(label(arm), *(_cell(cells.get((arm, setting))) for setting in settings)) for arm in arms]
    early = rising(exported(*names))
    levels = {
        setting: f"{_level(setting, *names):.1f} %{', still rising' if setting in early else ''}"
        for setting in settings
    }
    header = ["", *(f"{short(setting)} ({levels[setting]})" for setting in settings)]
    effort = " ".join(_effort(name) for name in names if exported(name))
    return f"{_rows(header, rows)}\n\n{effort}"


def _cell(gain: Gain | None) -> str:
    if gain is None:
        return ""
    said = f"{gain.verdict.mean:+.2f}"
    lost = "" if not any(gain.lost) else f"; {gain.lost[0]}+{gain.lost[1]}"
    return (f"**{said}**" if gain.verdict.significant else said) + _between(gain.verdict) + lost


def _between(verdict: Verdict) -> str:
    return "" if verdict.interval is None else f" [{verdict.low:+.2f}, {verdict.high:+.2f}]"


def _level(setting: str, *names: str) -> float:
    return median(scores_of(exported(*names))[setting]["fedavg", "mean"].values())


def _effort(name: str) -> str:
    """How many seeds, how many runs of the contest and of the search of its rates, and the time on their device."""
    search = experiment(name).search
    entries, searched = exported(name), exported(search) if search else []
    seeds = len({entry.seed for entry in entries})
    minutes: dict[str, float] = {}
    for entry in (*entries, *searched):
        device = f"{entry.facts.get('device', 'unknown device')} in {entry.facts.get('precision', 'fp32')}"
        minutes[device] = minutes.get(device, 0.0) + float(entry.facts.get("seconds", 0)) / 60
    spent = " and ".join(f"{minutes[device]:.1f} minutes on {device}" for device in sorted(minutes, reverse=True))
    return f"{name}: {seeds} seeds, {len(entries)} + {len(searched)} runs, {spent}."


def why() -> str:
    """Findings of the analysis of entries and classes."""
    folder = RESULTS / WHY
    if not (folder / "findings.json").is_file():
        return NOT_YET
    known = {finding.id: finding.text for finding in read_findings(folder)}
    return "\n".join(f"- {known[name]}" for name in CLAIMED if name in known)


def universes() -> str:
    """What the universes say, and the levels that shift the difference most."""
    multiverse = multiverse_of(compare(experiment(UNIVERSES), exported(UNIVERSES), read_chosen()))
    if multiverse is None:
        return NOT_YET
    told = [*sentences(multiverse)[1:3], *most_telling(multiverse)]
    return "\n".join(f"- {capitalised(sentence)}." for sentence in told)


def parts() -> dict[Path, dict[str, str]]:
    """The measured parts of each page by name."""
    masks = {
        "answer": answer(),
        "finalists": finalists(),
        "confirmation": table(*CONFIRMATION),
        "text": text(),
        "universes": universes(),
        "fedadam": fedadam(),
        "why": why(),
    }
    return {PAGE: masks, ADVICE: {"comparison": table(FEDERATIONS)}}


def page_with(measured: dict[str, str], page: str) -> str:
    """The page with the measured parts in their places."""
    for name, text in measured.items():
        begin, end = f"<!-- {name}: written by tools/write_masks.py -->", f"<!-- end of {name} -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"
    return page


def draw() -> None:
    """The pictures of the page."""
    if gained := gains(*CONFIRMATION):
        save(draw_gains(gained, "Confirmation: gain over the mean"), PICTURES / "masks-confirmation.png")
    if (why := RESULTS / WHY / "usefulness.png").is_file():
        shutil.copyfile(why, PICTURES / "masks-why.png")


if __name__ == "__main__":
    for path, measured in parts().items():
        path.write_text(page_with(measured, path.read_text()))
    draw()
