"""Hypothesis strategies: stacks of updates with weights, and thresholds."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

TAUS = st.one_of(st.sampled_from([0.0, 0.2, 0.4, 0.5, 0.6, 1.0]), st.integers(0, 20).map(lambda k: k / 20))
FLOATS = ("float64", "float32", "float16")
SHAPES = st.one_of(st.just(()), hnp.array_shapes(max_dims=3, max_side=4, min_side=0))


def values(dtype):
    """Numbers as updates have them: signed, zeros of both signs, magnitudes over six orders, ties among clients."""
    small = st.integers(-8, 8).map(float)
    # beyond some twenty orders a pair of sums is rounded, and what is exact no longer is
    wide = st.floats(2**-13, 100, width={"float64": 64, "float32": 32, "float16": 16}[dtype])
    return st.one_of(small, st.just(-0.0), wide, wide.map(lambda value: -value))


@st.composite
def stacks(draw, dtypes=FLOATS, max_clients=12, min_clients=1):
    """A mapping of two arrays [client, ...] and raw sample counts."""
    clients = draw(st.integers(min_clients, max_clients))
    dtype = draw(st.sampled_from(dtypes))
    shapes = [draw(SHAPES), draw(SHAPES)]
    updates = {
        name: draw(hnp.arrays(dtype, (clients, *shape), elements=values(dtype)))
        for name, shape in zip(("conv.weight", "conv.bias"), shapes, strict=True)
    }
    weights = draw(st.lists(st.integers(1, 1000), min_size=clients, max_size=clients))
    return updates, weights


def rows(updates):
    """The same stack as a list of one mapping per client."""
    clients = len(next(iter(updates.values())))
    return [{name: entry[client] for name, entry in updates.items()} for client in range(clients)]


def same_bits(one, other):
    """Whether two mappings hold the same arrays, bit for bit (zeros by value), types included."""
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and np.array_equal(np.asarray(one[name]), np.asarray(other[name]))
        for name in one
    )
