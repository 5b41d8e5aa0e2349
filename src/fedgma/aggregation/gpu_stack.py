"""Tally and finish a stack of updates on a GPU in one pass, with the same result."""

import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from fedgma.aggregation import kernels
from fedgma.aggregation.aggregate import Aggregate, finish
from fedgma.aggregation.gate import entry_kind
from fedgma.aggregation.masks import VoteMask
from fedgma.aggregation.stack import Stack, Weights
from fedgma.aggregation.tally import Tally
from fedgma.arrays import Array, Params, Spec, is_torch
from fedgma.errors import Diverged


def finish_stack(
    tally: Tally, updates: Params, weights: Weights, clients: Sequence[Hashable] | None, mask: VoteMask | None
) -> Aggregate | None:
    """The result of `add_many` and `finish` on an empty tally, in one pass; None where that pass does not apply.

    It needs triton and a stack on a GPU whose entries are all trainable and of one floating type.
    """
    sample = next(iter(updates.values()), None)
    gpu = kernels.load_gpu_kernels() if is_torch(sample) and sample.device.type == "cuda" else None  # type: ignore[union-attr]
    if gpu is None:
        return None
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
            reshaped = None if masks is None else _reshape(masks, stack.schema)
            return Aggregate(_reshape(means, stack.schema), reshaped, tally.notes)
        if not tally.refuse_nonfinite(stack, keep):
            raise Diverged("a weighted sum overflows float64; nothing was changed, scale the updates down")
    return finish(tally)  # no client is left: raises NotEnoughClients


def _is_uniform(stack: Stack, tally: Tally) -> bool:
    kinds = {entry.dtype for entry in stack.schema.values()}
    trainable = all(entry_kind(name, entry, tally.buffers) == "masked" for name, entry in stack.schema.items())
    return len(kinds) == 1 and trainable and tally.gate.cast is False


def _reshape(arrays: Sequence[Array], schema: Mapping[str, Spec]) -> dict[str, Array]:
    return {name: array.view(entry.shape) for (name, entry), array in zip(schema.items(), arrays, strict=True)}
