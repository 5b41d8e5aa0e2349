"""Matrix products of few lanes in float32: bias and ReLU follow in the same kernel, or the mask of a ReLU.

With ten lanes of 32 samples a product is over before a library's kernel has filled the device. Here a program has few
columns, so that there are many programs, and sums run in the order of the inner axis, as in the library's kernels.

Buys: not measured yet.
"""

from typing import Any

import triton
import triton.language as tl

ROWS, COLUMNS, DEPTH = 32, 16, 64  # of a tile
WARPS = 4


@triton.jit
def _product(
    left_at, right_at, bias_at, seen_at, out_at, left_lane, right_lane, bias_lane, out_lane,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, left_by: tl.constexpr, right_by: tl.constexpr,
    BIAS: tl.constexpr, RELU: tl.constexpr, MASK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    ACROSS: tl.constexpr = (COLUMNS + N - 1) // N
    lane = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) // ACROSS * M + tl.arange(0, M)[:, None]
    n = tl.program_id(0) % ACROSS * N + tl.arange(0, N)[None, :]
    left_at += lane * left_lane
    right_at += lane * right_lane
    total = tl.zeros([M, N], tl.float32)
    for begin in range(0, DEPTH, K):
        across = begin + tl.arange(0, K)[None, :]
        down = begin + tl.arange(0, K)[:, None]
        left = tl.load(left_at + m * left_by[0] + across * left_by[1], (m < ROWS) & (across < DEPTH), 0.0)
        right = tl.load(right_at + down * right_by[0] + n * right_by[1], (down < DEPTH) & (n < COLUMNS), 0.0)
        total = tl.dot(left, right, total, input_precision="ieee")
    inside = (m < ROWS) & (n < COLUMNS)
    at = lane * out_lane + m * COLUMNS + n
    if BIAS:
        total += tl.load(bias_at + lane * bias_lane + n, n < COLUMNS, 0.0)
    if RELU:
        total = tl.where(total < 0, 0.0, total)  # NaN stays NaN
    if MASK:
        total = tl.where(tl.load(seen_at + at, inside, 0.0) > 0, total, 0.0)
    tl.store(out_at + at, total, inside)


def product(left: Any, right: Any, out: Any, *, bias: Any = None, relu: bool = False, seen: Any = None) -> None:
    """Fill `out` [lane, row, column], contiguous, with `left @ right`, and what follows it.

    That is a bias and a ReLU, or zeros where `seen`, as large as `out`, is not above zero.
    """
    lanes, rows, columns = out.shape
    grid = (triton.cdiv(rows, ROWS) * triton.cdiv(columns, COLUMNS), lanes)
    _product[grid](
        left, right, out if bias is None else bias, out if seen is None else seen, out,
        left.stride(0), right.stride(0), columns, out.stride(0), ROWS=rows, COLUMNS=columns, DEPTH=left.shape[2],
        left_by=left.stride()[1:], right_by=right.stride()[1:], BIAS=bias is not None, RELU=relu,
        MASK=seen is not None, M=ROWS, N=COLUMNS, K=DEPTH, num_warps=WARPS,
    )  # fmt: skip
