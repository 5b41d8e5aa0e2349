"""Kinds of claims: each tests one form of a claim on cells, and says in words what it found."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedgma.aggregation.masks import votes_needed
from fedgma.paper.catalogue import Claim
from fedgma.paper.compare import Agreement, Compared, Comparison, PerSeed
from fedgma.paper.entries import Entry
from fedgma.paper.findings import ClaimVerdict
from fedgma.paper.rates import KEYS
from fedgma.paper.search import best_pairs
from fedgma.statistics.comparisons import over_seeds
from fedgma.statistics.labels import plain, short, sortable
from fedgma.statistics.power import LEAST_SEEDS
from fedgma.statistics.verdicts import Verdict, p_within, paired

NEAR = 1.0  # points; arms that differ by less count as near
TARGET = 0.95  # share of the lower final accuracy that both arms have to reach
BETWEEN = ("near", "sooner", "versus")  # kinds that compare two arms of a cell
TOGETHER = ("peak", "best_pair", "same_pair")  # kinds with one verdict over all data sets
CHOOSING = TOGETHER  # kinds that choose the best of all cells; the chosen ones have to have converged
POOLED = ("ahead", "not_behind", "not_ahead", "versus", "near")  # kinds about a mean difference over cells


class Aside(NamedTuple):
    """Cells that stand apart from those of a verdict."""

    cells: int
    difference: Verdict | None  # None for kinds that are not about one


class Look(NamedTuple):
    """What a claim's cells say: a test whose positive side speaks for the claim, and words around the estimate."""

    before: str
    estimate: Verdict | None = None  # as it is shown
    test: Verdict | None = None  # as it is judged; None if nothing was tested
    unit: str = "points"
    after: str = ""
    fixed: ClaimVerdict | None = None  # a verdict without a test
    printed: float | None = None  # the mean of the printed differences of these cells
    measured: Verdict | None = None  # the estimate of an analysis, which its text already says
    apart: Mapping[str, Aside] = {}  # by why they stand apart
    as_printed: bool = False  # these cells speak against the claim in print too, so they do not contradict the paper

    @property
    def shown(self) -> Verdict | None:
        """The estimate with its interval, if there is one."""
        return self.estimate if self.measured is None else self.measured

    @property
    def verdict(self) -> ClaimVerdict | None:
        """The verdict of the corrected test; None if the look only describes."""
        if self.fixed is not None or self.test is None:
            return self.fixed
        outcomes = {"first ahead": ClaimVerdict.HOLDS, "second ahead": ClaimVerdict.CONTRADICTED}
        outcomes |= {"preliminary": ClaimVerdict.PRELIMINARY}
        if self.as_printed:
            del outcomes["second ahead"]
        return outcomes.get(self.test.outcome, ClaimVerdict.INCONCLUSIVE)

    @property
    def text(self) -> str:
        """The words, the estimate with its interval, p alone and corrected, and the seeds that would be enough."""
        if self.estimate is None:
            words = [] if self.test is None else [self.test.correction, self.test.advice]
            inside = "; ".join(filter(None, words))
            return f"{self.before} ({inside}){self.after}" if inside else f"{self.before}{self.after}"
        if self.estimate.interval is None:
            measured = f"{self.estimate.mean:+.2f} {self.unit}, one seed"
        else:
            between = f"95 % CI {self.estimate.low:+.2f} to {self.estimate.high:+.2f}"
            measured = f"{self.estimate.mean:+.2f} {self.unit}, {between}, {self.estimate.of} seeds"
        tested = "" if self.test is None else self.test.correction and f", {self.test.correction}"
        advice = f" ({self.test.advice})" if self.test is not None and self.test.advice else ""
        return f"{self.before}{measured}{tested}{advice}{self.after}"


Kind = Callable[[Claim, Sequence[Compared], Comparison], Look]


def _found(before: str, values: Sequence[float], unit: str = "points", after: str = "") -> Look:
    """A look at values by seed whose mean is above zero if the claim holds."""
    verdict = paired(values)
    return Look(before, verdict, verdict, unit, after)


