"""Statistics of how uneven a partition is (numpy only)."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedgma.data.partitions import Index, Labels, Partition

Floats = npt.NDArray[np.float64]


class Skew(NamedTuple):
    """Statistics of one partition; distances in [0, 1] are between a client's class mix and the pooled one."""

    clients: int
    samples: int
    size_min: int
    size_median: float
    size_max: int
    size_gini: float  # 0: all equal, 1: one client has everything
    effective_clients: float  # 1 / sum of squared shares of the samples
    classes_min: int
    classes_mean: float
    classes_max: int
    jensen_shannon_mean: float
    jensen_shannon_max: float
    hellinger_mean: float
    hellinger_max: float


def class_counts(partition: Partition, labels: Labels, classes: int) -> Index:
    """Samples of each class at each client: [client, class].

    >>> class_counts(Partition((np.array([0]), np.array([1, 2]))), np.array([1, 0, 1]), 2).tolist()
    [[0, 1], [1, 1]]
    """
    client_of = np.repeat(np.arange(len(partition.clients)), partition.sizes)
    index = np.concatenate([np.empty(0, np.int64), *partition.clients])
    flat = np.bincount(client_of * classes + labels[index], minlength=len(partition.clients) * classes)
    return flat.reshape(len(partition.clients), classes)


def measure(partition: Partition, labels: Labels, classes: int) -> Skew:
    """Compute all statistics of a partition.

    >>> y = np.array([0, 0, 1, 1])
    >>> skew = measure(Partition((np.array([0, 1]), np.array([2, 3]))), y, 2)
    >>> skew.effective_clients, skew.classes_mean, round(skew.jensen_shannon_mean, 3)
    (2.0, 1.0, 0.558)
    """
    counts = class_counts(partition, labels, classes)
    sizes = counts.sum(axis=1)
    nonempty = counts[sizes > 0]
    mixes, pooled = nonempty / nonempty.sum(axis=1, keepdims=True), nonempty.sum(axis=0) / nonempty.sum()
    js_distances, hellinger_distances = jensen_shannon(mixes, pooled), hellinger_distance(mixes, pooled)
    present = (counts > 0).sum(axis=1)
    return Skew(
        clients=len(sizes),
        samples=int(sizes.sum()),
        size_min=int(sizes.min()),
        size_median=float(np.median(sizes)),
        size_max=int(sizes.max()),
        size_gini=gini(sizes),
        effective_clients=float(sizes.sum() ** 2 / (sizes.astype(float) ** 2).sum()),
        classes_min=int(present.min()),
        classes_mean=float(present.mean()),
        classes_max=int(present.max()),
        jensen_shannon_mean=float(js_distances.mean()),
        jensen_shannon_max=float(js_distances.max()),
        hellinger_mean=float(hellinger_distances.mean()),
        hellinger_max=float(hellinger_distances.max()),
    )


def jensen_shannon(mixes: Floats, pooled: Floats) -> Floats:
    """Jensen-Shannon distance (root of the divergence in bits) of each row from the pooled mix."""
    middle = (mixes + pooled) / 2
    to_middle = _relative_entropy(mixes, middle), _relative_entropy(np.broadcast_to(pooled, mixes.shape), middle)
    divergence = (to_middle[0] + to_middle[1]) / 2
    return np.sqrt(np.clip(divergence, 0, 1))


def hellinger_distance(mixes: Floats, pooled: Floats) -> Floats:
    """Hellinger distance of each row from the pooled mix.

    >>> hellinger_distance(np.array([[1.0, 0.0]]), np.array([0.0, 1.0])).tolist()
    [1.0]
    """
    distance: Floats = np.sqrt(((np.sqrt(mixes) - np.sqrt(pooled)) ** 2).sum(axis=1) / 2)
    return distance


def gini(sizes: Index) -> float:
    """Gini coefficient of client sizes.

    >>> gini(np.array([5, 5, 5])), gini(np.array([0, 0, 0, 8]))
    (0.0, 0.75)
    """
    ascending = np.sort(sizes).astype(float)
    rank = np.arange(1, len(ascending) + 1)
    return float(
        2 * (rank * ascending).sum() / (len(ascending) * ascending.sum()) - (len(ascending) + 1) / len(ascending)
    )


def _relative_entropy(p: Floats, q: Floats) -> Floats:
    """Relative entropy (Kullback-Leibler divergence) of each row of p from q, in bits."""
    ratio = np.divide(p, q, out=np.ones_like(q), where=(p > 0) & (q > 0))
    entropy: Floats = (p * np.log2(ratio)).sum(axis=1)
    return entropy
