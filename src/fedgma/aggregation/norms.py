"""The norm of an update, whatever the sizes of its numbers."""

import math
from collections.abc import Iterable

import numpy as np

from fedgma.arrays import Array, cast

PIECE = 2**15  # entries whose squares are summed at a time
SAFE = 1e-280  # underflow does not matter in a sum of squares above this


def norm(arrays: Iterable[Array]) -> float:
    """Euclidean norm of all entries together, in float64; scaled where squares would overflow or underflow."""
    lengths = []
    for array in arrays:
        squares = _sum_of_squares(array) if isinstance(array, np.ndarray) else math.nan
        if SAFE < squares < math.inf:
            lengths.append(math.sqrt(squares))
            continue
        largest = float(abs(array).max()) if math.prod(array.shape) else 0.0
        if not math.isfinite(largest):
            return largest
        if largest > 0:
            scaled = cast(array, "float64") / largest
            lengths.append(largest * math.sqrt(float((scaled * scaled).sum())))
    return math.hypot(*lengths)


def _sum_of_squares(array: np.ndarray) -> float:
    """Sum of squares in pieces that fit the cache; infinite after an overflow, about zero after an underflow."""
    total, flat = 0.0, array.reshape(-1)
    for begin in range(0, flat.size, PIECE):
        piece = np.array(flat[begin : begin + PIECE], np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            total += float(np.multiply(piece, piece, out=piece).sum())
    return total
