"""What is left to run, in the order of `queue.toml`: missing runs, their samples, and minutes at the recorded rates.

Runs count as done wherever they were made: in run folders or in an export. Outdated runs do not count, nor those that
were stopped early. A run that two jobs ask for is left in the first of them only.
"""

import shlex
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from fedgma.errors import DataError
from fedgma.experiments.settings import Settings, record
from fedgma.paper.catalogue import catalogue, experiment
from fedgma.paper.entries import Entry
from fedgma.paper.index import Index
from fedgma.paper.outdated import why_outdated
from fedgma.paper.plans import Cut, plan_runs, samples, samples_a_round
from fedgma.paper.rates import Chosen
from fedgma.records.reader import flat
from fedgma.statistics.arms import frozen

# settings that do not make another run: how often it is measured, if often enough; a partition's seed, its run's
UNIMPORTANT = ("partition.seed", "evaluate_every", "mask_every", "client_test_size")
SEEDS = ("seed", "partition.seed")
QUEUE = "queue.toml"
ENOUGH = 0.9  # of its rounds: a run that was stopped later is not made again
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
    asked: set[tuple[str, int]] = set()  # settings and seed
    return [_left(job, index, speeds, chosen, asked) for job in jobs]


def _left(job: Job, index: Index, speeds: "Speeds", chosen: Chosen, asked: set[tuple[str, int]]) -> Left:
    """What is left of one job; its missing runs are added to `asked`."""
    listed = experiment(job.id)
    seeds = range(listed.first_seed, listed.first_seed + listed.seeds)
    plan = plan_runs(listed, chosen, Cut(seeds=1, cells=job.cells))  # every seed has the same runs
    once = {frozen(values := dict(flat(record(run))), SEEDS): (values, run) for _, run in plan.runs}
    old: list[list[Entry]] = []  # of each missing run that has to be made again
    runs, earlier, trained = 0, 0, 0
    seconds: list[float | None] = []
    for name, (values, run) in once.items():
        made = _by_seed(_made_for(run, index.find(values, (*UNIMPORTANT, "seed"))))
        undone = [seed for seed in seeds if all(map(_outdated, made.get(seed, [])))]
        missing = [seed for seed in undone if (name, seed) not in asked]
        earlier += len(undone) - len(missing)
        if not missing:
            continue
        asked |= {(name, seed) for seed in missing}
        old += [made[seed] for seed in missing if seed in made]
        size, rate = len(missing) * samples(run), speeds.rate(values)
        runs, trained = runs + len(missing), trained + size
        seconds.append(size / rate if rate else None)
    known = [value for value in seconds if value is not None]
    planned = len(once) * len(seeds)
    return Left(
        job=job,
        planned=planned,
        done=planned - runs - earlier,
        outdated=Counter(_outdated(entries[0]) for entries in old),
        earlier=earlier,
        runs=runs,
        samples=trained,
        seconds=sum(known) if len(known) == len(seconds) else None,
        precisions=frozenset(str(entry.facts.get("precision", "fp32")) for entries in old for entry in entries),
        unsearched=plan.unsearched,
    )


def _made_for(run: Settings, entries: Iterable[Entry]) -> list[Entry]:
    """The runs without those that were stopped early, and those that were evaluated in fewer rounds than planned."""
    return [
        entry
        for entry in entries
        if entry.played >= ENOUGH * int(entry.settings["rounds"])
        and int(entry.settings["evaluate_every"]) <= run.evaluate_every
    ]


def _by_seed(entries: Iterable[Entry]) -> dict[int, list[Entry]]:
    by_seed: dict[int, list[Entry]] = {}
    for entry in entries:
        by_seed.setdefault(entry.seed, []).append(entry)
    return by_seed


def _outdated(entry: Entry) -> str:
    """Why a run has to be made again; empty if it need not."""
    return why_outdated(entry.settings, entry.facts)


def not_made(runs: Iterable[Settings], entries: Sequence[Entry]) -> list[Settings]:
    """The planned runs that are not among `entries`, or only outdated."""
    index = Index(entries)
    made_by_run = ((run, index.find(dict(flat(record(run))), UNIMPORTANT)) for run in runs)
    return [run for run, made in made_by_run if all(map(_outdated, _made_for(run, made)))]


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

    def rate(self, settings: Mapping[str, Any]) -> float | None:
        """Samples a second of the runs that are most like one with these settings; None if there are none."""
        for key in _keys(settings):
            if key in self._sums:
                trained, seconds = self._sums[key]
                return trained / seconds
        return None


def _keys(settings: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    return [(names, *(settings.get(name) for name in names)) for names in ALIKE]
