"""Compiled functions, each compiled once in a process: fleets of the same shapes share the result."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from fedgma.training.hints import without_hints

SHAPES = 1024  # of one function; torch would stop compiling at 8


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled for every shape apart: symbolic shapes cost speed, and sizes are few by construction."""
    made = torch.compile(function, dynamic=False)

    def call(*arguments: Any) -> Any:
        limits = torch._dynamo.config.patch(recompile_limit=SHAPES, accumulated_recompile_limit=SHAPES)
        with limits, without_hints():
            return made(*arguments)

    return call
