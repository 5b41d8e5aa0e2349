"""Accuracy of clients that are sampled in a round and of the others (E7, the paper's Tables 4 and 5).

`paired` aggregates the same client updates to the same model both ways, so only the mask differs. `separate` trains the
two arms separately and evaluates the same rounds. Every client is tested on test images with its own mix of classes.
A change is relative, 100 (GMA / AVG - 1), as in the paper.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedgma.aggregation.rules import BASELINE
from fedgma.experiments.materials import Materials
from fedgma.paper.analyses import AnalysisRequest, AnalysisResult, Follow, unseen
from fedgma.paper.analyses.rounds import arm_of, data_and_model, specs_of
from fedgma.paper.compare import Agreement, judge
from fedgma.paper.findings import ClaimVerdict, Finding
from fedgma.paper.plots.analyses import PARTICIPATING, draw_participation
from fedgma.paper.printed import read_printed
from fedgma.simulation import fleet as fleets
from fedgma.simulation.device_round import RoundRecord
from fedgma.simulation.spec import RunSpec
from fedgma.simulation.state import export
from fedgma.statistics.verdicts import Verdict, from_interval, paired

ARMS = {"AVG": "mean", "GMA": "gma"}
GROUPS = (PARTICIPATING, "non_participating")
COHORTS = (5, 2)
CLIENTS = 10
PARTITION: Mapping[str, Any] = {"name": "label_skew", "classes_per_client": 2}
SAYS = {  # verdict on the claim that the change has the printed sign
    Agreement.INSIDE: ClaimVerdict.HOLDS,
    Agreement.SIGN: ClaimVerdict.HOLDS,
    Agreement.CONTRADICTS: ClaimVerdict.CONTRADICTED,
}
AFTER = (5, 10, 20, 40)  # rounds of training before the evaluated round


def group_means(accuracies: npt.NDArray[np.floating[Any]], cohort: Sequence[int]) -> dict[str, float]:
    """Mean accuracy in percent of the sampled clients and of the others; clients without test samples are left out.

    >>> group_means(np.array([0.9, 0.5, 0.7, np.nan]), [0])
    {'participating': 90.0, 'non_participating': 60.0}
    """
    there = np.isin(np.arange(len(accuracies)), list(cohort))
    parts = {"participating": accuracies[there], "non_participating": accuracies[~there]}
    return {name: round(100 * float(np.nanmean(part)), 6) for name, part in parts.items()}


def relative_change(gma: float, avg: float) -> float:
    """100 (GMA / AVG - 1).

    >>> round(relative_change(86.67, 89.64), 1), round(relative_change(75.77, 71.57), 1)
    (-3.3, 5.9)
    """
    return 100 * (gma / avg - 1)


def trial_rows(record: RoundRecord, runs: int) -> Iterator[dict[str, Any]]:
    """The rows of a round, one for each run and group of clients; a record lists the arms in turn."""
    assert record.client_scores is not None
    head = {"run": record.run % runs, "after": record.round - 1, "arm": list(ARMS)[record.run // runs]}
    for group, value in group_means(record.client_scores, record.sampled).items():
        yield {**head, "group": group, "accuracy_%": value}


def _both_arms(specs: Sequence[RunSpec], after: Sequence[int]) -> list[RunSpec]:
    looked = {"rounds": max(after) + 1, "evaluate_every": 1, "per_client": True}
    return [arm_of(spec, name, **looked) for name in ARMS.values() for spec in specs]


def paired_trials(specs: Sequence[RunSpec], after: Sequence[int], follow: Follow = unseen) -> Iterator[dict[str, Any]]:
    """Train plain FedAvg for `after` rounds, then aggregate one round both ways; a row per arm and group."""
    trunk = fleets.assemble([arm_of(spec, BASELINE, rounds=max(after), evaluate_every=0) for spec in specs])
    fork = fleets.assemble(_both_arms(specs, after))
    state = fleets.start(trunk)
    for point in follow(range(1, max(after) + 1), max(after), f"rounds of {len(specs)} runs with one trunk"):
        state, _ = fleets.play_round(trunk, state)
        if point not in after:
            continue
        plain = [export(trunk, state, run) for run in range(len(specs))]
        _, played = fleets.play_round(fork, fleets.restore(fork, plain * len(ARMS)))
        for record in played.records:
            yield from trial_rows(record, len(specs))


def separate_trials(
    specs: Sequence[RunSpec], after: Sequence[int], follow: Follow = unseen
) -> Iterator[dict[str, Any]]:
    """Train both arms separately, with the same initial weights and sampled clients; evaluate the same rounds."""
    both = _both_arms(specs, after)
    for played in follow(fleets.play(both), both[0].rounds, f"rounds of {len(both)} separate runs"):
        if int(played.rounds[0]) - 1 in after:
            for record in played.records:
                yield from trial_rows(record, len(specs))


MODES = {"paired": paired_trials, "separate": separate_trials}


def trials(request: AnalysisRequest, partition: Mapping[str, Any] = PARTITION) -> list[dict[str, Any]]:
    """All trials of both modes and both numbers of sampled clients."""
    after = (1, 2) if request.quick else AFTER if request.rounds is None else _points(request.rounds)
    materials, specs, rows = Materials(request.device), [], []
    for cohort in COHORTS:
        settings = {**data_and_model(request, "fmnist"), "partition": {**partition, "clients": CLIENTS}}
        rates = {"clients_per_round": cohort, "client_learning_rate": 0.01, "local_epochs": 3, "mask_every": 0}
        specs += specs_of(materials, request.seed_range, **settings, **rates, client_test_size=2000)
    for mode, play_mode in MODES.items():
        for row in play_mode(specs, after, request.follow):
            run = row.pop("run")
            named = {"mode": mode, "cohort": specs[run].clients_per_round, "seed": specs[run].seed}
            rows.append({**named, **row})
    return rows


def _points(rounds: int) -> tuple[int, ...]:
    return tuple(sorted({max(1, rounds // 8), max(1, rounds // 4), max(1, rounds // 2), rounds}))


def changes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Relative change in every group, by starting round and over all, with its interval over seeds."""
    summary = []
    for mode in MODES:
        for cohort in COHORTS:
            group_rows = [row for row in rows if row["mode"] == mode and row["cohort"] == cohort]
            points = sorted({row["after"] for row in group_rows})
            for point in [*points, "all"]:
                picked = [row for row in group_rows if point in ("all", row["after"])]
                for group in GROUPS:
                    summary.append({"mode": mode, "cohort": cohort, "after": point, **_change(picked, group)})
    return summary


