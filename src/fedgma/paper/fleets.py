"""An experiment's runs in fleets that suit a GPU, and how long they will take from a short measured rate."""

import json
import time
from collections.abc import Sequence
from typing import Any

from fedgma.errors import FedgmaError
from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import Planned, pack
from fedgma.experiments.play import play_fleet
from fedgma.experiments.settings import Settings
from fedgma.paper.plans import samples
from fedgma.records.reader import flat
from fedgma.statistics.arms import frozen
from fedgma.statistics.labels import AGGREGATION

PROBE_ROUNDS = 4
PROBE_SECONDS = 5.0
WORTH = 2_000_000  # samples; less than that is done before it is measured


def pack_alike(runs: Sequence[Planned], materials: Materials, most: int | None = None) -> list[list[Planned]]:
    """Fleets of runs that share data set, model, rounds and size of a client: all lanes have as many steps to take.

    `most` is the largest number of runs in a fleet, where memory alone would allow more. The arms of a seed stand
    together, so that a fleet that is played is a fleet of pairs.
    """
    alike: dict[tuple[Any, ...], list[Planned]] = {}
    for run in runs:
        alike.setdefault(kind(run.settings), []).append(run)
    packed = [fleet for members in alike.values() for fleet in pack(sorted(members, key=_pairs_first), materials)]
    if most is None:
        return packed
    return [fleet[first : first + most] for fleet in packed for first in range(0, len(fleet), most)]


def playable(runs: Sequence[Planned], materials: Materials) -> tuple[list[Planned], list[str]]:
    """The runs whose data can be dealt as they ask, and why not the others: a data set at hand may be too small."""
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
    """What the arms of a seed share, before what they do not."""
    settings = dict(flat(run.recorded))
    own = json.dumps({name: settings[name] for name in AGGREGATION if name in settings})
    return frozen(settings, without=(*AGGREGATION, "seed")) + f"{settings['seed']:9d}" + own


def kind(settings: Settings) -> tuple[Any, ...]:
    """What the runs of a fleet share."""
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
    """Seconds that the fleets will take, preparation left out; None where it is not worth measuring."""
    whole: dict[str, int] = {}
    first: dict[str, Sequence[Planned]] = {}
    for members in packed:
        model = str(members[0].settings.model)
        first.setdefault(model, members)
        whole[model] = whole.get(model, 0) + sum(samples(run.settings) for run in members)
    if sum(whole.values()) < WORTH:
        return None
    rates = {model: measure(members, materials) for model, members in first.items()}
    if any(rate is None for rate in rates.values()):
        return None
    return sum(whole[model] / rate for model, rate in rates.items() if rate)


def measure(members: Sequence[Planned], materials: Materials) -> float | None:
    """Samples a second in the first rounds of a fleet, the very first left out; None where there is but one round."""
    few = members if materials.device.type == "cuda" else members[:1]
    probe = [run._replace(folder=None) for run in few]
    begun, trained, now = 0.0, 0, 0.0
    for played in play_fleet(probe, materials):
        now = time.monotonic()
        if played.line["round"] == 1:
            begun = now
            continue
        trained += samples(played.run.settings) // played.run.settings.rounds
        last = played.run is probe[-1]
        if last and (played.line["round"] >= PROBE_ROUNDS or now - begun > PROBE_SECONDS):
            break
    return trained / (now - begun) if trained and now > begun else None


class Clock:
    """How long fleets took, and what that makes one expect of the next."""

    def __init__(self) -> None:
        self.begun = self.last = time.monotonic()
        self.rates: dict[str, float] = {}  # model -> samples a second, preparation included

    def played(self, members: Sequence[Planned]) -> str:
        """A fleet has ended: its time in words."""
        now = time.monotonic()
        took, self.last = max(now - self.last, 1e-9), now
        trained = sum(samples(run.settings) for run in members)
        self.rates[str(members[0].settings.model)] = trained / took
        what = f"{len(members)} runs of {members[0].settings.dataset}, {members[0].settings.rounds} rounds"
        return f"{what}, {took:.1f} s, {trained / took:,.0f} samples/s"

    def expected(self, members: Sequence[Planned]) -> float:
        """Seconds since the beginning at which a fleet would end; of a model that was not played yet, at once."""
        rate = self.rates.get(str(members[0].settings.model))
        ahead = 0.0 if rate is None else sum(samples(run.settings) for run in members) / rate
        return time.monotonic() - self.begun + ahead


def spoken(seconds: float) -> str:
    """A length of time as people say it.

    >>> spoken(40), spoken(400), spoken(40_000)
    ('40 s', '7 min', '11.1 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
