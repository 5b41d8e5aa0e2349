"""The replication at a glance: a line for each claim, all differences, levels beside print, seeds, rates, compute."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedgma.aggregation.rules import BASELINE
from fedgma.experiments.settings import Settings
from fedgma.paper.catalogue import Experiment, asks_again, catalogue
from fedgma.paper.claims import ANALYSIS, Answer, is_about
from fedgma.paper.compare import Compared, Comparison
from fedgma.paper.entries import Entry
from fedgma.paper.findings import ClaimVerdict
from fedgma.paper.kinds import POOLED, Look
from fedgma.paper.plans import samples_a_round
from fedgma.paper.plots.forest import Row
from fedgma.paper.printed import DID_NOT_LEARN
from fedgma.paper.rates import Chosen
from fedgma.paper.universes import is_universe
from fedgma.reports.tables import Table, Value
from fedgma.statistics.labels import in_sentence, plain
from fedgma.statistics.power import LEAST_SEEDS, LEVEL
from fedgma.statistics.verdicts import Verdict

CLOSE = 2.0  # points; a level that is nearer to print counts as reproduced
DIFFERENCES = (*POOLED, "best_pair")  # kinds whose estimate is one arm minus another
PARTICIPATION = "E7"  # an analysis whose findings are such differences, as are those of its repetition
DECIDED = (ClaimVerdict.HOLDS, ClaimVerdict.CONTRADICTED)
USED_ALWAYS = ("tau", "momentum", "mu", "beta1", "beta2", "epsilon")  # hyper-parameters with one default


def main_look(answer: Answer) -> Look:
    """The look that stands for an answer in one line: one that was tested, or has an interval, or the first."""
    looks = list(answer.looks.values())
    tested = [look for look in looks if look.test is not None and look.shown is not None]
    return next(iter([*tested, *(look for look in looks if look.shown is not None), *looks]))


def in_words(verdict: Verdict | None, unit: str = "points", digits: int = 2) -> str:
    """An estimate with its 95 % CI.

    >>> from fedgma.statistics.verdicts import paired
    >>> in_words(paired([1.0, 2.0, 3.0])), in_words(paired([1.0]), "rounds"), in_words(None)
    ('+2.00 (-0.48 to 4.48)', '+1.00 rounds (one seed)', '')
    """
    if verdict is None:
        return ""
    named = "" if unit == "points" else f" {unit}"
    between = "one seed" if verdict.interval is None else f"{verdict.low:.{digits}f} to {verdict.high:.{digits}f}"
    return f"{verdict.mean:+.{digits}f}{named} ({between})"


def claims_in_lines(answers: Mapping[str, Sequence[Answer]], names: Sequence[str]) -> Table:
    """One line for each claim of these experiments."""
    rows = []
    for name in names:
        for answer in answers.get(name, ()):
            look = main_look(answer)
            printed = None if look.printed is None else f"{look.printed:+.2f}"
            text = answer.claim.short if asks_again(catalogue()[name]) else answer.claim.text
            rows.append((name, _in_our_words(text), in_words(look.shown, look.unit), printed, brief(answer)))
    return Table("claims", "Claims", ("", "claim", "ours (95 % CI)", "printed", "verdict"), tuple(rows))


def _in_our_words(text: str) -> str:
    """A claim with shorter names of the two arms.

    >>> _in_our_words("Masked averaging ends above plain averaging")
    'GMA ends above the mean'
    """
    return re.sub("[Mm]asked averaging", "GMA", text).replace("plain averaging", "the mean")


def brief(answer: Answer) -> str:
    """The verdict of an answer in few words: that of its main look, and those of other groups or parts.

    A claim of which one part alone holds does not hold.
    """
    main, others = main_look(answer).verdict, [look.verdict for look in answer.looks.values()]
    verdict = str(main or ClaimVerdict.PRELIMINARY)
    rest = dict.fromkeys(str(other) for other in others if other is not None and other != main)
    if main in DECIDED and rest:
        return ", ".join(f"partly {part}" for part in (verdict, *rest))
    return f"{verdict} (partly {', '.join(rest)})" if rest else verdict


def reason(answer: Answer) -> str:
    """Why an answer is not decided, in few words: seeds, convergence or the correction."""
    look = main_look(answer)
    seeds = 0 if look.shown is None else look.shown.of
    if look.verdict in (ClaimVerdict.PRELIMINARY, None):
        early = "converged" in look.before
        few = f"{seeds} {'seed' if seeds == 1 else 'seeds'}" if 0 < seeds < LEAST_SEEDS else ""
        return ", ".join(filter(None, ["not converged" if early else "", few])) or "one seed"
    if look.as_printed:
        return "the paper prints the same sign in the converged cells"
    if look.test is not None and look.test.p < LEVEL <= look.test.corrected:
        return "not significant after the correction"
    return "over converged and printed cells, by the last ten rounds"


def differences(answers: Mapping[str, Sequence[Answer]]) -> list[Row]:
    """Every estimated difference between arms, in points, with its interval, the printed one and whether it is sure."""
    rows = []
    for name, listed in answers.items():
        for answer in listed:
            participation = PARTICIPATION in (name, catalogue()[name].repeats) and answer.claim.kind == ANALYSIS
            if answer.claim.kind not in DIFFERENCES and not participation:
                continue
            for group, look in answer.looks.items():
                if look.shown is not None and look.shown.interval is not None:
                    label = f"{name} {answer.claim.short}" + (f" ({group})" if len(answer.looks) > 1 else "")
                    rows.append(
                        Row(
                            label, look.shown.mean, *look.shown.interval, look.printed, _certainty(look), name[0] == "E"
                        )
                    )
    return rows


def _certainty(look: Look) -> str:
    if look.verdict in DECIDED or (look.as_printed and look.test is not None and look.test.significant):
        return "decided"
    return "preliminary" if look.verdict is ClaimVerdict.PRELIMINARY else "open"


class Levels(NamedTuple):
    """How many cells were run in both arms, how many of them have converged, and how many are near or above print."""

    run: int
    of: int
    converged: int
    near: int
    above: int
    printed: int


def levels_of(comparison: Comparison, cells: Iterable[Compared] | None = None) -> Levels:
    """Levels of the printed cells of an experiment, or of all where nothing is printed."""
    first = comparison.on(comparison.experiment.splits[0]) if cells is None else list(cells)
    wanted = [compared for compared in first if compared.cell.part.printed]
    both = [compared for compared in wanted if compared.differences]
    printed = [distance for compared in both if (distance := from_print(compared, comparison.experiment)) is not None]
    near, above = _near(printed), sum(distance > CLOSE for distance in printed)
    return Levels(len(both), len(wanted), sum(compared.converged for compared in both), near, above, len(printed))


def from_print(compared: Compared, experiment: Experiment) -> float | None:
    """Our plain mean minus the printed one, by the printed statistic; None if nothing was learned in print."""
    level, number = compared.restated(experiment.statistic).levels[0], compared.printed[0]
    if level is None or number is None or number.value <= DID_NOT_LEARN:
        return None
    return level.mean - number.value


def distances(comparison: Comparison, axis: str) -> dict[Any, list[float]]:
    """The distance of the plain mean from print, in points, of every cell by the value of a setting."""
    by_value: dict[Any, dict[str, float]] = {}
    for compared in comparison.on():
        if (distance := from_print(compared, comparison.experiment)) is not None:
            by_value.setdefault(compared.cell.settings[axis], {})[str(compared.cell.plain)] = abs(distance)
    return {value: list(cells.values()) for value, cells in by_value.items()}


def near_print(by_value: Mapping[Any, Sequence[float]], unit: str) -> str:
    """In how many cells a level is near print, by the value of a setting, in words.

    >>> near_print({1: [4.0, 6.0, 8.0], 3: [0.5, 1.0, 3.0]}, "steps")
    'within 2 points of print in 0 and 2 of 3 cells with 1 and 3 steps'
    """
    near = [str(_near(values)) for values in by_value.values()]
    cells = max(len(values) for values in by_value.values())
    where = _joined([str(value) for value in by_value])
    return f"within {CLOSE:g} points of print in {_joined(near)} of {cells} cells with {where} {unit}"


def nearest_readings(comparison: Comparison, where: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """How many levels of every arm are near those printed for masked averaging: (arm, number, of how many).

    Of the cells with the settings `where` whose printed level was learned; the nearest arm comes first.
    """
    levels: dict[str, dict[str, float]] = {}
    printed: dict[str, float] = {}
    for compared in comparison.on():
        cell, settings = str(compared.cell.plain), compared.cell.settings
        if any(settings[name] != value for name, value in where.items()):
            continue
        if (number := compared.printed[1]) is not None and number.value > DID_NOT_LEARN:
            printed[cell] = number.value
        both = compared.restated(comparison.experiment.statistic).levels
        for arm, level in zip((BASELINE, compared.cell.arm), both, strict=True):
            if level is not None:
                levels.setdefault(arm, {})[cell] = level.mean
    near = {arm: _near(of[cell] - printed[cell] for cell in printed if cell in of) for arm, of in levels.items()}
    nearest = sorted(near, key=lambda arm: -near[arm])
    return [(in_sentence(arm), near[arm], len(printed)) for arm in nearest]


def _near(distances: Iterable[float]) -> int:
    return sum(abs(distance) <= CLOSE for distance in distances)


def _joined(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def runs_table(comparisons: Mapping[str, Comparison]) -> Table:
    """What was run of every experiment: cells, seeds, rounds, convergence, levels."""
    rows: list[tuple[Value, ...]] = []
    for name, comparison in comparisons.items():
        if entries := comparison.entries:
            levels = levels_of(comparison)
            seeds = sorted({entry.seed for entry in entries})
            rounds = sorted({int(entry.settings["rounds"]) for entry in entries})
            near = f"{levels.near} of {levels.printed}" if levels.printed else None
            cells = f"{levels.run} of {levels.of}"
            rows.append((name, len(entries), _listed(seeds), _listed(rounds), cells, levels.converged, near))
    header = ("experiment", "runs", "seeds", "rounds", "cells in both arms", "converged", "AVG within 2 of print")
    return Table("runs", "Runs and seeds", header, tuple(rows))


def _listed(numbers: Sequence[int]) -> str:
    """Whole numbers, consecutive ones as a range.

    >>> _listed([0, 1, 2, 3]), _listed([12, 100])
    ('0 to 3', '12, 100')
    """
    whole = len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))


def compute_table(entries: Iterable[Entry]) -> Table:
    """Runs, samples and hours by device, precision and model, each run once."""
    sums: dict[tuple[str, str, str], list[float]] = {}
    for entry in entries:
        key = (str(entry.facts.get("device")), str(entry.facts.get("precision")), str(entry.settings["model"]))
        trained = entry.played * samples_a_round(entry.settings)
        row = sums.setdefault(key, [0, 0.0, 0.0])
        for column, value in enumerate((1, trained / 1e6, float(entry.facts.get("seconds", 0.0)) / 3600)):
            row[column] += value
    rows = [(*key, int(runs), round(millions), round(hours, 2)) for key, (runs, millions, hours) in sums.items()]
    header = ("device", "precision", "model", "runs", "million samples", "hours")
    return Table("compute", "Compute", header, tuple(sorted(rows)))


def rates_table(chosen: Chosen) -> Table:
    """The chosen pairs of client and server rate: for both arms together, for the mean, for GMA."""
    groups: dict[tuple[str, str], dict[str, str]] = {}
    for (where, algorithm, rule), (client, server) in chosen.rates.items():
        if is_universe(where):
            continue  # `results/C24/universes.csv` has these
        groups.setdefault((where, algorithm), {})[rule] = f"{plain(client)}, {plain(server)}"
    rules = ("shared", "mean", "gma")
    rows = [(*key, *(pairs.get(rule) for rule in rules)) for key, pairs in groups.items()]
    return Table("rates", "Rates", ("data set or setting", "algorithm", "both arms", "mean", "GMA"), tuple(rows))


def settings_table(comparisons: Mapping[str, Comparison]) -> Table:
    """Hyper-parameters by data set and model, over all runs of the paper's experiments."""
    names = ("local_epochs", "batch_size", "partition.clients", "clients_per_round", "augment")
    settings: dict[tuple[str, str], dict[str, set[Any]]] = {}
    for name, comparison in comparisons.items():
        for entry in comparison.entries if name[0] == "E" else ():
            key = str(entry.settings["dataset"]), str(entry.settings["model"])
            for setting in names:
                values = settings.setdefault(key, {}).setdefault(setting, set())
                values.add(entry.settings.get(setting))
    rows = [
        (*key, *(", ".join(plain(v) for v in sorted(values[name], key=_number)) for name in names))
        for key, values in settings.items()
    ]
    return Table("settings", "Settings", ("data set", "model", *names), tuple(sorted(rows)))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else -1.0


