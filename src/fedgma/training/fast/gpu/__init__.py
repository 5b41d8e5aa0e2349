"""GPU kernels in triton, each for many lanes at once: convolutions."""

import importlib
from types import ModuleType

from fedgma.aggregation.kernels import TRITON

# Modules of kernels that are in use. A layer whose kernels are not listed is computed by torch, which is how
# benchmarks measure what they buy.
KERNELS: tuple[str, ...] = ("conv_matrix", "conv_thread") if TRITON else ()


def kernels(name: str) -> ModuleType | None:
    """The module of kernels with that name, or None where it is not in use."""
    return importlib.import_module(f"fedgma.training.fast.gpu.{name}") if name in KERNELS else None
