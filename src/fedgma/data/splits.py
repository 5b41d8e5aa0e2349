"""Each client's samples: a partition, held-out validation samples, tests with the client's class mix (numpy only)."""

from typing import Any

import numpy as np

from fedgma.data.files.dataset import Dataset
from fedgma.data.partitions import Index, Labels, Partition, split
from fedgma.errors import ConfigError, DataError
from fedgma.seeds import generator


def divide(dataset: Dataset, name: str, clients: int | None = None, *, seed: int = 0, **settings: Any) -> Partition:
    """The partition of that name of a data set's training samples; `natural` uses owner ids instead of labels.

    >>> from fedgma.data.files import load
    >>> divide(load("fmnist-mini"), "label_skew", 50, classes_per_client=2).sizes.tolist() == [200] * 50
    True
    """
    if name != "natural":
        if clients is None:
            raise ConfigError(f"partition {name!r} needs a number of clients; set `clients`")
        return split(name, _labels(dataset, name), clients, seed=seed, **settings)
    if dataset.train.client is None:
        raise DataError(f"the natural partition needs an owner id for each sample, but {dataset.name} has none")
    return split(name, dataset.train.client, clients, seed=seed, **settings)


def _labels(dataset: Dataset, partition: str) -> Labels:
    """What a partition divides by: the classes; without classes the owners, for `dirichlet`; nothing if neither."""
    train = dataset.train
    if dataset.target == "class":
        return train.y
    if partition == "dirichlet" and train.client is not None:
        return train.client
    if partition in ("label_skew", "dirichlet", "client_dirichlet"):
        others = "iid, quantity" + ("" if train.client is None else ", natural, dirichlet (by owner)")
        raise ConfigError(
            f"partition {partition!r} divides samples by their class, and {dataset.name} has none; use {others}"
        )
    return np.zeros(len(train.y), np.int64)


def strata(dataset: Dataset) -> Labels:
    """What a share of the samples is drawn evenly from: the classes, or all samples together."""
    return dataset.train.y if dataset.target == "class" else np.zeros(len(dataset.train.y), np.int64)


def hold_out(
    partition: Partition, share: float, labels: Labels, *, seed: int = 0
) -> tuple[Partition, tuple[Index, ...]]:
    """Hold out a share of every client's samples, stratified by class; every client keeps at least one sample.

    Returns the partition without these samples, and the samples of each client that were held out.

    >>> y = np.array([0, 0, 1, 1] * 5)
    >>> rest, held_out = hold_out(Partition((np.arange(20),)), 0.2, y)
    >>> rest.sizes.tolist(), np.bincount(y[held_out[0]]).tolist()
    ([16], [2, 2])
    """
    if not 0 <= share < 1:
        raise ConfigError(f"the validation share must be at least 0 and below 1, got {share}")
    chosen = [
        _choose_evenly(index, share, labels, generator(seed, "validation", n))
        for n, index in enumerate(partition.clients)
    ]
    rest = tuple(index[~mask] for index, mask in zip(partition.clients, chosen, strict=True))
    held_out = tuple(index[mask] for index, mask in zip(partition.clients, chosen, strict=True))
    return partition._replace(clients=rest), held_out


def _choose_evenly(index: Index, share: float, labels: Labels, rng: np.random.Generator) -> np.ndarray:
    """A boolean mask that selects about share * n samples, evenly spaced among the samples sorted by class."""
    order = rng.permutation(len(index))
    order = order[np.argsort(labels[index[order]], kind="stable")]
    steps = np.floor(np.arange(len(index) + 1) * share + rng.random())
    chosen = order[np.diff(steps) > 0][: max(len(index) - 1, 0)]
    mask = np.zeros(len(index), bool)
    mask[chosen] = True
    return mask


def matching_tests(
    partition: Partition, labels: Labels, test_labels: Labels, *, size: int = 200, seed: int = 0
) -> tuple[Index, ...]:
    """Up to `size` test samples for each client, with the class mix of its training data.

    Drawn without replacement for each client; clients may share test samples. If the test set has too few samples of a
    class, the client's test set is smaller, in the same mix.

    >>> y, test_y = np.array([0, 0, 0, 1]), np.repeat([0, 1], 50)
    >>> test_y[matching_tests(Partition((np.arange(4),)), y, test_y, size=8)[0]].tolist()
    [0, 0, 0, 0, 0, 0, 1, 1]
    """
    if size < 1:
        raise ConfigError(f"a client's test set needs at least 1 sample, got {size}")
    classes = int(max(labels.max(initial=0), test_labels.max(initial=0))) + 1
    rng = generator(seed, "client tests")
    members = [rng.permutation(np.flatnonzero(test_labels == c)) for c in range(classes)]
    available = np.array([len(index) for index in members])
    tests = []
    for index in partition.clients:
        counts = _apportion(np.bincount(labels[index], minlength=classes), available, size)
        starts = rng.integers(0, np.maximum(available, 1))  # of a window in each shuffled class
        windows = [members[c][(starts[c] + np.arange(counts[c])) % available[c]] for c in np.flatnonzero(counts)]
        tests.append(np.sort(np.concatenate([np.empty(0, np.int64), *windows])))
    return tuple(tests)


def client_tests(dataset: Dataset, partition: Partition, *, size: int, seed: int = 0) -> tuple[Index, ...] | None:
    """Each client's test samples: with its class mix; without classes, of the owners whose samples it has.

    If a user's test samples have owners (`own_tests`), and no two clients share an owner, they are those of its owners
    too. None if the data set has neither classes nor owners.
    """
    train, test = dataset.train, dataset.test
    if dataset.target == "class" and not (dataset.own_tests and _keeps_owners(partition, train.client)):
        return matching_tests(partition, train.y, test.y, size=size, seed=seed)
    if train.client is None or test.client is None:
        return None
    rng, owners = generator(seed, "client tests"), train.client
    held = [np.flatnonzero(np.isin(test.client, owners[index])) for index in partition.clients]
    return tuple(np.sort(rng.permutation(samples)[:size]) for samples in held)


def _keeps_owners(partition: Partition, owners: Labels | None) -> bool:
    """Whether no two clients have samples of one owner."""
    if owners is None:
        return False
    held = [np.unique(owners[index]) for index in partition.clients]
    return sum(map(len, held)) == len(np.unique(np.concatenate(held)))


def _apportion(mix: Index, available: Index, size: int) -> Index:
    """Integers in proportion to `mix`, at most `available`, that sum to `size` if enough samples are available."""
    if not mix.any():
        return np.zeros_like(mix)
    shares = mix / mix.sum()
    largest_size = np.min(available[mix > 0] / shares[mix > 0])  # the largest set that keeps the mix
    exact = shares * min(size, largest_size)
    counts = np.floor(exact + 1e-9).astype(np.int64)
    missing = round(exact.sum()) - int(counts.sum())
    order = np.argsort(counts - exact, kind="stable")[:missing]
    counts[order] += 1
    capped: Index = np.minimum(counts, available)
    return capped
