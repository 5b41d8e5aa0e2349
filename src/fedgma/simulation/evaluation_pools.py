"""The pools that the runs of a fleet are evaluated on, and the test samples of each client."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedgma.data.pools import Pool
from fedgma.simulation.spec import RunSpec
from fedgma.training.same_pools import distinct


def shared_tests(specs: Sequence[RunSpec]) -> tuple[dict[str, Pool], ...]:
    """The test pools of each run; equal pools become one object, so that runs are evaluated on them together."""
    named = [spec.test_pools() for spec in specs]
    pools, position = distinct([pool for tests in named for pool in tests.values()])
    positions = iter(position.tolist())
    return tuple({name: pools[next(positions)] for name in tests} for tests in named)


def pools_of(tests: Sequence[dict[str, Pool]], runs: list[int]) -> list[tuple[str, Pool, np.ndarray]]:
    """Every test pool of these runs, with the runs that share it."""
    groups: dict[tuple[str, int], tuple[Pool, list[int]]] = {}
    for run in runs:
        for name, pool in tests[run].items():
            groups.setdefault((name, id(pool)), (pool, []))[1].append(run)
    return [(name, pool, np.array(rows)) for (name, _), (pool, rows) in groups.items()]


def client_table(spec: RunSpec, device: torch.device) -> Tensor | None:
    """The clients' test samples as one table, padded with -1; None where they are not evaluated."""
    samples = getattr(spec.federation, "client_tests", None) if spec.per_client else None
    if samples is None:
        return None
    table = np.full((len(samples), max(map(len, samples))), -1, np.int64)
    for client, index in enumerate(samples):
        table[client, : len(index)] = index
    return torch.from_numpy(table).to(device)
