"""Compare our runs with the printed numbers by cell: levels, the paired difference with its 95 % CI, a verdict.

The verdict on a cell depends on our paired difference, masked minus plain, in the mean of the last ten rounds. It is
significant if its p value, corrected for all cells of the table, is below 5 %.

    agrees in sign and interval   significant on the printed side, and the 95 % CI includes the printed difference
    agrees in sign                significant on the printed side
    inconclusive                  not significant
    contradicts                   significant on the other side
    printed as equal              significant where the printed numbers are equal
    equal                         our arms are equal in every seed
    preliminary                   fewer than four seeds
    masked ahead, plain ahead     significant, and nothing is printed
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from fedgma.paper.catalogue import Experiment, seeds_of
from fedgma.paper.cells import LOOSE, Cell, cells_of
from fedgma.paper.entries import Entry
from fedgma.paper.index import Index
from fedgma.paper.outdated import why_outdated
from fedgma.paper.plans import WHOLE, Cut
from fedgma.paper.printed import Number
from fedgma.paper.rates import KEYS, Chosen
from fedgma.statistics.arms import Spread, spread
from fedgma.statistics.convergence import Convergence, converge
from fedgma.statistics.verdicts import Verdict, correct, paired


class Agreement(StrEnum):
    """How our paired difference relates to the printed one."""

    INSIDE = "agrees in sign and interval"
    SIGN = "agrees in sign"
    INCONCLUSIVE = "inconclusive"
    CONTRADICTS = "contradicts"
    PRINTED_EQUAL = "printed as equal"
    EQUAL = "equal"
    PRELIMINARY = "preliminary"
    MASKED_AHEAD = "masked ahead"
    PLAIN_AHEAD = "plain ahead"
    NOT_RUN = "not run"


BySeed = Mapping[int, Entry]
PerSeed = dict[int, float]
PRIMARY = "last10"  # the statistic of verdicts


TRIAL = "These runs are a trial on embedded images in place of the data sets: they say nothing about the paper's claims"


class Compared(NamedTuple):
    """A cell on one split: our two arms over shared seeds, and the printed numbers."""

    cell: Cell
    split: str
    plain: Mapping[int, float]  # seed -> statistic in percent
    masked: Mapping[int, float]
    printed: tuple[Number | None, Number | None]  # plain, masked
    entries: tuple[BySeed, BySeed] = ({}, {})
    verdict: Verdict | None = None  # on the paired differences, corrected within its table; None without a pair
    course: Convergence | None = None  # of the paired runs
    lost: frozenset[int] = frozenset()  # seeds in which a run diverged

    @property
    def differences(self) -> dict[int, float]:
        """Masked minus plain by seed, in points."""
        return {seed: self.masked[seed] - self.plain[seed] for seed in sorted(set(self.masked) & set(self.plain))}

    @property
    def settled(self) -> Verdict | None:
        """The verdict without the seeds in which a run diverged, not corrected; None if none did or none is left."""
        values = [value for seed, value in self.differences.items() if seed not in self.lost]
        return paired(values) if self.lost and values else None

    @property
    def converged(self) -> bool:
        """Whether the paired runs have converged."""
        return self.course is not None and self.course.converged

    @property
    def is_flat(self) -> bool:
        """Whether they have converged by half of the limit."""
        return self.course is not None and self.course._replace(flat=self.course.flat / 2).converged

    @property
    def rounds(self) -> tuple[int, ...]:
        """The planned rounds of its runs; usually one number."""
        return tuple(sorted({int(entry.settings["rounds"]) for side in self.entries for entry in side.values()}))

    @property
    def played(self) -> str:
        """The rounds of its runs in words; of runs that were stopped, the fewest that one completed."""
        fewest: dict[int, int] = {}
        for entry in (entry for side in self.entries for entry in side.values()):
            planned = int(entry.settings["rounds"])
            fewest[planned] = min(entry.played, fewest.get(planned, planned))
        return " or ".join(f"{n} of {all_}" if n < all_ else str(all_) for all_, n in sorted(fewest.items()))

    @property
    def levels(self) -> tuple[Spread | None, Spread | None]:
        """Our mean and standard deviation for each arm."""
        plain, masked = ([*side.values()] for side in (self.plain, self.masked))
        return spread(plain) if plain else None, spread(masked) if masked else None

    def restated(self, statistic: str) -> "Compared":
        """The same cell by another statistic, with an uncorrected verdict."""
        plain, masked = (_scores(side, self.split, statistic) for side in self.entries)
        if statistic == "best" and plain and masked:
            plain, masked = _best_of_shared_rounds(self, plain, masked)
        made = self._replace(plain=plain, masked=masked)
        values = list(made.differences.values())
        return made._replace(verdict=paired(values) if values else None)

    @property
    def printed_difference(self) -> float | None:
        """Masked minus plain, as printed."""
        plain, masked = self.printed
        return None if plain is None or masked is None else round(masked.value - plain.value, 6)

    @property
    def agreement(self) -> Agreement:
        """How our difference relates to the printed one."""
        if self.verdict is None:
            return Agreement.NOT_RUN
        return judge(self.verdict, self.printed_difference)


def judge(verdict: Verdict, printed: float | None) -> Agreement:
    """How our difference relates to the printed one, or to zero if nothing is printed.

    >>> [str(judge(paired([1.0, 1.2, 1.6, 1.0]), printed)) for printed in (0.9, 2.0, -0.5)]
    ['agrees in sign and interval', 'agrees in sign', 'contradicts']
    >>> str(judge(paired([1.0, -1.2, 1.6, 1.0]), 2.0)), str(judge(paired([1.0, 1.1, 1.0]), 2.0))
    ('inconclusive', 'preliminary')
    """
    if not verdict.significant:
        return Agreement(verdict.outcome)
    if printed is None:
        return Agreement.MASKED_AHEAD if verdict.mean > 0 else Agreement.PLAIN_AHEAD
    if printed == 0:
        return Agreement.PRINTED_EQUAL
    if (printed > 0) != (verdict.mean > 0):
        return Agreement.CONTRADICTS
    return Agreement.INSIDE if verdict.low <= printed <= verdict.high else Agreement.SIGN


class Comparison(NamedTuple):
    """Every cell of an experiment on every measured split, with notes on runs that are left out."""

    experiment: Experiment
    compared: tuple[Compared, ...]
    entries: tuple[Entry, ...]  # those that the cells use
    notes: tuple[str, ...]
    statistic: str = PRIMARY  # that the verdicts are about

    def on(self, split: str = "test") -> list[Compared]:
        """The cells on one split."""
        return [compared for compared in self.compared if compared.split == split]


def compare(
    experiment: Experiment,
    entries: Sequence[Entry],
    chosen: Chosen,
    cut: Cut = WHOLE,
    *,
    unfinished: int = 0,
    statistic: str = PRIMARY,
) -> Comparison:
    """Find the runs of every cell and compare them with the printed numbers; verdicts are about `statistic`."""
    own = seeds_of(experiment)
    index = Index([entry for entry in entries if entry.seed in own])
    chosen_runs = [(cell, *_choose(cell, index)) for cell in cells_of(experiment, chosen, cut)]
    full_length = {cell.part.name for cell, plain, masked, _ in chosen_runs if _as_planned(cell, plain, masked)}
    compared: list[Compared] = []
    used: dict[int, Entry] = {}
    fitting: set[int] = set()
    for cell, plain, masked, fits in chosen_runs:
        if cell.part.name in full_length and not _as_planned(cell, plain, masked):
            plain, masked = {}, {}  # cells of a part need the same number of rounds
        fitting |= fits
        used |= {id(entry): entry for entry in (*plain.values(), *masked.values())}
        compared += [_compared(cell, split, statistic, plain, masked) for split in experiment.splits]
    measured = {result.split for result in compared if result.plain or result.masked} | {experiment.splits[0]}
    kept = _corrected([result for result in compared if result.split in measured])
    notes = [*([TRIAL] if cut.quick else []), *_notes(experiment, kept, len(fitting - set(used)), unfinished)]
    return Comparison(experiment, kept, tuple(used.values()), (*notes, *_time(list(used.values()))), statistic)


def _compared(cell: Cell, split: str, statistic: str, plain: BySeed, masked: BySeed) -> Compared:
    printed = (cell.printed.get((split, "plain")), cell.printed.get((split, "masked")))
    made = Compared(cell, split, {}, {}, printed, (plain, masked)).restated(statistic)
    seeds = list(made.differences)
    if not seeds:
        return made
    arms = [[(side[seed].scores[split], side[seed].curves.get(split)) for seed in seeds] for side in (plain, masked)]
    played = min(side[seed].played for side in (plain, masked) for seed in seeds)
    course, flags = converge(arms, played)
    lost = frozenset(seed for seed, *gone in zip(seeds, *flags, strict=True) if any(gone))
    return made._replace(course=course, lost=lost)


def _corrected(compared: Sequence[Compared]) -> tuple[Compared, ...]:
    """The cells with their verdicts corrected together, split by split: a table has the cells of one split."""
    verdicts: dict[int, Verdict] = {}
    for split in dict.fromkeys(result.split for result in compared):
        uncorrected = {
            id(result): result.verdict for result in compared if result.split == split and result.verdict is not None
        }
        verdicts |= dict(zip(uncorrected, correct(list(uncorrected.values())), strict=True))
    return tuple(result._replace(verdict=verdicts.get(id(result))) for result in compared)


def _scores(side: BySeed, split: str, statistic: str) -> PerSeed:
    return {s: float(getattr(entry.scores[split], statistic)) for s, entry in side.items() if split in entry.scores}


def _best_of_shared_rounds(compared: Compared, plain: PerSeed, masked: PerSeed) -> tuple[PerSeed, PerSeed]:
    """The best of the rounds that both runs of a pair evaluated, if they were not evaluated equally often."""
    plain, masked = dict(plain), dict(masked)
    for seed in set(plain) & set(masked):
        pair = [side[seed] for side in compared.entries]
        if pair[0].settings.get("evaluate_every") != pair[1].settings.get("evaluate_every"):
            curves = [entry.curves.get(compared.split, {}) for entry in pair]
            shared = curves[0].keys() & curves[1].keys()
            if shared:
                plain[seed], masked[seed] = (100 * max(curve[round] for round in shared) for curve in curves)
    return plain, masked


def _choose(cell: Cell, index: Index) -> tuple[BySeed, BySeed, set[int]]:
    """The runs of both arms by seed; of several kinds (rounds, rates, precision, data) the planned or longest one.

    Of two runs of one kind and seed the one that came further counts. Also returns the ids of all runs that match.
    """
    given = any(key in cell.part.settings for key in KEYS) or cell.part.own_rates
    without = LOOSE if given else (*LOOSE, *KEYS)
    sides = [[] if settings is None else index.find(settings, without) for settings in (cell.plain, cell.masked)]
    sides[1] = _newest(sides[1])
    rates = () if cell.part.own_rates else KEYS
    kinds: dict[str, tuple[dict[int, Entry], dict[int, Entry]]] = {}
    for arm, side in enumerate(sides):
        for entry in sorted(side, key=lambda entry: -entry.played):
            kinds.setdefault(_kind(entry, rates), ({}, {}))[arm].setdefault(entry.seed, entry)
    if not kinds:
        return {}, {}, set()
    plain, masked = max(kinds.values(), key=lambda pair: _rank(pair, cell))
    return plain, masked, {id(entry) for side in sides for entry in side}


def _newest(entries: list[Entry]) -> list[Entry]:
    """The runs without outdated ones, if there are others."""
    return [entry for entry in entries if not why_outdated(entry.settings, entry.facts)] or entries


def _as_planned(cell: Cell, plain: BySeed, masked: BySeed) -> bool:
    """Whether the runs have the planned number of rounds."""
    rounds = {entry.settings.get("rounds") for entry in (*plain.values(), *masked.values())}
    return rounds == {cell.settings.get("rounds")}


def _kind(entry: Entry, rates: Sequence[str]) -> str:
    precision = entry.facts.get("precision", "fp32")
    return repr([entry.settings.get("rounds"), precision, entry.data, *(entry.settings.get(key) for key in rates)])


def _rank(pair: tuple[Mapping[int, Entry], Mapping[int, Entry]], cell: Cell) -> tuple[Any, ...]:
    """Rank of a kind: planned rates, any pairs, planned rounds, more rounds, more pairs, full precision."""
    entry = next(iter([*pair[1].values(), *pair[0].values()]))
    wanted = cell.settings
    planned = all(entry.settings.get(key) == wanted.get(key) for key in KEYS)
    exact = entry.facts.get("precision", "fp32") == "fp32"
    rounds, pairs = entry.settings.get("rounds", 0), len(set(pair[0]) & set(pair[1]))
    return planned, pairs > 0, rounds == wanted.get("rounds"), rounds, pairs, exact


def _time(entries: Sequence[Entry]) -> list[str]:
    """How many runs each device made in which precision, and how long; a fleet's time is divided over its runs."""
    groups: dict[tuple[str, str], list[float]] = {}
    for entry in entries:
        place = str(entry.facts.get("device", "an unknown device")), str(entry.facts.get("precision", "fp32"))
        groups.setdefault(place, []).append(float(entry.facts.get("seconds", 0.0)))
    return [
        f"{len(seconds)} runs took {sum(seconds) / 60:.1f} minutes on {device} in {precision}"
        for (device, precision), seconds in sorted(groups.items())
    ]


