"""An additive model of differences over choices: by how much each level of a choice shifts them, the others held fixed.

Ordinary least squares. A level's effect is its distance from the mean over the levels of its choice. Variances may
differ from setting to setting, so intervals and tests use the HC3 covariance (MacKinnon and White, "Some
heteroskedasticity-consistent covariance matrix estimators", 1985) and Student's t with the residual degrees of freedom.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedgma.errors import DataError
from fedgma.statistics.labels import sortable
from fedgma.statistics.power import LEVEL
from fedgma.statistics.verdicts import holm

Floats = npt.NDArray[np.float64]


class Effect(NamedTuple):
    """One level of a choice: how many settings have it, their mean difference, its effect with a 95 % CI."""

    choice: str
    level: str
    settings: int
    mean: float
    effect: float
    low: float
    high: float


class Decided(NamedTuple):
    """Whether a choice matters: the largest distance between its levels, p alone and corrected for all choices."""

    choice: str
    spread: float
    p: float
    corrected: float


class Additive(NamedTuple):
    """The model of all choices."""

    effects: tuple[Effect, ...]
    decided: tuple[Decided, ...]
    explained: float  # share of the variance, adjusted for the number of levels
    freedom: int  # residual degrees of freedom


def fit_additive(choices: Sequence[Mapping[str, str]], values: Sequence[float]) -> Additive:
    """Fit the model to settings with their choices and differences; a choice with one level is left out.

    >>> rows = [{"a": a, "b": b} for a in "xy" for b in "uv" for _ in range(3)]
    >>> values = [(row["a"] == "y") * 2.0 + 0.01 * place for place, row in enumerate(rows)]
    >>> model = fit_additive(rows, values)
    >>> [(one.choice, round(one.spread, 1), one.p < 0.01) for one in model.decided]
    [('a', 2.1, True), ('b', 0.0, True)]
    """
    differences = np.asarray(values, np.float64)
    levels = {name: sorted({row[name] for row in choices}, key=sortable) for name in choices[0]}
    levels = {name: known for name, known in levels.items() if len(known) > 1}
    design = np.column_stack(
        [np.ones(len(differences)), *(_coded(choices, name, known) for name, known in levels.items())]
    )
    freedom = len(differences) - design.shape[1]
    if freedom < 1 or np.linalg.matrix_rank(design) < design.shape[1]:
        raise DataError(
            f"{len(differences)} settings cannot tell {design.shape[1]} effects apart; expected more settings, or "
            "choices that are not always made together"
        )
    inverse = np.linalg.inv(design.T @ design)
    solved = inverse @ design.T @ differences
    rest = differences - design @ solved
    covariance = _robust(design, inverse, rest)
    effects: list[Effect] = []
    decided: list[tuple[str, float, float]] = []
    at = 1
    for name, known in levels.items():
        part = slice(at, at + len(known) - 1)
        at = part.stop
        coded, spread = solved[part], covariance[part, part]
        weights = np.vstack([np.eye(len(coded)), -np.ones(len(coded))])  # the effects of all levels out of those coded
        shifts, errors = weights @ coded, np.sqrt(np.diag(weights @ spread @ weights.T))
        effects += _effects(name, known, choices, differences, shifts, errors, freedom)
        decided.append((name, float(np.ptp(shifts)), _wald(coded, spread, freedom)))
    corrected = holm([p for *_, p in decided])
    explained = 1 - (rest @ rest / freedom) / float(np.var(differences, ddof=1))
    together = tuple(Decided(*choice, after) for choice, after in zip(decided, corrected, strict=True))
    return Additive(tuple(effects), together, float(explained), freedom)


def _coded(choices: Sequence[Mapping[str, str]], name: str, known: Sequence[str]) -> Floats:
    """Columns that are 1 for a level, -1 for the last level and else 0: effects add up to zero."""
    codes = np.vstack([np.eye(len(known) - 1), -np.ones(len(known) - 1)])
    return np.asarray(codes[[known.index(row[name]) for row in choices]])


def _robust(design: Floats, inverse: Floats, rest: Floats) -> Floats:
    """The HC3 covariance; a setting that decides an effect alone keeps a finite weight."""
    leverage = np.einsum("ij,jk,ik->i", design, inverse, design)
    scaled = design * (rest / np.maximum(1 - leverage, 1e-3))[:, None]
    return np.asarray(inverse @ (scaled.T @ scaled) @ inverse)


def _effects(
    name: str,
    known: Sequence[str],
    choices: Sequence[Mapping[str, str]],
    differences: Floats,
    shifts: Floats,
    errors: Floats,
    freedom: int,
) -> list[Effect]:
    from scipy.special import stdtrit

    half = float(stdtrit(freedom, 1 - LEVEL / 2)) * errors
    rows = []
    for column, level in enumerate(known):
        of_level = differences[[row[name] == level for row in choices]]
        shift = float(shifts[column])
        rows.append(
            Effect(
                *(name, level, len(of_level), float(of_level.mean()), shift),
                *(shift - float(half[column]), shift + float(half[column])),
            )
        )
    return rows


def _wald(effects: Floats, covariance: Floats, freedom: int) -> float:
    """The p value of the test that all effects of a choice are zero, by Wald's statistic as an F value."""
    from scipy.special import fdtrc

    if np.linalg.matrix_rank(covariance) < len(effects):  # a fit without any error
        return 0.0 if effects.any() else 1.0
    statistic = float(effects @ np.linalg.solve(covariance, effects)) / len(effects)
    return float(fdtrc(len(effects), freedom, statistic))
