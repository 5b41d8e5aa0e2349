"""Summaries of the attacks (E16): means over attacked models, masked arms minus AVG, and the findings."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedgma.paper.analyses.attacks import LOGISTIC
from fedgma.paper.findings import ClaimVerdict, Finding, judged
from fedgma.paper.plots.attacks import PLACE, place_of
from fedgma.reports.tables import slug
from fedgma.statistics.verdicts import paired

NUMBERS = ("auc_%", "accuracy_%", "tpr_at_0.1%", "tpr_at_1%", "train_%", "test_%", "gap")


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean over targets with its interval, for every arm and attack."""
    names = [name for name in (*PLACE, "rounds", "attack", "models", "arm") if name in rows[0]]
    summary = []
    for label in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        group = [row for row in rows if tuple(row[name] for name in names) == label]
        out: dict[str, Any] = {**dict(zip(names, label, strict=True)), "targets": len(group)}
        for number in (number for number in NUMBERS if number in group[0]):
            verdict = paired([row[number] for row in group])
            out |= {number: verdict.mean, f"{number} ±": None if len(group) < 2 else verdict.high - verdict.mean}
        summary.append(out)
    return summary


def compare(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every other arm minus AVG, target by target, for every attack and number."""
    differences = []
    for attacked, kind, arm in dict.fromkeys((row["attack"], row["models"], row["arm"]) for row in rows):
        if arm == "AVG":
            continue
        group = [row for row in rows if (row["attack"], row["models"]) == (attacked, kind)]
        masked, plain = ([row for row in group if row["arm"] == name] for name in (arm, "AVG"))
        for number in (number for number in NUMBERS if number in group[0]):
            verdict = paired([first[number] - second[number] for first, second in zip(masked, plain, strict=True)])
            low, high = verdict.interval or (None, None)
            head: dict[str, Any] = {name: group[0][name] for name in PLACE if name in group[0]}
            head |= {"attack": attacked, "models": kind, "arm": arm, "number": number}
            differences.append({**head, "minus_AVG": verdict.mean, "low": low, "high": high, "targets": verdict.of})
    return differences


READ = {  # the numbers of each attack that become findings
    LOGISTIC: ("accuracy_%",),
    "LiRA": ("auc_%", "tpr_at_1%", "tpr_at_0.1%"),
    "threshold": ("auc_%", "tpr_at_1%"),
}


def find(differences: list[dict[str, Any]], gaps: list[dict[str, Any]]) -> list[Finding]:
    """Findings: what the attacker knows, the gaps, and the test of the paper's claim."""
    view = (
        "The attacker sees the last global model's logits and nothing of the rounds. Targets share shadows, so the "
        "intervals over targets are a little too narrow."
    )
    read = [row for row in differences if row["number"] in READ.get(row["attack"], ())]
    return [Finding("attacks/view", view), *map(_gap, gaps), *map(_difference, read)]


def _gap(row: Mapping[str, Any]) -> Finding:
    numbers = f"train {row['train_%']:.1f} %, test {row['test_%']:.1f} %, gap {row['gap']:.1f} points"
    text = f"{_prefix(row)}{row['arm']}, {row['models']}: {numbers}."
    return Finding(_id(row, "gap", row["models"], row["arm"]), text, estimate=row["gap"], n=row["targets"])


def _difference(row: Mapping[str, Any]) -> Finding:
    """A masked arm minus AVG; the claim is about the printed attack, and a lower number supports it."""
    interval = None if row["low"] is None else (row["low"], row["high"])
    between = ", one target"
    if interval:
        seen = ": inconclusive" if judged(interval) is ClaimVerdict.INCONCLUSIVE else ""
        between = f", 95 % CI {row['low']:.2f} to {row['high']:.2f}, {row['targets']} targets{seen}"
    number = row["number"].replace("_", " ")
    change = f"{row['arm']} {row['minus_AVG']:+.2f} points against AVG{between}"
    text = f"{_prefix(row)}{row['attack']}, {row['models']}, {number}: {change}."
    verdict = judged(interval and (-row["high"], -row["low"])) if row["attack"] == LOGISTIC else None
    name = _id(row, row["attack"], row["models"], row["number"], row["arm"])
    return Finding(name, text, verdict, row["minus_AVG"], interval, row["targets"])


def _id(row: Mapping[str, Any], *parts: str) -> str:
    federation = place_of(row)
    return "/".join(["attacks", *([slug(federation)] if federation else []), *map(slug, parts)])


def _prefix(row: Mapping[str, Any]) -> str:
    federation = place_of(row)
    return f"{federation}: " if federation else ""
