"""3x3 convolutions with a border of zeros of many lanes in bfloat16, each lane with its own weights, in triton.

One call does all lanes. The copy units of an H100 (TMA) fetch a block of positions for each tap and put zeros where it
reaches over the border of an image, so there are neither patches in memory nor masks. Activations are [lane, sample,
row, column, channel], weights [lane, out, row, column, in].
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


class Tile(NamedTuple):
    """The size of one program's work, and how it runs."""

    positions: int  # at a time, in whole rows
    outs: int
    inputs: int  # at a time
    warps: int
    stages: int
    first: bool = True  # whether weights are the left factor


@triton.jit
def _convolve(
    x_at, weight_at, out_at, BANDS: tl.constexpr, INPUTS: tl.constexpr, OUTS: tl.constexpr, FLIPPED: tl.constexpr,
    FIRST: tl.constexpr, S: tl.constexpr, R: tl.constexpr, C: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """A program has S samples, or a band of R rows of one, and N outputs."""
    M: tl.constexpr = S * R * C
    lane = tl.program_id(1)
    n = tl.program_id(0) % (OUTS // N) * N
    tile = tl.program_id(0) // (OUTS // N)
    sample = tile // BANDS * S
    row = tile % BANDS * R
    total = tl.zeros([N, M] if FIRST else [M, N], tl.float32)
    for step in range(9 * (INPUTS // K)):
        tap = step % 9
        k = step // 9 * K
        x = x_at.load([lane, sample, row + tap // 3 - 1, tap % 3 - 1, k]).reshape([M, K])
        if FLIPPED:
            weight = weight_at.load([lane * INPUTS + k, (8 - tap) * OUTS + n]).T
        else:
            weight = weight_at.load([lane * OUTS + n, tap * INPUTS + k])
        total = tl.dot(weight, x.T, total) if FIRST else tl.dot(x, weight.T, total)
    total = total.to(out_at.dtype)
    if FIRST:
        total = total.T
    out_at.store([lane, sample, row, 0, n], total.reshape([1, S, R, C, N]))


@triton.jit
def _nine(
    grads_at, x_at, parts_at, pieces, TILES: tl.constexpr, BANDS: tl.constexpr, INPUTS: tl.constexpr,
    OUTS: tl.constexpr, S: tl.constexpr, R: tl.constexpr, C: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Nine taps of the weight gradient, from three rows of inputs and three columns of gradients."""
    BLOCKS: tl.constexpr = (OUTS // N) * (INPUTS // K)
    P: tl.constexpr = S * R * C
    lane = tl.program_id(1)
    block = tl.program_id(0) % BLOCKS
    piece = tl.program_id(0) // BLOCKS
    n = block // (INPUTS // K) * N
    k = block % (INPUTS // K) * K
    up_left = tl.zeros([N, K], tl.float32)
    up_middle = tl.zeros([N, K], tl.float32)
    up_right = tl.zeros([N, K], tl.float32)
    same_left = tl.zeros([N, K], tl.float32)
    same_middle = tl.zeros([N, K], tl.float32)
    same_right = tl.zeros([N, K], tl.float32)
    down_left = tl.zeros([N, K], tl.float32)
    down_middle = tl.zeros([N, K], tl.float32)
    down_right = tl.zeros([N, K], tl.float32)
    for tile in range(piece * TILES, piece * TILES + TILES):
        sample = tile // BANDS * S
        row = tile % BANDS * R
        up = x_at.load([lane, sample, row - 1, 0, k]).reshape([P, K])
        same = x_at.load([lane, sample, row, 0, k]).reshape([P, K])
        down = x_at.load([lane, sample, row + 1, 0, k]).reshape([P, K])
        # the left tap connects an input with the output one column to its right
        left = grads_at.load([lane, sample, row, 1, n]).reshape([P, N]).T
        middle = grads_at.load([lane, sample, row, 0, n]).reshape([P, N]).T
        right = grads_at.load([lane, sample, row, -1, n]).reshape([P, N]).T
        up_left = tl.dot(left, up, up_left)
        same_left = tl.dot(left, same, same_left)
        down_left = tl.dot(left, down, down_left)
        up_middle = tl.dot(middle, up, up_middle)
        same_middle = tl.dot(middle, same, same_middle)
        down_middle = tl.dot(middle, down, down_middle)
        up_right = tl.dot(right, up, up_right)
        same_right = tl.dot(right, same, same_right)
        down_right = tl.dot(right, down, down_right)
    kind: tl.constexpr = parts_at.dtype.element_ty
    at = parts_at + (lane * pieces + piece).to(tl.int64) * (OUTS * 9 * INPUTS)
    at += ((n + tl.arange(0, N)) * (9 * INPUTS))[:, None] + (k + tl.arange(0, K))[None, :]
    tl.store(at, up_left.to(kind))
    tl.store(at + INPUTS, up_middle.to(kind))
    tl.store(at + 2 * INPUTS, up_right.to(kind))
    tl.store(at + 3 * INPUTS, same_left.to(kind))
    tl.store(at + 4 * INPUTS, same_middle.to(kind))
    tl.store(at + 5 * INPUTS, same_right.to(kind))
    tl.store(at + 6 * INPUTS, down_left.to(kind))
    tl.store(at + 7 * INPUTS, down_middle.to(kind))
    tl.store(at + 8 * INPUTS, down_right.to(kind))


@triton.jit
def _three(
    grads_at, x_at, parts_at, pieces, TILES: tl.constexpr, BANDS: tl.constexpr, INPUTS: tl.constexpr,
    OUTS: tl.constexpr, S: tl.constexpr, R: tl.constexpr, C: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The three taps of one column of the weight gradient; gradients are [lane and position, out]."""
    BLOCKS: tl.constexpr = (OUTS // N) * (INPUTS // K) * 3
    P: tl.constexpr = S * R * C
    lane = tl.program_id(1)
    block = tl.program_id(0) % BLOCKS
    piece = tl.program_id(0) // BLOCKS
    across = block % 3
    n = block // 3 // (INPUTS // K) * N
    k = block // 3 % (INPUTS // K) * K
    up = tl.zeros([N, K], tl.float32)
    same = tl.zeros([N, K], tl.float32)
    down = tl.zeros([N, K], tl.float32)
    for tile in range(piece * TILES, piece * TILES + TILES):
        sample = tile // BANDS * S
        row = tile % BANDS * R
        grads = grads_at.load([(lane * pieces * TILES + tile) * P, n]).T
        up = tl.dot(grads, x_at.load([lane, sample, row - 1, across - 1, k]).reshape([P, K]), up)
        same = tl.dot(grads, x_at.load([lane, sample, row, across - 1, k]).reshape([P, K]), same)
        down = tl.dot(grads, x_at.load([lane, sample, row + 1, across - 1, k]).reshape([P, K]), down)
    kind: tl.constexpr = parts_at.dtype.element_ty
    at = parts_at + (lane * pieces + piece).to(tl.int64) * (OUTS * 9 * INPUTS) + across * INPUTS
    at += ((n + tl.arange(0, N)) * (9 * INPUTS))[:, None] + (k + tl.arange(0, K))[None, :]
    tl.store(at, up.to(kind))
    tl.store(at + 3 * INPUTS, same.to(kind))
    tl.store(at + 6 * INPUTS, down.to(kind))


@triton.jit
def _one(
    grads_at, x_at, parts_at, pieces, TILES: tl.constexpr, BANDS: tl.constexpr, INPUTS: tl.constexpr,
    OUTS: tl.constexpr, S: tl.constexpr, R: tl.constexpr, C: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One tap of the weight gradient; gradients are [lane and position, out]."""
    BLOCKS: tl.constexpr = (OUTS // N) * (INPUTS // K) * 9
    P: tl.constexpr = S * R * C
    lane = tl.program_id(1)
    block = tl.program_id(0) % BLOCKS
    piece = tl.program_id(0) // BLOCKS
    tap = block % 9
    n = block // 9 // (INPUTS // K) * N
    k = block // 9 % (INPUTS // K) * K
    total = tl.zeros([N, K], tl.float32)
    for tile in range(piece * TILES, piece * TILES + TILES):
        sample = tile // BANDS * S
        row = tile % BANDS * R
        grads = grads_at.load([(lane * pieces * TILES + tile) * P, n]).T
        x = x_at.load([lane, sample, row + tap // 3 - 1, tap % 3 - 1, k]).reshape([P, K])
        total = tl.dot(grads, x, total)
    at = parts_at + (lane * pieces + piece).to(tl.int64) * (OUTS * 9 * INPUTS) + tap * INPUTS
    at += ((n + tl.arange(0, N)) * (9 * INPUTS))[:, None] + (k + tl.arange(0, K))[None, :]
    tl.store(at, total.to(parts_at.dtype.element_ty))


def forward(x: Any, weight: Any, out: Any, tile: Tile, *, flipped: bool = False) -> None:
    """Fill `out` with the convolution of x; flipped, x is the gradient of the output and `out` that of the input."""
    lanes, samples, rows, columns, inputs = x.shape
    outs, (s, r) = out.shape[4], _cut(tile.positions, rows, columns)
    n, k = min(tile.outs, outs), min(tile.inputs, inputs)
    bands = triton.cdiv(rows, r)
    matrix = weight.view(-1, 9 * weight.shape[4])  # [lane and out, tap and in]
    _convolve[(outs // n * bands * triton.cdiv(samples, s), lanes)](
        TensorDescriptor.from_tensor(x, [1, s, r, columns, k]),
        TensorDescriptor.from_tensor(matrix, [k, n] if flipped else [n, k]),
        TensorDescriptor.from_tensor(out, [1, s, r, columns, n]),
        BANDS=bands, INPUTS=inputs, OUTS=outs, FLIPPED=flipped, FIRST=tile.first, S=s, R=r, C=columns, N=n, K=k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def backward_weights(grads: Any, x: Any, parts: Any, tile: Tile, *, taps: int = 3) -> None:
    """Fill `parts` [lane, piece, out, row, column, in] with sums over pieces of the batch."""
    lanes, samples, rows, columns, inputs = x.shape
    pieces, outs = parts.shape[1:3]
    s, r = _cut(tile.positions, rows, columns)
    n, k = min(tile.outs, outs), min(tile.inputs, inputs)
    bands = rows // r
    kernel = {9: _nine, 3: _three, 1: _one}[taps]
    flat = grads if taps == 9 else grads.view(-1, outs)
    kernel[(outs // n * (inputs // k) * (9 // taps) * pieces, lanes)](
        TensorDescriptor.from_tensor(flat, [1, s, r, columns, n] if taps == 9 else [s * r * columns, n]),
        TensorDescriptor.from_tensor(x, [1, s, r, columns, k]),
        parts, pieces, TILES=samples // s * bands // pieces, BANDS=bands, INPUTS=inputs, OUTS=outs,
        S=s, R=r, C=columns, N=n, K=k, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _cut(positions: int, rows: int, columns: int) -> tuple[int, int]:
    """Samples and rows that have so many positions."""
    band = min(rows, max(1, positions // columns))
    return max(1, positions // (band * columns)), band
