"""What surrounds the steps of a lane in fewer calls, to the bits of `loop`: clients in threads wait for each call.

Python runs in one thread at a time, and every call of torch hands it over. A step of a small model has some ten calls
for its batch, eight for loss and measures and, in torch's optimiser, thirty more: as many as the model itself.

Buys, for the MLP of `benchmarks/bench_modules.py` on two cores: 1.15, and for small modules on one thread as much.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedgma.data.pools import Pool
from fedgma.training import loop
from fedgma.training.lane_batch import LaneBatch
from fedgma.training.task import Task
from fedgma.training.tasks import CLASSIFICATION
from fedgma.training.threads.light_sgd import LightSGD, Rates

AT_ONCE = 1 << 21  # bytes of batches that are made at a time: few calls, and they stay in the cache
ALIGNED = 64  # bytes: where torch's memory begins; some libraries round by the place of an array
KEPT = 32  # batches whose loss and measures are added at a time


def copy_state(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Replace the model's weights and buffers in one call."""
    tensors = model.state_dict(keep_vars=True)
    with torch.no_grad():
        torch._foreach_copy_([tensors[name] for name in values], list(values.values()))


def light_optimizer(trainable: list[nn.Parameter], lane_batch: LaneBatch, lane: int) -> object:
    """The lane's optimiser: SGD in few calls, others as torch has them."""
    if lane_batch.optimizer != "sgd":
        return loop.torch_optimizer(trainable, lane_batch, lane)
    rate = loop.rates_of(lane_batch, lane)
    return LightSGD(trainable, Rates(rate["momentum"], rate["weight_decay"], bool(rate["nesterov"])))


def several_batches_at_a_time(lane_batch: LaneBatch, lane: int, pool: Pool) -> loop.Batches:
    """The batches of a lane, several made at once; each lies in memory like one that is made alone.

    Cutting out, scaling and normalising round each value by itself. A view, such as a rotation, need not.
    """
    if getattr(getattr(pool, "pool", pool), "view", None) is not None:
        yield from loop.one_batch_at_a_time(lane_batch, lane, pool)
        return
    client, steps = torch.from_numpy(lane_batch.client[lane : lane + 1].astype(np.int64)), int(lane_batch.steps[lane])
    index = torch.from_numpy(lane_batch.orders[lane_batch.order[lane], :steps].astype(np.int64))
    counts, rates = lane_batch.counts[lane].tolist(), lane_batch.lr[lane].tolist()
    at_once = max(1, AT_ONCE // max(1, 4 * math.prod(pool.x.shape[1:]) * lane_batch.batch))
    for first in range(0, steps, at_once):
        x, y = pool.batch(index[first : first + at_once], client)
        for row, (batch, target) in enumerate(zip(x.unbind(), y.unbind(), strict=True), first):
            yield _alone(batch, counts[row]), _alone(target, counts[row]), rates[row]


def _alone(batch: Tensor, count: int) -> Tensor:
    """The first samples of a batch, in memory of their own where they do not begin like it."""
    part = batch if count == len(batch) else batch[:count]
    return part if part.data_ptr() % ALIGNED == 0 and part.is_contiguous() else part.clone()


class LateMeans(loop.Means):
    """The same means; those of the library's classification are taken of many batches and lanes at a time."""

    def __init__(self, task: Task, device: torch.device) -> None:
        super().__init__(task, device)
        self.kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, loss: Tensor, output: Tensor, y: Tensor) -> None:
        """Keep a batch: its mean loss, output and targets."""
        if self.task.metrics is not CLASSIFICATION.metrics or loss.dtype != torch.float32 or y.dim() != 1:
            super().add(loss, output, y)
            return
        self.kept.append((loss.data, output.data, y))
        if len(self.kept) == KEPT:
            _add_kept([self])

    @staticmethod
    def of_lanes(lanes: Sequence[loop.Means]) -> tuple[Tensor, Tensor]:
        """The means over the samples of each lane."""
        if waiting := [lane for lane in lanes if isinstance(lane, LateMeans) and lane.kept]:
            _add_kept(waiting)
        return loop.Means.of_lanes(lanes)


def _add_kept(lanes: Sequence[LateMeans]) -> None:
    """Add losses one after the other in float32, as a tensor would, and hits, which are whole numbers, at once."""
    losses, outputs, targets = zip(*(batch for lane in lanes for batch in lane.kept), strict=True)
    counts = np.array([len(y) for y in targets])
    terms = (torch.stack(losses) * torch.from_numpy(counts).float()).numpy()
    right = (torch.cat(outputs).argmax(-1) == torch.cat(targets)).numpy()
    hits = np.add.reduceat(right, np.cumsum(counts) - counts, dtype=np.int64)
    last = 0
    for lane in lanes:
        first, last = last, last + len(lane.kept)
        with np.errstate(all="ignore"):
            total = np.add.accumulate(np.concatenate([lane.loss.numpy()[None], terms[first:last]]))[-1]
        lane.loss = torch.tensor(total)
        lane.measured = lane.measured + torch.tensor([hits[first:last].sum()])
        lane.seen += int(counts[first:last].sum())
        lane.kept.clear()


LIGHT = loop.Parts(copy_state, light_optimizer, several_batches_at_a_time, LateMeans)
