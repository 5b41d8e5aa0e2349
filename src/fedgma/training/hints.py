"""Silences two warnings of torch that a user can do nothing about, only around the calls that raise them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

HINTS = (
    "There is a performance drop because we have not yet implemented the batching rule",  # vmap: slower, not wrong
    "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled",  # fp32 was asked for
)


@contextmanager
def without_hints() -> Iterator[None]:
    """Inside, torch's hints on speed are not shown; every other warning is."""
    with warnings.catch_warnings():
        for hint in HINTS:
            warnings.filterwarnings("ignore", hint, UserWarning)
        yield
