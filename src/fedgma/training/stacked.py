"""Parameters of many lanes or runs at once: by name with the lane axis first, or flat as [lane, entry]."""

import functools
import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

Stacked = dict[str, Tensor]  # names as in state_dict, lane (or run) axis first
ALIGNED = 16  # bytes, of arrays that are sent together
Shapes = Sequence[tuple[str, torch.Size]]  # names and shapes of the trainable parameters, in order


def ship(array: np.ndarray, device: torch.device | str) -> Tensor:
    """An array on the device, without waiting for what the device is doing."""
    if torch.device(device).type == "cpu":
        return torch.from_numpy(np.ascontiguousarray(array))
    pinned = torch.empty(array.shape, dtype=_torch_type(array), pin_memory=True)
    pinned.numpy()[...] = array  # one pass for any memory layout
    return pinned.to(device, non_blocking=True)


def ship_many(arrays: Sequence[np.ndarray], device: torch.device | str) -> list[Tensor]:
    """Arrays on the device, without waiting for it, in one transfer."""
    if torch.device(device).type == "cpu":
        return [ship(array, device) for array in arrays]
    pinned = torch.empty(packed_size(arrays), dtype=torch.uint8, pin_memory=True)
    pack(arrays, pinned.numpy())
    return unpack(arrays, pinned.to(device, non_blocking=True))


def packed_size(arrays: Sequence[np.ndarray]) -> int:
    """The bytes that arrays take one after the other."""
    return sum(_length(array) for array in arrays)


def pack(arrays: Sequence[np.ndarray], buffer: np.ndarray) -> None:
    """Write arrays into a buffer of bytes, one after the other; any memory layout takes one pass."""
    start = 0
    for array in arrays:
        np.copyto(np.ndarray(array.shape, array.dtype, buffer, start), array)
        start += _length(array)


def unpack(arrays: Sequence[np.ndarray], buffer: Tensor) -> list[Tensor]:
    """Views of a packed buffer with the shapes and types of the arrays."""
    starts = np.cumsum([0, *map(_length, arrays)]).tolist()
    pieces = [buffer[start : start + array.nbytes] for array, start in zip(arrays, starts[:-1], strict=True)]
    return [piece.view(_torch_type(array)).view(array.shape) for piece, array in zip(pieces, arrays, strict=True)]


class Parcel:
    """Tensors at fixed addresses on a device, to which arrays of these shapes are sent in one transfer."""

    def __init__(self, places: Sequence[tuple[Sequence[int], str]], device: torch.device) -> None:
        like = [np.broadcast_to(np.zeros((), dtype), tuple(shape)) for shape, dtype in places]
        starts = np.cumsum([0, *map(_length, like)]).tolist()
        self._places = [(array.shape, array.dtype, start) for array, start in zip(like, starts, strict=False)]
        self._buffer = torch.empty(starts[-1], dtype=torch.uint8, device=device)
        self.tensors = unpack(like, self._buffer)

    def send(self, arrays: Sequence[np.ndarray]) -> None:
        """Fill the tensors, without waiting for the device; the last array may have fewer rows than its tensor."""
        *whole, (shape, dtype, start) = self._places
        last = (len(arrays[-1]), *shape[1:])
        size = start + math.prod(last) * dtype.itemsize
        sent = torch.empty(size, dtype=torch.uint8, pin_memory=self._buffer.is_cuda)
        memory = sent.numpy()
        for array, place in zip(arrays, [*whole, (last, dtype, start)], strict=True):
            np.copyto(np.ndarray(place[0], place[1], memory, place[2]), array)
        self._buffer[:size].copy_(sent, non_blocking=True)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others of their types, with one launch for each type."""
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        pair = kinds.setdefault(target.dtype, ([], []))
        pair[0].append(target)
        pair[1].append(source)
    for pair in kinds.values():
        torch._foreach_copy_(*pair)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors in memory of their own."""
    made = [torch.empty_like(tensor) for tensor in tensors]
    copy_all(made, tensors)
    return made


def _length(array: np.ndarray) -> int:
    """Bytes of an array in a packed buffer, so that every array starts at a multiple of `ALIGNED`."""
    return -(-array.nbytes // ALIGNED) * ALIGNED


@functools.cache
def _type_of(name: str) -> torch.dtype:
    return torch.from_numpy(np.empty(0, name)).dtype


def _torch_type(array: np.ndarray) -> torch.dtype:
    return _type_of(array.dtype.str)


def stack(parts: Sequence[Mapping[str, Tensor]]) -> Stacked:
    """Several mappings with the same names as one, with a new front axis."""
    return {name: torch.stack([part[name] for part in parts]) for name in (parts[0] if parts else {})}


def without(stacked: Stacked, names: Collection[str]) -> Stacked:
    """The arrays that do not have one of these names."""
    return {name: value for name, value in stacked.items() if name not in names} if names else stacked


def flatten(stacked: Stacked) -> Tensor:
    """[lane, entry]: all parameters of each lane in one row."""
    if all(value.is_contiguous() for value in stacked.values()):
        return torch.cat([value.flatten(1) for value in stacked.values()], 1)
    first = next(iter(stacked.values()))
    flat = first.new_empty((len(first), sum(value[0].numel() for value in stacked.values())))
    for name, target in unflatten(flat, shapes_of(stacked)).items():
        target.copy_(stacked[name])
    return flat


def empty_flat(like: Stacked) -> Tensor:
    """[lane, entry] for so many parameters, not filled."""
    values = list(like.values())
    return values[0].new_empty(len(values[0]), sum(value.numel() for value in values) // len(values[0]))


def unflatten(flat: Tensor, like: Shapes) -> Stacked:
    """The rows of `flat` as named parameters again, as views."""
    parts = torch.split(flat, [shape.numel() for _, shape in like], 1)
    # splitting the last axis never needs a copy
    return {name: torch.unflatten(part, 1, shape) for (name, shape), part in zip(like, parts, strict=True)}


def shapes_of(start: Mapping[str, Tensor]) -> Shapes:
    """Names and shapes of stacked parameters, without their front axis."""
    return [(name, value.shape[1:]) for name, value in start.items()]
