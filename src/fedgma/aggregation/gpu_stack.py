"""Tally and finish a stack of updates on a GPU in one pass, with the same result."""

import math
from collections.abc import Collection, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from fedgma.aggregation import kernels
from fedgma.aggregation.aggregate import Aggregate, finish
from fedgma.aggregation.gate import Gate, entry_kind
from fedgma.aggregation.masks import VoteMask
from fedgma.aggregation.stack import Stack, Weights, plain_numbers
from fedgma.aggregation.tally import Tally
from fedgma.arrays import Array, Params, Spec
from fedgma.errors import Diverged

FLOAT = Spec((), "float32")
OPEN = Gate()


class Begun(NamedTuple):
    """A pass that the device works on."""

    result: Aggregate  # without notes
    nonfinite: Any  # true if a sum is not finite; waits for the device when it is asked
    weights: list[float]


def begin(
    updates: Params,
    weights: Weights,
    mask: VoteMask | None,
    clients: Sequence[Hashable] | None = None,
    like: Params | None = None,
    buffers: Collection[str] | None = None,
    gate: Gate | None = None,
) -> Begun | None:
    """Begin the pass of an ordinary stack before a tally is made, so that the device does not wait for the host.

    None for a stack that needs a closer look, and for arguments that have to be checked.
    """
    gpu = kernels.gpu_kernels_for(next(iter(updates.values()), None))
    if gpu is None or clients is not None or like is not None or not isinstance(gate, Gate | None):
        return None
    if isinstance(buffers, str) or not isinstance(buffers, Collection | None):
        return None
    if (found := _ordinary(updates, weights, buffers, gate or OPEN)) is None:
        return None
    arrays, layout, amounts = found
    return _begin(gpu, updates, arrays, layout, amounts, mask)


def finish_stack(
    tally: Tally,
    updates: Params,
    weights: Weights,
    clients: Sequence[Hashable] | None,
    mask: VoteMask | None,
    begun: Begun | None = None,
) -> Aggregate | None:
    """The result of `add_many` and `finish` on an empty tally, in one pass; None where that pass does not apply.

    It needs triton and a stack on a GPU whose entries are all trainable and of one floating type. Where the pass has
    `begun`, names and shapes are read one by one only if it finds a value that is not finite.
    """
    gpu = kernels.gpu_kernels_for(next(iter(updates.values()), None))
    if gpu is None:
        return None
    if begun is not None:
        tally.count(begun.weights, [])  # while the device works
        result = begun.result._replace(notes=tally.notes)
        if not begun.nonfinite:
            tally.check_share()
            return result
        tally.clear()
    stack = tally.read_stack(updates, weights, clients)
    if not _is_uniform(stack, tally):
        return None
    keep = tally.admit(stack)
    while keep:
        amounts = list(keep.values())
        arrays = [stack.select(name, keep) for name in stack.schema]
        layout = kernels.load_layouts().layout_of(tuple((len(keep), *entry.shape) for entry in stack.schema.values()))
        result, nonfinite, _ = _begin(gpu, stack.schema, arrays, layout, amounts, mask)
        if not nonfinite:
            tally.count(amounts, [stack.clients[row] for row in keep] if stack.named else [])
            tally.check_round()
            return result._replace(notes=tally.notes)
        if not tally.refuse_nonfinite(stack, keep):
            raise Diverged("a weighted sum overflows float64; nothing was changed, scale the updates down")
    return finish(tally)  # no client is left: raises NotEnoughClients


def _begin(
    gpu: Any, names: Iterable[str], arrays: list[Array], layout: Any, amounts: list[float], mask: VoteMask | None
) -> Begun:
    """Begin the pass; the result's views are made while the device works, and the flag is not read."""
    mean, masks, nonfinite = gpu.aggregate(arrays, layout, amounts, math.fsum(amounts), mask)
    views = kernels.load_layouts().views
    named = [dict(zip(names, views(flat, layout), strict=True)) for flat in (mean, masks) if flat is not None]
    return Begun(Aggregate(named[0], None if masks is None else named[1], {}), nonfinite, amounts)


def _ordinary(
    updates: Params, weights: Weights, buffers: Collection[str] | None, gate: Gate
) -> tuple[list[Array], Any, list[float]] | None:
    """Arrays, their layout and weights of a stack that needs no closer look before its pass; None for any other.

    That is: a gate that limits weights alone, plain weights, and tensors in one piece, of one floating type, on one
    device, all of them trainable.
    """
    arrays = list(updates.values())
    if gate.selected is not None or gate.cast or gate.limits_norms or not _all_vote(tuple(updates), buffers):
        return None
    layout = kernels.load_layouts().common_layout(arrays)
    if layout is None or not layout.clients:
        return None
    values = [1.0] * layout.clients if weights is None else _listed(weights, gate)
    return None if values is None or len(values) != layout.clients else (arrays, layout, values)


def _all_vote(names: tuple[Any, ...], buffers: Collection[str] | None) -> bool:
    """Whether these are texts that name trainable arrays."""
    if {*map(type, names)} != {str}:
        return False
    return _none_is_a_buffer(names) if buffers is None else _vote_beside(names, buffers)


@lru_cache(maxsize=64)
def _none_is_a_buffer(names: tuple[str, ...]) -> bool:
    return _vote_beside(names, None)


def _vote_beside(names: tuple[str, ...], buffers: Collection[str] | None) -> bool:
    return all(entry_kind(name, FLOAT, buffers) == "masked" for name in names)


def _listed(weights: Weights, gate: Gate) -> list[float] | None:
    """Plain weights in a list or an array; None for any others."""
    listed = weights.tolist() if isinstance(weights, np.ndarray) else weights
    return plain_numbers(listed, gate) if isinstance(listed, list | tuple) else None


def _is_uniform(stack: Stack, tally: Tally) -> bool:
    kinds = {entry.dtype for entry in stack.schema.values()}
    trainable = all(entry_kind(name, entry, tally.buffers) == "masked" for name, entry in stack.schema.items())
    return len(kinds) == 1 and trainable and tally.gate.cast is False
