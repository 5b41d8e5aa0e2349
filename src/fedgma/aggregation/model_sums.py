"""The sums of a whole model, entry by entry: what a tally adds arrays to. Everything here trusts its arguments.

`sums` are those of floating entries, `maxima` those of integer counters, both by name and changed in place.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from fedgma.aggregation import kernels
from fedgma.aggregation.kernels.plain import Sums, empty_sums, widen_votes
from fedgma.aggregation.kernels.plain import merge as merge_entry
from fedgma.aggregation.stack import Stack
from fedgma.arrays import Array, Spec, copy, is_torch, move_to

ModelSums = dict[str, Sums]
Maxima = dict[str, Array]


def empty(
    schema: Mapping[str, Spec], kinds: Mapping[str, str], clients: int, like: Array, further: Collection[str]
) -> ModelSums:
    """Sums over no clients yet, on the device of `like`, with a vote type that holds the votes of `clients`."""
    return {
        name: empty_sums(math.prod(entry.shape), entry.dtype, clients, kinds[name] == "masked", like, further)
        for name, entry in schema.items()
        if kinds[name] != "maximum"
    }


def widen(sums: ModelSums, clients: int) -> None:
    """Give the votes a type that holds those of `clients`."""
    for name, entry in sums.items():
        sums[name] = widen_votes(entry, clients)


def add(sums: ModelSums, maxima: Maxima, arrays: Mapping[str, Array], weight: float, like: Array) -> None:
    """Add one client's flat arrays; the sums are on the device of `like`."""
    summed = [name for name in arrays if name in sums]
    on_device = [move_to(arrays[name], like) for name in summed]
    kernels.add([sums[name] for name in summed], on_device, weight)
    update_maxima(maxima, {name: arrays[name] for name in arrays.keys() - sums.keys()})


def add_if_finite(sums: ModelSums, maxima: Maxima, arrays: Mapping[str, Array], weight: float) -> bool:
    """The same for arrays that were not checked, reading most of them only once; False if nothing was added.

    That is so if a value is not finite, and where such a kernel does not exist.
    """
    voting = [name for name, entry in sums.items() if entry.votes is not None]
    others = [name for name, entry in sums.items() if entry.votes is None]
    if kernels.first_nonfinite([arrays[name] for name in others]) is not None:
        return False
    if not kernels.add_if_finite([sums[name] for name in voting], [arrays[name] for name in voting], weight):
        return False
    kernels.add([sums[name] for name in others], [arrays[name] for name in others], weight)
    update_maxima(maxima, {name: array for name, array in arrays.items() if name not in sums})
    return True


def add_rows(sums: ModelSums, stack: Stack, rows: Sequence[int], weights: Sequence[float], like: Array) -> bool:
    """Add these rows of a stack; returns whether all of them are finite."""
    finite = True
    for name, entry in sums.items():
        part = move_to(stack.select(name, rows), like)
        finite = kernels.add_rows(entry, part, np.array(weights)) and finite
    return finite


def copied(sums: ModelSums) -> ModelSums:
    """A copy of all sums."""
    return {name: Sums(*(None if part is None else copy(part) for part in entry)) for name, entry in sums.items()}


def merge(sums: ModelSums, others: ModelSums) -> None:
    """Add another tally's sums."""
    for name, other in others.items():
        total = sums[name].total
        merge_entry(sums[name], Sums(*(None if part is None else move_to(part, total) for part in other)))


def update_maxima(maxima: Maxima, arrays: Mapping[str, Array]) -> None:
    """Take the larger one of each counter."""
    for name, array in arrays.items():
        if name in maxima:
            before = move_to(maxima[name], array)
            array = array.maximum(before) if is_torch(array) else np.maximum(array, before)
        maxima[name] = array.clone() if is_torch(array) else np.array(array)
