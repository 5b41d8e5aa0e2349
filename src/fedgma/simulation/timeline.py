"""What happens on a run's clock: who is asked, who answers in time, and when the server steps.

No event depends on a model, so a round's events are played on the host before its clients train, and only clients whose
updates are counted train. Where a run stands is a `Timeline`, which is passed in and returned.

A synchronous round begins by asking clients. It ends when as many as wanted have answered, when all that were asked
have, or at the deadline. Later answers are lost.

With a buffer (Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, 2022), `concurrency` clients
are at work. Whenever one answers, another one starts on the present model; whenever `clients_per_round` answers have
arrived, the server steps, which is a round. At one moment, answers come first, then the step, then new starts. A client
whose answer waits in the buffer is not asked again before the step, so it has one vote in it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedgma.errors import ConfigError
from fedgma.seeds import generator
from fedgma.simulation.clock import Clock, durations, present, samples_trained
from fedgma.simulation.spec import RunSpec


@dataclass(frozen=True, eq=False)
class RunClock:
    """A run's clock, with what its events depend on."""

    clock: Clock
    seed: int
    wanted: int  # clients of a round
    able: np.ndarray  # bool [client]: has enough samples to train
    work: np.ndarray  # int64 [client]: samples it trains on in a round


class Timeline(NamedTuple):
    """The time, and the clients at work or in the buffer, in the order of their starts."""

    time: float
    clients: np.ndarray  # int64
    rounds: np.ndarray  # int64, in which each started: it works on the model before that round
    arrivals: np.ndarray  # float64, when its update arrives; infinite if it never does
    ends: np.ndarray  # float64, when it answers or the server stops to wait for it


class Attendance(NamedTuple):
    """Who is counted in a round, and what became of the others."""

    clients: np.ndarray  # int64, rising
    rounds: np.ndarray  # int64, in which each started
    asked: int  # clients that started in this round
    lost: int  # clients that the server ceased to wait for in this round
    seconds: float  # that the round took
    time: float  # at its end


PATIENCE = 1000  # starts of one client in one round
START = Timeline(0.0, np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0), np.empty(0))


def lay_out(specs: Sequence[RunSpec]) -> tuple[RunClock | None, ...]:
    """The clocks of runs; None for runs without."""
    return tuple(None if spec.clock is None else _run_clock(spec, spec.clock) for spec in specs)


def _run_clock(spec: RunSpec, clock: Clock) -> RunClock:
    sizes = np.array([len(samples) for samples in spec.federation.clients], np.int64)
    able = sizes >= max(spec.smallest_batch, 1)
    if clock.concurrency is not None and able.sum() < spec.clients_per_round:
        raise ConfigError(
            f"a buffer of clients_per_round = {spec.clients_per_round} updates needs as many clients with samples, "
            f"but there are {able.sum()}"
        )
    lengths = {"epochs": spec.local_epochs, "batch": spec.batch_size, "steps": spec.local_steps}
    work = samples_trained(sizes, **lengths, least=spec.smallest_batch)  # type: ignore[arg-type]
    return RunClock(clock, spec.seed, spec.clients_per_round, able, work)


def attend(
    clocks: Sequence[RunClock | None],
    timelines: Mapping[int, Timeline],
    rounds: np.ndarray,
    runs: Sequence[int],
) -> tuple[dict[int, Timeline], dict[int, Attendance]]:
    """The next round of every run that has a clock; `rounds` [run] are its numbers."""
    after, attended = dict(timelines), {}
    for run in runs:
        if (clock := clocks[run]) is not None:
            play = synchronous if clock.clock.concurrency is None else buffered
            after[run], attended[run] = play(clock, timelines[run], int(rounds[run]))
    return after, attended


def synchronous(run: RunClock, timeline: Timeline, round: int) -> tuple[Timeline, Attendance]:
    """A round in which the server waits for clients that all start at once."""
    clock, begun = run.clock, timeline.time
    asked = _draw(run, round, 0, clock.asked(run.wanted), begun, np.empty(0, np.int64))
    seconds = durations(clock, run.seed, run.work, round)[asked]
    seconds[~present(clock, run.seed, begun + seconds, asked)] = math.inf
    first = np.argsort(seconds, kind="stable")[: run.wanted]
    first = first[seconds[first] <= clock.deadline]
    complete = len(first) == min(run.wanted, len(asked)) and (len(asked) > 0 or clock.deadline == math.inf)
    took = float(seconds[first].max(initial=0.0)) if complete else clock.deadline
    clients = np.sort(asked[first])
    end = begun + took
    attendance = Attendance(
        clients, np.full(len(clients), round, np.int64), len(asked), len(asked) - len(clients), took, end
    )
    return timeline._replace(time=end), attendance


