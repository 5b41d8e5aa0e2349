"""Convolution, bias, ReLU and 2x2 max pooling of many lanes as one GPU pass by triton, and back, by matrix units.

Every lane has weights of its own. Tensors are [lane, sample, channel, row, column] with any strides. Windows are
gathered on the way to the matrix units and never written to memory. What the backward passes need of the forward one is
a byte an output: which corner of its four won (0 to 3, the first of the largest), or CUT where ReLU cut it off.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """How a pass is cut and runs."""

    positions: int = 128  # at a time; for the forward pass before pooling
    depth: int = 32  # outputs at a time, in the input gradient
    warps: int = 4
    stages: int = 2
    precision: str | None = None  # of float32 products, instead of torch's setting


@triton.jit
def _place(flat, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sample, row and column of a position."""
    return flat // (ROWS * COLUMNS), flat // COLUMNS % ROWS, flat % COLUMNS


@triton.jit
def _window(
    x_at, sample, row, column, down, right, entry, wanted, by: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, PADDING: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """What outputs (sample, row, column) see through SPAN taps from (down, right) on; entries are (tap, channel).

    Outputs and entries broadcast against each other: only their sum is made for every pair, and no mask without need,
    since entries of one mask are loaded together.
    """
    top = row + down - PADDING
    left = column + right - PADDING
    across = entry // CHANNELS
    if entry.numel != SPAN * CHANNELS:
        wanted = wanted & (entry < SPAN * CHANNELS)
    if PADDING > 0:
        wanted = wanted & (top >= 0) & (top < HEIGHT) & (left + across >= 0) & (left + across < WIDTH)
    at = (sample * by[1] + top * by[3] + left * by[4]) + (across * by[4] + entry % CHANNELS * by[2])
    return tl.load(x_at + at, wanted, 0.0)


@triton.jit
def _forward(
    x_at, weight_at, bias_at, out_at, corners_at, samples,
    x_by: tl.constexpr, weight_by: tl.constexpr, bias_by: tl.constexpr, out_by: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUTS: tl.constexpr, KERNEL: tl.constexpr,
    PADDING: tl.constexpr, SIDE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    CORNERS: tl.constexpr = SIDE * SIDE
    ROWS: tl.constexpr = (HEIGHT + 2 * PADDING - KERNEL + 1) // SIDE
    COLUMNS: tl.constexpr = (WIDTH + 2 * PADDING - KERNEL + 1) // SIDE
    lane = tl.program_id(1).to(tl.int64)
    x_at += lane * x_by[0]
    weight_at += lane * weight_by[0]
    first = tl.program_id(0) * (M // CORNERS)
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, N)[None, :]
    place = first + m // CORNERS  # the corners of a pooled output are neighbours in the tile
    sample, row, column = _place(place, ROWS, COLUMNS)
    inside = place < samples * ROWS * COLUMNS
    row = row * SIDE + m % CORNERS // SIDE
    column = column * SIDE + m % SIDE
    across = tl.arange(0, K)[None, :]
    entry = tl.arange(0, K)[:, None]
    total = tl.zeros([M, N], tl.float32)
    for tap in range(0, KERNEL * KERNEL, SPAN):
        window = _window(
            x_at, sample, row, column, tap // KERNEL, tap % KERNEL, across, inside, x_by,
            HEIGHT, WIDTH, CHANNELS, PADDING, SPAN,
        )  # fmt: skip
        at = n * weight_by[1] + (entry % CHANNELS * weight_by[2] + (tap + entry // CHANNELS) * weight_by[4])
        weight = tl.load(weight_at + at, (entry < SPAN * CHANNELS) & (n < OUTS), 0.0)
        total = tl.dot(window, weight, total, input_precision=PRECISION)
    total += tl.load(bias_at + lane * bias_by[0] + n * bias_by[1], n < OUTS, 0.0).to(tl.float32)
    if CORNERS > 1:
        four = tl.reshape(total, [M // CORNERS, CORNERS, N])
        most = tl.max(four, 1)
        here = four == tl.expand_dims(most, 1)
        corner = tl.min(tl.where(here, tl.arange(0, CORNERS)[None, :, None], CORNERS), 1)
    else:
        most = total
        corner = tl.zeros([M, N], tl.int32)
    corner = tl.where(most > 0, corner, 4)
    most = tl.where(most < 0, 0.0, most)  # and NaN stays NaN
    place = first + tl.arange(0, M // CORNERS)[:, None]
    sample, row, column = _place(place, ROWS, COLUMNS)
    inside = (place < samples * ROWS * COLUMNS) & (n < OUTS)
    at = lane * out_by[0] + (sample * out_by[1] + row * out_by[3] + column * out_by[4] + n * out_by[2])
    tl.store(out_at + at, most.to(out_at.dtype.element_ty), inside)
    tl.store(corners_at + at, corner.to(tl.uint8), inside)


@triton.jit
def _backward_inputs(
    grads_at, corners_at, weight_at, out_at, samples,
    grads_by: tl.constexpr, corners_by: tl.constexpr, weight_by: tl.constexpr, out_by: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUTS: tl.constexpr, KERNEL: tl.constexpr,
    PADDING: tl.constexpr, SIDE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = (HEIGHT + 2 * PADDING - KERNEL + 1) // SIDE
    COLUMNS: tl.constexpr = (WIDTH + 2 * PADDING - KERNEL + 1) // SIDE
    PARTS: tl.constexpr = (OUTS + K - 1) // K
    lane = tl.program_id(1).to(tl.int64)
    grads_at += lane * grads_by[0]
    corners_at += lane * corners_by[0]
    weight_at += lane * weight_by[0]
    place = tl.program_id(0) * M + tl.arange(0, M)[:, None]
    n = tl.arange(0, N)[None, :]
    sample, row, column = _place(place, HEIGHT, WIDTH)
    inside = place < samples * HEIGHT * WIDTH
    total = tl.zeros([M, N], tl.float32)
    for step in range(0, KERNEL * KERNEL * PARTS):
        tap = step // PARTS
        begin = step % PARTS * K
        r = row + PADDING - tap // KERNEL  # the output that saw this input through this tap
        c = column + PADDING - tap % KERNEL
        out = begin + tl.arange(0, K)[None, :]
        wanted = inside & (r >= 0) & (r < ROWS * SIDE) & (c >= 0) & (c < COLUMNS * SIDE)
        if OUTS % K > 0:
            wanted = wanted & (out < OUTS)
        at = (sample * corners_by[1] + r // SIDE * corners_by[3] + c // SIDE * corners_by[4]) + out * corners_by[2]
        won = tl.load(corners_at + at, wanted, 4).to(tl.int32) == r % SIDE * SIDE + c % SIDE
        at = (sample * grads_by[1] + r // SIDE * grads_by[3] + c // SIDE * grads_by[4]) + out * grads_by[2]
        grads = tl.load(grads_at + at, wanted, 0.0)
        grads = tl.where(won, grads, 0.0).to(grads_at.dtype.element_ty)
        out = begin + tl.arange(0, K)[:, None]
        at = n * weight_by[2] + out * weight_by[1] + tap * weight_by[4]
        weight = tl.load(weight_at + at, (out < OUTS) & (n < CHANNELS), 0.0)
        total = tl.dot(grads, weight, total, input_precision=PRECISION)
    at = lane * out_by[0] + (sample * out_by[1] + row * out_by[3] + column * out_by[4] + n * out_by[2])
    tl.store(out_at + at, total.to(out_at.dtype.element_ty), inside & (n < CHANNELS))


@triton.jit
def _backward_weights(
    grads_at, corners_at, x_at, parts_at, biases_at,
    grads_by: tl.constexpr, corners_by: tl.constexpr, x_by: tl.constexpr, parts_by: tl.constexpr,
    biases_by: tl.constexpr, SAMPLES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    OUTS: tl.constexpr, KERNEL: tl.constexpr, PADDING: tl.constexpr, SIDE: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = (HEIGHT + 2 * PADDING - KERNEL + 1) // SIDE
    COLUMNS: tl.constexpr = (WIDTH + 2 * PADDING - KERNEL + 1) // SIDE
    CHUNKS: tl.constexpr = KERNEL * KERNEL // SPAN
    END: tl.constexpr = SAMPLES * ROWS * COLUMNS  # of a piece
    tap = tl.program_id(0) % CHUNKS * SPAN
    piece = tl.program_id(0) // CHUNKS
    lane = tl.program_id(1).to(tl.int64)
    grads_at += lane * grads_by[0] + piece * SAMPLES * grads_by[1]
    corners_at += lane * corners_by[0] + piece * SAMPLES * corners_by[1]
    x_at += lane * x_by[0] + piece * SAMPLES * x_by[1]
    entry = tl.arange(0, K)[:, None]
    n = tl.arange(0, N)[None, :]
    total = tl.zeros([K, N], tl.float32)
    bias = tl.zeros([N], tl.float32)
    for begin in range(0, END, M):
        place = begin + tl.arange(0, M)[:, None]
        sample, row, column = _place(place, ROWS, COLUMNS)
        wanted = place < END
        if N > OUTS:
            wanted = wanted & (n < OUTS)
        at = (sample * corners_by[1] + row * corners_by[3] + column * corners_by[4]) + n * corners_by[2]
        corner = tl.load(corners_at + at, wanted, 4).to(tl.int32)
        at = (sample * grads_by[1] + row * grads_by[3] + column * grads_by[4]) + n * grads_by[2]
        grads = tl.load(grads_at + at, wanted, 0.0)
        bias += tl.sum(tl.where(corner < 4, grads, 0.0).to(tl.float32), 0)
        place = begin + tl.arange(0, M)[None, :]
        sample, row, column = _place(place, ROWS, COLUMNS)
        for which in tl.static_range(SIDE * SIDE):
            window = _window(
                x_at, sample, row * SIDE + which // SIDE, column * SIDE + which % SIDE,
                tap // KERNEL, tap % KERNEL, entry, place < END, x_by, HEIGHT, WIDTH, CHANNELS, PADDING, SPAN,
            )  # fmt: skip
            here = tl.where(corner == which, grads, 0.0).to(window.dtype)
            total = tl.dot(window, here, total, input_precision=PRECISION)
    at = n * parts_by[2] + (entry % CHANNELS * parts_by[3] + (tap + entry // CHANNELS) * parts_by[5])
    at += lane * parts_by[0] + piece * parts_by[1]
    tl.store(parts_at + at, total, (entry < SPAN * CHANNELS) & (n < OUTS))
    n = tl.arange(0, N)
    at = lane * biases_by[0] + piece * biases_by[1] + n * biases_by[2]
    tl.store(biases_at + at, bias, (n < OUTS) & (tap == 0))


def forward(
    x: Any, weight: Any, bias: Any, out: Any, corners: Any, *, padding: int, pool: bool, tile: Tile | None = None
) -> None:
    """Fill `out` and `corners` (uint8, strides as those of `out`) [lane, sample, out, row, column]."""
    lanes, samples, channels, height, width = x.shape
    outs, kernel = weight.shape[1], weight.shape[3]
    tile = tile or Tile(warps=8)
    weight = (
        weight.permute(0, 3, 4, 1, 2).contiguous().permute(0, 3, 4, 1, 2)
    )  # inputs side by side, as tiles read them
    positions = samples * out.shape[3] * out.shape[4]
    grid = (triton.cdiv(positions, tile.positions // (4 if pool else 1)), lanes)
    _forward[grid](
        x, weight, bias, out, corners, samples,
        x_by=x.stride(), weight_by=weight.stride(), bias_by=bias.stride(), out_by=out.stride(),
        HEIGHT=height, WIDTH=width, CHANNELS=channels, OUTS=outs, KERNEL=kernel, PADDING=padding,
        SIDE=2 if pool else 1, N=_wide(outs), **_chunk(channels, kernel), **_options(tile),
    )  # fmt: skip


def backward_inputs(
    grads: Any, corners: Any, weight: Any, out: Any, *, padding: int, pool: bool, tile: Tile | None = None
) -> None:
    """Fill `out` with the gradient of the input [lane, sample, channel, row, column]."""
    lanes, samples, channels, height, width = out.shape
    outs, kernel = weight.shape[1], weight.shape[3]
    tile = tile or Tile(depth=64, warps=8)
    weight = weight.permute(0, 3, 4, 2, 1).contiguous().permute(0, 4, 3, 1, 2)  # outputs side by side
    _backward_inputs[(triton.cdiv(samples * height * width, tile.positions), lanes)](
        grads, corners, weight, out, samples,
        grads_by=grads.stride(), corners_by=corners.stride(), weight_by=weight.stride(), out_by=out.stride(),
        HEIGHT=height, WIDTH=width, CHANNELS=channels, OUTS=outs, KERNEL=kernel, PADDING=padding,
        SIDE=2 if pool else 1, N=_wide(channels), K=min(_wide(outs), tile.depth), **_options(tile),
    )  # fmt: skip


def backward_weights(
    grads: Any, corners: Any, x: Any, parts: Any, biases: Any, *, padding: int, pool: bool, tile: Tile | None = None
) -> None:
    """Fill `parts` [lane, piece, out, in, k, k] and `biases` [lane, piece, out] with sums over pieces of the batch."""
    lanes, samples, channels, height, width = x.shape
    pieces, outs, kernel = parts.shape[1], parts.shape[2], parts.shape[4]
    tile = tile or Tile(positions=32)
    chunk = _chunk(channels, kernel)
    _backward_weights[(pieces * kernel * kernel // chunk["SPAN"], lanes)](
        grads, corners, x, parts, biases,
        grads_by=grads.stride(), corners_by=corners.stride(), x_by=x.stride(), parts_by=parts.stride(),
        biases_by=biases.stride(), SAMPLES=samples // pieces, HEIGHT=height, WIDTH=width, CHANNELS=channels,
        OUTS=outs, KERNEL=kernel, PADDING=padding, SIDE=2 if pool else 1, N=_wide(outs), **chunk, **_options(tile),
    )  # fmt: skip


def _chunk(channels: int, kernel: int) -> dict[str, int]:
    """Taps that are worked on at a time, and their entries: a row of the kernel, or one tap of many channels."""
    span = kernel if channels < 16 else 1
    return {"SPAN": span, "K": _wide(span * channels)}


def _wide(size: int) -> int:
    """The side of a tile that matrix units take."""
    return max(16, int(triton.next_power_of_2(size)))


def _options(tile: Tile) -> dict[str, Any]:
    exact = torch.get_float32_matmul_precision() == "highest"
    return {
        "M": tile.positions,
        "PRECISION": tile.precision or ("ieee" if exact else "tf32"),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
