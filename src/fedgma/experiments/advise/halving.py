"""Successive halving of rules and learning rates within a time budget; pure arithmetic, without data or training.

A candidate is a rule at a pair of rates. In every stage each rule that is left has as many pairs, seeds and rounds as
the others, the plain mean included; it stays to the end. A stage of more rounds and seeds has fewer rules and pairs.
Time is counted in units: a round of a run is one, and an evaluation of a run is another.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Pair = tuple[float, float]  # client rate, server rate
Candidate = tuple[str, Pair]  # name of an arm and its rates

LAST = 10  # rounds at the end of a run, each of which is evaluated
LEAST_ROUNDS, LEAST_SHARE = 10, 1 / 8  # of a stage, and of the rounds that were asked for; fewer say nothing
CLIENT_FACTORS, SERVER_FACTORS = (0.4, 2.0), (0.5, 2.0)  # of the given rates
SEARCH = 0.55  # of the time; the rest is for the test
SHARES = (0.25, 0.15, 0.15)  # of the time, for each stage of the search
STEADY = 1.3  # by which the second half of a stage is taken to be slower than it was, for the next stage
LEAST_UNIT = 1e-9  # seconds
PAIRS = (9, 5, 3)  # of rates in the first stage, the first number that can be afforded


class Stage(NamedTuple):
    """Runs that are trained together and compared: every candidate with every seed."""

    candidates: tuple[Candidate, ...]
    seeds: tuple[int, ...]
    rounds: int
    final: bool = False  # on the test samples, not on validation samples

    @property
    def runs(self) -> int:
        """How many runs the stage has."""
        return len(self.candidates) * len(self.seeds)

    @property
    def arms(self) -> tuple[str, ...]:
        """The names of its arms, in order."""
        return tuple(dict.fromkeys(name for name, _ in self.candidates))

    @property
    def pairs(self) -> int:
        """How many pairs of rates an arm has."""
        return len(self.candidates) // max(1, len(self.arms))

    def as_object(self) -> dict[str, Any]:
        """The stage as a JSON object."""
        return {**self._asdict(), "candidates": [[name, *pair] for name, pair in self.candidates]}


def stage_of(content: Mapping[str, Any]) -> Stage:
    """The stage that a JSON object describes.

    >>> stage = Stage((("mean", (0.05, 1.0)),), (0, 1), 20)
    >>> stage_of(stage.as_object()) == stage
    True
    """
    candidates = tuple((str(name), (float(client), float(server))) for name, client, server in content["candidates"])
    return Stage(candidates, tuple(map(int, content["seeds"])), int(content["rounds"]), bool(content["final"]))


def rates_around(client: float, server: float) -> list[Pair]:
    """The given pair, then others around it: first with another client rate, then another server rate, then both.

    >>> rates_around(0.05, 1.0)[:5]
    [(0.05, 1.0), (0.02, 1.0), (0.1, 1.0), (0.05, 0.5), (0.05, 2.0)]
    """
    clients, servers = (
        [float(f"{rate * factor:.6g}") for factor in factors]
        for rate, factors in ((client, CLIENT_FACTORS), (server, SERVER_FACTORS))
    )
    both = [(c, s) for c in clients for s in servers]
    return [(client, server), *((c, server) for c in clients), *((client, s) for s in servers), *both]


def units(rounds: int, every: int | None = None) -> int:
    """What a run takes: its rounds, the evaluations of the last ten, and those of every `every`-th round before.

    >>> units(100), units(100, 10), units(3)
    (110, 119, 6)
    """
    earlier = 0 if every is None else max(0, rounds - LAST) // every
    return rounds + min(rounds, LAST) + earlier


class Pace(NamedTuple):
    """How fast runs train."""

    unit: float  # seconds of a unit
    start: float = 0.0  # seconds that a stage takes beyond its units, such as compilation for a GPU


def pace(began: float, ticks: Sequence[tuple[float, int]]) -> Pace:
    """The pace of a stage, out of times with the units that were done by then: that of its second half.

    What the first half took beyond it is the start. A single tick tells no start from units.

    >>> pace(0.0, [(10.0, 10), (11.0, 20)]), pace(0.0, [(11.0, 20)])
    (Pace(unit=0.13, start=8.4), Pace(unit=0.55, start=0.0))
    """
    end, total = ticks[-1]
    middle, half = next(tick for tick in ticks if 2 * tick[1] >= total)
    whole = (end - began) / total
    late = whole if half == total else STEADY * (end - middle) / (total - half)
    unit = max(min(whole, late), LEAST_UNIT)
    return Pace(unit, max(0.0, end - began - unit * total))


class Allowance(NamedTuple):
    """What a stage may take."""

    seconds: float  # after its start
    unit: float  # seconds of a unit, as measured
    most: int  # rounds
    every: int | None = None  # rounds between evaluations

    @property
    def least(self) -> int:
        """The fewest rounds that are worth training.

        >>> Allowance(1.0, 0.1, 200).least, Allowance(1.0, 0.1, 40).least, Allowance(1.0, 0.1, 3).least
        (25, 10, 3)
        """
        return min(self.most, max(LEAST_ROUNDS, int(LEAST_SHARE * self.most)))

    def rounds(self, runs: int) -> int:
        """The most rounds for which this many runs fit into the time; 0 if one round does not.

        >>> Allowance(100.0, 0.1, 200).rounds(10), Allowance(1.0, 0.1, 200).rounds(10)
        (90, 0)
        """
        each = self.seconds / (self.unit * runs)
        rounds = int(min(self.most, each))
        while rounds > 0 and units(rounds, self.every) > each:
            rounds -= 1
        return rounds


def first_stage(arms: Sequence[str], pairs: Sequence[Pair], seed: int, allowed: Allowance) -> Stage | None:
    """The first stage: all arms with as many pairs as fit, else the first arms with three; None if two do not fit.

    >>> stage = first_stage(["mean", "GMA", "TIES"], rates_around(0.05, 1.0), 0, Allowance(60.0, 0.1, 40))
    >>> stage.arms, stage.pairs, stage.rounds
    (('mean', 'GMA', 'TIES'), 9, 12)
    """
    choices = [(len(arms), count) for count in (len(pairs), *PAIRS) if count <= len(pairs)]
    choices += [(count, min(PAIRS[-1], len(pairs))) for count in range(len(arms) - 1, 1, -1)]
    for count, of_each in choices:
        rounds = allowed.rounds(count * of_each)
        if rounds >= allowed.least:
            return Stage(tuple((name, pair) for name in arms[:count] for pair in pairs[:of_each]), (seed,), rounds)
    return None


def next_stage(before: Stage, kept: Sequence[Candidate], seeds: Sequence[int], allowed: Allowance) -> Stage | None:
    """The candidates that are left, with more rounds or seeds; None if there is no time for more than before.

    If all `seeds` do not fit, the first of them are used.

    >>> before = Stage((("mean", (0.05, 1.0)), ("GMA", (0.05, 1.0))), (0,), 12)
    >>> next_stage(before, before.candidates, (0, 1), Allowance(8.0, 0.1, 200))
    Stage(candidates=(('mean', (0.05, 1.0)), ('GMA', (0.05, 1.0))), seeds=(0,), rounds=30, final=False)
    """
    for count in range(len(seeds), 0, -1):
        rounds = allowed.rounds(count * len(kept))
        if rounds > before.rounds or (rounds == before.rounds and count > len(before.seeds)):
            return Stage(tuple(kept), tuple(seeds[:count]), rounds)
    return None


def final_stage(
    ranked: Sequence[Candidate], given: Candidate | None, seeds: Sequence[int], allowed: Allowance
) -> Stage | None:
    """The test: the baseline, which comes first in `ranked`, one or two others, and the baseline at the given rates.

    Those that do not fit with all rounds are left out. If two arms do not fit, they have fewer rounds; None if these
    are fewer than the least.
    """
    extra = () if given is None or given in ranked else (given,)
    for arms in ((*ranked[:3], *extra), (*ranked[:2], *extra), ranked[:2]):
        rounds = allowed.rounds(len(arms) * len(seeds))
        if rounds == allowed.most:
            break
    return Stage(tuple(arms), tuple(seeds), rounds, final=True) if rounds >= allowed.least else None


def survivors(
    scores: Mapping[Candidate, float], base: str, arms: int, pairs: int, given: Pair | None = None
) -> tuple[Candidate, ...]:
    """The best pairs of the best arms; the arm `base` stays always, and so does the `given` pair of every arm.

    An arm is as good as its best pair.

    >>> scores = {("mean", (1, 1)): 50.0, ("GMA", (1, 1)): 60.0, ("GMA", (2, 1)): 70.0, ("TIES", (1, 1)): 65.0}
    >>> survivors(scores, "mean", 2, 1)
    (('mean', (1, 1)), ('GMA', (2, 1)))
    """
    ranked = sorted(scores, key=lambda candidate: scores[candidate], reverse=True)
    order = list(dict.fromkeys([base, *(name for name, _ in ranked)]))[:arms]
    kept: list[Candidate] = []
    for arm in order:
        of_arm = [pair for name, pair in ranked if name == arm]
        best = of_arm[:pairs]
        if given in of_arm and given not in best and pairs > 1:
            best = [*best[:-1], given]
        kept += [(arm, pair) for pair in best]
    return tuple(kept)
