"""One interface to numpy arrays, torch tensors and anything that numpy can convert.

Inside fedgma an entry of a model is a *native* array: a numpy array on the CPU (torch's CPU tensors are viewed, not
copied) or a torch tensor on another device. torch is imported only where the user passes a tensor.
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
NUMBERS = FLOATS | INTEGERS
BLOCK = 1 << 16  # entries per step: the temporaries of a block stay in the cache


class Spec(NamedTuple):
    """Shape and number type of an entry."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class NotDense(TypeError):
    """An array whose numbers cannot be read as they stand; the message says what it is."""


class Placement(NamedTuple):
    """Library and device of a user's arrays; results go back to the same ones."""

    library: str  # "numpy" or "torch"
    device: Any = None


def is_torch(array: Array) -> bool:
    """Whether this is a torch tensor."""
    if type(array) is np.ndarray:
        return False
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def placement(array: Array) -> Placement:
    """Library and device of an array."""
    return Placement("torch", array.device) if is_torch(array) else Placement("numpy")


def spec(array: Array) -> Spec:
    """Shape and number type of an array, with numpy's names for the types; `NotDense` if it hides or lacks values."""
    if type(array) is np.ndarray:
        return Spec(array.shape, _type_name(array.dtype))
    if is_torch(array):
        _check_dense(array)
    elif isinstance(array, np.ma.MaskedArray):
        raise NotDense("a masked array (fill the masked values first)")
    else:
        array = np.asarray(array)
    return Spec(tuple(array.shape), _type_name(array.dtype))


def _check_dense(tensor: Array) -> None:
    if tensor.is_nested:
        raise NotDense("a nested tensor")
    if tensor.is_meta:
        raise NotDense("a tensor on the meta device, which has no values")
    if tensor.layout is not sys.modules["torch"].strided:
        raise NotDense("a sparse tensor (use to_dense)")


@lru_cache(maxsize=256)
def _type_name(dtype: Any) -> str:
    if isinstance(dtype, np.dtype):
        return dtype.name if dtype.kind != "V" else f"numpy's {dtype.name}"  # bfloat16 of an extension is not torch's
    return str(dtype).removeprefix("torch.")


def working_type(dtype: str) -> str:
    """The number type to compute with: float64 for float64, float32 for all others."""
    return "float64" if dtype == "float64" else "float32"


def detach(array: Array) -> Array:
    """The values alone: a tensor without its graph, a list as an array; a view where possible."""
    return array.detach() if is_torch(array) else np.asarray(array)


def to_native(array: Array) -> Array:
    """Convert to a native array: numpy on the CPU, a tensor elsewhere; a view where possible.

    numpy has no bfloat16, so bfloat16 on the CPU becomes float32, which holds each of its values exactly.
    """
    if not is_torch(array):
        array = np.asarray(array)
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    array = array.detach()
    if array.device.type != "cpu":
        return array
    return (array.float() if str(array.dtype) == "torch.bfloat16" else array).resolve_neg().numpy()


def flatten(array: Array) -> Array:
    """Reshape to one contiguous axis; a view where possible."""
    return array.contiguous().view(-1) if is_torch(array) else np.ascontiguousarray(array).reshape(-1)


def flatten_rows(array: Array) -> Array:
    """Reshape to [client, entry], contiguous; a view where possible."""
    shape = (array.shape[0], math.prod(array.shape[1:]))
    return array.contiguous().view(shape) if is_torch(array) else np.ascontiguousarray(array).reshape(shape)


def move_to(array: Array, like: Array) -> Array:
    """Move a native array to the device of `like`, another native array; no copy if it is already there."""
    if is_torch(like):
        import torch

        readable = is_torch(array) or array.flags.writeable  # torch warns of arrays that cannot be written to
        return torch.as_tensor(array if readable else array.copy(), device=like.device)
    return array.cpu().numpy() if is_torch(array) else array


def zeros(shape: int | tuple[int, ...], dtype: str, like: Array) -> Array:
    """Zeros of a number type on the device of `like`, a native array."""
    if is_torch(like):
        import torch

        return torch.zeros(shape, dtype=getattr(torch, dtype), device=like.device)
    return np.zeros(shape, dtype)


def quotient(array: Array, number: float) -> Array:
    """A native array over a number, rounded once on every device.

    A GPU multiplies by the reciprocal of a plain number, which rounds twice; it divides by a tensor of its own.
    """
    return array / (zeros((), spec(array).dtype, array) + number if is_torch(array) else number)


def cast(array: Array, dtype: str) -> Array:
    """Convert to another number type; no copy if the type is the same."""
    if is_torch(array):
        import torch

        return array.to(getattr(torch, dtype))
    return np.asarray(array).astype(dtype, copy=False)


def convert(array: Array, dtype: str) -> Array:
    """Round a native array to another floating type, as a native array; what the type cannot hold becomes infinite."""
    if is_torch(array):
        return cast(array, dtype)
    with np.errstate(over="ignore"):
        if dtype != "bfloat16":
            return cast(array, dtype)
        import torch

        return torch.from_numpy(array.astype(np.float32)).bfloat16().float().numpy()


def to_int64(array: Array) -> Array:
    """A native array of integers as int64; raises `OverflowError` for values of uint64 that do not fit."""
    wide = cast(array, "int64")
    if spec(array).dtype == "uint64" and bool((wide < 0).any()):
        raise OverflowError("a value of 2**63 or more")
    return wide


def no_entries(placement: Placement) -> Array:
    """An empty native array on the device of a placement."""
    if placement.library == "torch" and placement.device.type != "cpu":
        import torch

        return torch.empty(0, device=placement.device)
    return np.empty(0)


def copy(array: Array) -> Array:
    """A native array with memory of its own."""
    return array.clone() if is_torch(array) else array.copy()


def to_user(array: Array, to: Spec, placement: Placement) -> Array:
    """Convert a native array to the user's library, device, shape and number type."""
    if to.dtype != "bfloat16" and not is_torch(array):
        array = cast(array, to.dtype)  # torch would round float64 to float16 twice, by way of float32
    if placement.library == "numpy" and to.dtype != "bfloat16":
        return cast(array, to.dtype).reshape(to.shape)
    import torch

    tensor = array if is_torch(array) else torch.from_numpy(np.ascontiguousarray(array))
    return tensor.to(device=placement.device, dtype=getattr(torch, to.dtype)).reshape(to.shape)


def column_max(array: Array) -> Array:
    """Maximum over the first axis."""
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
