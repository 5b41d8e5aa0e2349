"""Write the measured parts of docs/robustness.md, and its picture, from the exported runs of C7 in results/.

python tools/write_robustness.py
"""

from collections.abc import Sequence
from pathlib import Path

from fedgma.paper.catalogue import experiment
from fedgma.paper.entries import Entry, read_export
from fedgma.paper.plans import plan_runs
from fedgma.paper.plots.robustness import draw_attacks
from fedgma.paper.rates import Chosen
from fedgma.paper.robustness import NO_ATTACK, Matrix, matrices
from fedgma.reports.plots.style import plain_text, save
from fedgma.statistics.verdicts import Verdict, correct

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "robustness.md"
PICTURE = ROOT / "docs" / "pictures" / "robustness.png"
RESULTS = ROOT / "results" / "C7"
BEGIN, END = "<!-- measured: written by tools/write_robustness.py -->", "<!-- end of measured -->"
NORMAL = "sign flip, 30 %"  # the attack of the figure asked for
DEFAULT = ("mean", "GMA")  # rules with and without the bound of a deployment


def exported() -> list[Entry]:
    """The exported runs of C7; empty if there are none."""
    return read_export(RESULTS) if (RESULTS / "runs.jsonl").is_file() else []


def measured(entries: Sequence[Entry]) -> str:
    """Findings, tables and the picture as Markdown."""
    if not entries:
        return "Not measured yet."
    maps = matrices(entries)
    seeds = sorted({entry.seed for entry in entries})
    planned = len(plan_runs(experiment("C7"), Chosen()).grid.runs)
    parts = [f"{len(entries)} of {planned} planned runs, {len(seeds)} seeds.", "", "### Findings", ""]
    parts += [line for matrix in maps for line in _findings(matrix)]
    parts += ["![Accuracy by attack and rule](pictures/robustness.png)", ""]
    for matrix in maps:
        parts += [f"### Accuracy, {matrix.title}", "", *_table(matrix), ""]
    for matrix in matrices(entries, "backdoor"):
        parts += [f"### Success of the backdoor, {matrix.title}", "", *_table(matrix, best=False), ""]
    return "\n".join(parts).rstrip()


def _findings(matrix: Matrix) -> list[str]:
    attacks = [attack for attack in matrix.attacks if attack != NO_ATTACK]
    clean = matrix.mean(NO_ATTACK, "mean")
    lines = [f"{matrix.title}:", "", f"- Without an attack: {_levels(matrix, NO_ATTACK)}."]
    if NORMAL in attacks:
        best = matrix.best(NORMAL)
        kept = matrix.mean(NORMAL, best)
        lines.append(
            f"- Sign flip by 30 % of the clients: the best rule is {_the(best)} with {kept:.1f} %, which is "
            f"{100 * kept / clean:.0f} % of the accuracy of the mean without an attack ({clean:.1f} %)."
        )
    lines.append(f"- GMA and the mean under {len(attacks)} attacks: {_gma(matrix, attacks)}.")
    lines.append(f"- Within 5 points of the mean without an attack: {_withstood(matrix, attacks, clean)}.")
    for rule in DEFAULT:
        if (NO_ATTACK, f"bounded {rule}") in matrix.scores:
            cost = matrix.versus(NO_ATTACK, f"bounded {rule}", rule)
            lines.append(f"- Cost of the norm bound without an attack, {rule}: {_cost(cost)}.")
    return [*lines, ""]


def _levels(matrix: Matrix, attack: str) -> str:
    return ", ".join(f"{rule} {matrix.mean(attack, rule):.1f}" for rule in matrix.rules)


def _gma(matrix: Matrix, attacks: Sequence[str]) -> str:
    """In how many attacks GMA is ahead of and behind the mean, and by how much at most."""
    corrected = correct([matrix.versus(attack, "GMA", "mean") for attack in attacks])
    verdicts = dict(zip(attacks, corrected, strict=True))
    ahead = [attack for attack, verdict in verdicts.items() if verdict.outcome == "first ahead"]
    behind = [attack for attack, verdict in verdicts.items() if verdict.outcome == "second ahead"]
    said = [
        f"corrected for {len(verdicts)} tests, GMA is significantly ahead in {len(ahead)} and behind in {len(behind)}"
    ]
    if ahead:
        most = max(ahead, key=lambda attack: verdicts[attack].mean)
        said.append(f"ahead by at most {verdicts[most].mean:.1f} points ({most})")
    if behind:
        most = min(behind, key=lambda attack: verdicts[attack].mean)
        said.append(f"behind by at most {-verdicts[most].mean:.1f} points ({most})")
    return ", ".join(said)


def _withstood(matrix: Matrix, attacks: Sequence[str], clean: float) -> str:
    """How many attacks leave each rule within five points of the clean mean."""
    counts = {rule: sum(matrix.mean(attack, rule) >= clean - 5 for attack in attacks) for rule in matrix.rules}
    ranked = sorted(counts, key=lambda rule: -counts[rule])
    return ", ".join(f"{rule} under {counts[rule]}" for rule in ranked) + f" of {len(attacks)} attacks"


def _cost(verdict: Verdict) -> str:
    if verdict.outcome == "equal":
        return f"none, the same accuracy in all {verdict.of} seeds"
    interval = "" if verdict.interval is None else f", 95 % CI {verdict.low:+.2f} to {verdict.high:+.2f}"
    return f"{verdict.mean:+.2f} points{interval}, {verdict.of} seeds"


def _the(rule: str) -> str:
    return rule if rule[0].isupper() or rule.startswith("multi") else f"the {rule}"


def _table(matrix: Matrix, *, best: bool = True) -> list[str]:
    """Accuracy in percent, mean over seeds; the best rule of each attack in bold."""
    rows = [f"| attack | {' | '.join(matrix.rules)} |", f"| --- |{' ---: |' * len(matrix.rules)}"]
    for attack in matrix.attacks:
        top = matrix.best(attack) if best else ""
        cells = [f"{matrix.mean(attack, rule):.1f}" for rule in matrix.rules]
        bold = [f"**{cell}**" if rule == top else cell for rule, cell in zip(matrix.rules, cells, strict=True)]
        rows.append(f"| {attack} | {' | '.join(bold)} |")
    return rows


def page_with(text: str, page: str) -> str:
    """The page with the measured part in its place."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    runs = exported()
    PAGE.write_text(page_with(measured(runs), PAGE.read_text()))
    if runs:
        with plain_text():
            save(draw_attacks(matrices(runs)), PICTURE)
