"""From what a search and a test found to an advice: which rule and rates, the expected gain, and the settings file.

A rule is advised only if it is ahead of the plain mean at the mean's own best rates, after correction for all tests,
and not below the mean at the given rates. Other rates for the mean are advised only if they are ahead of the given
ones. Else the settings stay as they are.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fedgma.experiments.advise.halving import SHARES, Candidate, Pair
from fedgma.experiments.advise.question import AVERAGE_OF_MODELS, RATES, seeds_of_the_test
from fedgma.experiments.advise.search import Findings
from fedgma.experiments.materials import Materials
from fedgma.experiments.settings import SECTIONS, Settings, record
from fedgma.statistics.arms import last_rounds, score, summarise
from fedgma.statistics.convergence import converge, is_dead
from fedgma.statistics.labels import NAMES, capitalised, in_sentence
from fedgma.statistics.metrics import course
from fedgma.statistics.verdicts import Verdict, correct, paired

ALWAYS = ("aggregator", *RATES)  # in the settings file, also if they are the defaults


class Contender(NamedTuple):
    """An arm of the test: its scores by seed, and its verdict against the plain mean."""

    candidate: Candidate
    name: str  # in a sentence
    scores: Mapping[int, float]
    verdict: Verdict | None = None  # None for the plain mean at its best rates

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return math.fsum(self.scores.values()) / len(self.scores)

    @property
    def gain(self) -> float:
        """By how much it is better than the plain mean at its best rates; 0 for that itself."""
        return 0.0 if self.verdict is None else self.verdict.mean


class Advice(NamedTuple):
    """The recommendation, why, and what to doubt."""

    headline: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    chosen: Candidate
    gain: Verdict | None  # over the plain mean at its best rates; None if the plain mean is advised
    contenders: tuple[Contender, ...]  # the plain mean at its best rates first


def conclude(findings: Findings) -> Advice:
    """The advice that the test supports."""
    base, given = findings.question.base, findings.question.pairs[0]
    notes = (*findings.notes, *_short_of_time(findings), *_doubts(findings), *_unsettled(findings))
    if not findings.tests:
        why = ("The time was over before the test was complete; the same command goes on with it",)
        return Advice(_keep(given), why, notes, (base, given), None, ())
    contenders = _contenders(findings)
    chosen = _chosen(contenders, (base, given))
    gain = next(
        (contender.verdict for contender in contenders if contender.candidate == chosen and chosen[0] != base), None
    )
    headline = (
        f"Use {_in_sentence(chosen[0])}{_at(chosen[1])}"
        if gain is not None
        else _keep(chosen[1], changed=chosen[1] != given)
    )
    return Advice(headline, tuple(_reasons(findings, contenders, gain)), notes, chosen, gain, tuple(contenders))


def _contenders(findings: Findings) -> list[Contender]:
    (best, base_runs), *others = findings.tests.items()
    metric = findings.courses[0].metric
    scores = {c: {seed: score(run, of=metric) for seed, run in runs.items()} for c, runs in findings.tests.items()}
    gains = {c: [metric.sign * (scores[c][seed] - scores[best][seed]) for seed in base_runs] for c, _ in others}
    verdicts = correct([paired(values, _names(c, best), metric) for c, values in gains.items()])
    contested = [Contender(c, v.names[0], scores[c], v) for (c, _), v in zip(others, verdicts, strict=True)]
    return [Contender(best, "the mean", scores[best]), *contested]


def _chosen(contenders: Sequence[Contender], given: Candidate) -> Candidate:
    """The best rule that is ahead; else the mean, at other rates than the given ones only if these are behind."""
    best, *others = contenders
    as_given = next((contender for contender in contenders if contender.candidate == given), None)
    ahead = [
        contender
        for contender in others
        if contender.candidate != given
        and contender.verdict is not None
        and contender.verdict.outcome == "first ahead"
        and (as_given is None or contender.gain > as_given.gain)
    ]
    if ahead:
        return max(ahead, key=lambda contender: contender.gain).candidate
    if as_given is not None and as_given.verdict is not None and as_given.verdict.outcome == "second ahead":
        return best.candidate
    return given


def _reasons(findings: Findings, contenders: Sequence[Contender], gain: Verdict | None) -> list[str]:
    best, *others = contenders
    runs = [run for of in findings.tests.values() for run in of.values()]
    metric = findings.courses[0].metric
    digits, unit = metric.decimals(*(contender.mean for contender in contenders)), f" {metric.unit}".rstrip()
    levels = ", ".join(f"{contender.name} {contender.mean:.{digits}f}{unit}" for contender in contenders)
    seeds = f"{len(best.scores)} seed{'s' if len(best.scores) > 1 else ''}"
    lines = [_first_reason(best, others, gain)]
    lines.append(
        f"Test {metric.name}, {last_rounds(runs)} of {findings.rounds}, {seeds}, each at its best rates: {levels}"
    )
    for contender in others:
        if contender.verdict is not None and contender.verdict is not gain:
            lines.append(f"{capitalised(contender.name)}{_at(contender.candidate[1])}: {contender.verdict.text}")
    return lines


def _first_reason(best: Contender, others: Sequence[Contender], gain: Verdict | None) -> str:
    """The expected gain over the plain mean, or why there is none."""
    if gain is not None:
        return f"Expected gain over the plain mean at its own best rates{_at(best.candidate[1])}: {gain.text}"
    rules = [contender for contender in others if contender.candidate[0] != best.candidate[0]]
    leading = [contender for contender in rules if contender.verdict is not None and contender.verdict.mean > 0]
    if not leading:
        return "No gain of another rule is to be expected: no finalist is ahead of the plain mean at its best rates"
    most = max(leading, key=lambda contender: contender.gain)
    if most.verdict is not None and most.verdict.significant:
        return (
            f"{capitalised(most.name)} is ahead of the plain mean at its best rates, but not of the mean at your rates"
        )
    return f"No other rule is significantly ahead; the most promising is {most.name}; more minutes give more seeds"


def _short_of_time(findings: Findings) -> list[str]:
    """What there was no time for."""
    asked, first, last = findings.question, findings.courses[0].stage, findings.courses[-1].stage
    notes = []
    if left := [name for name in asked.arms if name not in first.arms]:
        notes.append(f"there was no time to try {len(left)} rules: {'; '.join(left)}")
    if first.pairs < len(asked.pairs):
        notes.append(
            f"{first.pairs} of {len(asked.pairs)} pairs of learning rates were tried, by the speed of the first rounds"
        )
    if len(findings.courses) < len(SHARES) and last.rounds < asked.rounds:
        notes.append(f"there was time for {len(findings.courses)} of {len(SHARES)} stages of the search")
    if len(last.seeds) == 1:
        few = f"the search chose by one seed and {last.rounds} of {asked.rounds} rounds"
        notes.append(f"{few}; a rule that it left out may be as good")
    tested = [name for name, _ in findings.tests if name != asked.base]
    if len(tested) == 1 and len(last.arms) > 2:
        notes.append(f"there was time to test one rule: {tested[0]}")
    if findings.rounds < asked.rounds:
        few = f"the test had {findings.rounds} of {asked.rounds} rounds"
        notes.append(f"{few}; longer training may change the order of the arms")
    return notes


def _doubts(findings: Findings) -> list[str]:
    """Best rates at the edge of those that were tried."""
    notes = []
    tried = {pair for _, pair in findings.courses[0].stage.candidates}
    for name, pair in list(findings.tests)[:2]:
        edges = [
            f"{side} rate {pair[axis]:g}"
            for axis, side in enumerate(("client", "server"))
            if len(values := sorted({other[axis] for other in tried})) > 1 and pair[axis] in (values[0], values[-1])
        ]
        if edges:
            notes.append(
                f"the best {' and '.join(edges)} of {_in_sentence(name)} is at the edge of those that were tried"
            )
    return notes


def _unsettled(findings: Findings) -> list[str]:
    """Whether the arms of the test still rise, and which diverged: no interval over a few seeds covers such runs."""
    metric = findings.courses[0].metric
    curves = [[course(run, "test", metric) for run in runs.values()] for runs in findings.tests.values()]
    if not curves:
        return []
    settled, _ = converge(
        [[(summarise(curve, metric), curve) for curve in arm] for arm in curves],
        findings.rounds,
        metric,
        [[is_dead(run) for run in runs.values()] for runs in findings.tests.values()],
    )
    notes = []
    rising = any(rise is not None and rise > settled.flat for rise in settled.rises)
    if rising and findings.rounds >= findings.question.rounds:  # a shorter test says so already
        notes.append(
            f"the arms had not converged after {findings.rounds} rounds; longer training may change their order"
        )
    if any(settled.diverged):
        lost = zip(findings.tests, settled.diverged, strict=True)
        by_arm = ", ".join(f"{_in_sentence(name)}{_at(pair)} {count}" for (name, pair), count in lost if count)
        of = f"{sum(settled.diverged)} of {settled.of} runs of the test diverged"
        notes.append(f"{of}: {by_arm}; choose lower rates for these arms")
    return notes


def _keep(pair: Pair, *, changed: bool = False) -> str:
    return f"Keep the plain mean{_at(pair)}{', in place of your rates' if changed else ', as in your settings'}"


def _at(pair: Pair) -> str:
    return f" (client rate {pair[0]:g}, server rate {pair[1]:g})"


def _names(candidate: Candidate, best: Candidate) -> tuple[str, str]:
    """The names of an arm and of the mean in a sentence; the mean at other rates is told apart."""
    if candidate[0] == best[0]:
        return "the mean at your rates", "the mean at its best rates"
    return _in_sentence(candidate[0]), "the mean"


def _in_sentence(label: str) -> str:
    """The label of an arm as it stands in a sentence."""
    rules = {words: in_sentence(name) for name, words in NAMES.items()} | {
        AVERAGE_OF_MODELS: f"the {AVERAGE_OF_MODELS}"
    }
    return rules.get(label, label)


def settings_file(findings: Findings, advice: Advice, materials: Materials) -> str:
    """The advised settings as a file for `fedgma run`: what differs from the defaults, and the seeds of the test."""
    asked = findings.question
    seeds = seeds_of_the_test(asked)[: len(asked.seeds)]
    settings = asked.settings(advice.chosen, seeds[0], asked.rounds, final=True)
    recorded, located = record(settings), materials.located(settings)
    left_out = {"partition": {"seed"}} if asked.follows else {}
    always = [f"{name} = {json.dumps(getattr(located, name))}" for name in ALWAYS]
    lines = [f"# {advice.headline}.", *always, *_lines(located, recorded, Settings())]
    lines.append(f"seed = {json.dumps(list(seeds))}")
    for section in SECTIONS:
        values = getattr(located, section)
        inner = {n: v for n, v in recorded.get(section, {}).items() if n not in left_out.get(section, ())}
        rows = _lines(values, inner, type(values)())
        lines += ["", f"[{section}]", *rows] if rows else []
    return "\n".join(lines) + "\n"


def _lines(settings: Any, recorded: Mapping[str, Any], default: Any) -> list[str]:
    """The settings that the run uses and that are not at their defaults."""
    names = [name for name, value in recorded.items() if value is not None and name not in (*SECTIONS, *ALWAYS, "seed")]
    named = {name: getattr(settings, name) for name in names}
    return [f"{name} = {json.dumps(v)}" for name, v in named.items() if v is not None and v != getattr(default, name)]
