"""3x3 convolutions with zero padding of many lanes in bfloat16, each with its own weights, as one triton kernel.

Memory traffic limits them: a plain kernel reads every input nine times. The three taps of a row of weights see the same
inputs one column apart, so their products are summed separately and moved by a column at the end. A tile has whole rows
of an image for that, and inputs are read three times. The weight gradient reads three rows of inputs and three columns
of gradients for its nine products. Activations are [lane, sample, row, column, channel], weights [lane, out, row,
column, in].

Buys: rows "gpu/conv_3x3" in the table of `benchmarks/bench_parts.py`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Tile(NamedTuple):
    """The size of one program's work, and how it runs."""

    positions: int  # at a time
    outs: int
    inputs: int
    warps: int
    stages: int


@triton.jit
def _convolve(
    x_at, weight_at, out_at, x_lane, weight_lane, out_lane, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr, OUTS: tl.constexpr, INPUT_BY: tl.constexpr, OUT_BY: tl.constexpr, TAP_BY: tl.constexpr,
    FLIPPED: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(2).to(tl.int64)
    x_at += lane * x_lane
    weight_at += lane * weight_lane
    out_at += lane * out_lane
    position = tl.program_id(1) * M + tl.arange(0, M)
    row = position // COLUMNS % ROWS
    n = tl.program_id(0) * N + tl.arange(0, N)
    k = tl.arange(0, K)
    left = tl.zeros([M, N], tl.float32)
    middle = tl.zeros([M, N], tl.float32)
    right = tl.zeros([M, N], tl.float32)
    for step in range(0, 3 * (INPUTS // K)):
        down = step % 3
        begin = step // 3 * K
        inside = (row + down >= 1) & (row + down <= ROWS)
        at = (position + (down - 1) * COLUMNS) * INPUTS + begin
        x = tl.load(x_at + at[:, None] + k[None, :], mask=inside[:, None], other=0.0)
        first = 8 - down * 3 if FLIPPED else down * 3
        next_by: tl.constexpr = -TAP_BY if FLIPPED else TAP_BY
        here = weight_at + first * TAP_BY + (begin + k)[:, None] * INPUT_BY + n[None, :] * OUT_BY
        left = tl.dot(x, tl.load(here), left)
        middle = tl.dot(x, tl.load(here + next_by), middle)
        right = tl.dot(x, tl.load(here + 2 * next_by), right)
    m = tl.arange(0, M)
    column = m % COLUMNS
    before = tl.broadcast_to(tl.where(column > 0, m - 1, m)[:, None], [M, N])
    after = tl.broadcast_to(tl.where(column < COLUMNS - 1, m + 1, m)[:, None], [M, N])
    total = middle + tl.where(column[:, None] > 0, tl.gather(left, before, 0), 0.0)
    total += tl.where(column[:, None] < COLUMNS - 1, tl.gather(right, after, 0), 0.0)
    tl.store(out_at + position[:, None] * OUTS + n[None, :], total.to(out_at.dtype.element_ty))


@triton.jit
def _backward_weights(
    grads_at, x_at, parts_at, grads_lane, x_lane, pieces, POSITIONS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, INPUTS: tl.constexpr, OUTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(2).to(tl.int64)
    piece = tl.program_id(1)
    k = tl.program_id(0) % (INPUTS // K) * K + tl.arange(0, K)
    n = tl.program_id(0) // (INPUTS // K) * N + tl.arange(0, N)
    x_at += lane * x_lane
    grads_at += lane * grads_lane
    up_left = tl.zeros([N, K], tl.float32)
    up_middle = tl.zeros([N, K], tl.float32)
    up_right = tl.zeros([N, K], tl.float32)
    same_left = tl.zeros([N, K], tl.float32)
    same_middle = tl.zeros([N, K], tl.float32)
    same_right = tl.zeros([N, K], tl.float32)
    down_left = tl.zeros([N, K], tl.float32)
    down_middle = tl.zeros([N, K], tl.float32)
    down_right = tl.zeros([N, K], tl.float32)
    for begin in range(0, POSITIONS, M):
        position = piece * POSITIONS + begin + tl.arange(0, M)
        row = position // COLUMNS % ROWS
        column = position % COLUMNS
        x_here = x_at + (position * INPUTS)[:, None] + k[None, :]
        grads_here = grads_at + (position * OUTS)[:, None] + n[None, :]
        up = tl.load(x_here - COLUMNS * INPUTS, mask=(row > 0)[:, None], other=0.0)
        same = tl.load(x_here)
        down = tl.load(x_here + COLUMNS * INPUTS, mask=(row < ROWS - 1)[:, None], other=0.0)
        # the left tap connects an input with the output one column to its right
        left = tl.trans(tl.load(grads_here + OUTS, mask=(column < COLUMNS - 1)[:, None], other=0.0))
        middle = tl.trans(tl.load(grads_here))
        right = tl.trans(tl.load(grads_here - OUTS, mask=(column > 0)[:, None], other=0.0))
        up_left = tl.dot(left, up, up_left)
        up_middle = tl.dot(middle, up, up_middle)
        up_right = tl.dot(right, up, up_right)
        same_left = tl.dot(left, same, same_left)
        same_middle = tl.dot(middle, same, same_middle)
        same_right = tl.dot(right, same, same_right)
        down_left = tl.dot(left, down, down_left)
        down_middle = tl.dot(middle, down, down_middle)
        down_right = tl.dot(right, down, down_right)
    at = parts_at + (lane * pieces + piece) * (OUTS * 9 * INPUTS) + (n * (9 * INPUTS))[:, None] + k[None, :]
    tl.store(at, up_left)
    tl.store(at + INPUTS, up_middle)
    tl.store(at + 2 * INPUTS, up_right)
    tl.store(at + 3 * INPUTS, same_left)
    tl.store(at + 4 * INPUTS, same_middle)
    tl.store(at + 5 * INPUTS, same_right)
    tl.store(at + 6 * INPUTS, down_left)
    tl.store(at + 7 * INPUTS, down_middle)
    tl.store(at + 8 * INPUTS, down_right)


def fits(tile: Tile, positions: int, columns: int, inputs: int, outs: int) -> bool:
    """Whether tiles divide the positions, in whole rows, and the channels."""
    whole = positions % tile.positions == 0 and tile.positions % columns == 0
    return whole and inputs % tile.inputs == 0 and outs % tile.outs == 0


def forward(x: Any, weight: Any, out: Any, tile: Tile, *, flipped: bool = False) -> None:
    """Fill `out` with the convolution of x; flipped, x is the gradient of the output and `out` that of the input."""
    lanes, samples, rows, columns, inputs = x.shape
    outs, last = out.shape[4], weight.shape[4]
    _convolve[(outs // tile.outs, samples * rows * columns // tile.positions, lanes)](
        x, weight, out, x.stride(0), weight.stride(0), out.stride(0), ROWS=rows, COLUMNS=columns, INPUTS=inputs,
        OUTS=outs, INPUT_BY=9 * last if flipped else 1, OUT_BY=1 if flipped else 9 * last, TAP_BY=last, FLIPPED=flipped,
        M=tile.positions, N=tile.outs, K=tile.inputs, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def backward_weights(grads: Any, x: Any, parts: Any, tile: Tile) -> None:
    """Fill `parts` [lane, piece, out, row, column, in] with sums over pieces of the batch."""
    lanes, samples, rows, columns, inputs = x.shape
    pieces, outs = parts.shape[1:3]
    _backward_weights[(outs // tile.outs * (inputs // tile.inputs), pieces, lanes)](
        grads, x, parts, grads.stride(0), x.stride(0), pieces, POSITIONS=samples * rows * columns // pieces, ROWS=rows,
        COLUMNS=columns, INPUTS=inputs, OUTS=outs, M=tile.positions, N=tile.outs, K=tile.inputs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
