"""A comparison as tables: the claims first, then every cell with our numbers and the printed ones."""

from collections.abc import Mapping, Sequence

from fedgma.paper.claims import Answer, mask_step
from fedgma.paper.compare import Compared, Comparison
from fedgma.paper.printed import Number
from fedgma.reports.tables import Table, Value
from fedgma.statistics.labels import plain, short

VERDICTS = (
    "Difference: masked minus plain averaging in points, paired by seed, with its 95 % CI. A cell agrees or "
    "contradicts only where the CI excludes zero; `inside` says whether the CI includes the printed difference."
)
CLAIMS = (
    "A claim holds or is contradicted where the 95 % CI over seeds excludes zero. Significant cells are counted one by "
    "one at 5 %, without a correction for their number."
)


def claims_table(answers: Sequence[Answer]) -> Table:
    """One row a claim."""
    rows = tuple((answer.claim.text, answer.verdict, answer.text) for answer in answers)
    return Table("claims", "Claims", ("claim", "verdict", "result"), rows, CLAIMS)


def summary_table(answers: Mapping[str, Sequence[Answer]]) -> Table:
    """The claims of several experiments under each other."""
    rows = tuple((name, one.claim.text, one.verdict, one.text) for name, own in answers.items() for one in own)
    return Table("claims", "Claims", ("experiment", "claim", "verdict", "result"), rows, CLAIMS)


def cells_table(comparison: Comparison, split: str) -> Table:
    """One row a cell that was run: our levels, the printed ones, both differences and the verdict."""
    cells = [one for one in comparison.on(split) if one.plain or one.masked]
    names = list(cells[0].cell.label) if cells else []
    rows = tuple((*(plain(one.cell.label[name]) for name in names), *_values(one)) for one in cells)
    masked = "GMA" if all(one.cell.arm in ("gma", "mean") for one in cells) else "masked"
    header = (
        *map(short, names),
        "seeds",
        *("AVG", masked, "AVG printed", f"{masked} printed"),
        *("difference", "CI low", "CI high", "printed difference", "inside", "verdict"),
    )
    first = split == comparison.experiment.splits[0]
    name = "cells" if first else f"cells-{split}"
    title = "Cells" if first else f"Cells on {split.replace('_', ' ')}"
    return Table(name, title, header, rows, f"{comparison.experiment.statistic} accuracy in percent. {VERDICTS}")


def _values(one: Compared) -> tuple[Value, ...]:
    verdict, printed = one.verdict, one.printed_difference
    interval = None if verdict is None else verdict.interval
    inside = None
    if printed is not None and interval is not None:
        inside = "yes" if interval[0] <= printed <= interval[1] else "no"
    seeds = len(one.differences) or len(one.plain) or len(one.masked)
    return (
        seeds,
        *one.levels,
        *map(_printed, one.printed),
        *(
            None if verdict is None else round(verdict.mean, 9) + 0.0,
            *(interval or (None, None)),
            printed,
            inside,
            one.agreement,
        ),
    )


def _printed(number: Number | None) -> Value:
    if number is None:
        return None
    return f"{number.value:g}" if number.deviation is None else f"{number.value:.2f} ± {number.deviation:.2f}"


def taus_note(comparison: Comparison) -> str:
    """Which thresholds give the same mask; empty where thresholds were not varied."""
    taus = {one.cell.settings["tau"]: mask_step(one.cell.settings) for one in comparison.on() if one.cell.masked}
    groups: dict[int, list[str]] = {}
    for tau in sorted(taus):
        groups.setdefault(taus[tau], []).append(plain(tau))
    if len(taus) < 2 or len(groups) == len(taus):
        return ""
    said = "; ".join(" = ".join(group) for group in groups.values() if len(group) > 1)
    return (
        f"Of {len(taus)} thresholds {len(groups)} give different masks, since without zero updates the votes are odd "
        f"or even as the number of clients is: {said}. These differ only in entries that some client does not move"
    )
