"""What the ranks of one run have to agree on: which runs are left, from which states they go on, and what came out.

The first rank decides and the others follow. All of it travels as JSON or as plain arrays.
"""

import json
import platform
from collections.abc import Mapping, Sequence

import numpy as np
import torch

import fedgma
from fedgma.errors import ConfigError
from fedgma.experiments.materials import Materials
from fedgma.experiments.plan import Planned, missing, pack
from fedgma.records.checkpoints import Checkpoint
from fedgma.records.format import Record
from fedgma.records.reader import read_rounds
from fedgma.training.ranks import Ranks, from_first


def fleets_of(planned: Sequence[Planned], materials: Materials, ranks: Ranks) -> list[list[Planned]]:
    """The runs that are left, in fleets; those that the first rank sees, on every rank."""
    packed = pack(missing(planned), materials) if ranks.first else []
    names = [[run.fingerprint for run in members] for members in packed]
    facts = {"versions": _versions(), "runs": sorted(run.fingerprint for run in planned)}
    told = json.loads(from_first(ranks, json.dumps({**facts, "fleets": names}).encode()))
    for name, value in facts.items():
        if told[name] != value:
            what = "versions of fedgma, torch or Python" if name == "versions" else "data or model files"
            raise ConfigError(
                f"rank {ranks.rank} on {platform.node()} has other {what} than the first rank; make them the same"
            )
    by_name = {run.fingerprint: run for run in planned}
    shared = [[by_name[name] for name in members] for members in told["fleets"]]
    lanes = max(
        (sum(run.settings.clients_per_round or 10 for run in members) for members in shared), default=ranks.size
    )
    if ranks.size > lanes:
        raise ConfigError(
            f"{ranks.size} ranks are more than the {lanes} clients that train in a round; use --ranks {lanes}"
        )
    return shared


def _versions() -> list[str]:
    return [fedgma.__version__, torch.__version__, platform.python_version()]


def share_checkpoints(ranks: Ranks, points: Sequence[Checkpoint | None]) -> list[Checkpoint | None]:
    """The checkpoints of the first rank, on every rank; None for a run without one."""
    if ranks.size == 1:
        return list(points)
    from safetensors.numpy import load, save

    rounds = [None if point is None else point.round for point in points]
    rounds = json.loads(from_first(ranks, json.dumps(rounds).encode()))
    shared: list[Checkpoint | None] = []
    for round, point in zip(rounds, points, strict=True):
        if round is None:
            shared.append(None)
            continue
        state: Mapping[str, np.ndarray] = {} if point is None else point.state
        data = save({name: np.asarray(value, order="C") for name, value in state.items()}) if ranks.first else b""
        shared.append(Checkpoint(round, load(from_first(ranks, data))))
    return shared


def share_lines(
    ranks: Ranks, planned: Sequence[Planned], lines: Mapping[str, list[Record]]
) -> tuple[list[Planned], Mapping[str, list[Record]]]:
    """Runs, and the lines of their rounds where they have no folder; the other ranks have no folders."""
    shared: dict[str, list[Record]] = {}
    if ranks.first and ranks.size > 1:
        shared = {**lines, **{run.fingerprint: read_rounds(run.folder) for run in planned if run.folder is not None}}
    shared = json.loads(from_first(ranks, json.dumps(shared).encode()))
    if ranks.first:
        return list(planned), lines
    return [run._replace(folder=None) for run in planned], shared