def differences_of(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> list[PerSeed]:
    """The differences that a claim is about, by seed, one row for each cell."""
    if claim.kind in BETWEEN:
        return [row for row in _apart(claim, cells, comparison) if row]
    return [cell.differences for cell in cells]


def _ahead(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    """In how many cells the masked arm is ahead, the mean difference, and the printed one."""
    verdicts = [cell.verdict for cell in cells if cell.verdict is not None]
    means = [verdict.mean for verdict in verdicts]
    outcomes = [verdict.outcome for verdict in verdicts]
    sure = outcomes.count("first ahead"), outcomes.count("second ahead")
    values = over_seeds([cell.differences for cell in cells])
    if not values:
        return Look("the cells share no seed")
    printed = [cell.printed_difference for cell in cells if cell.printed_difference is not None]
    paper = sum(printed) / len(printed) if printed else None
    beside = "" if paper is None else f"; printed {paper:+.2f}, by cell: {_counted(cells)}"
    text = (
        f"ahead in {sum(m > 0 for m in means)} of {len(means)} cells ({sure[0]} significant), behind in "
        f"{sum(m < 0 for m in means)} ({sure[1]} significant); over these cells "
    )
    look = _found(text, values, after=beside)._replace(printed=paper)
    if paper is not None and paper < 0 and paired(values).mean < 0:
        return look._replace(as_printed=True, after=f"{beside}; behind in print too, so no contradiction")
    return look


def _counted(cells: Sequence[Compared]) -> str:
    """The number of cells with each verdict."""
    counts = Counter(cell.agreement for cell in cells if cell.printed_difference is not None)
    return ", ".join(f"{agreement} {counts[agreement]}" for agreement in Agreement if counts[agreement])


def _not_ahead(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    look = _ahead(claim, cells, comparison)
    return look if look.test is None else look._replace(test=look.test._replace(mean=-look.test.mean), as_printed=False)


def lines(cells: Sequence[Compared], axis: str) -> dict[str, list[Compared]]:
    """Rows of cells that differ only in the setting `axis`, sorted by its value; named by the shared settings."""
    rows: dict[str, list[Compared]] = {}
    for compared in cells:
        rest = ", ".join(plain(value) for name, value in compared.cell.label.items() if name != axis)
        rows.setdefault(rest, []).append(compared)
    return {
        name: sorted(row, key=lambda compared: sortable(compared.cell.settings[axis])) for name, row in rows.items()
    }


def _trend(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    """Whether the difference rises along the axis: the slope of each seed, over cells with as many rounds."""
    rows = [row for line in lines(cells, claim.axis).values() if len(row := _as_long(line)) > 1]
    slopes = [_slopes(row) for row in rows]
    values = over_seeds([slope for slope in slopes if slope])
    if not values:
        return Look(f"no two values of {short(claim.axis)} have the same number of rounds")
    steps = _levels(rows[0], claim.axis) if len(rows) == 1 else f"mean of {len(rows)} settings"
    return _found("the difference changes by ", values, "points a step", f"; {steps}")


def _as_long(line: Sequence[Compared]) -> list[Compared]:
    """The cells of a line that have the commonest number of rounds, the largest of several."""
    counts = Counter(cell.rounds for cell in line)
    rounds = max(counts, key=lambda each: (counts[each], each))
    return [cell for cell in line if cell.rounds == rounds]


def _slopes(row: Sequence[Compared]) -> PerSeed:
    """Least-squares slope of the difference over the position in the row, by seed."""
    seeds = sorted(set.intersection(*(set(cell.differences) for cell in row)))
    middle = (len(row) - 1) / 2
    weights = [position - middle for position in range(len(row))]
    total = sum(weight * weight for weight in weights)
    return {
        seed: sum(w * cell.differences[seed] for w, cell in zip(weights, row, strict=True)) / total for seed in seeds
    }


def _levels(row: Sequence[Compared], axis: str) -> str:
    parts = [
        f"{plain(compared.cell.settings[axis])}: {compared.verdict.mean:+.2f}" for compared in row if compared.verdict
    ]
    return f"by {short(axis)} " + ", ".join(parts)


def _peak(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    """The claimed value against the best other value that gives a different mask; every row has to agree."""
    sentences, verdicts, early = [], [], False
    for name, row in lines(cells, claim.axis).items():
        claimed = next((compared for compared in row if compared.cell.settings[claim.axis] == claim.at), None)
        best = max(row, key=lambda compared: _mean(compared.masked))
        others = [compared for compared in row if claimed is not None and not _same_mask(compared, claimed)]
        if claimed is None or not others:
            continue
        rival = max(others, key=lambda compared: _mean(compared.masked))
        shared = sorted(set(claimed.masked) & set(rival.masked))
        verdict = paired([claimed.masked[seed] - rival.masked[seed] for seed in shared])
        verdicts.append(verdict)
        early = early or not (claimed.converged and rival.converged)
        where = f"{name}: " if name else ""
        at, top = plain(claim.at), plain(best.cell.settings[claim.axis])
        rest = f"{at} minus the best other ({plain(rival.cell.settings[claim.axis])})"
        shown = Look("", verdict).text
        sentences.append(f"{where}best at {top} ({_mean(best.masked):.2f}); {rest}: {shown}")
    if not verdicts:
        return Look(f"{claim.at} or its rivals were not run")
    return _if_converged(Look("; ".join(sentences), test=_all_agree(verdicts)), not early)


def _if_converged(look: Look, converged: bool) -> Look:
    """A look at chosen cells; preliminary if they have not converged."""
    if converged:
        return look
    return look._replace(before=f"not converged; {look.before}", test=None, fixed=ClaimVerdict.PRELIMINARY)


def _all_agree(verdicts: Sequence[Verdict]) -> Verdict:
    """The test that all rows lie on one side: the weakest row decides, and rows on both sides decide nothing."""
    weakest = max(verdicts, key=lambda verdict: (verdict.p, -verdict.of))
    fewest = min(verdict.of for verdict in verdicts)
    if len({verdict.mean > 0 for verdict in verdicts}) > 1:
        weakest = weakest._replace(p=1.0, corrected=1.0)
    return weakest._replace(of=fewest)


def _same_mask(first: Compared, second: Compared) -> bool:
    """Whether two thresholds give the same mask if no update is zero."""
    return mask_step(first.cell.settings) == mask_step(second.cell.settings)


def mask_step(settings: Mapping[str, Any]) -> int:
    """The smallest |votes| that passes a threshold if no update is zero; |votes| has the parity of the clients.

    >>> [mask_step({"tau": tau, "clients_per_round": 10}) for tau in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)]
    [0, 2, 2, 4, 4, 6]
    """
    clients = int(settings["clients_per_round"])
    needed = votes_needed(settings["tau"], clients)
    return needed + (needed - clients) % 2 if needed else 0


def _above(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    """One value of a setting against another, in each arm."""
    differences = []
    for row in lines(cells, claim.axis).values():
        by_value = {compared.cell.settings[claim.axis]: compared for compared in row}
        if claim.first in by_value and claim.second in by_value:
            first, second = by_value[claim.first], by_value[claim.second]
            for a, b in ((first.plain, second.plain), (first.masked, second.masked)):
                differences.append({seed: a[seed] - b[seed] for seed in set(a) & set(b)})
    values = over_seeds(differences)
    if not values:
        return Look(f"{claim.first} and {claim.second} were not both run")
    higher = sum(_mean(by_seed) > 0 for by_seed in differences)
    return _found(f"higher in {higher} of {len(differences)} pairs; over all pairs ", values)


def _between(claim: Claim, cells: Sequence[Compared]) -> list[tuple[dict[int, Entry], dict[int, Entry]]]:
    """The runs of two arms in each cell; every cell has its own plain mean."""
    groups: dict[str, dict[str, dict[int, Entry]]] = {}
    for compared in cells:
        rest = repr([(k, v) for k, v in compared.cell.label.items() if k != "aggregator"])
        arms = groups.setdefault(rest, {})
        arms["mean"], arms[compared.cell.arm] = dict(compared.entries[0]), dict(compared.entries[1])
    return [
        (arms[claim.first], arms[claim.second]) for arms in groups.values() if {claim.first, claim.second} <= {*arms}
    ]


def _apart(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> list[PerSeed]:
    """First arm minus second in every cell, by seed."""

    def score(entry: Entry) -> float:
        return float(getattr(entry.scores[claim.split], comparison.statistic))

    return [{seed: score(a[seed]) - score(b[seed]) for seed in {*a} & {*b}} for a, b in _between(claim, cells)]


def _versus(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    rows = differences_of(claim, cells, comparison)
    values = over_seeds(rows)
    if not values:
        return Look(f"{claim.first} and {claim.second} share no seed")
    ahead = sum(_mean(row) > 0 for row in rows)
    return _found(f"{claim.first} ahead of {claim.second} in {ahead} of {len(rows)} cells; ", values)


def _near(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    """Whether two arms are less than a point apart: tested on the distance of the mean from that margin."""
    values = over_seeds(differences_of(claim, cells, comparison))
    if not values:
        return Look(f"{claim.first} and {claim.second} share no seed")
    verdict = paired(values)
    p = min(p_within(verdict, NEAR))
    test = verdict._replace(mean=NEAR - abs(verdict.mean), p=p, corrected=p)
    return Look(f"{claim.first} minus {claim.second}: ", verdict, test, after=f"; near is within {NEAR:g} point")


def _sooner(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    """Rounds to a level that both arms reach: 95 % of the lower last10."""
    saved = [
        {s: needed for s in sorted({*a} & {*b}) if (needed := rounds_saved(a[s], b[s], claim.split)) is not None}
        for a, b in _between(claim, cells)
    ]
    values = over_seeds([row for row in saved if row])
    if not values:
        return Look("no seed in which both arms reach a common level")
    saving = f"rounds that {claim.first} needs less than {claim.second} to reach {TARGET:.0%} of the lower level"
    return _found(f"{saving}: ", values, "rounds")


def rounds_saved(first: Entry, second: Entry, split: str = "test") -> float | None:
    """How many fewer rounds the first run needs to a level that both reach; None if a curve is missing."""
    if split not in first.curves or split not in second.curves:
        return None
    target = TARGET * min(first.scores[split].last10, second.scores[split].last10) / 100
    reached = [next((r for r, v in sorted(e.curves[split].items()) if v >= target), None) for e in (first, second)]
    return None if None in reached else float((reached[1] or 0) - (reached[0] or 0))


def _best_pair(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    """Compare the arms, each at the pair of rates with its highest mean."""
    best_plain = max(cells, key=lambda compared: _mean(compared.plain))
    best_masked = max(cells, key=lambda compared: _mean(compared.masked))
    seeds = sorted(set(best_plain.plain) & set(best_masked.masked))
    pairs = [" and ".join(plain(compared.cell.settings[key]) for key in KEYS) for compared in (best_plain, best_masked)]
    values = [best_masked.masked[seed] - best_plain.plain[seed] for seed in seeds]
    look = _found(f"best of plain at {pairs[0]}, of masked at {pairs[1]}: ", values)
    return _if_converged(look, best_plain.converged and best_masked.converged)


def _same_pair(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    """In how many data sets and algorithms both arms choose the same pair, as the search chooses it."""
    groups: dict[str, list[Compared]] = {}
    for compared in cells:
        groups.setdefault(f"{compared.cell.settings['dataset']} {compared.cell.settings['algorithm']}", []).append(
            compared
        )
    chosen = [best_pairs(row) for row in groups.values()]
    same = sum(pairs["mean"] == pairs["gma"] for pairs in chosen)
    seeds = min(len(compared.differences) for compared in cells)
    verdict = ClaimVerdict.HOLDS if same == len(groups) else ClaimVerdict.CONTRADICTED
    text = f"the same pair is best for both arms in {same} of {len(groups)} data sets and algorithms"
    few = f", {seeds} {'seed' if seeds == 1 else 'seeds'}; a verdict needs at least {LEAST_SEEDS} seeds"
    if seeds < LEAST_SEEDS:
        return Look(text, after=few, fixed=ClaimVerdict.PRELIMINARY)
    return Look(text, fixed=verdict)


def _mean(values: Mapping[int, float]) -> float:
    return sum(values.values()) / len(values) if values else float("-inf")


KINDS: dict[str, Kind] = {
    "ahead": _ahead,
    "not_behind": _ahead,
    "not_ahead": _not_ahead,
    "trend": _trend,
    "peak": _peak,
    "above": _above,
    "near": _near,
    "versus": _versus,
    "sooner": _sooner,
    "best_pair": _best_pair,
    "same_pair": _same_pair,
}
