"""Two engines that share a GPU: each trains half of the lanes, on a stream of its own.

Matrix products keep the processors busy and the memory idle, normalisation and optimiser the other way round. Two
halves of the lanes that are not in step fill both, and the last programs of one half's kernel run beside the first of
the other's.
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fedgma.training.lane_batch import Assignment, Tilt, Trained
from fedgma.training.stacked import Stacked

Half = Callable[..., Trained]  # an engine, called with `early`


class SideBySide:
    """A local trainer of two engines, called like one of them."""

    def __init__(self, first: Half, second: Half, *, compiles: bool) -> None:
        self.halves = (first, second)
        self.compiles = compiles

    def __call__(self, task: Assignment, *, early: bool = False) -> Trained:
        """Train all lanes of the batch; an odd number of them on one engine, so that no further size is compiled."""
        lanes, device = task.lane_batch.size, task.pools[0].y.device
        if lanes % 2:
            return self.halves[0](task, early=early)
        parts: list[Trained] = []
        for train, rows in zip(self.halves, np.split(np.arange(lanes), 2), strict=True):
            if device.type == "cuda":
                parts.append(_on_stream(train, task.take(rows), early, _stream(device, len(parts))))
            else:
                parts.append(train(task.take(rows), early=early))
        if device.type == "cuda":
            for number in range(2):
                torch.cuda.current_stream(device).wait_stream(_stream(device, number))
        return _joined(*parts)


def _on_stream(train: Half, task: Assignment, early: bool, stream: torch.cuda.Stream) -> Trained:
    """Train on a stream, after everything that was begun before.

    The stream waits for all that came before the next call too, so memory that it hands out is free to be used again.
    """
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        return train(task, early=early)


@functools.cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _joined(first: Trained, second: Trained) -> Trained:
    """The results of two halves, one after the other."""

    def both(one: Tensor, other: Tensor) -> Tensor:
        return torch.cat([one, other])

    def all_of(one: Stacked, other: Stacked) -> Stacked:
        return {name: both(value, other[name]) for name, value in one.items()}

    tilt = None
    if first.tilt is not None and second.tilt is not None:
        tilt = Tilt(*(all_of(*pair) for pair in zip(first.tilt, second.tilt, strict=True)))
    return Trained(
        both(first.flat, second.flat),
        first.shapes,
        all_of(first.buffers, second.buffers),
        both(first.loss, second.loss),
        both(first.measures, second.measures),
        tilt,
    )
