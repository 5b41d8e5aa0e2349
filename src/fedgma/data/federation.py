"""A federation on a device: its splits as pools, and the sample indices of each client."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedgma.data.client_views import Coloured, Rotated, colour_view
from fedgma.data.files.dataset import Dataset, Source
from fedgma.data.partitions import Index, Labels, Partition
from fedgma.data.pools import ImagePool, Moments, View, channel_statistics, image_moments, view_moments
from fedgma.data.shifts import Colour, Rotation, Shift, client_angles, client_colouring, held_out_colouring
from fedgma.data.splits import client_tests, hold_out, strata
from fedgma.errors import DataError
from fedgma.seeds import generator

__all__ = ["Federation", "ImagePool", "Placed", "client_of_sample", "federate", "place"]


@dataclass(frozen=True, eq=False)
class Federation:
    """The data of a run.

    With a feature shift, `test` is the held-out environment, and `more_tests["seen"]` holds the same images as the
    training clients see them; the indices of `client_tests` are valid for both. `more_tests["validation"]` holds the
    validation samples of all clients, each as its client sees it.
    """

    name: str
    train: ImagePool
    test: ImagePool
    clients: tuple[Index, ...]  # training samples of each client; disjoint, unless the partition shares them
    validation: tuple[Index, ...]  # held out of each client's samples; may be empty
    client_tests: tuple[Index, ...] | None = None  # indices into `test`, with the client's class mix
    more_tests: Mapping[str, ImagePool] = field(default_factory=dict)
    source: Source | None = None
    notes: tuple[str, ...] = ()


class Placed(NamedTuple):
    """A data set on a device; several federations can share it."""

    dataset: Dataset
    splits: Mapping[str, tuple[Tensor, Tensor]]  # images and labels of train, test and further tests
    moments: Moments | None  # of the training images; None for features


class Views(NamedTuple):
    """Views of the training split, of the test split in the held-out environment, and of the test split for clients."""

    train: View
    test: View
    seen: View


def place(dataset: Dataset, device: torch.device | str = "cpu") -> Placed:
    """Copy a data set to a device once, for several federations (partitions, shifts, seeds)."""
    splits = {}
    for name, split in {"train": dataset.train, "test": dataset.test, **dataset.more_tests}.items():
        # np.array copies: a cached split is a read-only memory map, which torch cannot use
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
    """Make a federation from a data set, a partition of its training samples and a feature shift.

    `shift` defaults to the data set's shift. `validation` is the share held out of each client's samples.
    `client_test_size` above 0 gives every client a test set of that size. `device` applies to a `Dataset`; a `Placed`
    one stays on its device, and its images are shared.

    >>> from fedgma.data.files import load
    >>> from fedgma.data.partitions import label_skew
    >>> mini = load("fmnist-mini")
    >>> fed = federate(mini, label_skew(mini.train.y, 100), validation=0.1)
    >>> len(fed.clients), len(fed.clients[0]), len(fed.validation[0])
    (100, 90, 10)
    """
    placed = data if isinstance(data, Placed) else place(data, device)
    dataset = placed.dataset
    rest, held_out = hold_out(partition, validation, strata(dataset), seed=seed)
    tests = client_tests(dataset, partition, size=client_test_size, seed=seed) if client_test_size else None
    pools = _pools(placed, partition, dataset.shift if shift is None else shift, seed)
    train, test = pools.pop("train"), pools.pop("test")
    if any(map(len, held_out)):
        pools["validation"] = train.subset(torch.from_numpy(np.sort(np.concatenate(held_out))).to(train.y.device))
    notes = (*dataset.notes, *partition.notes)
    return Federation(dataset.name, train, test, rest.clients, held_out, tests, pools, dataset.source, notes)


def client_of_sample(partition: Partition, samples: int) -> Index:
    """The client of each sample; 0 for samples without a client.

    >>> client_of_sample(Partition((np.array([2]), np.array([0, 1]))), 4).tolist()
    [1, 1, 0, 0]
    """
    client_of = np.zeros(samples, np.int64)
    for client, index in enumerate(partition.clients):
        client_of[index] = client
    return client_of


def _pools(placed: Placed, partition: Partition, shift: Shift | None, seed: int) -> dict[str, ImagePool]:
    """All pools of a federation, normalised by the statistics of the training images as the clients see them."""
    dataset, clients = placed.dataset, len(partition.clients)
    views = None if shift is None else _views(shift, dataset, clients, seed)
    pools = {name: _make_pool(x, y, len(dataset.classes)) for name, (x, y) in placed.splits.items()}
    client_of = torch.from_numpy(client_of_sample(partition, len(dataset.train.y)))
    pools["train"] = replace(pools["train"], client_of=client_of)
    if views is not None:
        shown_by = generator(seed, "seen").integers(0, clients, len(dataset.test.y))
        pools["train"] = replace(pools["train"], view=views.train)
        pools["seen"] = replace(pools["test"], client_of=torch.from_numpy(shown_by), view=views.seen)
        pools["test"] = replace(pools["test"], view=views.test)
    device = placed.splits["train"][0].device
    pools = {name: pool.to(device) for name, pool in pools.items()}
    mean, std = _statistics(pools["train"], placed.moments)
    return {name: replace(pool, mean=mean, std=std) for name, pool in pools.items()}


def _make_pool(x: Tensor, y: Tensor, classes: int) -> ImagePool:
    return ImagePool(x, y, classes, torch.zeros(len(y), dtype=torch.int64), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))


def _statistics(train: ImagePool, moments: Moments | None) -> tuple[Tensor, Tensor]:
    """Channel mean and deviation of the training images as their clients see them."""
    if moments is None:
        return train.mean, train.std
    if isinstance(train.view, Coloured):
        moments = train.view.to("cpu").moments(moments, train.y.cpu(), train.client_of.cpu())
    elif train.view is not None:
        moments = view_moments(train)
    mean, std = channel_statistics(moments)
    return mean.to(train.x.device), std.to(train.x.device)


def _views(shift: Shift, dataset: Dataset, clients: int, seed: int) -> Views:
    if dataset.train.x.dtype != np.uint8:
        raise DataError(
            f"colour and rotation shifts need uint8 images, but {dataset.name} holds {dataset.train.x.dtype} features"
        )
    if isinstance(shift, Colour):
        if dataset.target != "class":
            raise DataError(f"the colour shift depends on the class of an image, and {dataset.name} has no classes")
        return _colour_views(shift, dataset, clients, seed)
    return _rotation_views(shift, clients)


def _colour_views(shift: Colour, dataset: Dataset, clients: int, seed: int) -> Views:
    if dataset.train.x.shape[1] != 1:
        channels = dataset.train.x.shape[1]
        raise DataError(f"only grey images can be coloured, but {dataset.name} has {channels} channels")
    classes = len(dataset.classes)

    def draw(labels: Labels, part: str) -> View:
        return colour_view(client_colouring(shift, labels, clients, classes, seed=seed, part=part))

    test = colour_view(held_out_colouring(shift, dataset.test.y, classes, seed=seed))
    return Views(draw(dataset.train.y, "train"), test, draw(dataset.test.y, "test"))


def _rotation_views(shift: Rotation, clients: int) -> Views:
    clients_view = Rotated(torch.from_numpy(client_angles(shift, clients)))
    return Views(clients_view, Rotated(torch.tensor([shift.test], dtype=torch.float32)), clients_view)