def _has_foreign_rates(cell: Cell) -> bool:
    """Whether the rates of a cell were searched with another partition than its own: E15 searches with label skew."""
    given = any(key in cell.part.settings for key in KEYS)
    return not given and not cell.part.searched and cell.settings["partition.name"] == "iid"


def _notes(experiment: Experiment, compared: Sequence[Compared], passed: int, unfinished: int) -> list[str]:
    """Notes on the runs: how many were run, stopped or left out."""
    first = [cell for cell in compared if cell.split == experiment.splits[0]]
    run = [cell for cell in first if cell.plain or cell.masked]
    left = Counter(str(cell.cell.settings["dataset"]) for cell in first if not cell.plain and not cell.masked)
    notes = [*experiment.notes, *_notes_on_cells(run, len(first)), *_notes_on_stopped(run)]
    if left:
        notes.append("cells that were not run: " + ", ".join(f"{count} of {name}" for name, count in left.items()))
    if passed:
        notes.append(f"{passed} runs of the same cells with other rounds, rates or precision are left out")
    if unfinished:
        notes.append(f"{unfinished} unfinished runs are left out")
    return notes


def _notes_on_cells(run: Sequence[Compared], planned: int) -> list[str]:
    """How many of the planned cells were run, with how many seeds and rounds, and what to keep in mind about them."""
    if not run:
        return []
    both = [cell for cell in run if cell.differences]
    seeds = sorted({len(cell.differences) or len(cell.plain) or len(cell.masked) for cell in run})
    rounds = sorted({number for cell in run for number in cell.rounds})
    one_arm = f", and {len(run) - len(both)} in one arm only" if len(both) < len(run) else ""
    notes = [
        f"{len(both)} of {planned} cells were run in both arms{one_arm}, with {' or '.join(map(str, seeds))} "
        f"{'seed' if seeds == [1] else 'seeds'} and {', '.join(map(str, rounds))} rounds"
    ]
    if slow := sum(not cell.converged for cell in both):
        notes.append(f"{slow} of these {len(both)} cells have not converged")
    if foreign := sum(_has_foreign_rates(cell.cell) for cell in both):
        notes.append(f"{foreign} of them are iid and use learning rates that were searched with label skew")
    courses = [cell.course for cell in both if cell.course is not None]
    if lost := sum(sum(course.diverged) for course in courses):
        notes.append(f"{lost} of {sum(course.of for course in courses)} paired runs diverged")
    return notes


def _notes_on_stopped(run: Sequence[Compared]) -> list[str]:
    """How many runs were stopped before their last round."""
    used = {id(entry): entry for cell in run for side in cell.entries for entry in side.values()}
    pairs = [(entry.played, int(entry.settings["rounds"])) for entry in used.values()]
    stopped = Counter((played, planned) for played, planned in pairs if played < planned)
    return [
        f"{count} runs were stopped after {played} of {planned} rounds and count as they were then"
        for (played, planned), count in sorted(stopped.items())
    ]
