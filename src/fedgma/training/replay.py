"""A function of tensors as a CUDA graph: captured once for every shape, then replayed with one launch.

A round of a small model is over sooner on the device than its hundred launches on the host. The captured function runs
the same kernels, so results are the same to the bit.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedgma.training.stacked import copies, copy_all

log = logging.getLogger(__name__)
LARGEST = 1 << 24  # entries of all updates; beyond, the device takes longer than the launches
WARM_UP = 2  # calls before a capture: kernels are compiled, and short runs never wait for one

Function = Callable[..., Sequence[Tensor]]


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """What is launched inside becomes the graph; neither other threads nor freed memory may break the capture off.

    "thread_local": what another thread asks of the device meanwhile, such as numbers to write, is no error. Python's
    garbage collector waits, because freeing the graph of an earlier run is an error during a capture.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()


class Captured(NamedTuple):
    """Tensors at fixed addresses, and the call that computes them."""

    outputs: list[Tensor]
    replay: Callable[[], None]


class Fixed:
    """A function without arguments, whose tensors keep their addresses, and which does not wait for the device."""

    def __init__(self, function: Callable[[], Sequence[Tensor]], device: torch.device) -> None:
        self.function, self.device = function, device
        self._calls = 0
        self._captured: Captured | None = None  # also if it cannot be captured

    def __call__(self) -> list[Tensor]:
        """What the function returns; the next call may write over it."""
        self._calls += 1
        if self._calls == WARM_UP + 1:
            self._captured = _capture(self.function, self.device)
        if self._captured is None:
            return list(self.function())
        self._captured.replay()
        return self._captured.outputs


class Replayed:
    """A function of tensors that reads nothing else that changes, and does not wait for the device."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self._calls: dict[tuple[object, ...], int] = {}
        self._captured: dict[
            tuple[object, ...], tuple[list[Tensor], Captured | None]
        ] = {}  # inputs; None: it cannot be

    def __call__(self, *given: Tensor) -> list[Tensor]:
        """What the function returns, in memory of its own."""
        key = tuple((value.shape, value.dtype) for value in given)
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] <= WARM_UP:
            return list(self.function(*given))
        if key not in self._captured:
            inputs = [value.clone(memory_format=torch.contiguous_format) for value in given]
            self._captured[key] = inputs, _capture(partial(self.function, *inputs), inputs[0].device)
        inputs, captured = self._captured[key]
        if captured is None:
            return list(self.function(*given))
        copy_all(inputs, given)
        captured.replay()
        return copies(captured.outputs)


def _capture(function: Callable[[], Sequence[Tensor]], device: torch.device) -> Captured | None:
    if device.type != "cuda":  # the same without a graph
        outputs = list(function())
        return Captured(outputs, lambda: copy_all(outputs, list(function())))
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    try:
        with capturing(graph):
            outputs = list(function())
    except RuntimeError as error:
        log.warning("a part of a round could not be captured in a CUDA graph: %s", str(error).splitlines()[0])
        return None
    return Captured(outputs, graph.replay)
