"""What is left to run, in the order of `queue.toml`: missing runs, their samples, and minutes at the recorded rates.

Runs count as done wherever they were made: in run folders or in an export. Outdated runs do not count. A run that two
jobs ask for is left in the first of them only.
"""

import shlex
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from fedgma.errors import DataError
from fedgma.experiments.settings import Settings, record
from fedgma.paper.catalogue import QUEUE, catalogue, experiment
from fedgma.paper.entries import Entry
from fedgma.paper.index import Index
from fedgma.paper.outdated import why_outdated
from fedgma.paper.plans import Cut, plan_runs, samples, samples_a_round
from fedgma.paper.rates import Chosen
from fedgma.records.reader import flat

# settings that do not make another run: how often it is measured; a partition's seed is that of its run
UNIMPORTANT = ("partition.seed", "evaluate_every", "mask_every", "client_test_size")
# settings by which the rate of a run is looked up in the records, the most exact ones first
ALIKE = (
    ("dataset", "model", "partition.clients", "local_epochs", "local_steps", "batch_size"),
    ("dataset", "model"),
    ("model",),
)


class Job(NamedTuple):
    """One step of the queue."""

    id: str
    why: str
    cells: str = ""
    precision: str = "fp32"
    search: bool = False  # whether learning rates are chosen from its runs

    def command(self, done: Sequence[str]) -> str:
        """The command that makes its missing runs; those in the exports `done` are not made again."""
        words = ["search", "--plan", self.id] if self.search else ["run", self.id]
        words += ["--cells", self.cells] if self.cells else []
        words += [word for path in done for word in ("--done", path)]
        return shlex.join(["fedgma", "paper", *words, "--precision", self.precision])


class Left(NamedTuple):
    """What is left of a job."""

    job: Job
    planned: int
    done: int
    outdated: Mapping[str, int]  # why runs have to be made again -> number of runs
    earlier: int  # missing runs that an earlier job makes
    runs: int  # missing runs
    samples: int
    seconds: float | None  # on a GPU, at the rates of the records; None if there are no records of such runs
    precisions: frozenset[str] = frozenset()  # of the outdated runs; others would not pair with the arms beside them
    unsearched: tuple[str, ...] = ()  # data sets and algorithms whose rates have not been searched yet

    @property
    def rate(self) -> float | None:
        """Samples a second."""
        return self.samples / self.seconds if self.seconds else None


def read_queue() -> tuple[Job, ...]:
    """The jobs in their order."""
    text = (resources.files("fedgma.paper") / QUEUE).read_text(encoding="utf-8")
    jobs = tuple(Job(**table) for table in tomllib.loads(text)["jobs"])
    if unknown := {job.id for job in jobs} - set(catalogue()):
        raise DataError(f"{QUEUE}: unknown plans {', '.join(sorted(unknown))}")
    return jobs


def outlook(jobs: Iterable[Job], entries: Sequence[Entry], chosen: Chosen) -> list[Left]:
    """What is left of each job, given the runs that were made."""
    index, speeds = Index(entries), Speeds(entries)
    asked: set[str] = set()
    return [_left(job, index, speeds, chosen, asked) for job in jobs]


def _left(job: Job, index: Index, speeds: "Speeds", chosen: Chosen, asked: set[str]) -> Left:
    """What is left of one job; its missing runs are added to `asked`."""
    plan = plan_runs(experiment(job.id), chosen, Cut(cells=job.cells))
    outdated: Counter[str] = Counter()
    precisions: set[str] = set()
    missing, earlier = [], 0
    for name, settings in plan.named.items():
        made = _made(settings, index)
        if any(not why_outdated(entry.settings, entry.facts) for entry in made):
            continue
        if name in asked:
            earlier += 1
            continue
        asked.add(name)
        missing.append(settings)
        outdated.update(why_outdated(entry.settings, entry.facts) for entry in made[:1])
        precisions |= {str(entry.facts.get("precision", "fp32")) for entry in made}
    seconds = [speeds.seconds(settings) for settings in missing]
    total = None if None in seconds else sum(one for one in seconds if one is not None)
    done = len(plan.named) - len(missing) - earlier
    trained = sum(samples(settings) for settings in missing)
    return Left(
        job=job,
        planned=len(plan.named),
        done=done,
        outdated=outdated,
        earlier=earlier,
        runs=len(missing),
        samples=trained,
        seconds=total,
        precisions=frozenset(precisions),
        unsearched=plan.unsearched,
    )


def not_made(runs: Iterable[Settings], entries: Sequence[Entry]) -> list[Settings]:
    """The planned runs that are not among `entries`, or only outdated."""
    index = Index(entries)
    return [run for run in runs if all(why_outdated(entry.settings, entry.facts) for entry in _made(run, index))]


def _made(settings: Settings, index: Index) -> list[Entry]:
    """The runs with the settings of a planned one."""
    return index.find(dict(flat(record(settings))), UNIMPORTANT)


class Speeds:
    """Samples a second of the runs that were made on a GPU; the time of a fleet is divided over its runs."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._sums: dict[tuple[Any, ...], list[float]] = {}
        for entry in entries:
            seconds = float(entry.facts.get("seconds", 0.0))
            if str(entry.facts.get("device", "cpu")).startswith("cpu") or not seconds:
                continue
            trained = entry.played * samples_a_round(entry.settings)
            for key in _keys(entry.settings):
                sums = self._sums.setdefault(key, [0.0, 0.0])
                sums[0] += trained
                sums[1] += seconds

    def seconds(self, settings: Settings) -> float | None:
        """How long a run would take at the rate of the runs that are most like it; None if there are none."""
        values = dict(flat(record(settings)))
        for key in _keys(values):
            if key in self._sums:
                trained, seconds = self._sums[key]
                return samples(settings) * seconds / trained
        return None


def _keys(settings: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [(names, *(settings.get(name) for name in names)) for names in ALIKE]
