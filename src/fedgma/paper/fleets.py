"""An experiment's runs in fleets that suit a GPU, and how long they will take from a short measured rate."""

import time
from collections.abc import Sequence
from typing import Any

from fedgma.experiments.config import Settings
from fedgma.experiments.materials import Materials
from fedgma.experiments.play import Planned, pack, play_fleet
from fedgma.paper.plans import samples

PROBE_ROUNDS = 4
PROBE_SECONDS = 5.0
WORTH = 2_000_000  # samples; less than that is done before it is measured


def pack_alike(runs: Sequence[Planned], materials: Materials) -> list[list[Planned]]:
    """Fleets of runs that share data set, model, rounds and size of a client: all lanes have as many steps to take."""
    alike: dict[tuple[Any, ...], list[Planned]] = {}
    for run in runs:
        alike.setdefault(kind(run.settings), []).append(run)
    return [fleet for members in alike.values() for fleet in pack(members, materials)]


def kind(settings: Settings) -> tuple[Any, ...]:
    """What the runs of a fleet share."""
    part = settings.partition
    return (settings.dataset, settings.model, settings.rounds, part.clients, settings.cohort, settings.local_epochs)


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


def spoken(seconds: float) -> str:
    """A length of time as people say it.

    >>> spoken(40), spoken(400), spoken(40_000)
    ('40 s', '7 min', '11.1 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
