"""torch.compile, called once per function and process, so that fleets with the same shapes share the compiled code.

Compiling takes 10 to 60 s the first time on a machine and some seconds from the compiler's cache; a compiled step saves
a fraction of a millisecond to a few milliseconds: launches, and passes over the activations. So a run begins
uncompiled, and is compiled once it has gone on for so long that compiling would have paid by then. Which rounds those
are depends on the shape of the run alone, never on the clock: rounding differs between the two, and a run must give the
same bits whenever it is repeated or resumed.
"""

import functools
from collections.abc import Callable
from typing import Any

from fedgma.training.hints import without_hints

SHAPES = 1024  # compiled versions of one function; torch would stop at 8
PATIENCE = 10_000  # light local steps that a run trains uncompiled
LIGHT = 1 << 28  # bytes of activations that make a step twice as heavy


Table = dict[Any, Callable[..., Any]]  # operators, and what the compiler puts in their place


@functools.cache
def compiled(function: Callable[..., Any], change: Callable[[Table], Table] | None = None) -> Callable[..., Any]:
    """The function, compiled separately for every shape: symbolic shapes are slower, and there are few shapes here.

    Nothing is compiled, nor is the compiler imported, before the first call. `change` changes the compiler's table of
    what it puts in place of operators.
    """

    def call(*arguments: Any) -> Any:
        import torch._dynamo  # takes seconds

        limits = torch._dynamo.config.patch(recompile_limit=SHAPES, accumulated_recompile_limit=SHAPES)
        with limits, without_hints():
            return fixed_shapes()(*arguments)

    @functools.cache
    def fixed_shapes() -> Callable[..., Any]:
        import torch

        return torch.compile(function, dynamic=False, backend="inductor" if change is None else _inductor(change))

    return call


def _inductor(change: Callable[[Table], Table]) -> Callable[..., Any]:
    """torch's usual compiler with a changed table."""

    def compile_graph(graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.decomposition import select_decomp_table

        return compile_fx(graph, inputs, decompositions=change(select_decomp_table()))

    return compile_graph


def rounds_before_compiling(steps: int, activations: int) -> int:
    """The rounds that a run begins with uncompiled, by the steps called in a round and the bytes of their activations.

    >>> rounds_before_compiling(19, 0), rounds_before_compiling(19, 1 << 28), rounds_before_compiling(50_000, 0)
    (526, 263, 1)
    """
    return max(1, PATIENCE * LIGHT // (max(1, steps) * (LIGHT + activations)))
