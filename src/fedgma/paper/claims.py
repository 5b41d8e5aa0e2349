"""Test the paper's claims on our runs: one sentence and one verdict per claim.

For several cells the 95 % CI is over seeds: the difference of a seed is its mean over the cells, because cells that
share seeds are not independent.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedgma.aggregation.masks import votes_needed
from fedgma.paper.catalogue import Claim
from fedgma.paper.compare import Agreement, Compared, Comparison
from fedgma.paper.entries import Entry
from fedgma.paper.findings import ClaimVerdict, Finding, judged
from fedgma.paper.rates import KEYS
from fedgma.statistics.labels import plain, short, sortable
from fedgma.statistics.verdicts import Verdict, paired

NEAR = 1.0  # points; arms that differ by less count as near
OPPOSITE = {ClaimVerdict.HOLDS: ClaimVerdict.CONTRADICTED, ClaimVerdict.CONTRADICTED: ClaimVerdict.HOLDS}
TARGET = 0.95  # share of the lower final accuracy that both arms have to reach

ANALYSIS = "analysis"  # the kind of claim that needs an analysis
BETWEEN = ("near", "sooner", "versus")  # kinds that compare two arms of a cell
TOGETHER = ("peak", "best_pair", "same_pair")  # kinds with one verdict over all data sets

PerSeed = dict[int, float]
Look = tuple[ClaimVerdict | None, str]  # None if the cells of the claim were not run
Kind = Callable[[Claim, Sequence[Compared], Comparison], Look]


class Answer(NamedTuple):
    """The verdicts on a claim: one for each group of data sets, or one under the empty name."""

    claim: Claim
    verdicts: Mapping[str, ClaimVerdict]
    text: str

    @property
    def verdict(self) -> str:
        """The verdicts in words; a single one if they agree."""
        if len(set(self.verdicts.values())) == 1:
            return str(next(iter(self.verdicts.values())))
        return ", ".join(f"{verdict} ({names})" for names, verdict in self.verdicts.items())


def look_at(comparison: Comparison, findings: Sequence[Finding] = ()) -> list[Answer]:
    """Test every claim of an experiment; `findings` are those of its analysis."""
    return [
        _analysed(claim, findings) if claim.kind == ANALYSIS else _look(claim, comparison)
        for claim in comparison.experiment.claims
    ]


def _analysed(claim: Claim, findings: Sequence[Finding]) -> Answer:
    """Combine the verdicts of the findings that the claim names; findings without a verdict only describe."""
    named = [finding for finding in findings if finding.is_below(claim.finding)]
    if not named:
        return Answer(claim, {"": ClaimVerdict.NOT_RUN}, f"no analysis with a finding {claim.finding!r}")
    verdicts = {
        finding.id.removeprefix(f"{claim.finding}/").replace("_", "-"): finding.verdict
        for finding in named
        if finding.verdict is not None
    }
    return Answer(claim, verdicts or {"": ClaimVerdict.INCONCLUSIVE}, " ".join(finding.text for finding in named))


def _look(claim: Claim, comparison: Comparison) -> Answer:
    """Test a claim on its cells; data sets with different seeds get separate verdicts."""
    cells = [compared for compared in comparison.on(claim.split) if _is_about(claim, compared)]
    run = [compared for compared in cells if compared.differences]
    if not run:
        return Answer(claim, {"": ClaimVerdict.NOT_RUN}, "no cell of it was run")
    groups = {} if claim.kind in TOGETHER else _of_same_seeds(run)
    looked = {names: KINDS[claim.kind](claim, own, comparison) for names, own in (groups or {"": run}).items()}
    verdicts = {names: verdict for names, (verdict, _) in looked.items() if verdict is not None}
    texts = [f"{names}: {looked[names][1]}" if len(verdicts) > 1 else looked[names][1] for names in verdicts]
    text = "; ".join(texts) or next(iter(looked.values()))[1]
    part = f"; {len(run)} of {len(cells)} cells were run" if len(run) < len(cells) else ""
    return Answer(claim, verdicts or {"": ClaimVerdict.INCONCLUSIVE}, text + part)


def _is_about(claim: Claim, compared: Compared) -> bool:
    settings = {**compared.cell.settings, "rates": compared.cell.part.rates}
    arms = (claim.first, claim.second) if claim.kind in BETWEEN else (claim.arm,)
    return compared.cell.arm in arms and all(settings.get(name) == value for name, value in claim.where.items())


def over_seeds(rows: Sequence[PerSeed]) -> list[float]:
    """The mean over rows for every seed that all rows share.

    >>> over_seeds([{0: 1.0, 1: 2.0}, {0: 3.0, 1: 4.0, 2: 9.0}])
    [2.0, 3.0]
    """
    seeds = sorted(set.intersection(*(set(row) for row in rows))) if rows else []
    return [sum(row[seed] for row in rows) / len(rows) for seed in seeds]


def _estimate(verdict: Verdict, unit: str = "points") -> str:
    if verdict.interval is None:
        return f"{verdict.mean:+.2f} {unit}, one seed"
    return f"{verdict.mean:+.2f} {unit}, 95 % CI {verdict.low:+.2f} to {verdict.high:+.2f}, {verdict.of} seeds"


def _said(verdict: Verdict, unit: str = "points") -> str:
    """The estimate, and how many seeds would be enough if these are not."""
    advice = f" ({verdict.advice})" if verdict.advice else ""
    return _estimate(verdict, unit) + advice


def _of_same_seeds(cells: Sequence[Compared]) -> dict[str, list[Compared]]:
    """Cells grouped by data sets that share the same seeds; a group is named by its data sets.

    Cells with a single seed have no interval and are grouped separately, so that the others keep theirs.
    """
    datasets: dict[tuple[str, bool], list[Compared]] = {}
    for one in cells:
        datasets.setdefault((str(one.cell.settings["dataset"]), len(one.differences) == 1), []).append(one)
    together: dict[tuple[frozenset[int], bool], list[str]] = {}
    for (name, alone), members in datasets.items():
        seeds = frozenset[int].intersection(*(frozenset(one.differences) for one in members))
        if seeds:
            together.setdefault((seeds, alone), []).append(name)
    return {
        ", ".join(names) + (" with one seed" if alone else ""): [one for name in names for one in datasets[name, alone]]
        for (_, alone), names in sorted(together.items(), key=lambda group: group[0][1])
    }


def _ahead(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    """In how many cells the masked arm is ahead, the mean difference, and the printed one."""
    verdicts = [cell.verdict for cell in cells if cell.verdict is not None]
    means = [verdict.mean for verdict in verdicts]
    outcomes = [verdict.outcome for verdict in verdicts]
    sure = outcomes.count("first ahead"), outcomes.count("second ahead")
    values = over_seeds([cell.differences for cell in cells])
    if not values:
        return None, "the cells share no seed"
    overall = paired(values)
    printed = [cell.printed_difference for cell in cells if cell.printed_difference is not None]
    paper = f"; printed {sum(printed) / len(printed):+.2f}, by cell: {_counted(cells)}" if printed else ""
    text = (
        f"ahead in {sum(m > 0 for m in means)} of {len(means)} cells ({sure[0]} significant), behind in "
        f"{sum(m < 0 for m in means)} ({sure[1]} significant); over all cells {_said(overall)}{paper}"
    )
    return judged(overall.interval), text


def _counted(cells: Sequence[Compared]) -> str:
    """The number of cells with each verdict."""
    counts = Counter(cell.agreement for cell in cells if cell.printed_difference is not None)
    return ", ".join(f"{agreement} {counts[agreement]}" for agreement in Agreement if counts[agreement])


def _not_ahead(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    verdict, text = _ahead(claim, cells, comparison)
    return (None if verdict is None else OPPOSITE.get(verdict, verdict)), text


def lines(cells: Sequence[Compared], axis: str) -> dict[str, list[Compared]]:
    """Rows of cells that differ only in the setting `axis`, sorted by its value; named by the shared settings."""
    rows: dict[str, list[Compared]] = {}
    for one in cells:
        rest = ", ".join(plain(value) for name, value in one.cell.label.items() if name != axis)
        rows.setdefault(rest, []).append(one)
    return {name: sorted(row, key=lambda one: sortable(one.cell.settings[axis])) for name, row in rows.items()}


def _trend(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    """Whether the difference rises along the axis: the slope of each seed."""
    rows = [row for row in lines(cells, claim.axis).values() if len(row) > 1]
    slopes = [_slopes(row) for row in rows]
    values = over_seeds([slope for slope in slopes if slope])
    if not values:
        return None, f"no two values of {short(claim.axis)} were run"
    verdict = paired(values)
    steps = _levels(rows[0], claim.axis) if len(rows) == 1 else f"mean of {len(rows)} settings"
    return judged(verdict.interval), f"the difference changes by {_said(verdict, 'points a step')}; {steps}"


def _slopes(row: Sequence[Compared]) -> PerSeed:
    """Least-squares slope of the difference over the position in the row, by seed."""
    seeds = sorted(set.intersection(*(set(cell.differences) for cell in row)))
    middle = (len(row) - 1) / 2
    weights = [place - middle for place in range(len(row))]
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
    """The claimed value against the best other value that gives a different mask."""
    sentences, differences = [], []
    for name, row in lines(cells, claim.axis).items():
        here = next((compared for compared in row if compared.cell.settings[claim.axis] == claim.at), None)
        best = max(row, key=lambda compared: _mean(compared.masked))
        others = [compared for compared in row if here is not None and not _same_mask(compared, here)]
        if here is None or not others:
            continue
        rival = max(others, key=lambda compared: _mean(compared.masked))
        shared = sorted(set(here.masked) & set(rival.masked))
        differences.append({seed: here.masked[seed] - rival.masked[seed] for seed in shared})
        where = f"{name}: " if name else ""
        at, top = plain(claim.at), plain(best.cell.settings[claim.axis])
        sentences.append(
            f"{where}best at {top} ({_mean(best.masked):.2f}); {at} minus the best other "
            f"({plain(rival.cell.settings[claim.axis])}): {_said(paired(list(differences[-1].values())))}"
        )
    if not differences:
        return None, f"{claim.at} or its rivals were not run"
    marks = {judged(paired(list(values.values())).interval) for values in differences}
    return marks.pop() if len(marks) == 1 else ClaimVerdict.INCONCLUSIVE, "; ".join(sentences)


def _same_mask(one: Compared, other: Compared) -> bool:
    """Whether two thresholds give the same mask if no update is zero."""
    return mask_step(one.cell.settings) == mask_step(other.cell.settings)


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
        return None, f"{claim.first} and {claim.second} were not both run"
    higher = sum(_mean(by_seed) > 0 for by_seed in differences)
    verdict = paired(values)
    return judged(verdict.interval), f"higher in {higher} of {len(differences)} pairs; over all pairs {_said(verdict)}"


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
        return float(getattr(entry.scores[claim.split], comparison.experiment.statistic))

    return [{seed: score(a[seed]) - score(b[seed]) for seed in {*a} & {*b}} for a, b in _between(claim, cells)]


def _versus(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    rows = [row for row in _apart(claim, cells, comparison) if row]
    values = over_seeds(rows)
    if not values:
        return None, f"{claim.first} and {claim.second} share no seed"
    verdict, ahead = paired(values), sum(_mean(row) > 0 for row in rows)
    text = f"{claim.first} ahead of {claim.second} in {ahead} of {len(rows)} cells; {_said(verdict)}"
    return judged(verdict.interval), text


def _near(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    values = over_seeds([row for row in _apart(claim, cells, comparison) if row])
    if not values:
        return None, f"{claim.first} and {claim.second} share no seed"
    verdict = paired(values)
    inside = verdict.low >= -NEAR and verdict.high <= NEAR
    apart = verdict.low > NEAR or verdict.high < -NEAR
    says = ClaimVerdict.HOLDS if inside else ClaimVerdict.CONTRADICTED if apart else ClaimVerdict.INCONCLUSIVE
    return says, f"{claim.first} minus {claim.second}: {_estimate(verdict)}; near is within {NEAR:g} point"


def _sooner(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    """Rounds to a level that both arms reach: 95 % of the lower last10."""
    saved = [
        {s: needed for s in sorted({*a} & {*b}) if (needed := rounds_saved(a[s], b[s], claim.split)) is not None}
        for a, b in _between(claim, cells)
    ]
    values = over_seeds([row for row in saved if row])
    if not values:
        return None, "no seed in which both arms reach a common level"
    verdict = paired(values)
    what = f"rounds that {claim.first} needs less than {claim.second} to reach {TARGET:.0%} of the lower level"
    return judged(verdict.interval), f"{what}: {_said(verdict, 'rounds')}"


def rounds_saved(one: Entry, other: Entry, split: str = "test") -> float | None:
    """How many fewer rounds the first run needs to a level that both reach; None if a curve is missing."""
    if split not in one.curves or split not in other.curves:
        return None
    target = TARGET * min(one.scores[split].last10, other.scores[split].last10) / 100
    reached = [next((r for r, v in sorted(e.curves[split].items()) if v >= target), None) for e in (one, other)]
    return None if None in reached else float((reached[1] or 0) - (reached[0] or 0))


def _best_pair(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    """Compare the arms, each at the pair of rates with its highest mean."""
    best_plain = max(cells, key=lambda compared: _mean(compared.plain))
    best_masked = max(cells, key=lambda compared: _mean(compared.masked))
    seeds = sorted(set(best_plain.plain) & set(best_masked.masked))
    verdict = paired([best_masked.masked[seed] - best_plain.plain[seed] for seed in seeds])
    pairs = [" and ".join(plain(compared.cell.settings[key]) for key in KEYS) for compared in (best_plain, best_masked)]
    return judged(verdict.interval), f"best of plain at {pairs[0]}, of masked at {pairs[1]}: {_said(verdict)}"


def _same_pair(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    groups: dict[str, list[Compared]] = {}
    for one in cells:
        groups.setdefault(f"{one.cell.settings['dataset']} {one.cell.settings['algorithm']}", []).append(one)
    same = 0
    for row in groups.values():
        same += max(row, key=lambda one: _mean(one.plain)) is max(row, key=lambda one: _mean(one.masked))
    verdict = ClaimVerdict.HOLDS if same == len(groups) else ClaimVerdict.CONTRADICTED
    return verdict, f"the same pair is best for both arms in {same} of {len(groups)} data sets and algorithms"


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
