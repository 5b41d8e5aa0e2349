"""What runs are scored by: the accuracy of a classification, or the metrics that the task of a run records.

A score has a direction, so that "ahead" means better: differences are by how much the first arm is better. A share has
the unit "%": scores are in percent and differences in points. Other scores are in their own unit.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from fedgma.errors import ConfigError
from fedgma.records.reader import Run, curve

LARGEST = 3.4e38  # stands for a score that is not finite: a diverged run is as bad as float32 can say
DIGITS = 3  # significant ones, of scores that are not shares


WORDS = {"auc": "AUC", "macro_f1": "macro F1"}  # for names that are no words


class Metric(NamedTuple):
    """A score: its name in the records, which way is better, and its unit."""

    name: str = "accuracy"
    better: str = "higher"
    unit: str = "%"

    @property
    def share(self) -> bool:
        """Whether it is a share, shown in percent."""
        return self.unit == "%"

    @property
    def factor(self) -> float:
        """What a recorded value is multiplied by to be shown."""
        return 100.0 if self.share else 1.0

    @property
    def sign(self) -> float:
        """1 if higher is better, -1 if lower is."""
        return 1.0 if self.better == "higher" else -1.0

    @property
    def words(self) -> str:
        """The name as it stands in a text.

        >>> Metric("auc").words, Metric("balanced_accuracy").words
        ('AUC', 'balanced accuracy')
        """
        return WORDS.get(self.name, self.name.replace("_", " "))

    @property
    def label(self) -> str:
        """Name and unit, as on an axis.

        >>> Metric().label, Metric("mae", "lower", "EUR").label, Metric("mse", "lower", "").label
        ('accuracy, %', 'mae, EUR', 'mse')
        """
        return f"{self.words}, {self.unit}" if self.unit else self.words

    @property
    def apart(self) -> str:
        """The unit of a difference, in words: "points", or the unit and name of the metric.

        >>> Metric().apart, Metric("mae", "lower", "EUR").apart, Metric("mse", "lower", "").apart
        ('points', 'EUR in mae', 'in mse')
        """
        return "points" if self.share else f"{self.unit} in {self.words}".strip()

    @property
    def title(self) -> str:
        """The name at the beginning of a heading."""
        return self.words[:1].upper() + self.words[1:]

    @property
    def in_words(self) -> str:
        """What a score is and how it is read, for a note."""
        if self.share:
            return f"{self.words} in percent"
        unit = f" in {self.unit}" if self.unit else ""
        return f"{self.words}{unit} ({self.better} is better)"

    def decimals(self, *values: float) -> int:
        """Decimals that show these values: two for shares, else as many as the largest needs.

        >>> mse = Metric("mse", "lower", "")
        >>> ACCURACY.decimals(0.001), mse.decimals(0.00123), mse.decimals(12.0)
        (2, 5, 2)
        """
        largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
        if self.share or largest == 0:
            return 2
        return max(2, min(12, DIGITS - 1 - math.floor(math.log10(largest))))

    def best(self, values: Sequence[float]) -> float:
        """The best of these values."""
        return max(values) if self.better == "higher" else min(values)


ACCURACY = Metric()
LOSS = Metric("loss", "lower", "")


def metrics_of(run: Run) -> tuple[Metric, ...]:
    """The metrics that a run records; a verdict is about the first."""
    return from_facts(run.head.get("metrics"))


def from_facts(recorded: object) -> tuple[Metric, ...]:
    """Metrics as they are recorded; the accuracy where none are.

    >>> from_facts([{"name": "mae", "better": "lower", "unit": "EUR"}]), from_facts(None)
    ((Metric(name='mae', better='lower', unit='EUR'),), (Metric(name='accuracy', better='higher', unit='%'),))
    """
    facts = [row for row in recorded if isinstance(row, dict)] if isinstance(recorded, list | tuple) else []
    metrics = [
        Metric(str(row["name"]), str(row["better"]), str(row.get("unit", "")))
        for row in facts
        if row.get("name") and row.get("better") in ("higher", "lower")
    ]
    return tuple(metrics) or (ACCURACY,)


def metric_of(runs: Sequence[Run], name: str | None = None) -> Metric:
    """The metric of that name that all runs record; without a name, the first one of each, which must be the same."""
    if name == LOSS.name:
        return LOSS
    known = [metrics_of(run) for run in runs] or [(ACCURACY,)]
    if name is None:
        firsts = list(dict.fromkeys(metrics[0] for metrics in known))
        if len(firsts) > 1:
            names = " and ".join(metric.name for metric in firsts)
            raise ConfigError(f"these runs are scored by {names}; select those of one task with --where task=...")
        return firsts[0]
    named = {metric for metrics in known for metric in metrics if metric.name == name}
    if len(named) != 1 or not all(any(metric.name == name for metric in metrics) for metrics in known):
        names = ", ".join(dict.fromkeys([*(metric.name for metrics in known for metric in metrics), LOSS.name]))
        raise ConfigError(f"not every run records the metric {name!r}; the runs have {names}")
    return named.pop()


def course(run: Run, split: str, metric: Metric) -> dict[int, float]:
    """Round -> recorded score on a split; one that was not finite is the worst there is, if it is not a share."""
    recorded = curve(run, split, metric.name)
    if metric.share:
        return recorded
    worst = {r["round"]: -metric.sign * LARGEST for r in run.rounds if lacks(r.get(split), metric.name)}
    return dict(sorted({**recorded, **worst}.items()))


def is_lost(value: float) -> bool:
    """Whether a score that was not finite rules a mean or a difference; `LARGEST` stands for it.

    >>> is_lost(-LARGEST / 10), is_lost(1e30)
    (True, False)
    """
    return abs(value) > LARGEST / 1e6


def lacks(scores: object, name: str) -> bool:
    """Whether a score was not finite, which is recorded as null."""
    return isinstance(scores, dict) and name in scores and scores[name] is None


def by_metric(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs grouped by what their verdicts are about."""
    groups: dict[Metric, list[Run]] = {}
    for run in runs:
        groups.setdefault(metrics_of(run)[0], []).append(run)
    return list(groups.values())
