"""What surrounds the steps of a lane in fewer calls, to the bits of `loop`: clients in threads wait for each call.

Python runs in one thread at a time, and every call of torch hands it over. A step of a small model has some ten calls
for its batch, eight for loss and measures and, in torch's optimiser, thirty more: as many as the model itself.

Buys, for the MLP of `benchmarks/bench_modules.py` on two cores: 1.15.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from fedgma.data.pools import Pool
from fedgma.training import loop
from fedgma.training.lane_batch import LaneBatch
from fedgma.training.task import Task
from fedgma.training.tasks import CLASSIFICATION
from fedgma.training.threads.light_sgd import LightSGD, Rates

AT_ONCE = 1 << 20  # bytes of batches that are made at a time: they stay in the cache of a core
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
    client, steps = torch.tensor(int(lane_batch.client[lane])), int(lane_batch.steps[lane])
    index = torch.from_numpy(lane_batch.orders[lane_batch.order[lane], :steps].astype(np.int64))
    counts, rates = lane_batch.counts[lane].tolist(), lane_batch.lr[lane].tolist()
    at_once = max(1, AT_ONCE // max(1, 4 * pool.x[:1].numel() * lane_batch.batch))
    for first in range(0, steps, at_once):
        x, y = pool.batch(index[first : first + at_once], client)
        for row, (batch, target) in enumerate(zip(x.unbind(), y.unbind(), strict=True), first):
            yield _alone(batch, counts[row]), _alone(target, counts[row]), rates[row]


def _alone(batch: Tensor, count: int) -> Tensor:
    """The first samples of a batch, in memory of their own where they do not begin like it."""
    part = batch if count == len(batch) else batch[:count]
    return part if part.data_ptr() % ALIGNED == 0 and part.is_contiguous() else part.clone()


class LateMeans(loop.Means):
    """The same means; those of the library's classification are taken of many batches at a time, in their order."""

    def __init__(self, task: Task, device: torch.device) -> None:
        super().__init__(task, device)
        self.kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, loss: Tensor, output: Tensor, y: Tensor) -> None:
        """Keep a batch: its mean loss, output and targets."""
        if self.task.metrics is not CLASSIFICATION.metrics or loss.dtype != torch.float32 or y.dim() != 1:
            super().add(loss, output, y)
            return
        self.kept.append((loss, output, y))
        if len(self.kept) == KEPT:
            self._add_kept()

    def result(self) -> tuple[Tensor, Tensor]:
        """The means of all batches."""
        if self.kept:
            self._add_kept()
        return super().result()

    @torch.no_grad()
    def _add_kept(self) -> None:
        """Add losses one after the other in float32, as a tensor would, and hits, which are whole numbers, at once."""
        losses, outputs, targets = zip(*self.kept, strict=True)
        counts = [len(y) for y in targets]
        terms = (torch.stack(losses) * torch.tensor(counts, dtype=torch.float32)).numpy()
        with np.errstate(all="ignore"):
            total = np.add.accumulate(np.concatenate([self.loss.numpy()[None], terms]))[-1]
        self.loss = torch.tensor(total)
        hits = torch.cat(outputs).argmax(-1) == torch.cat(targets)
        self.measured, self.seen = self.measured + hits.sum()[None], self.seen + sum(counts)
        self.kept.clear()


LIGHT = loop.Parts(copy_state, light_optimizer, several_batches_at_a_time, LateMeans)
