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

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedgma.errors import ConfigError
from fedgma.seeds import generator
from fedgma.simulation.clock import Clock, durations, present, samples_trained, stretch_of, those_there
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
    lost: int  # clients that the server stopped waiting for in this round
    seconds: float  # that the round took
    time: float  # at its end


PATIENCE = 1000  # starts of one client in one round, or waits for anybody to be there
TRIES = 8  # clients that are tried before all are looked at
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
    there = those_there(clock, run.seed, stretch_of(clock, begun), len(run.able))
    drawn = draw(generator(run.seed, "cohort", round), np.flatnonzero(there), clock.asked(run.wanted))
    asked = drawn[run.able[drawn]]  # as in a run without a clock, a client without samples may be drawn
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
    desk = Desk(run, timeline, round)
    while len(desk.buffer) < run.wanted:
        desk.start_clients()
        desk.wait()
    return desk.close()


class Flight(NamedTuple):
    """A client at work, or in the buffer; flights are sorted by the moment at which they end."""

    end: float
    number: int  # in the order of their starts
    client: int
    round: int
    arrival: float


class Desk:
    """The server between two steps: who is at work, what has arrived, and who may be asked."""

    def __init__(self, run: RunClock, timeline: Timeline, round: int) -> None:
        self.run, self.round, self.begun, self.time = run, round, timeline.time, timeline.time
        parts = (part.tolist() for part in timeline[1:])
        flights = [Flight(end, n, c, r, a) for n, (c, r, a, end) in enumerate(zip(*parts, strict=True))]
        self.buffer = sorted(flight for flight in flights if flight.arrival <= timeline.time)
        self.working = sorted(flight for flight in flights if flight.arrival > timeline.time)  # a heap
        self.free = run.able.copy()  # neither at work nor in the buffer
        self.free[timeline.clients] = False
        self.numbers = itertools.count(len(flights))
        self.asked = self.lost = self.empty = 0
        self.starts: dict[int, int] = {}  # of each client in this round
        self.seconds: dict[int, np.ndarray] = {}  # [client], of the first, second, ... start
        self.there: dict[int, np.ndarray] = {}  # [client], by stretch of time
        self.again: np.random.Generator | None = None  # of all draws but the first

    def start_clients(self) -> None:
        """Start as many clients as are missing, out of those that are there."""
        clock = self.run.clock
        missing = clock.asked(self.run.wanted) - len(self.working)
        if missing <= 0:
            return
        free = self.free & self._there(self.time) if clock.away else self.free
        if self.again is None:
            drawn = draw(generator(self.run.seed, "cohort", self.round), np.flatnonzero(free), missing)
            self.again = generator(self.run.seed, "cohort", self.round, "again")
        else:
            drawn = pick(self.again, free, missing)
        for client in drawn.tolist():
            self._start(client)

    def _start(self, client: int) -> None:
        before = self.starts.get(client, 0)
        seconds = float(self._durations(before)[client])
        self.starts[client] = before + 1
        arrival = self.time + seconds
        clock = self.run.clock
        heard = seconds <= clock.deadline and arrival < math.inf
        if clock.away and heard:
            heard = bool(self._there(arrival)[client])
        end = arrival if heard else self.time + clock.deadline
        flight = Flight(end, next(self.numbers), client, self.round, arrival if heard else math.inf)
        heapq.heappush(self.working, flight)
        self.free[client] = False
        self.asked += 1

    def wait(self) -> None:
        """Move on to the next moment at which a client answers or is given up; arrivals go into the buffer."""
        clock = self.run.clock
        if not self.working:  # nobody is there to be asked: until some may be back
            self.empty += 1
            if self.empty > PATIENCE:
                raise ConfigError(
                    f"no client was there in {PATIENCE} stretches of time; lower clock.away = {clock.away}"
                )
            self.time = (stretch_of(clock, self.time) + 1) * clock.away_seconds
            return
        self.time = self.working[0].end
        while self.working and self.working[0].end == self.time:
            flight = heapq.heappop(self.working)
            if flight.arrival == self.time:
                self.buffer.append(flight)
            else:
                self.free[flight.client] = True
                self.lost += 1

    def close(self) -> tuple[Timeline, Attendance]:
        """Take the first arrivals out of the buffer, of several at one moment the first to start."""
        counted = sorted(self.buffer[: self.run.wanted], key=lambda flight: flight.client)
        left = sorted([*self.buffer[self.run.wanted :], *self.working], key=lambda flight: flight.number)
        clients, rounds = (np.array([getattr(f, part) for f in counted], np.int64) for part in ("client", "round"))
        attendance = Attendance(clients, rounds, self.asked, self.lost, self.time - self.begun, self.time)
        return Timeline(
            self.time,
            np.array([flight.client for flight in left], np.int64),
            np.array([flight.round for flight in left], np.int64),
            np.array([flight.arrival for flight in left], np.float64),
            np.array([flight.end for flight in left], np.float64),
        ), attendance

    def _there(self, time: float) -> np.ndarray:
        stretch = stretch_of(self.run.clock, time)
        if stretch not in self.there:
            self.there[stretch] = those_there(self.run.clock, self.run.seed, stretch, len(self.run.able))
        return self.there[stretch]

    def _durations(self, before: int) -> np.ndarray:
        """Seconds [client]; a client that was lost and starts again on the same model has another draw."""
        run = self.run
        if before >= PATIENCE:
            raise ConfigError(
                f"round {self.round} never ends: fewer than clients_per_round = {run.wanted} clients answer within "
                f"the deadline of {run.clock.deadline:g} s; set a longer clock.deadline"
            )
        if before not in self.seconds:
            when = (self.round, before) if before else (self.round,)
            self.seconds[before] = durations(run.clock, run.seed, run.work, *when)
        return self.seconds[before]


def draw(source: np.random.Generator, candidates: np.ndarray, number: int) -> np.ndarray:
    """So many of the candidates, or all if they are fewer, rising."""
    return np.sort(source.choice(candidates, min(number, len(candidates)), replace=False))


def pick(source: np.random.Generator, free: np.ndarray, number: int) -> np.ndarray:
    """So many of the free clients [client], or all; few are found by trying, without a pass over all clients."""
    tried = source.integers(len(free), size=TRIES) if number == 1 else np.empty(0, np.int64)
    free_ones = tried[free[tried]]
    return free_ones[:1] if len(free_ones) else draw(source, np.flatnonzero(free), number)
