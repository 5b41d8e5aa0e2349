"""Parameters of many lanes or runs at once: by name with the lane axis first, or flat as [lane, entry]."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

Stacked = dict[str, Tensor]  # names as in state_dict, lane (or run) axis first
Shapes = Sequence[tuple[str, torch.Size]]  # names and shapes of the trainable parameters, in order


def ship(array: np.ndarray, device: torch.device | str) -> Tensor:
    """An array on the device, without waiting for what the device is doing."""
    if torch.device(device).type == "cpu":
        return torch.from_numpy(np.ascontiguousarray(array))
    kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
    pinned = torch.empty(array.shape, dtype=kind, pin_memory=True)
    pinned.numpy()[...] = array  # one pass for any memory layout
    return pinned.to(device, non_blocking=True)


def stack(parts: Sequence[Mapping[str, Tensor]]) -> Stacked:
    """Several mappings with the same names as one, with a new front axis."""
    return {name: torch.stack([part[name] for part in parts]) for name in (parts[0] if parts else {})}


def without(stacked: Stacked, names: Collection[str]) -> Stacked:
    """The arrays that do not have one of these names."""
    return {name: value for name, value in stacked.items() if name not in names} if names else stacked


def flatten(stacked: Stacked) -> Tensor:
    """[lane, entry]: all parameters of each lane in one row."""
    return torch.cat([value.flatten(1) for value in stacked.values()], 1)


def unflatten(flat: Tensor, like: Shapes) -> Stacked:
    """The rows of `flat` as named parameters again, as views."""
    parts = torch.split(flat, [shape.numel() for _, shape in like], 1)
    # splitting the last axis never needs a copy
    return {name: torch.unflatten(part, 1, shape) for (name, shape), part in zip(like, parts, strict=True)}


def shapes_of(start: Mapping[str, Tensor]) -> Shapes:
    """Names and shapes of stacked parameters, without their front axis."""
    return [(name, value.shape[1:]) for name, value in start.items()]
