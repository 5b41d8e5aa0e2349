"""`fedgma power`: how many seeds a difference needs, and which difference a number of seeds can show."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedgma.cli.report import Of, Where
from fedgma.cli.runs import Json

POWERS = (0.8, 0.9)
MOST = 10_000  # seeds
DIFFERENCES = (0.25, 0.5, 1.0, 2.0, 4.0)  # points
SEEDS = (4, 5, 6, 8, 10, 12, 16, 20)


def power(
    first: Annotated[
        str | None, typer.Argument(metavar="[A]", help="An arm of earlier runs: gma, or a folder.")
    ] = None,
    second: Annotated[str | None, typer.Argument(metavar="[B]", help="The arm that it is compared with.")] = None,
    sd: Annotated[float | None, typer.Option(help="Standard deviation of the paired differences, in points.")] = None,
    difference: Annotated[float | None, typer.Option(help="The difference to show, in points.")] = None,
    seeds: Annotated[int | None, typer.Option(min=4, help="The number of paired seeds.")] = None,
    tests: Annotated[int, typer.Option(min=1, help="Number of tests that p is corrected for.")] = 1,
    runs: Annotated[list[Path] | None, typer.Option("--runs", help="Folders of the earlier runs.")] = None,
    where: Where = None,
    of: Of = None,
    as_json: Json = False,
) -> None:
    """Plan seeds: how many show a difference with a power of 80 or 90 %, or which difference a number can show.

    The standard deviation is given, or that of earlier runs, without pairs in which a run diverged:

    fedgma power gma mean --runs sweep --difference 1
    """
    from fedgma.statistics.power import detectable, seeds_for

    deviation, unit, source = _deviation(first, second, runs or [Path("runs")], sd, where or [], of)
    scale = 1.0 if unit == "points" else float(f"{deviation:.2g}")  # of a score whose usual differences are not known
    wanted = [scale * size for size in DIFFERENCES] if difference is None else [difference]
    counts = SEEDS if seeds is None else (seeds,)
    needed = [
        (abs(size), [seeds_for(size, deviation, least=least, tests=tests, most=MOST) for least in POWERS])
        for size in (wanted if difference is not None or seeds is None else ())
    ]
    shown = [
        (count, [detectable(deviation, count, least=least, tests=tests) for least in POWERS])
        for count in (counts if seeds is not None or difference is None else ())
    ]
    if as_json:
        typer.echo(json.dumps({"deviation": deviation, "unit": unit, "tests": tests, **_objects(needed, shown)}))
        return
    level = "5 %" if tests == 1 else f"5 % corrected for {tests} tests"
    typer.echo(
        f"Paired t test, two-sided, {level}; standard deviation of the differences {deviation:.3g} {unit}{source}."
    )
    for size, row in needed:
        usual, more = map(_number, row)
        of = "point" if size == 1 and unit == "points" else unit
        typer.echo(f"A difference of {size:g} {of}: {usual} seeds for a power of 80 %, {more} for 90 %.")
    for count, sizes in shown:
        usual, more = (_with_unit(size, unit) for size in sizes)
        typer.echo(f"{count} seeds show {usual} with a power of 80 %, {more} with 90 %.")


def _objects(needed: list[Any], shown: list[Any]) -> dict[str, object]:
    """The two tables as JSON objects, with a column for each power."""
    powers = [f"{power:.0%}" for power in POWERS]
    return {
        "seeds": [{"difference": size, **dict(zip(powers, row, strict=True))} for size, row in needed],
        "differences": [{"seeds": count, **dict(zip(powers, row, strict=True))} for count, row in shown],
    }


def _number(seeds: int | None) -> str:
    return f"more than {MOST}" if seeds is None else str(seeds)


def _with_unit(size: float, unit: str) -> str:
    return f"{size:.2f} {unit}" if unit == "points" else f"{size:.3g} {unit}"


def _deviation(
    first: str | None, second: str | None, runs: list[Path], sd: float | None, filters: list[str], of: str | None
) -> tuple[float, str, str]:
    """The standard deviation that was given, or that of the differences of earlier runs, its unit, and its source."""
    from fedgma.cli.report import check_disjoint, side
    from fedgma.errors import ConfigError
    from fedgma.statistics.comparisons import compare
    from fedgma.statistics.labels import counted
    from fedgma.statistics.power import LEAST_SEEDS, pooled_deviation
    from fedgma.statistics.selection import finished_of

    if (sd is None) == (first is None) or (first is None) != (second is None):
        raise ConfigError("expected --sd with a number, or two arms of earlier runs, such as: fedgma power gma mean")
    if sd is not None:
        return sd, "points", ""
    (ours, ours_fixed), (theirs, theirs_fixed) = (side(str(name), runs, filters) for name in (first, second))
    check_disjoint(ours, theirs)
    finished_of([*ours, *theirs])
    made = compare(ours, theirs, (str(first), str(second)), apart=[*ours_fixed, *theirs_fixed], of=of)
    samples = [[value for seed, value in cell.pairs.items() if seed not in cell.lost] for cell in made.cells]
    deviation = pooled_deviation([tuple(sample) for sample in samples if sample])
    pairs, left_out = sum(map(len, samples)), sum(len(cell.lost) for cell in made.cells)
    source = f", within settings, of {counted(pairs, 'pair')} in {counted(len(made.cells), 'setting')}"
    source += f"; {left_out} more had a run that diverged" if left_out else ""
    free = pairs - sum(map(bool, samples))  # each setting's own mean takes one
    few = f"fewer than {LEAST_SEEDS} pairs" if pairs < LEAST_SEEDS else "so few pairs of each setting"
    source += f"; {few} estimate it badly, train more first" if free < LEAST_SEEDS - 1 else ""
    return deviation, made.score.apart, source
