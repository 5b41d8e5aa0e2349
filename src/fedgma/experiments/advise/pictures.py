"""The pictures of an advice: the search stage by stage, the learning rates, and the arms of the test."""

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from fedgma.aggregation.rules import BASELINE
from fedgma.experiments.advise.advice import Advice
from fedgma.experiments.advise.search import Course, Findings
from fedgma.reports.plots.advice import draw_gains, draw_search
from fedgma.reports.plots.curves import draw_accuracy
from fedgma.reports.plots.grids import draw_rates
from fedgma.reports.plots.style import plain_text
from fedgma.statistics.metrics import course


def pictures_of(findings: Findings, advice: Advice) -> dict[str, Figure]:
    """File name -> figure; without a test only those of the search."""
    metric = findings.courses[0].metric
    with plain_text():
        drawn = {"search": draw_search({_stage(stage): _levels(stage) for stage in findings.courses}, metric)}
        if (rates := _rates(findings)) is not None:
            drawn["rates"] = rates
        base, *others = advice.contenders or (None,)
        if base is not None:
            drawn["accuracy"] = draw_accuracy(_curves(findings, advice), metric=metric)
            rows = {
                contender.name: (
                    contender.verdict,
                    [metric.sign * (contender.scores[seed] - base.scores[seed]) for seed in base.scores],
                )
                for contender in others
                if contender.verdict is not None
            }
            drawn["gain"] = draw_gains(rows)
        return drawn


def _stage(passed: Course) -> str:
    seeds = len(passed.stage.seeds)
    return f"{passed.stage.rounds} rounds\n{seeds} seed{'s' if seeds > 1 else ''}"


def _levels(passed: Course) -> dict[str, float]:
    """The score of each arm at its best rates."""
    scores = {arm: [v for (name, _), v in passed.scores.items() if name == arm] for arm in passed.stage.arms}
    return {arm: passed.metric.best(values) for arm, values in scores.items()}


def _rates(findings: Findings) -> Figure | None:
    """Heat maps of the first stage: the plain mean, and the rule that came furthest."""
    stage, scores, metric = findings.courses[0]
    levels = _levels(findings.courses[-1])
    arms = [findings.question.base, *sorted(levels, key=lambda name: -metric.sign * levels[name])]
    clients, servers = (sorted({pair[axis] for _, pair in stage.candidates}) for axis in (0, 1))
    if len(clients) * len(servers) == 1:
        return None
    shown = list(dict.fromkeys(arms))[:2]
    grids = {
        name: np.array([[scores.get((name, (c, s)), np.nan) for s in servers] for c in clients], float)
        for name in shown
    }
    return draw_rates(grids, servers, clients, metric=metric)


def _curves(findings: Findings, advice: Advice) -> Mapping[str, Mapping[int, Mapping[int, float]]]:
    names = {contender.candidate: contender.name for contender in advice.contenders}
    best = advice.contenders[0].candidate
    return {
        BASELINE if candidate == best else names[candidate]: {
            seed: course(run, "test", findings.courses[0].metric) for seed, run in runs.items()
        }
        for candidate, runs in findings.tests.items()
    }
