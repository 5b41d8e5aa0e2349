"""Partitions of samples among clients: pure functions of (labels, settings, seed), numpy only; all terminate.

Every function returns a `Partition` in which each sample is used once; `client_dirichlet` alone lets clients share
samples. The seed of a partition is independent of the seed of a run.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedgma.errors import ConfigError
from fedgma.seeds import generator

Index = npt.NDArray[np.int64]
Labels = npt.NDArray[np.int64]

Divider = Callable[[Labels, int, np.random.Generator], Sequence[npt.ArrayLike]]  # a user's partition

REDRAWS = 10  # Dirichlet draws that leave a client too small, before samples are moved instead


class Partition(NamedTuple):
    """Sample indices of each client, ascending; `notes` lists repairs."""

    clients: tuple[Index, ...]
    notes: tuple[str, ...] = ()
    held_out: Index = np.empty(0, np.int64)  # samples of owners that are kept for testing

    @property
    def sizes(self) -> Index:
        """Samples of each client."""
        return np.array([len(index) for index in self.clients], np.int64)


def iid(labels: Labels, clients: int, *, seed: int = 0) -> Partition:
    """Shuffle and split into equal parts; the first clients get one sample more if there is a remainder.

    >>> iid(np.zeros(7, int), 3).sizes.tolist()
    [3, 2, 2]
    """
    _check_clients(labels, clients, 1)
    order = generator(seed, "iid").permutation(len(labels))
    return _partition(np.array_split(order, clients))


def label_skew(
    labels: Labels, clients: int, *, classes_per_client: int = 2, mode: str = "exact", seed: int = 0
) -> Partition:
    """Give each client k = `classes_per_client` shards of one class each.

    `exact` guarantees k distinct classes to every client. `shards` sorts by label, cuts into equal shards and assigns
    them at random (McMahan et al. 2017); a client may then hold fewer than k classes, or more where a shard spans two.

    >>> y = np.repeat(np.arange(4), 6)
    >>> [sorted(set(y[index].tolist())) for index in label_skew(y, 4, classes_per_client=2).clients]
    [[0, 2], [0, 1], [1, 3], [2, 3]]
    """
    _check_clients(labels, clients, 1)
    if mode == "exact":
        return _exact_skew(labels, clients, classes_per_client, seed)
    if mode == "shards":
        return _shard_skew(labels, clients, classes_per_client, seed)
    raise ConfigError(f"unknown mode {mode!r} of label_skew; known: exact, shards")


def _exact_skew(labels: Labels, clients: int, k: int, seed: int) -> Partition:
    names, counts = np.unique(labels, return_counts=True)
    if not 1 <= k <= len(names):
        raise ConfigError(f"classes_per_client must be between 1 and the {len(names)} classes present, got {k}")
    copies, rest = divmod(clients * k, len(names))
    if rest:
        raise ConfigError(
            f"{clients} clients of {k} classes make {clients * k} shards, which {len(names)} classes cannot share "
            "equally; choose clients x classes_per_client as a multiple of the class count, or mode='shards'"
        )
    if counts.min() < copies:
        raise ConfigError(
            f"class {names[counts.argmin()]} has {counts.min()} samples but is divided into {copies} shards; "
            "use fewer clients or fewer classes per client"
        )
    rng = generator(seed, "label_skew", "exact")
    shards = [np.array_split(rng.permutation(np.flatnonzero(labels == name)), copies) for name in names]
    assignment = _assign_classes(len(names), clients, k, rng)
    return _partition([np.concatenate([shards[c].pop() for c in chosen]) for chosen in assignment])


def _assign_classes(classes: int, clients: int, k: int, rng: np.random.Generator) -> Index:
    """k distinct classes for each client, every class clients * k / classes times: [client, k].

    A class with as many shards left as there are clients left goes to every remaining client. The other classes are
    drawn in proportion to their shards left. A class never has more shards left than there are clients left, so a
    solution always exists.
    """
    left = np.full(classes, clients * k // classes)
    assignment = np.empty((clients, k), np.int64)
    for client in range(clients):
        due = left == clients - client
        # exponential keys / weight: the k smallest are a draw without replacement in proportion to the weight
        keys = np.where(left > 0, rng.exponential(size=classes) / np.maximum(left, 1), np.inf)
        chosen = np.argsort(np.where(due, -1.0, keys), kind="stable")[:k]
        left[chosen] -= 1
        assignment[client] = chosen
    return rng.permutation(assignment)


def _shard_skew(labels: Labels, clients: int, k: int, seed: int) -> Partition:
    if k < 1 or clients * k > len(labels):
        raise ConfigError(
            f"{clients} clients x {k} shards need at least 1 shard per client and 1 sample per shard, "
            f"got {len(labels)} samples"
        )
    rng = generator(seed, "label_skew", "shards")
    order = rng.permutation(len(labels))
    shards = np.array_split(order[np.argsort(labels[order], kind="stable")], clients * k)
    assignment = rng.permutation(clients * k).reshape(clients, k)
    return _partition([np.concatenate([shards[s] for s in chosen]) for chosen in assignment])


def dirichlet(labels: Labels, clients: int, *, alpha: float = 0.5, min_size: int = 10, seed: int = 0) -> Partition:
    """Split every class over the clients by a draw from Dir(alpha); a small alpha gives strong skew.

    If a client stays below `min_size` after several redraws, samples are moved to it from the largest clients, and the
    notes say so.

    >>> bool(dirichlet(np.repeat([0, 1], 50), 4, alpha=0.1, min_size=5).sizes.min() >= 5)
    True
    """
    _check_clients(labels, clients, min_size)
    _check_positive("alpha", alpha)
    rng = generator(seed, "dirichlet")
    members = [rng.permutation(np.flatnonzero(labels == name)) for name in np.unique(labels)]

    def draw() -> list[Index]:
        cuts = [_cut(index, _shares(rng, alpha, clients)) for index in members]
        return [np.concatenate(parts) for parts in zip(*cuts, strict=True)]

    return _large_enough(draw, min_size)


def client_dirichlet(labels: Labels, clients: int, *, alpha: float = 0.5, seed: int = 0) -> Partition:
    """Give every client equally many samples, of classes in proportions that are drawn from Dir(alpha) for this client.

    The classes are drawn as in Hsu, Qi and Brown, "Measuring the effects of non-identical data distribution for
    federated visual classification" (2019). A class that is used up starts over, so that no client gets other classes
    than it has drawn: clients may share samples, and some samples have no client. The notes say how many.

    >>> client_dirichlet(np.repeat([0, 1], 50), 4, alpha=0.1).sizes.tolist()
    [25, 25, 25, 25]
    """
    _check_clients(labels, clients, 1)
    _check_positive("alpha", alpha)
    rng = generator(seed, "client_dirichlet")
    members = [np.flatnonzero(labels == name) for name in np.unique(labels)]
    counts = [rng.multinomial(len(labels) // clients, _shares(rng, alpha, len(members))) for _ in range(clients)]
    by_class = []  # by class, the samples of each client
    for index, wanted in zip(members, np.transpose(counts), strict=True):
        samples = rng.permutation(np.resize(rng.permutation(index), wanted.sum()))
        by_class.append(np.split(samples, np.cumsum(wanted)[:-1]))
    parts = [np.concatenate(pieces) for pieces in zip(*by_class, strict=True)]
    held = np.bincount(np.concatenate(parts), minlength=len(labels))
    note = f"{(held > 1).sum()} of {len(labels)} samples are used more than once, {(held == 0).sum()} not at all"
    return _partition(parts, (note,))


def quantity(labels: Labels, clients: int, *, beta: float = 0.5, min_size: int = 1, seed: int = 0) -> Partition:
    """Split the shuffled samples by one draw from Dir(beta): clients differ in size only.

    >>> sizes = quantity(np.zeros(1000, int), 10, beta=0.5).sizes
    >>> int(sizes.sum()), bool(sizes.max() > 2 * sizes.min())
    (1000, True)
    """
    _check_clients(labels, clients, min_size)
    _check_positive("beta", beta)
    rng = generator(seed, "quantity")
    order = rng.permutation(len(labels))
    return _large_enough(lambda: _cut(order, _shares(rng, beta, clients)), min_size)


def natural(ids: Labels, clients: int | None = None, *, held_out: int = 0, seed: int = 0) -> Partition:
    """One client per owner (such as a writer), or per random group of owners; `held_out` owners are kept for testing.

    >>> natural(np.array([7, 7, 9, 9, 9, 4])).sizes.tolist()
    [1, 2, 3]
    """
    owners = np.unique(ids)
    if not 0 <= held_out < len(owners):
        raise ConfigError(f"held_out must leave at least one of the {len(owners)} owners, got {held_out}")
    training = len(owners) - held_out
    if clients is not None and not 1 <= clients <= training:
        raise ConfigError(f"{training} owners cannot make {clients} clients; ask for 1 to {training}")
    order = generator(seed, "natural").permutation(len(owners))
    groups = np.empty(len(owners), np.int64)
    training_owners = np.sort(order[held_out:])  # clients in the order of their ids, not of the draw
    groups[order[:held_out]] = -1
    groups[training_owners] = np.arange(training) if clients is None else _groups(training, clients, seed)
    client_of = groups[np.searchsorted(owners, ids)]
    by_client = np.argsort(client_of, kind="stable")
    bounds = np.searchsorted(client_of[by_client], np.arange(-1, (training if clients is None else clients) + 1))
    parts = [by_client[a:b] for a, b in pairwise(bounds)]
    return _partition(parts[1:])._replace(held_out=np.sort(parts[0]))


def _groups(owners: int, clients: int, seed: int) -> Index:
    """A random client for each owner, with equal numbers of owners per client."""
    return generator(seed, "natural", "groups").permutation(np.arange(owners) % clients)


def _partition(parts: list[Index], notes: tuple[str, ...] = ()) -> Partition:
    return Partition(tuple(np.sort(part).astype(np.int64) for part in parts), notes)


def _shares(rng: np.random.Generator, concentration: float, clients: int) -> npt.NDArray[np.float64]:
    return rng.dirichlet(np.full(clients, min(concentration, 1e100)))  # larger concentrations overflow in the sum


def _cut(index: Index, shares: npt.NDArray[np.float64]) -> list[Index]:
    """Split an index array in proportion to the shares; every index is used."""
    bounds = np.round(np.cumsum(shares)[:-1] * len(index)).astype(np.int64)
    return np.split(index, bounds)


def _large_enough(draw: Callable[[], list[Index]], min_size: int) -> Partition:
    """Redraw until every client has `min_size` samples; after `REDRAWS`, move samples from the largest clients."""
    parts = draw()
    for _ in range(REDRAWS):
        if min(map(len, parts)) >= min_size:
            return _partition(parts)
        parts = draw()
    if min(map(len, parts)) >= min_size:
        return _partition(parts)
    return _repair(parts, min_size)


def _repair(parts: list[Index], min_size: int) -> Partition:
    sizes = np.array([len(part) for part in parts])
    small = np.flatnonzero(sizes < min_size)
    moved = 0
    for client in small:
        while (missing := min_size - len(parts[client])) > 0:
            largest = int(sizes.argmax())
            take = min(missing, max(1, (int(sizes[largest]) - min_size) // 2))
            parts[client] = np.concatenate([parts[client], parts[largest][-take:]])
            parts[largest] = parts[largest][:-take]
            sizes[client] += take
            sizes[largest] -= take
            moved += take
    return _partition(parts, (f"repaired: moved {moved} samples to {len(small)} clients below {min_size}",))


def _check_clients(labels: Labels, clients: int, min_size: int) -> None:
    if clients < 1:
        raise ConfigError(f"a federation needs at least 1 client, got {clients}")
    if min_size < 0:
        raise ConfigError(f"min_size must be 0 or more, got {min_size}")
    if not len(labels):
        raise ConfigError(f"there is no sample to divide among {clients} clients; give data with samples")
    if clients > len(labels):
        raise ConfigError(f"{len(labels)} samples cannot be divided among {clients} clients; ask for fewer")
    if clients * min_size > len(labels):
        raise ConfigError(
            f"{clients} clients of at least {min_size} samples need {clients * min_size} samples, got {len(labels)}"
        )


def _check_positive(name: str, value: float) -> None:
    if not (np.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be a positive number, got {value}")


def by_function(function: Divider, labels: Labels, clients: int, *, seed: int = 0, name: str = "own") -> Partition:
    """The partition by a user's function of (labels, clients, generator), which returns the indices of each client.

    Samples that no client holds are not used, and the notes say how many.

    >>> by_function(lambda labels, clients, rng: np.array_split(rng.permutation(len(labels)), clients), np.zeros(7), 2)
    ... # doctest: +ELLIPSIS
    Partition(clients=(array([...]), array([...])), notes=(), held_out=array([], dtype=int64))
    """
    try:
        made = [np.asarray(index) for index in function(labels.copy(), clients, generator(seed, "own partition"))]
    except Exception as error:  # a user's function may raise anything
        raise ConfigError(
            f"partition {name} could not be called as function(labels, clients, generator) "
            f"({type(error).__name__}: {error})"
        ) from error
    if len(made) != clients:
        raise ConfigError(
            f"partition {name} must return the indices of {clients} clients, got those of {len(made)}; "
            f"set partition.clients={len(made)} if that is right"
        )
    for client, index in enumerate(made):
        if index.ndim != 1 or (index.dtype.kind not in "iu" and index.size):
            got = f"{index.dtype}{list(index.shape)}"
            raise ConfigError(f"partition {name} must return a list of whole numbers for client {client}, got {got}")
    used = np.concatenate([index.astype(np.int64) for index in made])
    if used.size and not 0 <= used.min() <= used.max() < len(labels):
        raise ConfigError(
            f"partition {name} must return indices from 0 to {len(labels) - 1}, got {used.min()} to {used.max()}"
        )
    values, counts = np.unique(used, return_counts=True)
    if (counts > 1).any():
        raise ConfigError(
            f"partition {name} must give a sample to one client, got sample {values[counts > 1][0]} twice"
        )
    if not used.size:
        raise ConfigError(f"partition {name} must give samples to the clients, got none")
    left = len(labels) - len(used)
    return _partition(made, (f"partition {name} leaves {left} of {len(labels)} samples out",) if left else ())


PARTITIONS: Mapping[str, Callable[..., Partition]] = {
    "iid": iid,
    "label_skew": label_skew,
    "dirichlet": dirichlet,
    "client_dirichlet": client_dirichlet,
    "quantity": quantity,
    "natural": natural,
}


def settings_of(name: str) -> tuple[str, ...]:
    """The settings that a partition of the library reads, beside the number of clients and the seed.

    >>> settings_of("dirichlet"), settings_of("iid")
    (('alpha', 'min_size'), ())
    """
    parameters = inspect.signature(PARTITIONS[name]).parameters.values()
    return tuple(entry.name for entry in parameters if entry.kind is entry.KEYWORD_ONLY and entry.name != "seed")


def split(name: str, labels: Labels, clients: int | None, *, seed: int = 0, **settings: Any) -> Partition:
    """The partition of that name; for `natural`, `labels` are the owners' ids.

    >>> split("iid", np.zeros(6, int), 2, seed=1).sizes.tolist()
    [3, 3]
    """
    if name not in PARTITIONS:
        raise ConfigError(f"unknown partition {name!r}; known: {', '.join(sorted(PARTITIONS))}")
    try:
        return PARTITIONS[name](labels, clients, seed=seed, **settings)
    except TypeError as error:
        raise ConfigError(f"partition {name!r}: {error}") from None
