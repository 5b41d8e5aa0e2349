"""Rules under attack: accuracy by attack and rule, for each partition, out of the runs of C7."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedgma.aggregation.rules import RULES
from fedgma.paper.entries import Entry
from fedgma.simulation.attacks import ATTACKS
from fedgma.statistics.arms import spread
from fedgma.statistics.labels import NAMES
from fedgma.statistics.verdicts import Verdict, paired

NO_ATTACK = "no attack"


class Matrix(NamedTuple):
    """Accuracy in percent by attack (row), rule (column) and seed, of one partition."""

    title: str
    attacks: tuple[str, ...]
    rules: tuple[str, ...]
    scores: Mapping[tuple[str, str], Mapping[int, float]]  # (attack, rule) -> seed -> accuracy

    def mean(self, attack: str, rule: str) -> float:
        """The mean over seeds; NaN where there was no run."""
        by_seed = self.scores.get((attack, rule))
        return spread(list(by_seed.values())).mean if by_seed else math.nan

    @property
    def means(self) -> npt.NDArray[np.float64]:
        """[attack, rule], NaN where there was no run."""
        return np.array([[self.mean(attack, rule) for rule in self.rules] for attack in self.attacks])

    def best(self, attack: str) -> str:
        """The rule with the highest mean accuracy under an attack."""
        return self.rules[int(np.nanargmax(self.means[self.attacks.index(attack)]))]

    def versus(self, attack: str, first: str, second: str) -> Verdict:
        """The verdict on two rules under one attack, paired by seed."""
        first_scores, second_scores = self.scores[attack, first], self.scores[attack, second]
        return paired(
            [first_scores[seed] - second_scores[seed] for seed in sorted(set(first_scores) & set(second_scores))],
            (first, second),
        )


def matrices(entries: Sequence[Entry], split: str = "test", statistic: str = "last10") -> list[Matrix]:
    """One matrix for each partition, iid first; attacks and rules in the order of the library's lists."""
    scored = [entry for entry in entries if split in entry.scores]
    by_partition: dict[str, list[Entry]] = {}
    for entry in sorted(scored, key=lambda entry: entry.settings["partition.name"] != "iid"):
        by_partition.setdefault(partition_name(entry.settings), []).append(entry)
    return [_matrix(title, members, split, statistic) for title, members in by_partition.items()]


def _matrix(title: str, entries: Sequence[Entry], split: str, statistic: str) -> Matrix:
    cells: dict[tuple[str, str], dict[int, float]] = {}
    for entry in entries:
        where = (attack_name(entry.settings), rule_name(entry.settings))
        cells.setdefault(where, {})[entry.seed] = float(getattr(entry.scores[split], statistic))
    attacks = dict.fromkeys(attack_name(e.settings) for e in sorted(entries, key=lambda e: _attack_rank(e.settings)))
    rules = dict.fromkeys(rule_name(e.settings) for e in sorted(entries, key=lambda e: _rule_rank(e.settings)))
    return Matrix(title, tuple(attacks), tuple(rules), cells)


def _attack_rank(settings: Mapping[str, Any]) -> tuple[float, ...]:
    name = settings.get("attack.name")
    if name is None:
        return (-1.0,)
    return list(ATTACKS).index(name), settings.get("attack.scale") or 0.0, settings["attack.share"]


def _rule_rank(settings: Mapping[str, Any]) -> tuple[bool, bool, int]:
    bounded, clipped = settings.get("norm_factor") is not None, settings.get("update_clip") is not None
    return bounded, clipped, list(RULES).index(settings["aggregator"])


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
