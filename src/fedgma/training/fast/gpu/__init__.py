"""GPU kernels of training, in triton: convolutions and group normalisation of many lanes at once."""

import importlib
from functools import cache
from types import ModuleType

from fedgma.aggregation.kernels import TRITON as TRITON


@cache
def kernels(name: str) -> ModuleType | None:
    """The kernels of that module, or None where triton is missing."""
    return importlib.import_module(f"fedgma.training.fast.gpu.{name}") if TRITON else None
