"""A comparison as tables: the claims first, then every cell with our numbers and the printed ones."""

from collections.abc import Sequence

from fedgma.paper.claims import Answer
from fedgma.paper.compare import Compared, Comparison
from fedgma.paper.kinds import mask_step
from fedgma.paper.printed import Number
from fedgma.reports.tables import Table, Value
from fedgma.statistics.convergence import Convergence
from fedgma.statistics.labels import plain, short

VERDICTS = (
    "Accuracy in percent; verdicts are about `last10`, the mean of the last ten rounds. `best`, the highest "
    "evaluation, is selected on test data: it favours the arm that fluctuates more, by its distance from `last10`. "
    "Difference: masked minus plain averaging in points, paired by seed, with its 95 % CI, the p value of the paired "
    "t test, and p after Holm's correction for the cells of this table, which decides the verdict; fewer than four "
    "seeds are preliminary. `still rises`: mean of the last quarter of the rounds minus that of the quarter before; a "
    "cell has converged if it has at least 40 rounds and neither arm still rises by more than a point. `inside`: "
    "whether the CI includes the printed difference."
)
CLAIMS = (
    "A claim holds or is contradicted where p, corrected by Holm's method for all tests of this page, is below 5 % "
    "with at least four seeds. It is answered over converged cells, and not contradicted by cells that speak against "
    "it in print too. Significant cells are corrected within their table."
)


def claims_table(answers: Sequence[Answer]) -> Table:
    """One row per claim."""
    rows = tuple((answer.claim.text, answer.verdict, answer.text) for answer in answers)
    return Table("claims", "Claims", ("claim", "verdict", "result"), rows, CLAIMS)


def cells_table(comparison: Comparison, split: str) -> Table:
    """One row per cell that was run: rounds, our levels and the printed ones, convergence, differences, the verdict."""
    cells = [compared for compared in comparison.on(split) if compared.plain or compared.masked]
    names = list(cells[0].cell.label) if cells else []
    statistic = comparison.experiment.statistic
    rows = tuple(
        (*(plain(compared.cell.label[name]) for name in names), *_levels(compared, statistic), *_tested(compared))
        for compared in cells
    )
    masked = "GMA" if all(compared.cell.arm in ("gma", "mean") for compared in cells) else "masked"
    header = (
        *map(short, names),
        *("rounds", "seeds", "AVG", masked, "AVG best", f"{masked} best", "AVG printed", f"{masked} printed"),
        *(f"AVG {statistic} minus print", "AVG still rises", f"{masked} still rises", "converged", "diverged"),
        *("difference", "CI low", "CI high", "p", "p (Holm)", "best difference", "without diverged"),
        *("printed difference", "inside", "verdict"),
    )
    first = split == comparison.experiment.splits[0]
    name = "cells" if first else f"cells-{split}"
    title = "Cells" if first else f"Cells on {split.replace('_', ' ')}"
    return Table(name, title, header, rows, VERDICTS)


def _levels(compared: Compared, statistic: str) -> tuple[Value, ...]:
    """Rounds and seeds, our levels beside the printed ones, and how far training got."""
    course, shown = compared.course, compared.restated(statistic).levels
    number = compared.printed[0]
    above = None if shown[0] is None or number is None else round(shown[0].mean - number.value, 9) + 0.0
    return (
        compared.played,
        len(compared.differences) or len(compared.plain) or len(compared.masked),
        *compared.levels,
        *compared.restated("best").levels,
        *map(_printed, compared.printed),
        above,
        *((None, None, None, None) if course is None else (*course.rises, _yes(course.converged), _lost(course))),
    )


def _tested(compared: Compared) -> tuple[Value, ...]:
    """The difference, its tests, and the verdict beside print."""
    verdict, best = compared.verdict, compared.restated("best").verdict
    printed, settled = compared.printed_difference, compared.settled
    if verdict is None or best is None:
        return (*(None,) * 7, printed, None, compared.agreement)
    interval = verdict.interval
    inside = None if printed is None or interval is None else _yes(interval[0] <= printed <= interval[1])
    return (
        round(verdict.mean, 9) + 0.0,
        *(interval or (None, None)),
        *((verdict.p, verdict.corrected) if verdict.correction else (None, None)),
        round(best.mean, 9) + 0.0,
        None if settled is None else settled.mean,
        *(printed, inside, compared.agreement),
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _lost(course: Convergence) -> str:
    return f"{sum(course.diverged)} of {course.of}" if any(course.diverged) else "none"


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
    equal = "; ".join(" = ".join(group) for group in groups.values() if len(group) > 1)
    return (
        f"Of {len(taus)} thresholds {len(groups)} give different masks, since without zero updates the votes are odd "
        f"or even as the number of clients is: {equal}. These differ only in entries that some client does not move"
    )
