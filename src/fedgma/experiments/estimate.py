"""What runs will take before they are trained: samples, time at the rate of a few short rounds, and memory."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import BYTES_AN_ENTRY, Planned, entries_of
from fedgma.experiments.play import play_fleet
from fedgma.experiments.settings import Settings
from fedgma.simulation import fleet as fleets
from fedgma.training.memory import CPU_BUDGET, CUDA_SHARE

PROBE_ROUNDS, PROBE_STEPS = 4, 4
PROBE_SECONDS = 5.0
MANY = 10_000  # rounds: the probe never comes to an evaluation
LONG = 1e12  # samples x parameters; less takes minutes on a CPU


class Estimate(NamedTuple):
    """What runs will take."""

    samples: int  # that are trained on, over all rounds and clients
    seconds: float  # without preparation
    memory: int  # bytes of the largest fleet, with its data


def samples_of(settings: Settings, materials: Materials) -> float:
    """The samples that a run trains on in a round: the mean over clients, times the clients of a round."""
    sizes = [len(index) for index in materials.federation(settings).clients]
    most = float("inf") if settings.local_steps is None else settings.local_steps * settings.batch_size
    each = sum(min(size * (settings.local_epochs or 1), most) for size in sizes) / len(sizes)
    return (settings.clients_per_round or 10) * each


def is_long(packed: Sequence[Sequence[Planned]], materials: Materials) -> bool:
    """Whether fleets will take more than a few minutes, and so are worth a measurement."""
    size = sum(
        _samples(members, materials) * entries_of(members[0].settings, materials) for members in packed if members
    )
    return size > LONG


def estimate(packed: Sequence[Sequence[Planned]], materials: Materials) -> Estimate:
    """What fleets will take; trains a few rounds of each."""
    samples = [_samples(members, materials) for members in packed]
    seconds = sum(count / rate(members, materials) for members, count in zip(packed, samples, strict=True))
    memory = max((_memory(members, materials) for members in packed), default=0)
    return Estimate(round(sum(samples)), seconds, memory)


def _samples(members: Sequence[Planned], materials: Materials) -> float:
    return sum(run.settings.rounds * samples_of(run.settings, materials) for run in members)


def _memory(members: Sequence[Planned], materials: Materials) -> int:
    """Bytes of a fleet while it trains: data, states of its runs, and the lanes that train at a time."""
    fleet = fleets.assemble([materials.spec(run.settings) for run in members], precision=materials.precision)
    entries = sum(shape.numel() for _, shape in fleet.seen)
    variates = sum(4 * len(spec.federation.clients) * spec.algorithm.arrays_of_a_client for spec in fleet.specs)
    pools = {id(pool): pool for pool in (*fleet.pools, *(p for tests in fleet.tests for p in tests.values()))}
    data = sum(array.numel() * array.element_size() for pool in pools.values() for array in (pool.x, pool.y))
    lanes = sum(spec.clients_per_round for spec in fleet.specs)
    share = min(1.0, lanes / fleet.chunk)
    return int(data + entries * (BYTES_AN_ENTRY * len(fleet.specs) + variates) + share * _budget(fleet))


def _budget(fleet: fleets.Fleet) -> float:
    if fleet.device.type != "cuda":
        return CPU_BUDGET
    return torch.cuda.get_device_properties(fleet.device).total_memory * CUDA_SHARE


def rate(members: Sequence[Planned], materials: Materials) -> float:
    """Samples a second of a fleet in rounds of a few steps, without the first round."""
    few = members if materials.device.type == "cuda" else members[:1]
    probe = [_short(run) for run in few]
    begun, trained, now = 0.0, 0.0, 0.0
    for played in play_fleet(probe, materials):
        now = time.monotonic()
        if played.line["round"] == 1:
            begun = now
            continue
        trained += samples_of(played.run.settings, materials)
        last = played.run is probe[-1]
        if last and (played.line["round"] > PROBE_ROUNDS or now - begun > PROBE_SECONDS):
            break
    return trained / max(now - begun, 1e-9)


def _short(run: Planned) -> Planned:
    """A run of few steps in a round and without evaluations, that is not recorded."""
    steps = min(run.settings.local_steps or PROBE_STEPS, PROBE_STEPS)
    update = {"rounds": MANY, "evaluate_every": MANY, "local_steps": steps}
    return run._replace(folder=None, settings=run.settings.model_copy(update=update))
