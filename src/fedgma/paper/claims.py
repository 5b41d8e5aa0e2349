"""Test the paper's claims on our runs: one sentence and one verdict per claim.

A claim is tested over the cells that it is about, that the paper prints (if it prints any), that reach half of the best
level and that have converged; the others are counted and stand apart. The 95 % CI is over seeds: the difference of a
seed is its mean over the cells, because cells that share seeds are not independent. The verdicts of a page are
corrected together.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedgma.paper.catalogue import Claim
from fedgma.paper.compare import Compared, Comparison
from fedgma.paper.findings import ClaimVerdict, Finding
from fedgma.paper.kinds import BETWEEN, CHOOSING, KINDS, POOLED, TOGETHER, Aside, Look, differences_of
from fedgma.statistics.comparisons import over_seeds
from fedgma.statistics.labels import counted
from fedgma.statistics.verdicts import Verdict, correct, from_interval, paired

ANALYSIS = "analysis"  # the kind of claim that needs an analysis
MOST = 3  # verdicts that are named one by one


class Answer(NamedTuple):
    """What runs or an analysis say to a claim: for each group of data sets, or once under the empty name."""

    claim: Claim
    looks: Mapping[str, Look]
    note: str = ""

    @property
    def verdicts(self) -> dict[str, ClaimVerdict]:
        """The verdict of each look; looks that only describe have none."""
        return {name: look.verdict for name, look in self.looks.items() if look.verdict is not None}

    @property
    def verdict(self) -> str:
        """The verdicts in words; a single one if they agree."""
        verdicts = self.verdicts or {"": ClaimVerdict.PRELIMINARY}
        distinct = list(dict.fromkeys(verdicts.values()))
        if len(distinct) == 1:
            return str(distinct[0])
        if len(verdicts) > MOST:
            return ", ".join(f"{each} in {list(verdicts.values()).count(each)}" for each in distinct)
        return ", ".join(f"{verdict} ({names})" for names, verdict in verdicts.items())

    @property
    def text(self) -> str:
        """What was found, in words, with p values alone and corrected."""
        if self.claim.kind == ANALYSIS:
            return " ".join(look.text for look in self.looks.values())
        named = len(self.looks) > 1
        texts = [f"{names}: {look.text}" if named else look.text for names, look in self.looks.items()]
        return "; ".join(texts) + self.note


def look_at(comparison: Comparison, findings: Sequence[Finding] = ()) -> list[Answer]:
    """Test every claim of an experiment, corrected together; `findings` are those of its analysis."""
    return correct_answers(
        [
            _analysed(claim, findings) if claim.kind == ANALYSIS else _look(claim, comparison)
            for claim in comparison.experiment.claims
        ]
    )


def correct_answers(answers: Sequence[Answer]) -> list[Answer]:
    """The answers of a page with their verdicts corrected together."""
    tests = [look.test for answer in answers for look in answer.looks.values() if look.test is not None]
    corrected = iter(correct(tests))
    return [
        answer._replace(
            looks={
                name: look if look.test is None else look._replace(test=next(corrected))
                for name, look in answer.looks.items()
            }
        )
        for answer in answers
    ]


def _analysed(claim: Claim, findings: Sequence[Finding]) -> Answer:
    """The findings that the claim names, each as a look; findings without a verdict only describe."""
    named = [finding for finding in findings if finding.is_below(claim.finding)]
    if not named:
        missing = Look(f"no analysis with a finding {claim.finding!r}", fixed=ClaimVerdict.NOT_RUN)
        return Answer(claim, {"": missing})
    return Answer(claim, {_short_id(finding, claim): _finding_look(finding) for finding in named})


def _short_id(finding: Finding, claim: Claim) -> str:
    return finding.id.removeprefix(f"{claim.finding}/").replace("_", "-")


def _finding_look(finding: Finding) -> Look:
    """A finding with an interval is a test; others keep their verdict."""
    if finding.verdict is None or finding.interval is None or finding.estimate is None or not finding.n:
        return Look(finding.text, fixed=finding.verdict)
    sign = -1 if finding.verdict is ClaimVerdict.CONTRADICTED else 1
    test = from_interval(finding.estimate, finding.interval, finding.n)
    return Look(finding.text, test=test._replace(mean=sign * abs(finding.estimate)), measured=test)


def _look(claim: Claim, comparison: Comparison) -> Answer:
    """Test a claim on its cells; data sets with different seeds get separate verdicts."""
    cells = [compared for compared in comparison.on(claim.split) if is_about(claim, compared)]
    run = [compared for compared in cells if compared.differences]
    if not run:
        return Answer(claim, {"": Look("no cell of it was run", fixed=ClaimVerdict.NOT_RUN)})
    groups = groups_of(claim, run)
    looks = {names: _settle(claim, members, comparison) for names, members in groups.items()}
    answered = {names: look for names, look in looks.items() if look.verdict is not None} or looks
    part = f"; {len(run)} of {len(cells)} cells were run" if len(run) < len(cells) else ""
    return Answer(claim, answered, part)


def groups_of(claim: Claim, run: Sequence[Compared]) -> dict[str, list[Compared]]:
    """The cells of a claim by data sets that share their seeds; all together for kinds with one verdict."""
    return ({} if claim.kind in TOGETHER else _of_same_seeds(run)) or {"": list(run)}


def _settle(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Look:
    """The verdict over the printed, converged cells; the others are counted and stand apart."""
    kind = KINDS[claim.kind]
    if claim.kind in CHOOSING:
        return kind(claim, cells, comparison)
    asides = {"not printed": [compared for compared in cells if not counts(claim, compared, comparison)]}
    printed = [compared for compared in cells if counts(claim, compared, comparison)] or list(cells)
    learned = [compared for compared in printed if has_learned(compared, printed)]
    asides["below half of the best level"] = [compared for compared in printed if compared not in learned]
    converged = [compared for compared in learned if compared.converged]
    look, over = kind(claim, converged, comparison) if converged else None, converged
    if look is not None and (look.test or look.fixed):
        asides["not converged"] = [compared for compared in learned if not compared.converged]
    else:
        look, over = kind(claim, learned, comparison), learned
        early = None if look.test is None else ClaimVerdict.PRELIMINARY
        why = "too few cells have converged" if converged else "no cell has converged"
        look = look._replace(before=f"{why}; {look.before}", test=None, fixed=early)
    apart = {what: _aside(claim, members, comparison) for what, members in asides.items() if members}
    words = "".join(_in_words(aside, what) for what, aside in apart.items())
    return look._replace(after=f"{look.after}{_without_lost(claim, over, comparison)}{words}", apart=apart)


def has_learned(compared: Compared, cells: Sequence[Compared]) -> bool:
    """Whether an arm of a cell reaches half of the best level of these cells on its data set.

    At rates far too low or too high a cell stays near chance: it does not rise, but has not converged either.
    """
    dataset = compared.cell.settings["dataset"]
    best = max(_level(other) for other in cells if other.cell.settings["dataset"] == dataset)
    return _level(compared) >= best / 2


def _level(compared: Compared) -> float:
    return max((level.mean for level in compared.levels if level is not None), default=0.0)


def counts(claim: Claim, compared: Compared, comparison: Comparison) -> bool:
    """Whether a claim is answered by this cell: it is printed, or the paper prints none, or two arms are compared."""
    return compared.cell.part.printed or not comparison.experiment.printed or claim.kind in BETWEEN


def _aside(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> Aside:
    """How many cells stand apart, and their difference."""
    values = over_seeds(differences_of(claim, cells, comparison)) if claim.kind in POOLED else []
    return Aside(len(cells), paired(values) if values else None)


def _in_words(aside: Aside, what: str) -> str:
    difference = "" if aside.difference is None else f", {_between(aside.difference)}"
    return f"; apart: {counted(aside.cells, 'cell')} {what}{difference}"


def _without_lost(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> str:
    """How many runs diverged, and the difference without the seeds in which one did."""
    runs = sum(sum(compared.course.diverged) for compared in cells if compared.course is not None)
    if not runs:
        return ""
    lost = frozenset[int]().union(*(compared.lost for compared in cells))
    rows = differences_of(claim, cells, comparison) if claim.kind in POOLED else []
    left = over_seeds([{seed: value for seed, value in row.items() if seed not in lost} for row in rows])
    diverged = (
        f"; {runs} of {sum(compared.course.of for compared in cells if compared.course is not None)} runs diverged"
    )
    return f"{diverged}, without their seeds {_between(paired(left))}" if left else diverged


def _between(verdict: Verdict) -> str:
    if verdict.interval is None:
        return f"{verdict.mean:+.2f} points, one seed"
    return f"{verdict.mean:+.2f} points, 95 % CI {verdict.low:+.2f} to {verdict.high:+.2f}"


def is_about(claim: Claim, compared: Compared) -> bool:
    """Whether a claim speaks of this cell."""
    settings = {**compared.cell.settings, "rates": compared.cell.part.rates}
    arms = (claim.first, claim.second) if claim.kind in BETWEEN else (claim.arm,)
    return compared.cell.arm in arms and all(
        settings.get(name) in (value if isinstance(value, list) else [value]) for name, value in claim.where.items()
    )


def _of_same_seeds(cells: Sequence[Compared]) -> dict[str, list[Compared]]:
    """Cells grouped by data sets that share the same seeds; a group is named by its data sets.

    Cells with a single seed have no interval and are grouped separately, so that the others keep theirs.
    """
    datasets: dict[tuple[str, bool], list[Compared]] = {}
    for compared in cells:
        datasets.setdefault((str(compared.cell.settings["dataset"]), len(compared.differences) == 1), []).append(
            compared
        )
    together: dict[tuple[frozenset[int], bool], list[str]] = {}
    for (name, alone), members in datasets.items():
        seeds = frozenset[int].intersection(*(frozenset(compared.differences) for compared in members))
        if seeds:
            together.setdefault((seeds, alone), []).append(name)
    return {
        ", ".join(names) + (" with one seed" if alone else ""): [
            compared for name in names for compared in datasets[name, alone]
        ]
        for (_, alone), names in sorted(together.items(), key=lambda group: group[0][1])
    }
