"""How a claim's estimate depends on choices: the statistic, which cells have converged, the number of clients."""

from collections.abc import Sequence

from fedgma.paper.catalogue import Claim
from fedgma.paper.claims import counts, groups_of, is_about
from fedgma.paper.compare import PRIMARY, Compared, Comparison
from fedgma.paper.kinds import KINDS, POOLED
from fedgma.reports.tables import Table, Value

STATISTICS = (PRIMARY, "best")
CLIENTS = "partition.clients"
KINDS_SHOWN = (*POOLED, "trend", "above")
NOTE = (
    "Every claim about a mean difference, by statistic, with and without cells that have not converged, over those "
    "that rise by at most half a point (flat), and by number of clients; cells that the paper does not print are left "
    "out where it prints some. p is not corrected. The verdict rests on `last10` and the converged cells, over all "
    "numbers of clients."
)


def sensitivity_table(comparison: Comparison) -> Table | None:
    """One row for each choice and claim; None if no claim has an estimate."""
    rows = [row for claim in comparison.experiment.claims for row in _rows(claim, comparison)]
    if not rows:
        return None
    header = ("claim", "data sets", "statistic", "cells", "clients", "number of cells", "seeds")
    return Table("sensitivity", "Sensitivity", (*header, "difference", "CI low", "CI high", "p"), tuple(rows), NOTE)


def _rows(claim: Claim, comparison: Comparison) -> list[tuple[Value, ...]]:
    if claim.kind not in KINDS_SHOWN:
        return []
    cells = [compared for compared in comparison.on(claim.split) if is_about(claim, compared) and compared.differences]
    rows = []
    for names, group in groups_of(claim, cells).items() if cells else []:
        printed = [compared for compared in group if counts(claim, compared, comparison)]
        for statistic in STATISTICS:
            stated = comparison._replace(statistic=statistic)
            for what, members in _by_convergence(printed).items():
                for clients, cells_of_size in _by_clients(claim, members).items():
                    row = _row(claim, [compared.restated(statistic) for compared in cells_of_size], stated)
                    rows += [(claim.text, names, statistic, what, clients, len(cells_of_size), *row)] if row else []
    return rows


def _by_convergence(cells: Sequence[Compared]) -> dict[str, list[Compared]]:
    """Cells by how strictly convergence is read."""
    return {
        "flat": [compared for compared in cells if compared.is_flat],
        "converged": [compared for compared in cells if compared.converged],
        "all": list(cells),
    }


def _by_clients(claim: Claim, cells: Sequence[Compared]) -> dict[str, list[Compared]]:
    """All cells, and those of each number of clients if there are several."""
    numbers = sorted({int(compared.cell.settings.get(CLIENTS) or 0) for compared in cells})
    several = len(numbers) > 1 and claim.axis != CLIENTS
    each = {
        str(n): [compared for compared in cells if compared.cell.settings.get(CLIENTS) == n]
        for n in numbers
        if n and several
    }
    return {"all": list(cells), **each} if cells else {}


def _row(claim: Claim, cells: Sequence[Compared], comparison: Comparison) -> tuple[Value, ...] | None:
    verdict = KINDS[claim.kind](claim, cells, comparison).estimate
    if verdict is None:
        return None
    return verdict.of, verdict.mean, *(verdict.interval or (None, None)), verdict.p if verdict.of > 1 else None
