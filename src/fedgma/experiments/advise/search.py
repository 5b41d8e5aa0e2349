"""Which rule for this federation? Successive halving of rules and rates on validation samples, then a test.

The search holds out a share of the training samples and scores candidates on them, with seeds of its own. The test
trains the finalists and the plain mean, each at its own best rates, on all training samples with other seeds, and
scores them on the test samples, which the search did not use. So the interval is not that of the best of many.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fedgma.documents import read_json
from fedgma.errors import ConfigError, DataError
from fedgma.experiments.advise.halving import (
    LEAST_UNIT,
    PAIRS,
    SEARCH,
    SHARES,
    Allowance,
    Candidate,
    Pace,
    Stage,
    final_stage,
    first_stage,
    next_stage,
    pace,
    stage_of,
    survivors,
    units,
)
from fedgma.experiments.advise.question import NEVER, Question, finalists, seeds_of_the_search, seeds_of_the_test
from fedgma.experiments.grid import Grid
from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import Planned, missing, pack, plan
from fedgma.experiments.play import Played, play_fleet
from fedgma.experiments.settings import record
from fedgma.records.format import fingerprint
from fedgma.records.reader import Run, read_run
from fedgma.statistics.arms import score
from fedgma.statistics.labels import duration
from fedgma.statistics.metrics import ACCURACY, Metric, metric_of
from fedgma.statistics.power import LEAST_SEEDS

PROBE_ROUNDS = 3  # the first is not timed
CAREFUL = 0.9  # share of the time that is planned
LATE = 1.1  # share of the time after which the test is stopped
LARGEST = 2**20  # bytes of a plan
Scores = Mapping[Candidate, float]
Clock = Callable[[], float]


class Course(NamedTuple):
    """A stage of the search that was completed, with the scores of its candidates on validation samples."""

    stage: Stage
    scores: Scores
    metric: Metric = ACCURACY

    @property
    def merits(self) -> Scores:
        """The scores with the sign by which higher is better."""
        return {candidate: self.metric.sign * value for candidate, value in self.scores.items()}


class Findings(NamedTuple):
    """What search and test found."""

    question: Question
    courses: tuple[Course, ...]
    tests: Mapping[Candidate, Mapping[int, Run]]  # by seed; the plain mean at its best rates first; empty if stopped
    rounds: int  # of the test
    notes: tuple[str, ...] = ()  # what went otherwise than planned


class Watcher(Protocol):
    """Shows how far the runs are."""

    def stage(self, words: str, planned: Sequence[Planned]) -> None:
        """A stage starts."""

    def begin(self, members: Sequence[Planned], name: str) -> None:
        """A fleet starts."""

    def see(self, played: Played) -> None:
        """A round was completed."""


class StageLog:
    """The stages that were planned, in a file, so that the same question goes on with them."""

    def __init__(self, path: Path, question: Question, seconds: float) -> None:
        arms = {name: record(settings) for name, settings in question.arms.items()}
        asked: dict[str, Any] = {"arms": arms, "pairs": question.pairs, "seeds": question.seeds, "seconds": seconds}
        self.path, self.question = path, fingerprint(asked)
        self.stages: list[Stage] = []
        if path.exists():
            content = read_json(path, LARGEST)
            try:
                if content["question"] == self.question:
                    self.stages = [stage_of(stage) for stage in content["stages"]]
            except (TypeError, KeyError, ValueError, AttributeError):
                raise DataError(f"{str(path)!r} is not a plan of fedgma advise; remove it to start again") from None

    def add(self, stage: Stage) -> Stage:
        """Write down a stage."""
        self.stages.append(stage)
        content = {"question": self.question, "stages": [stage.as_object() for stage in self.stages]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        new.replace(self.path)
        return stage


class Trainer(NamedTuple):
    """How runs are trained: where, by which clock, who watches, and whether the user stopped it."""

    question: Question
    materials: Materials
    out: Path
    clock: Clock
    watch: Watcher
    stop: Callable[[], bool]

    def planned(self, stage: Stage) -> dict[tuple[Candidate, int], Planned]:
        """The runs of a stage."""
        keys = [(candidate, seed) for candidate in stage.candidates for seed in stage.seeds]
        settings = [self.question.settings(c, seed, stage.rounds, final=stage.final) for c, seed in keys]
        folder = self.out / ("runs" if stage.final else "search")
        return dict(zip(keys, plan(Grid(tuple(settings), ()), self.materials, folder), strict=True))

    def train(self, stage: Stage, words: str, until: float) -> Pace | None:
        """Train the missing runs of a stage; returns its pace, or None if nothing was trained."""
        planned = list(self.planned(stage).values())
        left = missing(planned)
        if not left:
            return None
        self.watch.stage(words, planned)
        began, trained, ticks = self.clock(), 0, []
        for members in pack(left, self.materials):
            self.watch.begin(members, "training")
            for played in play_fleet(members, self.materials, stop=lambda: self.stop() or self.clock() > until):
                self.watch.see(played)
                trained += 1 + (played.line.get("test") is not None)
                if self.on_gpu:
                    ticks.append((self.clock(), trained))
        return pace(began, [*ticks, (self.clock(), trained)]) if trained else None

    def done(self, stage: Stage) -> bool:
        """Whether all runs of a stage are done."""
        return not missing(list(self.planned(stage).values()))

    def runs(self, stage: Stage) -> dict[Candidate, dict[int, Run]]:
        """The runs of a completed stage, by candidate and seed."""
        read: dict[Candidate, dict[int, Run]] = {}
        for (candidate, seed), run in self.planned(stage).items():
            if run.folder is not None:
                read.setdefault(candidate, {})[seed] = read_run(run.folder)
        return read

    @property
    def on_gpu(self) -> bool:
        """Whether runs train on a GPU, where stages take time to start."""
        return self.materials.device.type == "cuda"

    def probe(self) -> Pace:
        """The pace of a few rounds of each arm, on a GPU of each candidate, that are not recorded."""
        asked = self.question
        pairs = asked.pairs if self.on_gpu else asked.pairs[:1]
        candidates = [(name, pair) for name in asked.arms for pair in pairs]
        settings = [asked.settings(c, seeds_of_the_search(asked)[0], NEVER, final=False) for c in candidates]
        settings = [run.model_copy(update={"evaluate_every": 1}) for run in settings]
        members = pack(plan(Grid(tuple(settings), ()), self.materials, None), self.materials)[0]
        self.watch.stage("measuring the speed", members)
        began = now = self.clock()
        trained = 0
        for played in play_fleet(members, self.materials, stop=self.stop):
            now = self.clock()
            if played.line["round"] == 1:
                began = now
                continue
            trained += 2
            if played.run is members[-1] and played.line["round"] >= PROBE_ROUNDS:
                break
        return Pace(max((now - began) / max(trained, 1), LEAST_UNIT))


class Advisor:
    """A search and a test within a time, that go on where they were stopped."""

    def __init__(self, trainer: Trainer, log: StageLog, seconds: float, spent: float) -> None:
        self.trainer, self.log, self.seconds = trainer, log, seconds
        self.began = trainer.clock() - spent
        self.measured: Pace | None = None
        self.notes: list[str] = []

    @property
    def pace(self) -> Pace:
        """The pace of the last stage that was trained; measured first if there was none."""
        if self.measured is None:
            self.measured = self.trainer.probe()
        return self.measured

    def allowed(self, end: float, part: float = 1.0, every: int | None = None) -> Allowance:
        """A part of the time until a share of it has passed; the speed is measured before the time is read."""
        unit, start = self.pace
        left = self.began + end * self.seconds - self.trainer.clock()
        return Allowance(max(0.0, CAREFUL * part * left - start), unit, self.trainer.question.rounds, every)

    def search(self) -> list[Course]:
        """Train the stages of the search, those in the log first, until the time for it is over."""
        courses: list[Course] = []
        closed = any(stage.final for stage in self.log.stages)
        earlier = [stage for stage in self.log.stages if not stage.final]
        for number in range(len(SHARES)):
            stage = earlier[number] if number < len(earlier) else None if closed else self._planned(courses)
            if stage is None:
                break
            self._train(stage, f"search {number + 1}", SEARCH + (1 - SEARCH) / 3)
            if not self.trainer.done(stage):
                self.notes.append(f"stage {number + 1} of the search took longer than planned and was left out")
                break
            courses.append(_scored(stage, self.trainer.runs(stage)))
        return courses

    def _planned(self, courses: Sequence[Course]) -> Stage | None:
        """The next stage of the search, with an equal share of the time that is left for it."""
        number, asked = len(courses), self.trainer.question
        allowed = self.allowed(SEARCH, SHARES[number] / sum(SHARES[number:]))
        seeds = seeds_of_the_search(asked)
        if not courses:
            stage = first_stage(list(asked.arms), asked.pairs, seeds[0], allowed)
        else:
            before, scores = courses[-1].stage, courses[-1].merits
            arms = max(3, -(-len(before.arms) // 2))
            kept = survivors(scores, asked.base, arms, max(2, before.pairs // 3), asked.pairs[0])
            stage = next_stage(before, kept, seeds[: number + 1], allowed)
        # the speed is not known if the user stopped its measurement
        return None if stage is None or self.trainer.stop() else self.log.add(stage)

    def test(self, last: Course) -> tuple[dict[Candidate, dict[int, Run]], int]:
        """Train the finalists on all samples; the runs by candidate and seed, and their rounds."""
        asked, seeds = self.trainer.question, seeds_of_the_test(self.trainer.question)
        planned = [stage for stage in self.log.stages if stage.final]
        if not planned:
            ranked = finalists(survivors(last.merits, asked.base, 3, 1), asked)
            every = asked.arms[asked.base].evaluate_every
            stage = final_stage(ranked, (asked.base, asked.pairs[0]), seeds[:LEAST_SEEDS], self.allowed(1, every=every))
            if self.trainer.stop():
                return {}, 0
            if stage is None:
                raise self.too_short()
            planned = [self.log.add(stage)]
        first = planned[0]
        self._train(first, "test", LATE)
        if not self.trainer.done(first):
            return {}, first.rounds
        if len(planned) == 1 and not self.trainer.stop():  # how many more seeds depends on the time alone
            planned.append(self.log.add(first._replace(seeds=self._more_seeds(first, seeds))))
        self._train(planned[1], "test, more seeds", LATE)
        runs = self.trainer.runs(first)
        more = self.trainer.runs(planned[1]) if self.trainer.done(planned[1]) else {}  # also empty if no seed fits
        return {candidate: {**held, **more.get(candidate, {})} for candidate, held in runs.items()}, first.rounds

    def _more_seeds(self, stage: Stage, seeds: Sequence[int]) -> tuple[int, ...]:
        allowed = self.allowed(1)
        every = self.trainer.question.arms[self.trainer.question.base].evaluate_every
        a_seed = len(stage.candidates) * units(stage.rounds, every) * allowed.unit
        fit = int(min(len(seeds), allowed.seconds / a_seed))
        return tuple(seeds[len(stage.seeds) : len(stage.seeds) + fit])

    def _train(self, stage: Stage, name: str, until: float) -> None:
        if self.trainer.stop() or not stage.seeds:
            return
        words = f"{name}: {in_words(stage)}"
        if self.measured is not None:
            unit, start = self.measured
            words += f", at most about {duration(start + stage.runs * units(stage.rounds) * unit)}"
        trained = self.trainer.train(stage, words, self.began + until * self.seconds)
        self.measured = self.measured if trained is None else trained

    def too_short(self) -> ConfigError:
        """The error if there is no time for the smallest search: two arms with three pairs of rates."""
        pairs = min(PAIRS[-1], len(self.trainer.question.pairs))
        unit, start = self.pace
        rounds = Allowance(0.0, unit, self.trainer.question.rounds).least
        least = start + 2 * pairs * units(rounds) * unit
        minutes = math.ceil(1.5 * least / (CAREFUL * SHARES[0]) / 60)
        return ConfigError(
            f"{self.seconds / 60:g} min are too short: a round of a run takes about {unit:.2g} s here; "
            f"give at least --minutes {max(minutes, math.ceil(self.seconds / 60) + 1)}"
        )


def search_and_test(trainer: Trainer, seconds: float, *, spent: float = 0.0) -> Findings | None:
    """Search and test within the time; None if the user stopped it. The same call goes on where it was stopped.

    `spent` is the part of the time that is over already.
    The stages are written to plan.json in the folder `out` of the trainer as soon as they are planned.
    """
    asked = trainer.question
    advisor = Advisor(trainer, StageLog(trainer.out / "plan.json", asked, seconds), seconds, spent)
    courses = advisor.search()
    if trainer.stop():
        return None
    if not courses:
        raise advisor.too_short()
    tests, rounds = advisor.test(courses[-1])
    return None if trainer.stop() else Findings(asked, tuple(courses), tests, rounds, tuple(advisor.notes))


def in_words(stage: Stage) -> str:
    """What a stage trains.

    >>> in_words(Stage((("mean", (0.05, 1.0)), ("GMA", (0.05, 1.0))), (0,), 12))
    '2 rules, 1 pair of rates each, 1 seed, 12 rounds'
    """
    seeds = f"{len(stage.seeds)} seed{'s' if len(stage.seeds) > 1 else ''}, {stage.rounds} rounds"
    if stage.final:
        return f"{len(stage.candidates)} arms, {seeds}"
    return f"{len(stage.arms)} rules, {stage.pairs} pair{'s' if stage.pairs > 1 else ''} of rates each, {seeds}"


def _scored(stage: Stage, runs: Mapping[Candidate, Mapping[int, Run]]) -> Course:
    """A completed stage with the mean score of each candidate over seeds."""
    metric = metric_of([run for of in runs.values() for run in of.values()])
    scores = {c: _mean([score(run, split="validation", of=metric) for run in of.values()]) for c, of in runs.items()}
    return Course(stage, scores, metric)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
