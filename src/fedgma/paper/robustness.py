"""Rules under attack: accuracy by attack and rule, for each partition, out of the runs of C7."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedgma.paper.entries import Entry
from fedgma.simulation.attacks import ATTACKS
from fedgma.statistics.arms import Spread, spread
from fedgma.statistics.labels import NAMES

NO_ATTACK = "no attack"


class Matrix(NamedTuple):
    """Accuracy in percent over seeds, by attack (row) and rule (column), of one partition."""

    title: str
    attacks: tuple[str, ...]
    rules: tuple[str, ...]
    scores: Mapping[tuple[str, str], Spread]

    @property
    def means(self) -> npt.NDArray[np.float64]:
        """[attack, rule], NaN where there was no run."""
        rows = [[self.scores.get((attack, rule)) for rule in self.rules] for attack in self.attacks]
        return np.array([[np.nan if value is None else value.mean for value in row] for row in rows])


def matrices(entries: Sequence[Entry], split: str = "test", statistic: str = "last10") -> list[Matrix]:
    """One matrix for each partition, in the order of the runs."""
    cells: dict[str, dict[tuple[str, str], dict[int, float]]] = {}
    for entry in entries:
        if split in entry.scores:
            where = (attack_name(entry.settings), rule_name(entry.settings))
            by_seed = cells.setdefault(partition_name(entry.settings), {}).setdefault(where, {})
            by_seed[entry.seed] = float(getattr(entry.scores[split], statistic))
    return [_matrix(title, found) for title, found in cells.items()]


def _matrix(title: str, cells: Mapping[tuple[str, str], Mapping[int, float]]) -> Matrix:
    attacks, rules = (tuple(dict.fromkeys(where[axis] for where in cells)) for axis in (0, 1))
    return Matrix(title, attacks, rules, {where: spread(list(by_seed.values())) for where, by_seed in cells.items()})


def attack_name(settings: Mapping[str, Any]) -> str:
    """An attack in a table.

    >>> attack_name({"attack.name": "sign_flip", "attack.share": 0.3, "attack.scale": 10.0})
    'sign flip x10, 30 %'
    >>> attack_name({"attack.name": None})
    'no attack'
    """
    name = settings.get("attack.name")
    if name is None:
        return NO_ATTACK
    scale = settings.get("attack.scale")
    scaled = "" if scale is None or scale == ATTACKS[name].scale else f" x{scale:g}"
    return f"{name.replace('_', ' ')}{scaled}, {100 * settings['attack.share']:g} %"


def rule_name(settings: Mapping[str, Any]) -> str:
    """A rule in a table, with what is done to updates before it.

    >>> rule_name({"aggregator": "gma", "update_clip": 1.0}), rule_name({"aggregator": "mean", "norm_factor": 10.0})
    ('clipped GMA', 'bounded mean')
    """
    before = "clipped " if settings.get("update_clip") is not None else ""
    before = "bounded " if settings.get("norm_factor") is not None else before
    return before + NAMES[settings["aggregator"]]


def partition_name(settings: Mapping[str, Any]) -> str:
    """A partition in a title.

    >>> partition_name({"partition.name": "dirichlet", "partition.alpha": 0.3})
    'Dirichlet 0.3'
    """
    if settings["partition.name"] == "dirichlet":
        return f"Dirichlet {settings['partition.alpha']:g}"
    return str(settings["partition.name"])
