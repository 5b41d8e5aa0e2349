"""Convolution, bias, ReLU and 2x2 max pooling of many lanes in triton, on matrix units, with their gradients.

Every lane has its own weights. Tensors are [lane, sample, channel, row, column] with any strides. Windows are gathered
on the way to the matrix units and never written to memory. For the backward passes the forward pass keeps one byte per
output: which corner of its pooling window held the maximum (0 to 3, the first of equals), or 4 where ReLU made it zero.
`spread` turns that into the gradient of the bare convolution; the input gradient is then another convolution.

Buys, over cuDNN on an H200: 3.0 for the small CNN, 50 lanes, TF32 (`benchmarks/bench_parts.py`).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """The size of one program's work, and how it runs."""

    positions: int = 128  # at a time; before pooling
    entries: int = 32  # pairs of tap and channel at a time
    warps: int = 4
    stages: int = 2
    precision: str | None = None  # of float32 products, instead of torch's setting


@triton.jit
def _coordinates(flat, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sample, row and column of a position."""
    return flat // (ROWS * COLUMNS), flat // COLUMNS % ROWS, flat % COLUMNS


@triton.jit
def _window(
    x_at, sample, row, column, entry, wanted, by: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, PADDING: tl.constexpr, MASKED: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The inputs of outputs (sample, row, column); an entry is a pair (tap, channel).

    Outputs and entries broadcast against each other, so only their sum is computed for every pair. There is no mask
    where none is needed: loads under one mask are combined.
    """
    tap = entry // CHANNELS
    down = tap // KERNEL - PADDING
    across = tap % KERNEL - PADDING
    if KERNEL * KERNEL * CHANNELS % K > 0:
        wanted = wanted & (tap < KERNEL * KERNEL)
    if MASKED:
        wanted = wanted & (row + down >= 0) & (row + down < HEIGHT) & (column + across >= 0) & (column + across < WIDTH)
    at = (sample * by[1] + row * by[3] + column * by[4]) + (down * by[3] + across * by[4] + entry % CHANNELS * by[2])
    return tl.load(x_at + at, wanted, 0.0)


@triton.jit
def _convolve(
    x_at, weight_at, bias_at, out_at, corners_at, samples, lane_by,
    x_by: tl.constexpr, weight_by: tl.constexpr, bias_by: tl.constexpr, out_by: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    OUTS: tl.constexpr, KERNEL: tl.constexpr, PADDING: tl.constexpr, MASKED: tl.constexpr, SIDE: tl.constexpr,
    BACK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """With BACK the weights are flipped, and neither bias nor ReLU follows."""
    CORNERS: tl.constexpr = SIDE * SIDE
    TAPS: tl.constexpr = KERNEL * KERNEL
    lane = tl.program_id(1).to(tl.int64)
    x_at += lane * lane_by[0]
    weight_at += lane * lane_by[1]
    first = tl.program_id(0) * (M // CORNERS)
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, N)[None, :]
    position = first + m // CORNERS  # the corners of one pooled output are neighbours in the tile
    sample, row, column = _coordinates(position, ROWS, COLUMNS)
    inside = position < samples * ROWS * COLUMNS
    row = row * SIDE + m % CORNERS // SIDE
    column = column * SIDE + m % SIDE
    total = tl.zeros([M, N], tl.float32)
    for begin in range(0, TAPS * CHANNELS, K):
        window = _window(
            x_at, sample, row, column, begin + tl.arange(0, K)[None, :], inside, x_by,
            HEIGHT, WIDTH, CHANNELS, KERNEL, PADDING, MASKED, K,
        )  # fmt: skip
        entry = begin + tl.arange(0, K)[:, None]
        tap = entry // CHANNELS
        if BACK:
            tap = TAPS - 1 - tap
        at = n * weight_by[1] + (entry % CHANNELS * weight_by[2] + tap * weight_by[4])
        weight = tl.load(weight_at + at, (entry < TAPS * CHANNELS) & (n < OUTS), 0.0)
        total = tl.dot(window, weight, total, input_precision=PRECISION)
    position = first + tl.arange(0, M // CORNERS)[:, None]
    sample, row, column = _coordinates(position, ROWS, COLUMNS)
    inside = (position < samples * ROWS * COLUMNS) & (n < OUTS)
    at = lane * lane_by[3] + (sample * out_by[1] + row * out_by[3] + column * out_by[4] + n * out_by[2])
    if BACK:
        tl.store(out_at + at, total.to(out_at.dtype.element_ty), inside)
    else:
        total += tl.load(bias_at + lane * lane_by[2] + n * bias_by[1], n < OUTS, 0.0).to(tl.float32)
        if CORNERS > 1:
            four = tl.reshape(total, [M // CORNERS, CORNERS, N])
            most = tl.max(four, 1)
            here = four == tl.expand_dims(most, 1)
            corner = tl.min(tl.where(here, tl.arange(0, CORNERS)[None, :, None], CORNERS), 1)
        else:
            most = total
            corner = tl.zeros([M, N], tl.int32)
        corner = tl.where(most > 0, corner, 4)
        most = tl.where(most < 0, 0.0, most)  # NaN stays NaN
        tl.store(out_at + at, most.to(out_at.dtype.element_ty), inside)
        tl.store(corners_at + at, corner.to(tl.uint8), inside)


@triton.jit
def _spread(
    grads_at, corners_at, out_at, samples, lane_by,
    grads_by: tl.constexpr, corners_by: tl.constexpr, out_by: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, OUTS: tl.constexpr, SIDE: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(1).to(tl.int64)
    flat = tl.program_id(0) * M + tl.arange(0, M)
    inside = flat < samples * ROWS * COLUMNS * OUTS
    sample, row, column = _coordinates(flat // OUTS, ROWS, COLUMNS)
    n = flat % OUTS
    at = sample * grads_by[1] + row * grads_by[3] + column * grads_by[4] + n * grads_by[2]
    grads = tl.load(grads_at + lane * lane_by[0] + at, inside, 0.0)
    at = sample * corners_by[1] + row * corners_by[3] + column * corners_by[4] + n * corners_by[2]
    corner = tl.load(corners_at + lane * lane_by[1] + at, inside, 4).to(tl.int32)
    at = sample * out_by[1] + row * (SIDE * out_by[3]) + column * (SIDE * out_by[4]) + n * out_by[2]
    out_at += lane * lane_by[2]
    for which in tl.static_range(SIDE * SIDE):
        here = tl.where(corner == which, grads, 0.0).to(out_at.dtype.element_ty)
        tl.store(out_at + at + (which // SIDE * out_by[3] + which % SIDE * out_by[4]), here, inside)


@triton.jit
def _backward_weights(
    grads_at, corners_at, x_at, parts_at, biases_at, lane_by,
    grads_by: tl.constexpr, corners_by: tl.constexpr, x_by: tl.constexpr, parts_by: tl.constexpr,
    biases_by: tl.constexpr, SAMPLES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, OUTS: tl.constexpr, KERNEL: tl.constexpr, PADDING: tl.constexpr,
    DENSE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program has some entries of a piece; DENSE gradients, from `spread`, do not need the corners."""
    CHUNKS: tl.constexpr = (KERNEL * KERNEL * CHANNELS + K - 1) // K
    END: tl.constexpr = SAMPLES * ROWS * COLUMNS  # of a piece
    chunk = tl.program_id(0) % CHUNKS
    piece = tl.program_id(0) // CHUNKS
    lane = tl.program_id(1).to(tl.int64)
    grads_at += lane * lane_by[0] + piece * SAMPLES * grads_by[1]
    corners_at += lane * lane_by[1] + piece * SAMPLES * corners_by[1]
    x_at += lane * lane_by[2] + piece * SAMPLES * x_by[1]
    entry = chunk * K + tl.arange(0, K)[:, None]
    n = tl.arange(0, N)[None, :]
    total = tl.zeros([K, N], tl.float32)
    bias = tl.zeros([M, N], tl.float32)
    for begin in range(0, END, M):
        position = begin + tl.arange(0, M)[:, None]
        sample, row, column = _coordinates(position, ROWS, COLUMNS)
        wanted = position < END
        if N > OUTS:
            wanted = wanted & (n < OUTS)
        at = (sample * grads_by[1] + row * grads_by[3] + column * grads_by[4]) + n * grads_by[2]
        grads = tl.load(grads_at + at, wanted, 0.0)
        if not DENSE:
            at = (sample * corners_by[1] + row * corners_by[3] + column * corners_by[4]) + n * corners_by[2]
            grads = tl.where(tl.load(corners_at + at, wanted, 4) == 0, grads, 0.0).to(grads_at.dtype.element_ty)
        bias += grads.to(tl.float32)
        position = begin + tl.arange(0, M)[None, :]
        sample, row, column = _coordinates(position, ROWS, COLUMNS)
        window = _window(
            x_at, sample, row, column, entry, position < END, x_by,
            HEIGHT, WIDTH, CHANNELS, KERNEL, PADDING, PADDING > 0, K,
        )  # fmt: skip
        total = tl.dot(window, grads, total, input_precision=PRECISION)
    at = n * parts_by[2] + (entry % CHANNELS * parts_by[3] + entry // CHANNELS * parts_by[5])
    at += lane * lane_by[3] + piece * parts_by[1]
    tl.store(parts_at + at, total, (entry < KERNEL * KERNEL * CHANNELS) & (n < OUTS))
    n = tl.arange(0, N)
    at = lane * lane_by[4] + piece * biases_by[1] + n * biases_by[2]
    tl.store(biases_at + at, tl.sum(bias, 0), chunk * N + n < OUTS)  # the first chunk alone: N is at least OUTS


def forward(
    x: Any, weight: Any, bias: Any, out: Any, corners: Any, *, padding: int, pool: bool, tile: Tile | None = None
) -> None:
    """Fill `out` and `corners` (uint8, strides as those of `out`) [lane, sample, out, row, column]."""
    weight = weight.permute(0, 3, 4, 1, 2).contiguous()  # inputs next to each other, as tiles read them
    weight = weight.permute(0, 3, 4, 1, 2)
    _launch(
        x,
        weight,
        bias,
        out,
        corners,
        padding,
        2 if pool else 1,
        tile or (Tile(positions=64) if _exact() else Tile(warps=8)),
    )


def backward_inputs(
    grads: Any, corners: Any, weight: Any, out: Any, *, padding: int, pool: bool, tile: Tile | None = None
) -> None:
    """Fill `out` with the input gradient [lane, sample, channel, row, column]; `grads` without corners are spread."""
    if corners is not None:
        grads = spread(grads, corners, pool=pool)
    weight = weight.permute(0, 3, 4, 2, 1).contiguous().permute(0, 3, 4, 1, 2)  # outputs next to each other
    _launch(
        grads,
        weight,
        None,
        out,
        None,
        weight.shape[3] - 1 - padding,
        1,
        tile or (Tile(warps=8) if _exact() else Tile(stages=3)),
    )


def _launch(x: Any, weight: Any, bias: Any, out: Any, corners: Any, padding: int, side: int, tile: Tile) -> None:
    """Start the convolution of x into `out`; without a bias, of gradients back to an input."""
    lanes, samples, channels, height, width = x.shape
    outs, rows, columns = out.shape[2:]
    kernel, back = weight.shape[3], bias is None
    reach = kernel - 1 - 2 * padding
    masked = padding > 0 or rows * side + reach > height or columns * side + reach > width
    grid = (triton.cdiv(samples * rows * columns, tile.positions // side**2), lanes)
    bias, corners = (out, out) if back else (bias, corners)  # never read
    _convolve[grid](
        x, weight, bias, out, corners, samples, lane_strides(x, weight, bias, out),
        x_by=strides(x), weight_by=strides(weight), bias_by=strides(bias), out_by=strides(out),
        HEIGHT=height, WIDTH=width, CHANNELS=channels, ROWS=rows, COLUMNS=columns, OUTS=outs, KERNEL=kernel,
        PADDING=padding, MASKED=masked, SIDE=side, BACK=back, N=_wide(outs), **_options(tile, channels, kernel),
    )  # fmt: skip


def spread(grads: Any, corners: Any, *, pool: bool) -> Any:
    """The gradient before ReLU and pooling, channels last: an output's gradient goes to the corner of its maximum."""
    lanes, samples, outs, rows, columns = grads.shape
    side, block = 2 if pool else 1, 1024
    out = grads.new_empty((lanes, samples, rows * side, columns * side, outs)).permute(0, 1, 4, 2, 3)
    _spread[(triton.cdiv(samples * rows * columns * outs, block), lanes)](
        grads, corners, out, samples, lane_strides(grads, corners, out),
        grads_by=strides(grads), corners_by=strides(corners), out_by=strides(out),
        ROWS=rows, COLUMNS=columns, OUTS=outs, SIDE=side, M=block, num_warps=4,
    )  # fmt: skip
    return out


def backward_weights(
    grads: Any, corners: Any, x: Any, parts: Any, biases: Any, *, padding: int, pool: bool, tile: Tile | None = None
) -> None:
    """Fill `parts` [lane, piece, out, in, k, k] and `biases` [lane, piece, out] with sums over pieces of the batch.

    `grads` without corners are spread.
    """
    if pool and corners is not None:
        grads, corners = spread(grads, corners, pool=pool), None
    lanes, samples, channels, height, width = x.shape
    rows, columns = grads.shape[3:]
    pieces, outs, kernel = parts.shape[1], parts.shape[2], parts.shape[4]
    options = _options(tile or _tile_of_weights(grads, channels * kernel**2), channels, kernel)
    dense = corners is None
    where = grads if dense else corners
    _backward_weights[(pieces * triton.cdiv(channels * kernel**2, options["K"]), lanes)](
        grads, where, x, parts, biases, lane_strides(grads, where, x, parts, biases),
        grads_by=strides(grads), corners_by=strides(where), x_by=strides(x),
        parts_by=strides(parts), biases_by=strides(biases), SAMPLES=samples // pieces, HEIGHT=height, WIDTH=width,
        CHANNELS=channels, ROWS=rows, COLUMNS=columns, OUTS=outs, KERNEL=kernel, PADDING=padding, DENSE=dense,
        N=_wide(outs), **options,
    )  # fmt: skip


def _tile_of_weights(grads: Any, entries: int) -> Tile:
    """The tile of a weight gradient; two warps in TF32, since four would need tiles transposed on the way."""
    if entries <= 32:
        return Tile(positions=32 if _exact() else 64, entries=32)
    if grads.dtype == torch.float32:
        return Tile(positions=64, entries=64) if _exact() else Tile(positions=32, entries=64, warps=2, stages=3)
    return Tile(positions=64, entries=64, stages=3)


def strides(tensor: Any) -> tuple[int, ...]:
    """All strides but that of the lanes, which depends on the batch: one kernel then serves every batch size."""
    return (0, *tensor.stride()[1:])


def lane_strides(*tensors: Any) -> tuple[int, ...]:
    """The stride from lane to lane of each tensor."""
    return tuple(tensor.stride(0) for tensor in tensors)


def _wide(size: int) -> int:
    """The size of a tile for matrix units that holds so many."""
    return max(16, int(triton.next_power_of_2(size)))


def _options(tile: Tile, channels: int, kernel: int) -> dict[str, Any]:
    return {
        "M": tile.positions,
        "K": min(tile.entries, _wide(channels * kernel**2)),
        "PRECISION": tile.precision
        or ("tf32x3" if _exact() else "tf32"),  # three TF32 products are as exact as float32
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _exact() -> bool:
    return torch.get_float32_matmul_precision() == "highest"
