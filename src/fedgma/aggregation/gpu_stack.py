"""Tally and finish a stack of updates on a GPU in one pass, with the same result."""

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from fedgma.aggregation import kernels
from fedgma.aggregation.aggregate import Aggregate, finish
from fedgma.aggregation.gate import entry_kind, read_schema
from fedgma.aggregation.masks import VoteMask
from fedgma.aggregation.stack import Stack, Weights, plain_numbers
from fedgma.aggregation.tally import Tally
from fedgma.arrays import FLOATS, Array, Params, Spec, is_torch, spec
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
        means, masks, nonfinite = gpu.aggregate(arrays, np.array(amounts), math.fsum(amounts), mask)
        schema = read_schema(updates)  # while the device works
        tally.set_schema({name: Spec(entry.shape[1:], entry.dtype) for name, entry in schema.items()}, arrays[0])
        result = _result(tally, means, masks)
        if not bool(nonfinite):
            tally.count(amounts, [])
            tally.check_round()
            return result._replace(notes=tally.notes)
    stack = tally.read_stack(updates, weights, clients)
    if not _is_uniform(stack, tally):
        return None
    keep = tally.admit(stack)
    while keep:
        kept_weights = list(keep.values())
        arrays = [stack.select(name, keep) for name in stack.schema]
        means, masks, nonfinite = gpu.aggregate(arrays, np.array(kept_weights), math.fsum(kept_weights), mask)
        if not bool(nonfinite):
            tally.count(kept_weights, [stack.clients[row] for row in keep] if stack.named else [])
            tally.check_round()
            return _result(tally, means, masks)
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
    gate, arrays = tally.gate, list(updates.values())
    looks = (gate.selected, tally.schema, clients) != (None, None, None) or gate.cast or gate.max_norm < math.inf
    first = arrays[0]
    if looks or not first.dim():
        return None
    size, kind, device = len(first), first.dtype, first.device
    for name, array in updates.items():
        alike = is_torch(array) and array.dtype == kind and array.device == device and array.dim() > 0
        if not alike or len(array) != size or not _is_in_one_piece(array) or not _is_plain_name(name, tally):
            return None
    listed = weights.tolist() if isinstance(weights, np.ndarray) else weights
    values = (
        [1.0] * size if listed is None else plain_numbers(listed, gate) if isinstance(listed, list | tuple) else None
    )
    return (arrays, values) if size and values is not None and len(values) == size and _is_float(first) else None


def _gpu_kernels_for(sample: Any) -> Any:
    return kernels.load_gpu_kernels() if is_torch(sample) and sample.device.type == "cuda" else None


def _is_in_one_piece(tensor: Any) -> bool:
    return not tensor.is_nested and str(tensor.layout) == "torch.strided" and bool(tensor.is_contiguous())


def _is_float(tensor: Any) -> bool:
    return spec(tensor).dtype in FLOATS


def _is_plain_name(name: object, tally: Tally) -> bool:
    return isinstance(name, str) and entry_kind(name, FLOAT, tally.buffers) == "masked"


def _result(tally: Tally, means: Sequence[Array], masks: Sequence[Array] | None) -> Aggregate:
    schema = tally.schema or {}
    return Aggregate(_reshape(means, schema), None if masks is None else _reshape(masks, schema), tally.notes)


def _is_uniform(stack: Stack, tally: Tally) -> bool:
    kinds = {entry.dtype for entry in stack.schema.values()}
    trainable = all(entry_kind(name, entry, tally.buffers) == "masked" for name, entry in stack.schema.items())
    return len(kinds) == 1 and trainable and tally.gate.cast is False


def _reshape(arrays: Sequence[Array], schema: Mapping[str, Spec]) -> dict[str, Array]:
    return {name: array.view(entry.shape) for (name, entry), array in zip(schema.items(), arrays, strict=True)}
