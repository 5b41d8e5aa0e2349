"""A federation on a device: its splits as pools, and the indices that say which client holds what."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgma.data.client_views import Coloured, Rotated, coloured
from fedgma.data.files.dataset import Dataset, Source
from fedgma.data.partitions import Index, Labels, Partition
from fedgma.data.pools import ImagePool, Moments, View, channel_statistics, image_moments, seen_moments
from fedgma.data.shifts import Colour, Rotation, Shift, client_angles, client_colouring, held_out_colouring
from fedgma.data.splits import hold_out, matching_tests
from fedgma.errors import DataError
from fedgma.seeds import generator

__all__ = ["Federation", "ImagePool", "Placed", "federate", "owners", "place"]


@dataclass(frozen=True, eq=False)
class Federation:
    """Everything a run needs of its data.

    With a feature shift, `test` is the held-out environment and `more_tests["seen"]` shows the same images as the
    training clients would; the indices of `client_tests` hold for both. `more_tests["validation"]` is what all clients
    held out, each in its own environment.
    """

    name: str
    train: ImagePool
    test: ImagePool
    clients: tuple[Index, ...]  # training samples of each client, disjoint
    validation: tuple[Index, ...]  # held out of each client's own data; may be empty
    client_tests: tuple[Index, ...] | None = None  # into test, with the client's class mix
    more_tests: Mapping[str, ImagePool] = field(default_factory=dict)
    source: Source | None = None
    notes: tuple[str, ...] = ()


class Placed(NamedTuple):
    """A data set on a device, which any number of federations can share."""

    dataset: Dataset
    splits: Mapping[str, tuple[Tensor, Tensor]]  # images and labels of train, test and further tests
    moments: Moments | None  # of the training images; None for features


class Views(NamedTuple):
    """How the training split, the held-out environment and the in-distribution copy of the test split are seen."""

    train: View
    test: View
    seen: View


def place(dataset: Dataset, device: torch.device | str = "cpu") -> Placed:
    """Put a data set on a device once, for many federations (other partitions, other shifts, other seeds)."""
    splits = {}
    for name, split in {"train": dataset.train, "test": dataset.test, **dataset.more_tests}.items():
        # np.array copies: a cached split is a read-only map of a file, which torch must not write into
        splits[name] = torch.from_numpy(np.array(split.x)), torch.from_numpy(np.array(split.y))
    images = splits["train"][0]
    moments = image_moments(images) if images.dtype == torch.uint8 else None
    return Placed(dataset, {name: (x.to(device), y.to(device)) for name, (x, y) in splits.items()}, moments)


def federate(
    data: Dataset | Placed,
    partition: Partition,
    *,
    shift: Shift | None = None,
    validation: float = 0.0,
    client_test_size: int = 0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Federation:
    """Make a federation of a data set, a partition of its training samples and a feature shift.

    `shift` defaults to the one that belongs to the data set; `validation` is the share held out of each client, and
    `client_test_size` above 0 gives every client a test set of that size. `device` is for a `Dataset`; a `Placed` one
    stays where it is, and its images are shared.

    >>> from fedgma.data.files import load
    >>> from fedgma.data.partitions import label_skew
    >>> mini = load("fmnist-mini")
    >>> fed = federate(mini, label_skew(mini.train.y, 100), validation=0.1)
    >>> len(fed.clients), len(fed.clients[0]), len(fed.validation[0])
    (100, 90, 10)
    """
    placed = data if isinstance(data, Placed) else place(data, device)
    dataset = placed.dataset
    rest, held = hold_out(partition, validation, dataset.train.y, seed=seed)
    tests = None
    if client_test_size:
        tests = matching_tests(partition, dataset.train.y, dataset.test.y, size=client_test_size, seed=seed)
    pools = _pools(placed, partition, dataset.shift if shift is None else shift, seed)
    train, test = pools.pop("train"), pools.pop("test")
    if any(map(len, held)):
        pools["validation"] = train.part(torch.from_numpy(np.sort(np.concatenate(held))).to(train.y.device))
    notes = (*dataset.notes, *partition.notes)
    return Federation(dataset.name, train, test, rest.clients, held, tests, pools, dataset.source, notes)


def owners(partition: Partition, samples: int) -> Index:
    """The client of each sample; client 0 for samples that nobody holds.

    >>> owners(Partition((np.array([2]), np.array([0, 1]))), 4).tolist()
    [1, 1, 0, 0]
    """
    owner = np.zeros(samples, np.int64)
    for client, index in enumerate(partition.clients):
        owner[index] = client
    return owner


def _pools(placed: Placed, partition: Partition, shift: Shift | None, seed: int) -> dict[str, ImagePool]:
    """All pools of a federation, normalised by what the training clients see."""
    dataset, clients = placed.dataset, len(partition.clients)
    views = None if shift is None else _views(shift, dataset, clients, seed)
    pools = {name: _plain(x, y, len(dataset.classes)) for name, (x, y) in placed.splits.items()}
    client_of = torch.from_numpy(owners(partition, len(dataset.train.y)))
    pools["train"] = replace(pools["train"], client_of=client_of)
    if views is not None:
        visited = generator(seed, "seen").integers(0, clients, len(dataset.test.y))
        pools["train"] = replace(pools["train"], view=views.train)
        pools["seen"] = replace(pools["test"], client_of=torch.from_numpy(visited), view=views.seen)
        pools["test"] = replace(pools["test"], view=views.test)
    device = placed.splits["train"][0].device
    pools = {name: pool.to(device) for name, pool in pools.items()}
    mean, std = _statistics(pools["train"], placed.moments)
    return {name: replace(pool, mean=mean, std=std) for name, pool in pools.items()}


def _plain(x: Tensor, y: Tensor, classes: int) -> ImagePool:
    return ImagePool(x, y, classes, torch.zeros(len(y), dtype=torch.int64), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))


def _statistics(train: ImagePool, moments: Moments | None) -> tuple[Tensor, Tensor]:
    """Channel mean and deviation of the training images as their clients see them."""
    if moments is None:
        return train.mean, train.std
    if isinstance(train.view, Coloured):
        moments = train.view.to("cpu").moments(moments, train.y.cpu(), train.client_of.cpu())
    elif train.view is not None:
        moments = seen_moments(train)
    mean, std = channel_statistics(moments)
    return mean.to(train.x.device), std.to(train.x.device)


def _views(shift: Shift, dataset: Dataset, clients: int, seed: int) -> Views:
    if dataset.train.x.dtype != np.uint8:
        raise DataError(
            f"colour and rotation need uint8 images, but {dataset.name} holds {dataset.train.x.dtype} features"
        )
    if isinstance(shift, Colour):
        return _colour_views(shift, dataset, clients, seed)
    return _rotation_views(shift, clients)


def _colour_views(shift: Colour, dataset: Dataset, clients: int, seed: int) -> Views:
    if dataset.train.x.shape[1] != 1:
        channels = dataset.train.x.shape[1]
        raise DataError(f"only grey images can be coloured, but {dataset.name} has {channels} channels")
    classes = len(dataset.classes)

    def draw(labels: Labels, part: str) -> View:
        return coloured(client_colouring(shift, labels, clients, classes, seed=seed, part=part))

    test = coloured(held_out_colouring(shift, dataset.test.y, classes, seed=seed))
    return Views(draw(dataset.train.y, "train"), test, draw(dataset.test.y, "test"))


def _rotation_views(shift: Rotation, clients: int) -> Views:
    clients_view = Rotated(torch.from_numpy(client_angles(shift, clients)))
    return Views(clients_view, Rotated(torch.tensor([shift.test], dtype=torch.float32)), clients_view)
