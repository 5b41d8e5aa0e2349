"""The pools that runs are evaluated on: those that several runs share, and each client's own samples of them."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedgma.data.pools import Pool
from fedgma.simulation.spec import RunSpec
from fedgma.training.same_pools import distinct


def client_tests(spec: RunSpec, device: torch.device) -> Tensor | None:
    """The clients' test samples as one table, padded with -1."""
    samples = getattr(spec.federation, "client_tests", None) if spec.per_client else None
    if samples is None:
        return None
    table = np.full((len(samples), max(map(len, samples))), -1, np.int64)
    for client, index in enumerate(samples):
        table[client, : len(index)] = index
    return torch.from_numpy(table).to(device)


def test_pools(tests: Sequence[dict[str, Pool]], runs: Sequence[int]) -> list[tuple[str, Pool, np.ndarray]]:
    """Every test pool to evaluate these runs on, with those that share it; `tests` are the pools of all runs."""
    groups: dict[tuple[str, int], tuple[Pool, list[int]]] = {}
    for run in runs:
        for name, pool in tests[run].items():
            groups.setdefault((name, id(pool)), (pool, []))[1].append(run)
    return [(name, pool, np.array(rows)) for (name, _), (pool, rows) in groups.items()]


def shared_tests(specs: Sequence[RunSpec]) -> tuple[dict[str, Pool], ...]:
    """The test pools of each run; equal pools become one object, so that runs are evaluated on them together."""
    named = [spec.test_pools() for spec in specs]
    pools, position = distinct([pool for tests in named for pool in tests.values()])
    positions = iter(position.tolist())
    return tuple({name: pools[next(positions)] for name in tests} for tests in named)
