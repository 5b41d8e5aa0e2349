"""A flag that a kernel sets in the host's memory: reading it is a wait, without a copy from the device.

A kernel writes to it only if something was found, so in nearly all passes nothing is sent at all.
"""

from typing import Any

import torch

ROOM = 64  # flags in one piece of the host's memory, 16 bytes apart
_kept: list[Any] = []  # all memory of flags: a pass that nobody waits for may still write to its own
_free: list[Any] = []  # that of flags that were read; zero


def take_memory(device: Any) -> Any:
    """An int32 tensor [1] of zero on the host, to which kernels on this device can write."""
    if device.type != "cuda":  # triton's interpreter runs on the CPU
        return torch.zeros(1, dtype=torch.int32, device="cpu")
    try:
        return _free.pop()
    except IndexError:
        _kept.append(torch.zeros(ROOM, 4, dtype=torch.int32, device="cpu", pin_memory=True))
        first, *others = _kept[-1][:, :1]
        _free.extend(others)
        return first


class Flag:
    """True if what was launched just before it was made, on the current stream, sets its memory; waits when asked."""

    def __init__(self, memory: Any, device: Any) -> None:
        self._memory, self._found = memory, False
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def __bool__(self) -> bool:
        if self._memory is not None:
            self._read(self._memory)
            self._memory = None
        return self._found

    def _read(self, memory: Any) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        value = memory.numpy()
        self._found, value[0] = bool(value[0]), 0
        if self._stream is not None:
            _free.append(memory)
