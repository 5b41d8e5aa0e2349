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
    """One row per claim."""
    rows = tuple((answer.claim.text, answer.verdict, answer.text) for answer in answers)
    return Table("claims", "Claims", ("claim", "verdict", "result"), rows, CLAIMS)


def summary_table(answers: Mapping[str, Sequence[Answer]]) -> Table:
    """The claims of several experiments in one table."""
    rows = tuple(
        (name, answer.claim.text, answer.verdict, answer.text) for name, listed in answers.items() for answer in listed
    )
    return Table("claims", "Claims", ("experiment", "claim", "verdict", "result"), rows, CLAIMS)


def cells_table(comparison: Comparison, split: str) -> Table:
    """One row per cell that was run: our levels, the printed ones, both differences and the verdict."""
    cells = [compared for compared in comparison.on(split) if compared.plain or compared.masked]
    names = list(cells[0].cell.label) if cells else []
    rows = tuple((*(plain(compared.cell.label[name]) for name in names), *_values(compared)) for compared in cells)
    masked = "GMA" if all(compared.cell.arm in ("gma", "mean") for compared in cells) else "masked"
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


def _values(compared: Compared) -> tuple[Value, ...]:
    verdict, printed = compared.verdict, compared.printed_difference
    interval = None if verdict is None else verdict.interval
    inside = None
    if printed is not None and interval is not None:
        inside = "yes" if interval[0] <= printed <= interval[1] else "no"
    seeds = len(compared.differences) or len(compared.plain) or len(compared.masked)
    return (
        seeds,
        *compared.levels,
        *map(_printed, compared.printed),
        *(
            None if verdict is None else round(verdict.mean, 9) + 0.0,
            *(interval or (None, None)),
            printed,
            inside,
            compared.agreement,
        ),
    )


def _printed(number: Number | None) -> Value:
    if number is None:
        return None
    return f"{number.value:g}" if number.deviation is None else f"{number.value:.2f} ± {number.deviation:.2f}"


def taus_note(comparison: Comparison) -> str:
    """Which thresholds give the same mask; empty if thresholds were not varied."""
    taus = {
        compared.cell.settings["tau"]: mask_step(compared.cell.settings)
        for compared in comparison.on()
        if compared.cell.masked and compared.cell.masked["tau"] is not None
    }
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
