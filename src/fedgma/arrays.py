"""Arrays from numpy, torch or anything numpy understands, seen as one thing.

Inside fedgma an entry of a model lives in one of two forms: a numpy array (everything on the CPU; torch's CPU tensors
are viewed, not copied) or a torch tensor (on another device). torch is brought in only for those who hand us a tensor,
so somebody with numpy alone never waits for it.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

Array = Any  # numpy.ndarray or torch.Tensor
Params = Mapping[str, Array]  # names as in a state_dict

FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})
INTEGERS = frozenset({"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"})
BLOCK = 1 << 16  # entries worked on at a time: the temporaries of a block stay in the cache


class Spec(NamedTuple):
    """What an entry must look like: its shape and the name of its number type."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Placement(NamedTuple):
    """Where a user's arrays live, so that results go back to the same library and device."""

    library: str  # "numpy" or "torch"
    device: Any = None


def is_torch(array: Array) -> bool:
    """Whether this is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def placement(array: Array) -> Placement:
    """The library and device that an array belongs to."""
    return Placement("torch", array.device) if is_torch(array) else Placement("numpy")


def spec(array: Array) -> Spec:
    """Shape and number type of an array, in the words that numpy and torch share."""
    if not is_torch(array):
        array = np.asarray(array)
    return Spec(tuple(array.shape), _type_name(array.dtype))


@lru_cache(maxsize=256)
def _type_name(dtype: Any) -> str:
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def native(array: Array) -> Array:
    """The form worked on inside: a numpy array for the CPU, a tensor elsewhere; a view where possible.

    bfloat16 on the CPU, which numpy lacks, is widened to float32, which holds each of its values exactly.
    """
    if not is_torch(array):
        array = np.asarray(array)
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    array = array.detach()
    if array.device.type != "cpu":
        return array
    return (array.float() if str(array.dtype) == "torch.bfloat16" else array).resolve_neg().numpy()


def flat(array: Array) -> Array:
    """One axis, contiguous; a view where possible."""
    return array.contiguous().view(-1) if is_torch(array) else np.ascontiguousarray(array).reshape(-1)


def rows(array: Array) -> Array:
    """Two axes, the first (clients) kept, contiguous; a view where possible."""
    shape = (array.shape[0], math.prod(array.shape[1:]))
    return array.contiguous().view(shape) if is_torch(array) else np.ascontiguousarray(array).reshape(shape)


def beside(array: Array, like: Array) -> Array:
    """A native array moved to where `like` (another one) is; the array itself where it is there already."""
    if is_torch(like):
        import torch

        return torch.as_tensor(array, device=like.device)
    return array.cpu().numpy() if is_torch(array) else array


def zeros(shape: int | tuple[int, ...], dtype: str, like: Array) -> Array:
    """Zeros of a number type, where `like` (a native array) is."""
    if is_torch(like):
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype), device=like.device)
    return np.zeros(shape, dtype)


def cast(array: Array, dtype: str) -> Array:
    """The same numbers in another type; the array itself where the type is right already."""
    if is_torch(array):
        import torch

        return array.to(getattr(torch, dtype))
    return np.asarray(array).astype(dtype, copy=False)


def delivered(array: Array, to: Spec, placement: Placement) -> Array:
    """A native array as the user's kind: library, device, shape and number type."""
    if placement.library == "numpy" and to.dtype != "bfloat16":
        return cast(array, to.dtype).reshape(to.shape)
    import torch

    tensor = array if is_torch(array) else torch.from_numpy(np.ascontiguousarray(array))
    return tensor.to(device=placement.device, dtype=getattr(torch, to.dtype)).reshape(to.shape)


def largest(array: Array) -> Array:
    """The largest of each column, over the first axis."""
    return array.amax(0) if is_torch(array) else array.max(0)


def all_finite(array: Array) -> bool:
    """Whether no entry of a flat native array is NaN or infinite."""
    if is_torch(array):
        return bool(array.isfinite().all())
    return all(bool(np.isfinite(array[part]).all()) for part in blocks(len(array)))


def blocks(size: int, length: int = BLOCK) -> Iterator[slice]:
    """Slices that cover `size` entries, `length` at a time."""
    for start in range(0, size, length):
        yield slice(start, min(start + length, size))
