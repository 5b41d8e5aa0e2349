"""Compare our runs with the printed numbers by cell: levels, the paired difference with its 95 % CI, a verdict.

The verdict on a cell depends on our 95 % CI of the paired difference, masked minus plain:

    agrees in sign and interval   it excludes zero on the printed side and includes the printed difference
    agrees in sign                it excludes zero on the printed side
    inconclusive                  it includes zero
    contradicts                   it excludes zero on the other side
    printed as equal              it excludes zero where the printed numbers are equal
    equal                         our arms are equal in every seed
    one seed                      one seed has no interval
    masked ahead, plain ahead     it excludes zero, and nothing is printed
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from fedgma.experiments.settings import Settings
from fedgma.paper.catalogue import Experiment
from fedgma.paper.cells import LOOSE, Cell, Flat, cells_of
from fedgma.paper.entries import Entry
from fedgma.paper.plans import WHOLE, Cut
from fedgma.paper.printed import Number
from fedgma.paper.rates import KEYS, Chosen
from fedgma.records.reader import flat
from fedgma.statistics.arms import Spread, frozen, spread
from fedgma.statistics.verdicts import Verdict, paired


class Agreement(StrEnum):
    """How our paired difference relates to the printed one."""

    INSIDE = "agrees in sign and interval"
    SIGN = "agrees in sign"
    INCONCLUSIVE = "inconclusive"
    CONTRADICTS = "contradicts"
    PRINTED_EQUAL = "printed as equal"
    EQUAL = "equal"
    ONE_SEED = "one seed"
    MASKED_AHEAD = "masked ahead"
    PLAIN_AHEAD = "plain ahead"
    NOT_RUN = "not run"


BySeed = Mapping[int, Entry]
DEFAULTS = dict(flat(Settings().model_dump()))


class Compared(NamedTuple):
    """A cell on one split: our two arms over shared seeds, and the printed numbers."""

    cell: Cell
    split: str
    plain: Mapping[int, float]  # seed -> statistic in percent
    masked: Mapping[int, float]
    printed: tuple[Number | None, Number | None]  # plain, masked
    entries: tuple[BySeed, BySeed] = ({}, {})

    @property
    def differences(self) -> dict[int, float]:
        """Masked minus plain by seed, in points."""
        return {seed: self.masked[seed] - self.plain[seed] for seed in sorted(set(self.masked) & set(self.plain))}

    @property
    def verdict(self) -> Verdict | None:
        """The verdict on the paired differences; None without a pair."""
        values = list(self.differences.values())
        return paired(values) if values else None

    @property
    def levels(self) -> tuple[Spread | None, Spread | None]:
        """Our mean and standard deviation for each arm."""
        plain, masked = ([*side.values()] for side in (self.plain, self.masked))
        return spread(plain) if plain else None, spread(masked) if masked else None

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
        return judge(self.verdict.interval, self.printed_difference)


def judge(interval: tuple[float, float] | None, printed: float | None) -> Agreement:
    """How our 95 % CI relates to the printed difference, or to zero if nothing is printed.

    >>> [str(judge((0.75, 1.65), printed)) for printed in (0.9, 2.0, -0.5)]
    ['agrees in sign and interval', 'agrees in sign', 'contradicts']
    >>> str(judge((-0.5, 0.6), 2.0)), str(judge(None, 2.0))
    ('inconclusive', 'one seed')
    """
    if interval is None:
        return Agreement.ONE_SEED
    low, high = interval
    if low <= 0 <= high:
        return Agreement.INCONCLUSIVE if low < high else Agreement.EQUAL
    if printed is None:
        return Agreement.MASKED_AHEAD if low > 0 else Agreement.PLAIN_AHEAD
    if printed == 0:
        return Agreement.PRINTED_EQUAL
    if (printed > 0) != (low > 0):
        return Agreement.CONTRADICTS
    return Agreement.INSIDE if low <= printed <= high else Agreement.SIGN


class Comparison(NamedTuple):
    """Every cell of an experiment on every measured split, with notes on runs that are left out."""

    experiment: Experiment
    compared: tuple[Compared, ...]
    entries: tuple[Entry, ...]  # those that the cells use
    notes: tuple[str, ...]

    def on(self, split: str = "test") -> list[Compared]:
        """The cells on one split."""
        return [compared for compared in self.compared if compared.split == split]


def compare(
    experiment: Experiment, entries: Sequence[Entry], chosen: Chosen, cut: Cut = WHOLE, *, unfinished: int = 0
) -> Comparison:
    """Find the runs of every cell and compare them with the printed numbers."""
    index = _Index(entries)
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
        compared += [_compared(cell, split, experiment.statistic, plain, masked) for split in experiment.splits]
    measured = {one.split for one in compared if one.plain or one.masked} | {experiment.splits[0]}
    kept = tuple(one for one in compared if one.split in measured)
    notes = _notes(experiment, kept, len(fitting - set(used)), unfinished)
    return Comparison(experiment, kept, tuple(used.values()), (*notes, *_time(list(used.values()))))


def _compared(cell: Cell, split: str, statistic: str, plain: BySeed, masked: BySeed) -> Compared:
    sides = [
        {seed: float(getattr(entry.scores[split], statistic)) for seed, entry in side.items() if split in entry.scores}
        for side in (plain, masked)
    ]
    printed = (cell.printed.get((split, "plain")), cell.printed.get((split, "masked")))
    return Compared(cell, split, sides[0], sides[1], printed, (plain, masked))


class _Index:
    """Entries by the settings that identify a cell and that both record and plan have."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._known: dict[tuple[frozenset[str], frozenset[str], tuple[str, ...]], dict[str, list[Entry]]] = {}
        self._by_names: dict[frozenset[str], list[Entry]] = {}
        for entry in entries:
            self._by_names.setdefault(frozenset(entry.settings), []).append(entry)

    def find(self, wanted: Flat, without: tuple[str, ...]) -> list[Entry]:
        entries = []
        for names in self._by_names:
            common = names & set(wanted)
            newer = set(wanted) - names - set(without)  # these runs had the default, or did not use the setting
            if any(wanted[name] not in (None, DEFAULTS.get(name)) for name in newer):
                continue
            table = self._table(names, frozenset(common), without)
            entries += table.get(frozen({name: wanted[name] for name in common}, without), [])
        return list({id(entry): entry for entry in entries}.values())

    def _table(self, names: frozenset[str], common: frozenset[str], without: tuple[str, ...]) -> dict[str, list[Entry]]:
        """The entries with settings of these names, by their values of the `common` ones."""
        if (names, common, without) not in self._known:
            table: dict[str, list[Entry]] = {}
            for entry in self._by_names[names]:
                key = frozen({name: entry.settings[name] for name in common}, without)
                table.setdefault(key, []).append(entry)
            self._known[names, common, without] = table
        return self._known[names, common, without]


