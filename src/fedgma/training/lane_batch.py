"""Lanes that train together: their samples, the order of these, their pools and learning rates.

A lane is one sampled client of one run while it trains in a round.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fedgma.data.pools import Pool
from fedgma.training.stacked import Shapes, Stacked, ship, unflatten


class Tilt(NamedTuple):
    """What is subtracted from the gradient of a lane before it is perturbed, [lane, ...] each: FedSMOO's mu_i and s."""

    own: Stacked  # every local step adds the perturbation minus `shared`
    shared: Stacked
    last: Stacked  # the perturbation of the last step; zeros before the first

    def mapped(self, change: Callable[[Stacked], Stacked]) -> "Tilt":
        """The same with every part changed."""
        return Tilt(*map(change, self))


class Trained(NamedTuple):
    """The result of local training, lane axis first; loss and measures are means over the training batches."""

    flat: Tensor  # [lane, entry]: local - global, trainable parameters only
    shapes: Shapes
    buffers: Stacked
    loss: Tensor  # [lane]
    measures: Tensor  # [lane, column], of the task
    tilt: Tilt | None = None  # after the last step; None if none was given

    @property
    def updates(self) -> Stacked:
        """The updates by name, as views."""
        return unflatten(self.flat, self.shapes)


# hyper-parameters of a lane that stay the same during a round: those of the algorithm, then those of the optimiser
TERMS = (
    "mu",  # proximal coefficient
    "scale",  # factor of the gradient; a correction is added afterwards
    "rho",  # size of the perturbation at which a second gradient is taken
    "unit",  # 1: `rho` is the length of the perturbation; 0: a factor of the gradient
    "blend",  # share of the second gradient; 0 for none
    "tilted",  # 1: the lane has a tilt
)
RATES = (
    *TERMS,
    "clip",  # inf for no clipping
    "momentum",
    "weight_decay",
    "nesterov",  # 1 for Nesterov's step, else 0
    "beta1",  # of AdamW, as are the next two
    "beta2",
    "epsilon",
)
LANE_WISE = ("run", "client", "pool", "order", "rates", "seeds")


@dataclass(frozen=True)
class LaneBatch:
    """The lanes of a round; every array but `orders` has the lane axis first.

    Paired runs draw the same batches, so each order of samples is stored once, and `order` gives that of each lane.
    """

    run: np.ndarray  # int64 [lane], the row of the starting weights
    client: np.ndarray  # int64 [lane]
    pool: np.ndarray  # int64 [lane], which of the pools the samples are in
    order: np.ndarray  # int64 [lane], the row of `orders`
    orders: np.ndarray  # int32 [order, step, batch]; entries after the count are padding
    counts: np.ndarray  # int64 [lane, step]; 0 after the lane's last step
    lr: np.ndarray  # float32 [lane, step]
    rates: np.ndarray  # float32 [lane, rate], in the order of `RATES`
    seeds: np.ndarray  # int64 [lane], of dropout masks
    optimizer: str = "sgd"  # of all lanes: "sgd" or "adamw"

    @property
    def size(self) -> int:
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

    @cached_property
    def steps(self) -> np.ndarray:
        """Local steps of each lane."""
        return np.asarray((self.counts > 0).sum(1))

    def rate(self, name: str) -> np.ndarray:
        """One of the `RATES` of each lane, as a view."""
        return np.asarray(self.rates[:, RATES.index(name)])

    def take(self, rows: np.ndarray | slice) -> "LaneBatch":
        """Some of the lanes; steps that are empty for all of them are dropped."""
        last = int(self.steps[rows].max(initial=0))
        parts = {name: getattr(self, name)[rows] for name in LANE_WISE}
        used, parts["order"] = np.unique(parts["order"], return_inverse=True)
        orders = self.orders if len(used) == len(self.orders) else self.orders[used]
        return replace(self, **parts, orders=orders[:, :last], counts=self.counts[rows, :last], lr=self.lr[rows, :last])


class Assignment(NamedTuple):
    """The input of a local trainer; each lane starts from its run's row of `start` and `buffers`."""

    model: nn.Module
    lane_batch: LaneBatch
    pools: Sequence[Pool]
    start: Stacked
    buffers: Stacked
    correction: Stacked | None = None  # [lane, ...], added to every gradient: SCAFFOLD's c - c_i
    tilt: Tilt | None = None

    def take(self, rows: np.ndarray) -> "Assignment":
        """The same for some of the lanes, in the order of `rows`; arrays of lanes are copied."""
        plain, lane_batch = not self.correction and self.tilt is None, self.lane_batch
        longest = lane_batch.steps.max(initial=0) == lane_batch.counts.shape[1]
        if plain and longest and np.array_equal(rows, np.arange(lane_batch.size)):
            return self  # all lanes in their order, and no step is empty
        taken = self._replace(lane_batch=lane_batch.take(rows))
        if plain:
            return taken
        picked = ship(rows, self.pools[0].y.device)

        def take_rows(stacked: Stacked) -> Stacked:
            return {name: value[picked] for name, value in stacked.items()}

        correction = take_rows(self.correction) if self.correction else None
        tilt = None if self.tilt is None else self.tilt.mapped(take_rows)
        return taken._replace(correction=correction, tilt=tilt)


LocalTrainer = Callable[[Assignment], Trained]


@contextmanager
def keyed_generators(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, torch's generators (dropout draws from them) start at `seed`; afterwards they are restored."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def random_states(device: torch.device) -> list[Tensor]:
    """The states of torch's generators on the host and on the device."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def ship_batches(lane_batch: LaneBatch, device: torch.device) -> Tensor:
    """The batches of all lanes on the device: int64 [step, lane, batch]; each order is copied once."""
    orders = ship(lane_batch.orders.transpose(1, 0, 2), device)
    return orders.index_select(1, ship(lane_batch.order, device)).long()
