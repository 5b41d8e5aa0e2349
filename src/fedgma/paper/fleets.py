"""Pack the runs of an experiment into fleets for a GPU, and estimate their time from a short measurement."""

import json
import time
from collections.abc import Sequence
from typing import Any

from fedgma.errors import FedgmaError
from fedgma.experiments.estimate import rate
from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import Planned, pack
from fedgma.experiments.settings import Settings
from fedgma.paper.plans import samples
from fedgma.records.reader import flat
from fedgma.statistics.arms import frozen
from fedgma.statistics.labels import AGGREGATION

WORTH = 2_000_000  # samples; fewer take less time than the measurement


def pack_alike(runs: Sequence[Planned], materials: Materials, most: int | None = None) -> list[list[Planned]]:
    """Fleets of runs that share data set, model, rounds and client size, so that all lanes take equally many steps.

    `most` limits the number of runs in a fleet below what memory allows. The arms of a seed are adjacent, so that each
    finished fleet consists of pairs.
    """
    alike: dict[tuple[Any, ...], list[Planned]] = {}
    for run in runs:
        alike.setdefault(kind(run.settings), []).append(run)
    packed = [fleet for members in alike.values() for fleet in pack(sorted(members, key=_pairs_first), materials)]
    if most is None:
        return packed
    return [fleet[first : first + most] for fleet in packed for first in range(0, len(fleet), most)]


def playable(runs: Sequence[Planned], materials: Materials) -> tuple[list[Planned], list[str]]:
    """The runs whose data can be partitioned, and why the others cannot run: a data set may be too small."""
    groups: dict[tuple[Any, ...], list[Planned]] = {}
    for run in runs:
        groups.setdefault((*kind(run.settings), run.settings.partition.name), []).append(run)
    kept, reasons = [], []
    for members in groups.values():
        try:
            materials.federation(members[0].settings)
            kept += members
        except FedgmaError as error:
            reasons.append(f"{len(members)} runs of {members[0].settings.dataset} are left out: {error}")
    return kept, reasons


def _pairs_first(run: Planned) -> str:
    """Sort key that makes the arms of a seed adjacent."""
    settings = dict(flat(run.recorded))
    aggregation = json.dumps({name: settings[name] for name in AGGREGATION if name in settings})
    return frozen(settings, without=(*AGGREGATION, "seed")) + f"{settings['seed']:9d}" + aggregation


def kind(settings: Settings) -> tuple[Any, ...]:
    """The settings that the runs of a fleet share."""
    part = settings.partition
    return (
        settings.dataset,
        settings.model,
        settings.rounds,
        part.clients,
        settings.clients_per_round,
        settings.local_epochs,
    )


def estimate(packed: Sequence[Sequence[Planned]], materials: Materials) -> float | None:
    """Estimated seconds for the fleets without preparation; None if too short to be worth measuring."""
    samples_of: dict[str, int] = {}
    first: dict[str, Sequence[Planned]] = {}
    for members in packed:
        model = str(members[0].settings.model)
        first.setdefault(model, members)
        samples_of[model] = samples_of.get(model, 0) + sum(samples(run.settings) for run in members)
    if sum(samples_of.values()) < WORTH:
        return None
    return sum(samples_of[model] / rate(members, materials) for model, members in first.items())


class Clock:
    """Measures how long fleets took, and predicts the time of the next."""

    def __init__(self) -> None:
        self.begun = self.last = time.monotonic()
        self.rates: dict[str, float] = {}  # model -> samples a second, preparation included

    def played(self, members: Sequence[Planned]) -> str:
        """Record that a fleet has ended; return its time in words."""
        now = time.monotonic()
        took, self.last = max(now - self.last, 1e-9), now
        trained = sum(samples(run.settings) for run in members)
        self.rates[str(members[0].settings.model)] = trained / took
        what = f"{len(members)} runs of {members[0].settings.dataset}, {members[0].settings.rounds} rounds"
        return f"{what}, {took:.1f} s, {trained / took:,.0f} samples/s"

    def expected(self, members: Sequence[Planned]) -> float:
        """Seconds since the start at which a fleet would end; a model without a measured rate adds no time."""
        rate = self.rates.get(str(members[0].settings.model))
        ahead = 0.0 if rate is None else sum(samples(run.settings) for run in members) / rate
        return time.monotonic() - self.begun + ahead