def _choose(cell: Cell, index: _Index) -> tuple[BySeed, BySeed, set[int]]:
    """The runs of both arms by seed; of several kinds (rounds, rates, precision, data) the planned or longest one.

    Also returns the ids of all runs that match the cell.
    """
    given = any(key in cell.part.settings for key in KEYS) or cell.part.own_rates
    without = LOOSE if given else (*LOOSE, *KEYS)
    sides = [[] if settings is None else index.find(settings, without) for settings in (cell.plain, cell.masked)]
    rates = () if cell.part.own_rates else KEYS
    kinds: dict[str, tuple[dict[int, Entry], dict[int, Entry]]] = {}
    for arm, side in enumerate(sides):
        for entry in side:
            kinds.setdefault(_kind(entry, rates), ({}, {}))[arm].setdefault(entry.seed, entry)
    if not kinds:
        return {}, {}, set()
    plain, masked = max(kinds.values(), key=lambda pair: _rank(pair, cell))
    return plain, masked, {id(entry) for side in sides for entry in side}


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
    """How long the runs took; the time of a fleet is divided over its runs."""
    total = sum(float(entry.facts.get("seconds", 0.0)) for entry in entries)
    devices = sorted({str(entry.facts.get("device", "an unknown device")) for entry in entries})
    return [f"{len(entries)} runs took {total / 60:.1f} minutes on {' and '.join(devices)}"] if entries else []


def _notes(experiment: Experiment, compared: Sequence[Compared], passed: int, unfinished: int) -> list[str]:
    """Notes on the runs: how many were run, stopped or left out."""
    notes = list(experiment.notes)
    first = [cell for cell in compared if cell.split == experiment.splits[0]]
    run = [cell for cell in first if cell.plain or cell.masked]
    rounds: dict[int, None] = {}
    for cell in run:
        for side in cell.entries:
            rounds |= {int(entry.settings["rounds"]): None for entry in side.values()}
    seeds = sorted({len(cell.differences) or len(cell.plain) or len(cell.masked) for cell in run})
    if run:
        notes.append(
            f"{len(run)} of {len(first)} cells were run, with {' or '.join(map(str, seeds))} seeds and "
            f"{', '.join(map(str, sorted(rounds)))} rounds; accuracy is {experiment.statistic} in percent"
        )
    left = Counter(str(cell.cell.settings["dataset"]) for cell in first if not cell.plain and not cell.masked)
    used = {id(entry): entry for cell in run for side in cell.entries for entry in side.values()}
    pairs = [(entry.played, int(entry.settings["rounds"])) for entry in used.values()]
    stopped = Counter((played, planned) for played, planned in pairs if played < planned)
    for (played, planned), count in sorted(stopped.items()):
        notes.append(f"{count} runs were stopped after {played} of {planned} rounds and count as they were then")
    if left:
        notes.append("cells that were not run: " + ", ".join(f"{count} of {name}" for name, count in left.items()))
    if passed:
        notes.append(f"{passed} runs of the same cells with other rounds, rates or precision are left out")
    if unfinished:
        notes.append(f"{unfinished} unfinished runs are left out")
    return notes
