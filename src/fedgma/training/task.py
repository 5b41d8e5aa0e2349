"""What the lanes of a round see: which samples in which order, from which pool, with which hyper-parameters.

A lane is one client training in one round of one run. The order of its samples is drawn on the host from
(seed, "batches", round, client), so the loop, the lanes and a fleet all train on the same batches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedgma.seeds import generator

Stacked = dict[str, Tensor]  # names as in state_dict, lane (or run) axis first


class Pool(Protocol):
    """One split of a data set, whole, on one device."""

    x: Tensor  # [n, ...]
    y: Tensor  # int64 [n]
    classes: int

    def batch(self, index: Tensor, client: Tensor) -> tuple[Tensor, Tensor]:
        """Samples [...] as the given clients see them, ready for the network, and their labels."""


Shapes = Sequence[tuple[str, torch.Size]]  # names and shapes of the trainable parameters, in order


class Trained(NamedTuple):
    """What local training gives back, lane axis first; loss and accuracy are those met on the way."""

    flat: Tensor  # [lane, entry]: local - global, trainable parameters only
    shapes: Shapes
    buffers: Stacked
    loss: Tensor  # [lane]
    accuracy: Tensor  # [lane]

    @property
    def updates(self) -> Stacked:
        """The updates by name, as views."""
        return unflatten(self.flat, self.shapes)


LANE_WISE = ("run", "client", "pool", "order", "lr", "momentum", "mu", "clip", "seeds")


@dataclass(frozen=True)
class Cohort:
    """The lanes of a round; every array but `orders` has the lane axis first.

    Paired runs draw the same batches, so each order of samples is there once and lanes say which is theirs.
    """

    run: np.ndarray  # int64 [lane], the row of the starting weights
    client: np.ndarray  # int64 [lane]
    pool: np.ndarray  # int64 [lane], which of the pools the samples are in
    order: np.ndarray  # int64 [lane], the row of `orders`
    orders: np.ndarray  # int32 [order, step, batch]; what is past the count is padding
    counts: np.ndarray  # int64 [lane, step]; 0 after the lane's last step
    lr: np.ndarray  # float32 [lane], and so the next three
    momentum: np.ndarray
    mu: np.ndarray
    clip: np.ndarray  # inf for no clipping
    seeds: np.ndarray  # int64 [lane], of dropout masks

    @property
    def lanes(self) -> int:
        """How many lanes there are."""
        return len(self.run)

    @property
    def batch(self) -> int:
        """Samples of a full batch."""
        return int(self.orders.shape[2])

    @property
    def index(self) -> np.ndarray:
        """Every lane's own batches: int64 [lane, step, batch]."""
        return np.asarray(self.orders[self.order], np.int64)

    @property
    def steps(self) -> np.ndarray:
        """Local steps of each lane."""
        return np.asarray((self.counts > 0).sum(1))

    def take(self, rows: np.ndarray | slice) -> "Cohort":
        """Some of the lanes, without steps that none of them takes."""
        counts = self.counts[rows]
        last = int((counts > 0).sum(1).max(initial=0))
        parts = {name: getattr(self, name)[rows] for name in LANE_WISE}
        used, parts["order"] = np.unique(parts["order"], return_inverse=True)
        orders = self.orders if len(used) == len(self.orders) else self.orders[used]
        return replace(self, **parts, orders=orders[:, :last], counts=counts[:, :last])


class Task(NamedTuple):
    """What a local trainer is given: each lane starts from its run's row of `start` and `buffers`."""

    model: nn.Module
    cohort: Cohort
    pools: Sequence[Pool]
    start: Stacked
    buffers: Stacked
    correction: Stacked | None = None  # [lane, ...], added to every gradient: SCAFFOLD's c - c_i


LocalTrainer = Callable[[Task], Trained]


