"""torch.compile, called once per function and process, so that fleets with the same shapes share the compiled code."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from fedgma.training.hints import without_hints

SHAPES = 1024  # compiled versions of one function; torch would stop at 8


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled separately for every shape: symbolic shapes are slower, and there are few shapes here."""
    fixed_shapes = torch.compile(function, dynamic=False)

    def call(*arguments: Any) -> Any:
        limits = torch._dynamo.config.patch(recompile_limit=SHAPES, accumulated_recompile_limit=SHAPES)
        with limits, without_hints():
            return fixed_shapes(*arguments)

    return call