def defaults() -> str:
    """The hyper-parameters that are the same everywhere, in words."""
    usual = Settings()
    return ", ".join(f"{name} {getattr(usual, name):g}" for name in USED_ALWAYS)


def evidence_table(comparisons: Mapping[str, Comparison], answers: Mapping[str, Sequence[Answer]]) -> Table:
    """Every claim that was tested: its plan, the printed numbers, the file of its runs, which of them, how many."""
    rows: list[tuple[Value, ...]] = []
    for name, listed in answers.items():
        experiment = comparisons[name].experiment
        printed = ", ".join(f"printed/{table.file}" for table in experiment.printed)
        plan = f"{name[0].lower()}{int(name[1:]):0{2 if name[0] == 'E' else 1}d}.toml"
        for answer in listed:
            claim = answer.claim
            if claim.kind == ANALYSIS:
                rows.append((name, claim.text, plan, printed, f"{name}/findings.json", claim.finding, None))
                continue
            cells = [compared for compared in comparisons[name].on(claim.split) if is_about(claim, compared)]
            runs = {id(entry) for compared in cells for side in compared.entries for entry in side.values()}
            where = "; ".join(f"{key} = {_values(value)}" for key, value in claim.where.items()) or "all"
            rows += [(name, claim.text, plan, printed, f"{name}/runs.jsonl", where, len(runs))] if runs else []
    header = ("experiment", "claim", "plan", "printed numbers", "runs in", "which", "runs")
    return Table("evidence", "Claims, files and runs", header, tuple(rows))


def _values(value: Any) -> str:
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)
