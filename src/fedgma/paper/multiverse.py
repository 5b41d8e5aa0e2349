"""What the multiverse says: differences in all universes, how many are ahead or behind, and which choices decide it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedgma.errors import DataError
from fedgma.paper.compare import Compared, Comparison
from fedgma.paper.rates import KEYS
from fedgma.paper.universes import CHOICES, CLIENT_RATES, Universe, name_of, read
from fedgma.reports.plots.specifications import Specification
from fedgma.reports.tables import Table, Value
from fedgma.statistics.additive import Additive, fit_additive
from fedgma.statistics.comparisons import over_seeds
from fedgma.statistics.power import LEAST_SEEDS, LEVEL
from fedgma.statistics.verdicts import Verdict, paired

MARGIN = 0.3  # points; a smaller difference hardly matters to a user


class Shares(NamedTuple):
    """How many universes are ahead and behind: by the difference alone, by its 95 % CI, after the correction."""

    of: int
    alone: tuple[int, int]
    interval: tuple[int, int]
    corrected: tuple[int, int]


class Multiverse(NamedTuple):
    """The universes that were run in both arms with enough seeds, and what follows from them."""

    cells: tuple[tuple[Universe, Compared, Verdict], ...]
    drawn: int
    shares: Shares
    overall: Verdict  # over universes, not over seeds
    median: float
    deviation: float  # of the true differences: what is left of the spread without the noise of the seeds
    model: Additive | None  # None: too few universes
    by_rank: Additive | None = None  # the same of the differences' ranks in percent, which outliers cannot rule

    @property
    def settled(self) -> list[float]:
        """The differences of universes in which no run diverged."""
        return [verdict.mean for _, compared, verdict in self.cells if not compared.lost]


def multiverse_of(comparison: Comparison) -> Multiverse | None:
    """What the universes of a comparison say; None where none was run."""
    by_name = {name_of(universe): universe for universe in read()}
    cells = [
        (_merged(by_name[compared.cell.part.name]), compared, compared.verdict)
        for compared in comparison.on()
        if compared.verdict is not None and compared.verdict.of >= LEAST_SEEDS
    ]
    if len(cells) < 2:
        return None
    means = [verdict.mean for *_, verdict in cells]
    noise = float(np.mean([verdict.deviation**2 / verdict.of for *_, verdict in cells]))
    spread = math.sqrt(max(0.0, float(np.var(means, ddof=1)) - noise))
    return Multiverse(
        cells=tuple(cells),
        drawn=len(by_name),
        shares=_shares([verdict for *_, verdict in cells]),
        overall=paired(means),
        median=float(np.median(means)),
        deviation=spread,
        model=_model([universe for universe, *_ in cells], means),
        by_rank=_model([universe for universe, *_ in cells], _ranks(means)),
    )


def _merged(universe: Universe) -> dict[str, str]:
    """The choices of a universe for figures and the model: where the mask sits is a choice of an adaptive server."""
    adaptive = universe["server"] == "FedAdam"
    server = f"{universe['server']}, mask {universe['position']}" if adaptive else universe["server"]
    chosen = {name: universe[name] for name in CHOICES if name != "position"}
    return {"number": universe["number"], **chosen, "server": server}


def _choices(universe: Universe) -> dict[str, str]:
    return {name: level for name, level in universe.items() if name != "number"}


def _shares(verdicts: Sequence[Verdict]) -> Shares:
    return Shares(
        of=len(verdicts),
        alone=(sum(verdict.mean > 0 for verdict in verdicts), sum(verdict.mean < 0 for verdict in verdicts)),
        interval=(sum(verdict.low > 0 for verdict in verdicts), sum(verdict.high < 0 for verdict in verdicts)),
        corrected=(
            sum(verdict.outcome == "first ahead" for verdict in verdicts),
            sum(verdict.outcome == "second ahead" for verdict in verdicts),
        ),
    )


def _model(universes: Sequence[Universe], means: Sequence[float]) -> Additive | None:
    try:
        return fit_additive([_choices(universe) for universe in universes], means)
    except DataError:
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    """The share of values that are smaller, in percent; equal values share theirs.

    >>> _ranks([3.0, -1.0, 3.0, 90.0])
    [37.5, 0.0, 37.5, 75.0]
    """
    numbers = np.asarray(values)
    smaller, same = (numbers[:, None] > numbers).sum(1), (numbers[:, None] == numbers).sum(1)
    return [float(rank) for rank in 100 * (smaller + (same - 1) / 2) / len(numbers)]


def specifications(multiverse: Multiverse) -> list[Specification]:
    """The universes for a specification curve."""
    return [Specification(_choices(universe), verdict) for universe, _, verdict in multiverse.cells]


def sentences(multiverse: Multiverse) -> list[str]:
    """The findings, each in a sentence without its full stop."""
    return [
        _run_ones(multiverse),
        _counted(multiverse),
        _converged(multiverse),
        *_overall(multiverse),
        _edges(multiverse),
        *_decided(multiverse.model, "the differences"),
        *_decided(multiverse.by_rank, "their ranks"),
    ]


def _run_ones(multiverse: Multiverse) -> str:
    seeds = " or ".join(map(str, sorted({verdict.of for *_, verdict in multiverse.cells})))
    return f"{multiverse.shares.of} of {multiverse.drawn} drawn universes were run in both arms, with {seeds} seeds"


def _counted(multiverse: Multiverse) -> str:
    """Counts of universes; those of single seeds have an interval, since universes share seeds."""
    shares, (ahead, behind) = multiverse.shares, multiverse.shares.alone
    signs = [
        {seed: 100.0 * (value > 0) for seed, value in compared.differences.items()}
        for _, compared, _ in multiverse.cells
    ]
    by_seed = paired(over_seeds(signs))
    return (
        f"masked averaging is ahead in {ahead} and behind in {behind} (by seed: ahead in {by_seed.mean:.0f} %, 95 % CI "
        f"{by_seed.low:.0f} to {by_seed.high:.0f}); "
        f"the 95 % CI excludes zero in {shares.interval[0]} and {shares.interval[1]}; after Holm's correction for "
        f"{shares.of} tests {shares.corrected[0]} are ahead and {shares.corrected[1]} behind"
    )


def _converged(multiverse: Multiverse) -> str:
    means = [verdict.mean for _, compared, verdict in multiverse.cells if compared.converged]
    ahead, behind = sum(mean > 0 for mean in means), sum(mean < 0 for mean in means)
    return f"of the {len(means)} universes that have converged, it is ahead in {ahead} and behind in {behind}"


def _overall(multiverse: Multiverse) -> list[str]:
    overall, settled = multiverse.overall, multiverse.settled
    small = sum(abs(verdict.mean) < MARGIN for *_, verdict in multiverse.cells)
    lost = len(multiverse.cells) - len(settled)
    without = f", and without these the mean is {float(np.mean(settled)):+.2f} points" if lost and settled else ""
    return [
        f"the mean over universes is {overall.mean:+.2f} points (95 % CI {overall.low:+.2f} to {overall.high:+.2f}), "
        f"the median {multiverse.median:+.2f}; in {small} universes the difference is below {MARGIN:g} points",
        "without the noise of the seeds, universes differ by a standard deviation of "
        f"{multiverse.deviation:.2f} points",
        f"a run diverged in {lost} universes{without}",
    ]


def _edges(multiverse: Multiverse) -> str:
    """How many arms chose a client rate at an end of the grid."""
    sides = [
        side for _, compared, _ in multiverse.cells for side in (compared.cell.plain, compared.cell.masked) if side
    ]
    grids = [CLIENT_RATES[f"{side['momentum']:g}"] for side in sides]
    low, high = (sum(side[KEYS[0]] == end(grid) for side, grid in zip(sides, grids, strict=True)) for end in (min, max))
    return f"of {len(sides)} arms {low} chose the smallest client rate of the grid and {high} the largest"


def _decided(model: Additive | None, of: str) -> list[str]:
    if model is None:
        return []
    tested = sorted(model.decided, key=lambda test: test.p)
    sure = [f"{test.choice} (p {_p(test.corrected)})" for test in tested if test.corrected < LEVEL]
    return [
        f"an additive model of the choices explains {100 * max(0.0, model.explained):.0f} % of the variance of {of}; "
        f"choices that decide it after Holm's correction: {', '.join(sure) or 'none'}"
    ]


def _p(value: float) -> str:
    return f"= {value:.2g}" if value >= 1e-4 else "< 0.0001"


def most_telling(multiverse: Multiverse) -> list[str]:
    """The levels that shift the rank of the difference, of the choices that decide it; empty if there are none."""
    model = multiverse.by_rank
    sure = [] if model is None else [test.choice for test in model.decided if test.corrected < LEVEL]
    effects = [] if model is None else [effect for effect in model.effects if effect.choice in sure]
    telling = sorted(
        (effect for effect in effects if not effect.low < 0 < effect.high), key=lambda effect: effect.effect
    )
    words = [
        f"{effect.choice} {effect.level} {effect.effect:+.0f} ({effect.low:+.0f} to {effect.high:+.0f}; ahead in "
        f"{_ahead(multiverse, effect.choice, effect.level)} of {effect.settings})"
        for effect in telling
    ]
    sentence = f"levels that shift the rank of a universe, in percent with 95 % CI, not corrected: {', '.join(words)}"
    return [sentence] if words else []


def _ahead(multiverse: Multiverse, choice: str, level: str) -> int:
    return sum(universe[choice] == level and verdict.mean > 0 for universe, _, verdict in multiverse.cells)


def choices_table(multiverse: Multiverse) -> Table | None:
    """The effect of every level of every choice."""
    if multiverse.model is None:
        return None
    ranked = multiverse.by_rank or multiverse.model
    tests = {test.choice: test for test in ranked.decided}
    rows: list[tuple[Value, ...]] = []
    for effect, rank in zip(multiverse.model.effects, ranked.effects, strict=True):
        test = tests.pop(effect.choice, None)
        rows.append(
            (
                *(effect.choice, effect.level, effect.settings, f"{effect.mean:+.2f}"),
                f"{effect.effect:+.2f} ({effect.low:+.2f} to {effect.high:+.2f})",
                f"{rank.effect:+.0f} ({rank.low:+.0f} to {rank.high:+.0f})",
                *((None, None) if test is None else (_number(test.p), _number(test.corrected))),
            )
        )
    header = ("choice", "level", "universes", "mean difference", "effect, points", "effect, rank in percent")
    note = (
        "Effects of an additive model on the difference, masked minus plain, and on its rank among the universes, "
        "relative to the mean over the levels of a choice, with 95 % CIs (HC3). The p values, alone and corrected for "
        "all choices, are those of the ranks: a few universes in which runs diverge rule the points."
    )
    return Table("choices", "Which choices decide it", (*header, "p of the choice", "corrected"), tuple(rows), note)


def _number(p: float) -> str:
    return _p(p).removeprefix("= ")


def universes_table(multiverse: Multiverse) -> Table:
    """Every universe with its choices, the rates of both arms, levels, difference and test."""
    rows = []
    for universe, compared, verdict in sorted(multiverse.cells, key=lambda cell: cell[2].mean):
        plain, masked = compared.levels
        assert plain is not None
        assert masked is not None
        rates = [f"{side[key]:g}" for side in (compared.cell.plain, compared.cell.masked) if side for key in KEYS]
        rows.append(
            (
                *universe.values(),
                *rates,
                *(f"{value:.2f}" for value in (plain.mean, masked.mean, verdict.mean, verdict.low, verdict.high)),
                *(f"{verdict.p:.2g}", f"{verdict.corrected:.2g}", verdict.of),
                *("yes" if compared.converged else "no", len(compared.lost)),
            )
        )
    rates_of = [f"{side} {which} rate" for side in ("mean", "masked") for which in ("client", "server")]
    names = [*multiverse.cells[0][0], *rates_of, "mean", "masked", "difference", "low", "high", "p", "corrected p"]
    return Table("universes", "Universes", (*names, "seeds", "converged", "diverged seeds"), tuple(rows))
