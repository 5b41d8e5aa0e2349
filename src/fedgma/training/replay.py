"""A function of tensors as a CUDA graph: captured once for every shape, then replayed with one launch.

A round of a small model is over sooner on the device than its hundred launches on the host. The captured function runs
the same kernels, so results are the same to the bit.
"""

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)
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
    """Tensors at fixed addresses, and the call that computes the outputs from the inputs."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    replay: Callable[[], None]


class Replayed:
    """A function of tensors that reads nothing else that changes, and does not wait for the device."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self._calls: dict[tuple[object, ...], int] = {}
        self._captured: dict[tuple[object, ...], Captured | None] = {}  # None: it cannot be captured

    def __call__(self, *given: Tensor) -> list[Tensor]:
        """What the function returns, in memory of its own."""
        key = tuple((value.shape, value.dtype) for value in given)
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] <= WARM_UP:
            return list(self.function(*given))
        if key not in self._captured:
            self._captured[key] = _capture(self.function, given)
        captured = self._captured[key]
        if captured is None:
            return list(self.function(*given))
        torch._foreach_copy_(captured.inputs, list(given))
        captured.replay()
        return [value.clone() for value in captured.outputs]


def _capture(function: Function, given: Sequence[Tensor]) -> Captured | None:
    inputs = [value.clone(memory_format=torch.contiguous_format) for value in given]
    if inputs[0].device.type != "cuda":  # the same without a graph
        outputs = list(function(*inputs))
        return Captured(inputs, outputs, lambda: torch._foreach_copy_(outputs, list(function(*inputs))))
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    try:
        with capturing(graph):
            outputs = list(function(*inputs))
    except RuntimeError as error:
        log.warning("a round's last part could not be captured in a CUDA graph: %s", str(error).splitlines()[0])
        return None
    return Captured(inputs, outputs, graph.replay)