def batch_order(
    samples: np.ndarray, *, seed: int, round: int, client: int, epochs: int, batch: int, steps: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A client's batches of a round: indices [step, batch], padded, and how many of each are real.

    Every epoch is a new permutation and ends with a partial batch where the batch size does not divide the samples.

    >>> index, counts = batch_order(np.arange(5), seed=0, round=1, client=7, epochs=1, batch=2)
    >>> counts.tolist(), sorted(index[:2].ravel().tolist() + index[2, :1].tolist())
    ([2, 2, 1], [0, 1, 2, 3, 4])
    """
    size, per_epoch = len(samples), -(-len(samples) // batch)
    rng = generator(seed, "batches", round, client)
    index = np.zeros((epochs, per_epoch * batch), np.int64)
    for epoch in range(epochs):
        index[epoch, :size] = rng.permutation(samples)
    counts = np.full((epochs, per_epoch), batch, np.int64)
    if size % batch:
        counts[:, -1] = size % batch
    return index.reshape(-1, batch)[:steps], counts.reshape(-1)[:steps]


def stack_orders(orders: Sequence[tuple[np.ndarray, np.ndarray]], batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Orders as one int32 array [order, step, batch], and counts [order, step]; short ones end in empty steps."""
    longest = max((len(counts) for _, counts in orders), default=0)
    index = np.zeros((len(orders), longest, batch), np.int32)
    counts = np.zeros((len(orders), longest), np.int64)
    for lane, (one, count) in enumerate(orders):
        index[lane, : len(count)] = one
        counts[lane, : len(count)] = count
    return index, counts


def effective_steps(steps: np.ndarray, momentum: np.ndarray) -> np.ndarray:
    """How many plain gradients a lane's displacement amounts to, in units of its learning rate.

    A gradient seen j steps before the end acts (1 - rho^j) / (1 - rho) times under momentum rho. Without momentum this
    is the number of steps, SCAFFOLD's K.

    >>> effective_steps(np.array([3, 2]), np.array([0.0, 0.5])).tolist()
    [3.0, 2.5]
    """
    rho = momentum.astype(np.float64)
    return np.asarray((steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho))


@contextmanager
def keyed_generators(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, torch's generators (dropout draws from them) start at `seed`; outside they are as they were."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def ship(array: np.ndarray, device: torch.device | str) -> Tensor:
    """An array on the device, without waiting for what the device is doing."""
    if torch.device(device).type == "cpu":
        return torch.from_numpy(np.ascontiguousarray(array))
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    pinned = torch.empty(array.shape, dtype=kind, pin_memory=True)
    pinned.numpy()[...] = array  # one pass, whatever the order in memory
    return pinned.to(device, non_blocking=True)


def ship_batches(cohort: Cohort, device: torch.device) -> Tensor:
    """The batches of all lanes on the device: int64 [step, lane, batch]; each order crosses the wire once."""
    orders = ship(cohort.orders.transpose(1, 0, 2), device)
    return orders.index_select(1, ship(cohort.order, device)).long()


def stack(parts: Sequence[Mapping[str, Tensor]]) -> Stacked:
    """One mapping with a new front axis out of several of the same names."""
    return {name: torch.stack([part[name] for part in parts]) for name in (parts[0] if parts else {})}


def flatten(stacked: Stacked) -> Tensor:
    """[lane, entry]: all parameters of each lane in one row."""
    return torch.cat([value.flatten(1) for value in stacked.values()], 1)


def unflatten(flat: Tensor, like: Shapes) -> Stacked:
    """The rows of `flat` as named parameters again, as views."""
    parts = torch.split(flat, [shape.numel() for _, shape in like], 1)
    # splitting the last axis never needs a copy, whatever the stride of the rows
    return {name: torch.unflatten(part, 1, shape) for (name, shape), part in zip(like, parts, strict=True)}


def shapes_of(start: Mapping[str, Tensor]) -> Shapes:
    """Names and shapes of stacked parameters, without their front axis."""
    return [(name, value.shape[1:]) for name, value in start.items()]
