"""Data sets that hand out one sample after the other by its number, as the `Dataset` of torch and torchvision do.

They are known by what they can do; neither torch nor torchvision is imported here.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedgma.arrays import is_torch
from fedgma.data.files.own.roles import Parts
from fedgma.errors import DataError


def hands_out_samples(value: Any) -> bool:
    """Whether an object has a length and gives an item for each number, and is not itself an array, list or mapping."""
    if isinstance(value, tuple | list | str | bytes | Mapping) or hasattr(value, "dtype"):
        return False
    return hasattr(value, "__getitem__") and hasattr(value, "__len__")


def parts_of_samples(value: Any, where: str) -> Parts:
    """Samples and labels of all items, each of which is (sample, label)."""
    items = [value[number] for number in range(len(value))]
    odd = next((item for item in items if not (isinstance(item, tuple | list) and len(item) == 2)), None)
    if odd is not None or not items:
        got = (
            "none"
            if odd is None
            else f"a {type(odd).__name__}" + (f" of {len(odd)}" if hasattr(odd, "__len__") else "")
        )
        raise DataError(f"{where}: each item of a {type(value).__name__} must be (sample, label), got {got}")
    samples = [np.asarray(as_numpy(sample)) for sample, _ in items]
    if shapes := sorted({sample.shape for sample in samples} - {samples[0].shape}):
        raise DataError(f"{where}: all samples must have one shape, got {list(samples[0].shape)} and {list(shapes[0])}")
    labels = [as_numpy(label) for _, label in items]
    return Parts(np.stack(samples), np.asarray(labels), classes=_classes(value))


def as_numpy(values: Any) -> Any:
    """A tensor of torch as an array, bfloat16 as float32, from any device; other values as they are."""
    if not is_torch(values):
        return values
    values = values.detach().cpu()
    return (values.float() if str(values.dtype) == "torch.bfloat16" else values).numpy()


def _classes(value: Any) -> tuple[str, ...] | None:
    """The names of the classes, as torchvision's data sets have them."""
    names: Any = getattr(value, "classes", None)
    if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names) or None
