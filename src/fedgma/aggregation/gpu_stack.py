"""A stack of updates on a GPU: tally and finish in one pass, with the answer of the two."""

import math
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from fedgma.aggregation import kernels
from fedgma.aggregation.aggregate import Aggregate, finish
from fedgma.aggregation.gate import treatment
from fedgma.aggregation.masks import VoteMask
from fedgma.aggregation.stack import Stack, Weights
from fedgma.aggregation.tally import Tally
from fedgma.arrays import Array, Params, Spec, is_torch
from fedgma.errors import Diverged


def finish_stack(
    tally: Tally, updates: Params, weights: Weights, clients: Sequence[Hashable] | None, mask: VoteMask | None
) -> Aggregate | None:
    """What `add_many` and `finish` give for an empty tally, in one pass; None where that pass does not apply.

    It applies to stacks on a GPU, with triton there, whose entries are all trainable and of one floating type.
    """
    sample = next(iter(updates.values()), None)
    gpu = kernels.fused() if is_torch(sample) and sample.device.type == "cuda" else None  # type: ignore[union-attr]
    if gpu is None:
        return None
    stack = tally.read_stack(updates, weights, clients)
    if not _uniform(stack, tally):
        return None
    keep = tally.admit(stack)
    while keep:
        amounts = list(keep.values())
        arrays = [stack.taken(name, keep) for name in stack.schema]
        means, masks, found = gpu.aggregate(arrays, np.array(amounts), math.fsum(amounts), mask)
        if not bool(found):
            tally.count(amounts, [stack.clients[row] for row in keep] if stack.named else [])
            shaped = None if masks is None else _shaped(masks, stack.schema)
            return Aggregate(_shaped(means, stack.schema), shaped, tally.notes)
        if not tally.refuse_nonfinite(stack, keep):
            raise Diverged("a weighted sum overflows float64; nothing was changed, scale the updates down")
    return finish(tally)  # nobody is left: its error says so


def _uniform(stack: Stack, tally: Tally) -> bool:
    kinds = {entry.dtype for entry in stack.schema.values()}
    trainable = all(treatment(name, entry, tally.buffers) == "masked" for name, entry in stack.schema.items())
    return len(kinds) == 1 and trainable and tally.gate.cast is False


def _shaped(arrays: Sequence[Array], schema: Mapping[str, Spec]) -> dict[str, Array]:
    return {name: array.view(entry.shape) for (name, entry), array in zip(schema.items(), arrays, strict=True)}
