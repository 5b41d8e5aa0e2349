"""How far training is: rounds, rate, time left and the score of each arm."""

from collections.abc import Mapping, Sequence

from fedgma.experiments.plan import Planned, as_run
from fedgma.records.format import Line
from fedgma.statistics.arms import grouped
from fedgma.statistics.labels import duration
from fedgma.statistics.metrics import Metric, from_facts

MOST_ARMS = 4  # that are shown


def arm_names(planned: Sequence[Planned]) -> dict[str, str]:
    """The name of each run's arm, by the run's fingerprint."""
    return {run.folder.name: row.name for row in grouped([as_run(run) for run in planned]) for run in row.runs}


class Progress:
    """Counts the rounds of runs that train."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names  # fingerprint -> arm
        self.name = ""
        self.total = self.rounds = 0
        self.seconds = 0.0  # that the counted rounds took
        self.curves: dict[str, list[float]] = {}  # arm -> accuracy in percent or another score, mean over seeds
        self.metrics: dict[str, Metric] = {}  # of each arm
        self._at: dict[str, int] = {}
        self._latest: dict[str, dict[int, float]] = {}

    def begin(self, members: Sequence[Planned], name: str) -> None:
        """These runs start."""
        self.name = name
        self.total = sum(run.settings.rounds for run in members)
        self.rounds, self.seconds, self.curves, self._latest = 0, 0.0, {}, {}
        self._at = dict.fromkeys((run.fingerprint for run in members), 0)

    def see(self, run: Planned, line: Line) -> None:
        """A round was completed."""
        self._at[run.fingerprint] = line["round"]
        self.seconds += line["seconds"]
        self.rounds += 1
        scores, metric = line.get("test"), from_facts(run.metrics)[0]
        score = None if scores is None else scores.get(metric.name)
        if score is not None:
            arm = self.names[run.fingerprint]
            self.metrics[arm] = metric
            self._latest.setdefault(arm, {})[run.settings.seed] = metric.factor * score
            latest = self._latest[arm]
            self.curves.setdefault(arm, []).append(sum(latest.values()) / len(latest))

    @property
    def done(self) -> int:
        """Rounds that are complete, with those of before a resume."""
        return sum(self._at.values())

    @property
    def rate(self) -> float:
        """Rounds a second."""
        return self.rounds / max(self.seconds, 1e-9)

    @property
    def text(self) -> str:
        """One line: how far, how long still, and the score of each arm."""
        parts = [f"{self.done} of {self.total} rounds"]
        if self.rounds and self.done < self.total:
            parts.append(f"about {duration((self.total - self.done) / self.rate)} left")
        shown = [f"{arm} {self.latest(arm)}" for arm in list(self.curves)[:MOST_ARMS]]
        return ", ".join([f"{self.name}: {parts[0]}", *parts[1:], *shown]) + self.more_arms

    def latest(self, arm: str) -> str:
        """The last score of an arm, with its unit or name."""
        metric, value = self.metrics[arm], self.curves[arm][-1]
        return f"{value:.1f} %" if metric.share else f"{value:.3g} {metric.unit or metric.name}"

    @property
    def more_arms(self) -> str:
        """How many arms are not shown, in words."""
        return f" and {len(self.curves) - MOST_ARMS} more" if len(self.curves) > MOST_ARMS else ""
