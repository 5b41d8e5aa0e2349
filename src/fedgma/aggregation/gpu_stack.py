"""Tally and finish a stack of updates on a GPU in one pass, with the same result."""

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from fedgma.aggregation import kernels
from fedgma.aggregation.aggregate import Aggregate, finish
from fedgma.aggregation.gate import Gate, entry_kind
from fedgma.aggregation.masks import VoteMask
from fedgma.aggregation.stack import Stack, Weights, plain_numbers
from fedgma.aggregation.tally import Tally
from fedgma.arrays import FLOATS, Array, NotDense, Params, Spec, is_torch, spec
from fedgma.errors import Diverged

FLOAT = Spec((), "float32")


def finish_stack(
    tally: Tally, updates: Params, weights: Weights, clients: Sequence[Hashable] | None, mask: VoteMask | None
) -> Aggregate | None:
    """The result of `add_many` and `finish` on an empty tally, in one pass; None where that pass does not apply.

    It needs triton and a stack on a GPU whose entries are all trainable and of one floating type. The pass of an
    ordinary stack is begun before its names and shapes are read, so that the device does not wait for the host.
    """
    gpu = _gpu_kernels_for(next(iter(updates.values()), None))
    if gpu is None:
        return None
    if (begun := _ordinary(tally, updates, weights, clients)) is not None:
        arrays, amounts = begun
        mean, masks, nonfinite = gpu.aggregate(arrays, np.array(amounts), math.fsum(amounts), mask)
        shapes = tuple([array.shape[1:] for array in arrays])
        result = _result(gpu, updates, shapes, mean, masks)  # while the device works
        if not bool(nonfinite):
            tally.count(amounts, [])
            tally.check_share()
            return result._replace(notes=tally.notes)
    stack = tally.read_stack(updates, weights, clients)
    if not _is_uniform(stack, tally):
        return None
    keep = tally.admit(stack)
    while keep:
        kept_weights = list(keep.values())
        arrays = [stack.select(name, keep) for name in stack.schema]
        mean, masks, nonfinite = gpu.aggregate(arrays, np.array(kept_weights), math.fsum(kept_weights), mask)
        if not bool(nonfinite):
            tally.count(kept_weights, [stack.clients[row] for row in keep] if stack.named else [])
            tally.check_round()
            shapes = tuple([entry.shape for entry in stack.schema.values()])
            return _result(gpu, stack.schema, shapes, mean, masks)._replace(notes=tally.notes)
        if not tally.refuse_nonfinite(stack, keep):
            raise Diverged("a weighted sum overflows float64; nothing was changed, scale the updates down")
    return finish(tally)  # no client is left: raises NotEnoughClients


def _ordinary(
    tally: Tally, updates: Params, weights: Weights, clients: Sequence[Hashable] | None
) -> tuple[list[Array], list[float]] | None:
    """Arrays and weights of a stack that needs no closer look before its pass; None for any other.

    That is: clients without names, a gate that limits weights alone, plain weights, and tensors in one piece, of one
    floating type, on one device, all of them trainable.
    """
    gate, first = tally.gate, next(iter(updates.values()))
    looks = (gate.selected, tally.schema, clients) != (None, None, None) or gate.cast or gate.max_norm < math.inf
    if looks or not first.dim() or not len(first) or not _is_dense_float(first):
        return None
    size, layout = len(first), (first.dtype, first.device, first.layout)
    for name, array in updates.items():
        if not isinstance(name, str) or entry_kind(name, FLOAT, tally.buffers) != "masked" or not is_torch(array):
            return None
        if (array.dtype, array.device, array.layout) != layout or array.is_nested or not array.is_contiguous():
            return None
        if array.shape[:1] != (size,):
            return None
    values = [1.0] * size if weights is None else _listed(weights, gate)
    return None if values is None or len(values) != size else (list(updates.values()), values)


def _listed(weights: Weights, gate: Gate) -> list[float] | None:
    """Plain weights in a list or an array; None for any others."""
    listed = weights.tolist() if isinstance(weights, np.ndarray) else weights
    return plain_numbers(listed, gate) if isinstance(listed, list | tuple) else None


def _gpu_kernels_for(sample: Any) -> Any:
    return kernels.load_gpu_kernels() if is_torch(sample) and sample.device.type == "cuda" else None


def _is_dense_float(tensor: Any) -> bool:
    try:
        return spec(tensor).dtype in FLOATS
    except NotDense:
        return False


def _result(gpu: Any, names: Iterable[str], shapes: tuple[Any, ...], mean: Array, mask: Array | None) -> Aggregate:
    means = dict(zip(names, gpu.shaped(mean, shapes), strict=True))
    masks = None if mask is None else dict(zip(names, gpu.shaped(mask, shapes), strict=True))
    return Aggregate(means, masks, {})


def _is_uniform(stack: Stack, tally: Tally) -> bool:
    kinds = {entry.dtype for entry in stack.schema.values()}
    trainable = all(entry_kind(name, entry, tally.buffers) == "masked" for name, entry in stack.schema.items())
    return len(kinds) == 1 and trainable and tally.gate.cast is False