def buffered(run: RunClock, timeline: Timeline, round: int) -> tuple[Timeline, Attendance]:
    """The events from one step of the server to the next."""
    clock = run.clock
    assert clock.concurrency is not None
    begun, asked, lost, group = timeline.time, 0, 0, 0
    starts = np.zeros(len(run.work), np.int64)  # of each client in this round
    drawn: dict[int, np.ndarray] = {}  # seconds [client] of the first, second, ... start
    while (here := timeline.arrivals <= timeline.time).sum() < run.wanted:
        missing = clock.concurrency - int((~here).sum())
        started = _draw(run, round, group, missing, timeline.time, timeline.clients)
        group, asked = group + (missing > 0), asked + len(started)
        seconds = _seconds(run, round, started, starts, drawn)
        timeline = _start(run, timeline, round, started, seconds)
        starts[started] += 1
        awaited = timeline.ends[np.append(~here, np.ones(len(started), bool))]
        if len(awaited):
            timeline = timeline._replace(time=float(awaited.min()))
        else:  # nobody is there to be asked: wait until some may be back
            stretch = math.floor(timeline.time / clock.away_seconds) + 1
            timeline = timeline._replace(time=stretch * clock.away_seconds)
        timeline, ended = _drop(timeline, (timeline.ends <= timeline.time) & np.isinf(timeline.arrivals))
        lost += ended
    arrived = np.flatnonzero(here)
    # the first to arrive, of several at one moment the first to start
    first = arrived[np.argsort(timeline.arrivals[arrived], kind="stable")][: run.wanted]
    first = first[np.argsort(timeline.clients[first])]
    clients, rounds = timeline.clients[first], timeline.rounds[first]
    timeline, _ = _drop(timeline, np.isin(np.arange(len(timeline.clients)), first))
    return timeline, Attendance(clients, rounds, asked, lost, timeline.time - begun, timeline.time)


def _draw(run: RunClock, round: int, group: int, number: int, time: float, busy: np.ndarray) -> np.ndarray:
    """Clients to start, rising, out of those that are there and not busy; `group` counts the draws of a round.

    The draw of a synchronous round is that of a run without a clock: clients without samples are left out after it.
    """
    if number <= 0:
        return np.empty(0, np.int64)
    free = present(run.clock, run.seed, time, np.arange(len(run.able)))
    free[busy] = False
    if run.clock.concurrency is not None:
        free &= run.able
    candidates = np.flatnonzero(free)
    path = (round, group) if group else (round,)
    drawn = generator(run.seed, "cohort", *path).choice(candidates, min(number, len(candidates)), replace=False)
    return np.sort(drawn[run.able[drawn]])


def _seconds(
    run: RunClock, round: int, clients: np.ndarray, starts: np.ndarray, drawn: dict[int, np.ndarray]
) -> np.ndarray:
    """How long these clients take; one that was lost and starts again on the same model has another draw."""
    taken = np.empty(len(clients))
    for before in np.unique(starts[clients]).tolist():
        if before >= PATIENCE:
            raise ConfigError(
                f"round {round} never ends: fewer than clients_per_round = {run.wanted} clients answer within the "
                f"deadline of {run.clock.deadline:g} s; set a longer clock.deadline"
            )
        if before not in drawn:
            drawn[before] = durations(run.clock, run.seed, run.work, *((round, before) if before else (round,)))
        rows = starts[clients] == before
        taken[rows] = drawn[before][clients[rows]]
    return taken


def _start(run: RunClock, timeline: Timeline, round: int, clients: np.ndarray, seconds: np.ndarray) -> Timeline:
    """The timeline with clients that start now and take this long."""
    arrivals = timeline.time + seconds
    heard = (seconds <= run.clock.deadline) & present(run.clock, run.seed, arrivals, clients)
    ends = np.where(heard, arrivals, timeline.time + run.clock.deadline)
    new = (clients, np.full(len(clients), round, np.int64), np.where(heard, arrivals, math.inf), ends)
    return Timeline(timeline.time, *(np.concatenate(pair) for pair in zip(timeline[1:], new, strict=True)))


def _drop(timeline: Timeline, which: np.ndarray) -> tuple[Timeline, int]:
    """The timeline without these clients, and how many they are."""
    return Timeline(timeline.time, *(part[~which] for part in timeline[1:])), int(which.sum())
