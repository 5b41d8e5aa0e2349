"""Which of the processes of one run (ranks) this one is, as its environment says.

fedgma's own launcher, torchrun and Slurm's srun set the environment. This module imports no torch.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from fedgma.errors import ConfigError

STORE = "FEDGMA_RANKS_STORE"  # a file through which ranks that fedgma started find each other
FIRST_PORT, PORTS = 20_000, 20_000  # where ranks of Slurm meet, by the number of the job


class Place(NamedTuple):
    """Which of the ranks a process is."""

    rank: int
    size: int
    local: int  # among those on its machine
    environment: dict[str, str]  # what torch.distributed reads
    store: str = ""  # a file, in place of an address


def find_place(environment: Mapping[str, str], wanted: int | None = None) -> Place | None:
    """The place that torchrun, Slurm's srun or fedgma gave this process; None if none of them started it.

    `wanted` is the number of ranks that the user asks for. Of those that fedgma started, there may be fewer by now.
    """
    place = _from_torchrun(environment) or _from_slurm(environment)
    if place is not None and not place.store and wanted is not None and wanted != place.size:
        raise ConfigError(
            f"--ranks {wanted}: {place.size} processes were started, of which this is one; leave --ranks out or start "
            f"{wanted}"
        )
    return place


def _from_torchrun(given: Mapping[str, str]) -> Place | None:
    if "RANK" not in given or "WORLD_SIZE" not in given:
        return None
    rank, size = _number(given, "RANK"), _number(given, "WORLD_SIZE")
    local = _number(given, "LOCAL_RANK") if "LOCAL_RANK" in given else rank
    if not 0 <= rank < size:
        raise ConfigError(f"RANK must be from 0 to WORLD_SIZE - 1, got RANK={rank} and WORLD_SIZE={size}")
    if STORE in given:
        return Place(rank, size, local, {}, given[STORE])
    if absent := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in given]:
        raise ConfigError(f"RANK and WORLD_SIZE are set, but not {' and '.join(absent)}; start the ranks with torchrun")
    return Place(rank, size, local, {name: given[name] for name in ("MASTER_ADDR", "MASTER_PORT")})


def _from_slurm(given: Mapping[str, str]) -> Place | None:
    """The place that srun gave; a batch script is not a rank, and has no SLURM_STEP_NUM_TASKS."""
    if "SLURM_PROCID" not in given or "SLURM_STEP_NUM_TASKS" not in given:
        return None
    rank, size = _number(given, "SLURM_PROCID"), _number(given, "SLURM_STEP_NUM_TASKS")
    nodes = given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST", "")
    port = FIRST_PORT + (_number(given, "SLURM_JOB_ID") if "SLURM_JOB_ID" in given else 0) % PORTS
    meeting = {
        "MASTER_ADDR": given.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": given.get("MASTER_PORT") or str(port),
    }
    return Place(rank, size, int(given.get("SLURM_LOCALID", "0")), meeting)


def first_host(nodes: str) -> str:
    """The first machine of a list as Slurm writes it.

    >>> first_host("gpu[03-05,7],big1"), first_host("a1,a2"), first_host("n[1-2]-ib")
    ('gpu03', 'a1', 'n1-ib')
    """
    if (match := re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\]([^,\[]*))?", nodes)) is None:
        raise ConfigError(f"expected a list of nodes in SLURM_STEP_NODELIST, got {nodes!r}; set MASTER_ADDR")
    return match[1] + (match[2] or "") + (match[3] or "")


def _number(given: Mapping[str, str], name: str) -> int:
    if not given[name].isdecimal():
        raise ConfigError(f"expected a whole number in {name}, got {given[name]!r}")
    return int(given[name])