def _change(rows: list[dict[str, Any]], group: str) -> dict[str, Any]:
    """Accuracies and change of a group; the starting rounds of a seed are averaged to one trial."""
    seeds = sorted({row["seed"] for row in rows})
    means = {arm: [_mean(rows, group=group, arm=arm, seed=seed) for seed in seeds] for arm in ARMS}
    pairs = list(zip(means["GMA"], means["AVG"], strict=True))
    points = paired([gma - avg for gma, avg in pairs])
    each = [relative_change(gma, avg) for gma, avg in pairs if avg > 0]
    relative = paired(each) if each else None
    averages = {arm: float(np.mean(values)) for arm, values in means.items()}
    return {
        "group": group,
        "seeds": len(seeds),
        "AVG_%": averages["AVG"],
        "GMA_%": averages["GMA"],
        "points": points.mean,
        **_interval(points, "points_"),
        "GMA_ahead": f"{points.ahead} of {points.of}",
        "change_of_means_%": relative_change(averages["GMA"], averages["AVG"]) if averages["AVG"] else None,
        "change_%": None if relative is None else relative.mean,
        **_interval(relative),
    }


def _interval(verdict: Verdict | None, before: str = "") -> dict[str, float | None]:
    low, high = (verdict and verdict.interval) or (None, None)
    return {f"{before}low": low, f"{before}high": high}


def _mean(rows: list[dict[str, Any]], **wanted: Any) -> float:
    return float(
        np.mean([row["accuracy_%"] for row in rows if all(row[key] == value for key, value in wanted.items())])
    )


def printed() -> list[dict[str, Any]]:
    """The paper's numbers: means and relative changes of Tables 4 and 5."""
    rows = []
    for cohort in COHORTS:
        for row in read_printed(f"table_nonparticipating_{cohort}of10.csv"):
            named = {"cohort": cohort, "trial": row["trial"], "group": row["client_group"], "arm": row["aggregation"]}
            rows.append({**named, "value": float(row["value"])})
    return rows


def printed_changes() -> dict[tuple[int, str], float]:
    """The paper's relative changes by number of sampled clients and group."""
    return {(r["cohort"], r["group"]): r["value"] for r in printed() if r["trial"] == "relative_improvement_pct"}


def beside(summary: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our changes over all starting rounds, with the printed ones."""
    changed = printed_changes()
    means = {(r["cohort"], r["group"], r["arm"]): r["value"] for r in printed() if r["trial"] == "mean"}
    rows = []
    for row in summary:
        if row["after"] == "all":
            key = row["cohort"], row["group"]
            levels = {f"printed_{arm}_%": means[*key, arm] for arm in ARMS}
            points = {"printed_points": means[*key, "GMA"] - means[*key, "AVG"], "printed_change_%": changed[key]}
            verdict = judge(_points_verdict(row), points["printed_points"])
            rows.append({**row, **levels, **points, "verdict": str(verdict)})
    return rows


def _points_interval(row: dict[str, Any]) -> tuple[float, float] | None:
    return None if row["points_low"] is None else (row["points_low"], row["points_high"])


def _points_verdict(row: dict[str, Any]) -> Verdict:
    return from_interval(row["points"], _points_interval(row), row["seeds"])


def find(row: dict[str, Any]) -> Finding:
    """The finding of a row: our change in points, and whether it agrees with the printed one."""
    head = f"{row['mode']}, {row['cohort']} of {CLIENTS} clients, {row['group'].replace('_', '-')}"
    between = "" if row["points_low"] is None else f", 95 % CI {row['points_low']:.1f} to {row['points_high']:.1f}"
    change = "undefined" if row["change_of_means_%"] is None else f"{row['change_of_means_%']:.1f} %"
    levels = f"AVG {row['AVG_%']:.1f} %, GMA {row['GMA_%']:.1f} %, {row['points']:.1f} points{between}"
    printed = f"AVG {row['printed_AVG_%']:.1f} %, {row['printed_points']:.1f} points, {row['printed_change_%']:g} %"
    text = f"{head}: {levels}, relative change {change}; printed {printed}: {row['verdict']}."
    interval = _points_interval(row)
    verdict = SAYS.get(judge(_points_verdict(row), row["printed_points"]), ClaimVerdict.INCONCLUSIVE)
    name = f"{row['mode']}/{row['cohort']}/{row['group']}"
    return Finding(name, text, verdict, row["points"], interval, row["seeds"])


def analyse(request: AnalysisRequest, partition: Mapping[str, Any] = PARTITION) -> AnalysisResult:
    """E7: accuracy on participating and other clients after a round, with and without the mask.

    The paper does not state its partition of the classes; `partition` sets another one, as in a settings file.
    """
    rows = trials(request, partition)
    summary = changes(rows)
    compared = beside(summary)
    findings = [find(row) for row in compared]
    figures = {"participation": draw_participation(compared)}
    return AnalysisResult({"compared": compared, "changes": summary, "trials": rows}, findings, figures)
