"""A federation on a device: its splits as pools, and the indices that say which client holds what."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from fedgma.datasets.sets import Dataset, Source
from fedgma.errors import DataError
from fedgma.partitions import Index, Labels, Partition
from fedgma.pools import Pool, View, channel_statistics, make_pool, normalised
from fedgma.seeds import generator
from fedgma.shifts import Colour, Rotation, Shift, client_angles, client_colouring, held_out_colouring
from fedgma.splits import hold_out, matching_tests
from fedgma.views import Rotated, coloured

__all__ = ["Federation", "Pool", "federate", "owners"]


@dataclass(frozen=True, eq=False)
class Federation:
    """Everything a run needs of its data.

    With a feature shift, `test` is the held-out environment and `more_tests["seen"]` shows the same images as the
    training clients would; the indices of `client_tests` hold for both.
    """

    name: str
    train: Pool
    test: Pool
    clients: tuple[Index, ...]  # training samples of each client, disjoint
    validation: tuple[Index, ...]  # held out of each client's own data; may be empty
    client_tests: tuple[Index, ...] | None = None  # into test, with the client's class mix
    more_tests: Mapping[str, Pool] = field(default_factory=dict)
    source: Source | None = None
    notes: tuple[str, ...] = ()


class Views(NamedTuple):
    """How the training split, the held-out environment and the in-distribution copy of the test split are seen."""

    train: View
    test: View
    seen: View


def federate(
    dataset: Dataset,
    partition: Partition,
    *,
    shift: Shift | None = None,
    validation: float = 0.0,
    client_test_size: int = 0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Federation:
    """Put a data set, a partition of its training samples and a feature shift on a device.

    `shift` defaults to the one that belongs to the data set; `validation` is the share held out of each client, and
    `client_test_size` above 0 gives every client a test set of that size.

    >>> from fedgma.datasets import load
    >>> from fedgma.partitions import label_skew
    >>> mini = load("fmnist-mini")
    >>> fed = federate(mini, label_skew(mini.train.y, 100), validation=0.1)
    >>> len(fed.clients), len(fed.clients[0]), len(fed.validation[0])
    (100, 90, 10)
    """
    rest, held = hold_out(partition, validation, dataset.train.y, seed=seed)
    tests = None
    if client_test_size:
        tests = matching_tests(partition, dataset.train.y, dataset.test.y, size=client_test_size, seed=seed)
    pools = _pools(dataset, partition, dataset.shift if shift is None else shift, seed)
    placed = {name: pool.to(device) for name, pool in pools.items()}
    train, test = placed.pop("train"), placed.pop("test")
    notes = (*dataset.notes, *partition.notes)
    return Federation(dataset.name, train, test, rest.clients, held, tests, placed, dataset.source, notes)


def owners(partition: Partition, samples: int) -> Index:
    """The client of each sample; client 0 for samples that nobody holds.

    >>> owners(Partition((np.array([2]), np.array([0, 1]))), 4).tolist()
    [1, 1, 0, 0]
    """
    owner = np.zeros(samples, np.int64)
    for client, index in enumerate(partition.clients):
        owner[index] = client
    return owner


def _pools(dataset: Dataset, partition: Partition, shift: Shift | None, seed: int) -> dict[str, Pool]:
    """All pools of a federation on the CPU, normalised by what the training clients see."""
    classes, clients = len(dataset.classes), len(partition.clients)
    views = None if shift is None else _views(shift, dataset, clients, seed)
    home = owners(partition, len(dataset.train.y))
    pools = {"train": make_pool(dataset.train, classes, home=home, view=views and views.train)}
    pools["test"] = make_pool(dataset.test, classes, view=views and views.test)
    if views is not None:
        visited = generator(seed, "seen").integers(0, clients, len(dataset.test.y))
        pools["seen"] = replace(pools["test"], home=torch.from_numpy(visited), view=views.seen)  # images are shared
    for name, split in dataset.more_tests.items():
        pools[name] = make_pool(split, classes)
    mean, std = channel_statistics(pools["train"])
    return {name: normalised(pool, mean, std) for name, pool in pools.items()}


def _views(shift: Shift, dataset: Dataset, clients: int, seed: int) -> Views:
    if isinstance(shift, Colour):
        return _colour_views(shift, dataset, clients, seed)
    return _rotation_views(shift, clients)


def _colour_views(shift: Colour, dataset: Dataset, clients: int, seed: int) -> Views:
    channels = dataset.train.x.shape[1]
    if channels != 1:
        raise DataError(f"only grey images can be coloured, but {dataset.name} has {channels} channels")
    classes = len(dataset.classes)

    def draw(labels: Labels, part: str) -> View:
        return coloured(client_colouring(shift, labels, clients, classes, seed=seed, part=part))

    test = coloured(held_out_colouring(shift, dataset.test.y, classes, seed=seed))
    return Views(draw(dataset.train.y, "train"), test, draw(dataset.test.y, "test"))


def _rotation_views(shift: Rotation, clients: int) -> Views:
    clients_view = Rotated(torch.from_numpy(client_angles(shift, clients)))
    return Views(clients_view, Rotated(torch.tensor([shift.test], dtype=torch.float32)), clients_view)
