"""The passes of `conv_matrix` on threads instead of matrix units, which is faster for layers with few channels.

A thread keeps the sums of its positions in registers and goes through their inputs; all threads use the same weights.
No tiles are padded with zeros, and threads exchange nothing but the weight gradient.

Buys, over cuDNN on an H200: 2.1 for LeNet with 10 lanes, 8.6 with 640 (`benchmarks/bench_parts.py`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fedgma.training.fast.gpu.conv_matrix import _coordinates, lane_strides, strides

FOLDED = True  # whether the sums of threads are added by exchanging halves


class Tile(NamedTuple):
    """Positions of a program, channels whose sums a thread keeps (the largest divisor up to it), and warps."""

    positions: int
    group: int
    warps: int


@triton.constexpr_function
def _input_of(tap, corner, kernel, side):
    """The index, in a position's window, of the input that a corner meets at a tap."""
    return (tap // kernel + corner // side) * (kernel + side - 1) + tap % kernel + corner % side


@triton.constexpr_function
def _output_of(tap, pixel, kernel, side, shift, see):
    """The index, among the spread gradients, of the output that met a pixel of the position at a tap."""
    down, across = pixel // side + shift - tap // kernel, pixel % side + shift - tap % kernel
    return (down // side * see + across // side) * side**2 + down % side * side + across % side


@triton.jit
def _zeros(COUNT: tl.constexpr, M: tl.constexpr):
    """So many sums, all zero."""
    sums = ()
    for _ in tl.static_range(COUNT):
        sums += (tl.zeros([M], tl.float32),)
    return sums


@triton.jit
def _window(
    x_at, top, left,
    by: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, SEE: tl.constexpr,
):  # fmt: skip
    """SEE x SEE inputs from (top, left), row by row."""
    values = ()
    for i in tl.static_range(SEE):
        values += _row(x_at + i * by[3], top + i, left, by, HEIGHT, WIDTH, MASKED, SEE)
    return values


@triton.jit
def _row(
    x_at, row, left,
    by: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr, SEE: tl.constexpr,
):  # fmt: skip
    """SEE inputs of a row, from `left`."""
    values = ()
    for i in tl.static_range(SEE):
        if MASKED:
            wanted = (row >= 0) & (row < HEIGHT) & (left + i >= 0) & (left + i < WIDTH)
            values += (tl.load(x_at + i * by[4], wanted, 0.0).to(tl.float32),)
        else:
            values += (tl.load(x_at + i * by[4]).to(tl.float32),)
    return values


@triton.jit
def _weights(weight_at, by: tl.constexpr, COUNT: tl.constexpr, M: tl.constexpr):
    """The weights of so many taps."""
    weights = ()
    for tap in tl.static_range(COUNT):
        weights += (tl.broadcast_to(tl.load(weight_at + tap * by[4]).to(tl.float32), [M]),)
    return weights


@triton.jit
def _halved(values, thread, HALF: tl.constexpr):
    """Sums of pairs of threads: of the first half of the values in one thread, of the second half in the other."""
    upper = thread & HALF > 0
    found = ()
    for i in tl.static_range(HALF):
        given = tl.where(upper, values[i], values[i + HALF])
        found += (tl.where(upper, values[i + HALF], values[i]) + tl.gather(given, thread ^ HALF, 0),)
    return found


@triton.jit
def _totals(values, BEGIN: tl.constexpr, COUNT: tl.constexpr):
    """Totals of 32 values over 32 threads, by 31 exchanges instead of 160: thread t has that of value BEGIN + t."""
    thread = tl.arange(0, 32)
    found = ()
    for i in tl.static_range(32):
        if BEGIN + i < COUNT:
            found += (values[BEGIN + i],)
        else:
            found += (tl.zeros([32], tl.float32),)
    found = _halved(found, thread, 16)
    found = _halved(found, thread, 8)
    found = _halved(found, thread, 4)
    found = _halved(found, thread, 2)
    found = _halved(found, thread, 1)
    return found[0]


@triton.jit
def _forward(
    x_at, weight_at, bias_at, out_at, corners_at, samples, lane_by,
    x_by: tl.constexpr, weight_by: tl.constexpr, bias_by: tl.constexpr, out_by: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUTS: tl.constexpr, KERNEL: tl.constexpr,
    PADDING: tl.constexpr, SIDE: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    CORNERS: tl.constexpr = SIDE * SIDE
    SEE: tl.constexpr = KERNEL + SIDE - 1
    ROWS: tl.constexpr = (HEIGHT + 2 * PADDING - KERNEL + 1) // SIDE
    COLUMNS: tl.constexpr = (WIDTH + 2 * PADDING - KERNEL + 1) // SIDE
    GROUPS: tl.constexpr = OUTS // GROUP
    lane = tl.program_id(1).to(tl.int64)
    out = tl.program_id(0) % GROUPS * GROUP
    position = tl.program_id(0) // GROUPS * M + tl.arange(0, M)
    inside = position < samples * ROWS * COLUMNS
    position = tl.minimum(position, samples * ROWS * COLUMNS - 1)  # so that loads need no mask
    sample, row, column = _coordinates(position, ROWS, COLUMNS)
    top = row * SIDE - PADDING
    left = column * SIDE - PADDING
    x_at += lane * lane_by[0] + (sample * x_by[1] + top * x_by[3] + left * x_by[4])
    weight_at += lane * lane_by[1] + out * weight_by[1]
    sums = _zeros(GROUP * CORNERS, M)
    for channel in range(CHANNELS):
        x_row = x_at + channel * x_by[2]
        weight_row = weight_at + channel * weight_by[2]
        kept = _row(x_row, top, left, x_by, HEIGHT, WIDTH, PADDING > 0, SEE) if SIDE == 2 else ()
        for down in range(KERNEL):
            under = down + SIDE - 1  # with pooling, the lower corners read now what the upper corners read next
            row_of_x = _row(x_row + under * x_by[3], top + under, left, x_by, HEIGHT, WIDTH, PADDING > 0, SEE)
            values = kept + row_of_x
            before = sums
            sums = ()
            for o in tl.static_range(GROUP):
                weights = _weights(weight_row + o * weight_by[1], weight_by, KERNEL, M)
                for corner in tl.static_range(CORNERS):
                    total = before[o * CORNERS + corner]
                    for across in tl.static_range(KERNEL):
                        total = tl.fma(values[_input_of(across, corner, KERNEL, SIDE)], weights[across], total)
                    sums += (total,)
            weight_row += weight_by[3]
            if SIDE == 2:
                kept = row_of_x
    out_at += lane * lane_by[3] + (sample * out_by[1] + row * out_by[3] + column * out_by[4]) + out * out_by[2]
    corners_at += lane * lane_by[3] + (sample * out_by[1] + row * out_by[3] + column * out_by[4]) + out * out_by[2]
    for o in tl.static_range(GROUP):
        bias = tl.load(bias_at + lane * lane_by[2] + (out + o) * bias_by[1]).to(tl.float32)
        most = sums[o * CORNERS] + bias
        corner = tl.zeros([M], tl.int32)
        for other in tl.static_range(1, CORNERS):
            value = sums[o * CORNERS + other] + bias
            corner = tl.where(value > most, other, corner)
            most = tl.where(value > most, value, most)
        corner = tl.where(most > 0, corner, 4)
        most = tl.where(most < 0, 0.0, most)  # NaN stays NaN
        tl.store(out_at + o * out_by[2], most.to(out_at.dtype.element_ty), inside)
        tl.store(corners_at + o * out_by[2], corner.to(tl.uint8), inside)


@triton.jit
def _backward_inputs(
    grads_at, corners_at, weight_at, out_at, samples, lane_by,
    grads_by: tl.constexpr, corners_by: tl.constexpr, weight_by: tl.constexpr, out_by: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, OUTS: tl.constexpr, KERNEL: tl.constexpr,
    PADDING: tl.constexpr, SIDE: tl.constexpr, LOW: tl.constexpr, SEE: tl.constexpr,
    M: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A position is SIDE x SIDE inputs, its pixels; SEE x SEE outputs, from LOW, depend on them."""
    CORNERS: tl.constexpr = SIDE * SIDE
    ROWS: tl.constexpr = (HEIGHT + 2 * PADDING - KERNEL + 1) // SIDE
    COLUMNS: tl.constexpr = (WIDTH + 2 * PADDING - KERNEL + 1) // SIDE
    DOWN: tl.constexpr = (HEIGHT + SIDE - 1) // SIDE
    ACROSS: tl.constexpr = (WIDTH + SIDE - 1) // SIDE
    GROUPS: tl.constexpr = CHANNELS // GROUP
    lane = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) % GROUPS * GROUP
    position = tl.program_id(0) // GROUPS * M + tl.arange(0, M)
    inside = position < samples * DOWN * ACROSS
    sample, row, column = _coordinates(position, DOWN, ACROSS)
    top = row + LOW
    left = column + LOW
    grads_at += lane * lane_by[0] + (sample * grads_by[1] + top * grads_by[3] + left * grads_by[4])
    corners_at += lane * lane_by[1] + (sample * corners_by[1] + top * corners_by[3] + left * corners_by[4])
    weight_at += lane * lane_by[2] + channel * weight_by[2]
    sums = _zeros(GROUP * CORNERS, M)
    for out in range(OUTS):
        spread = ()  # the gradient of the convolution itself
        for i in tl.static_range(SEE * SEE):
            r = top + i // SEE
            c = left + i % SEE
            wanted = inside & (r >= 0) & (r < ROWS) & (c >= 0) & (c < COLUMNS)
            at = out * corners_by[2] + (i // SEE * corners_by[3] + i % SEE * corners_by[4])
            corner = tl.load(corners_at + at, wanted, 4).to(tl.int32)
            at = out * grads_by[2] + (i // SEE * grads_by[3] + i % SEE * grads_by[4])
            grads = tl.load(grads_at + at, wanted, 0.0).to(tl.float32)
            for which in tl.static_range(CORNERS):
                spread += (tl.where(corner == which, grads, 0.0),)
        before = sums
        sums = ()
        for i in tl.static_range(GROUP):
            weights = _weights(weight_at + out * weight_by[1] + i * weight_by[2], weight_by, KERNEL * KERNEL, M)
            for pixel in tl.static_range(CORNERS):
                total = before[i * CORNERS + pixel]
                for tap in tl.static_range(KERNEL * KERNEL):
                    grads = spread[_output_of(tap, pixel, KERNEL, SIDE, PADDING - SIDE * LOW, SEE)]
                    total = tl.fma(weights[tap], grads, total)
                sums += (total,)
    out_at += lane * lane_by[3] + (sample * out_by[1] + row * (SIDE * out_by[3]) + column * (SIDE * out_by[4]))
    for i in tl.static_range(GROUP):
        for pixel in tl.static_range(CORNERS):
            wanted = inside & (row * SIDE + pixel // SIDE < HEIGHT) & (column * SIDE + pixel % SIDE < WIDTH)
            at = (channel + i) * out_by[2] + (pixel // SIDE * out_by[3] + pixel % SIDE * out_by[4])
            tl.store(out_at + at, sums[i * CORNERS + pixel].to(out_at.dtype.element_ty), wanted)


@triton.jit
def _backward_weights(
    grads_at, corners_at, x_at, parts_at, biases_at, lane_by,
    grads_by: tl.constexpr, corners_by: tl.constexpr, x_by: tl.constexpr, parts_by: tl.constexpr,
    biases_by: tl.constexpr, SAMPLES: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    OUTS: tl.constexpr, KERNEL: tl.constexpr, PADDING: tl.constexpr, SIDE: tl.constexpr,
    M: tl.constexpr, GROUP: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """A program has one input channel and a group of outputs, with all their taps."""
    CORNERS: tl.constexpr = SIDE * SIDE
    SEE: tl.constexpr = KERNEL + SIDE - 1
    TAPS: tl.constexpr = KERNEL * KERNEL
    ROWS: tl.constexpr = (HEIGHT + 2 * PADDING - KERNEL + 1) // SIDE
    COLUMNS: tl.constexpr = (WIDTH + 2 * PADDING - KERNEL + 1) // SIDE
    GROUPS: tl.constexpr = OUTS // GROUP
    END: tl.constexpr = SAMPLES * ROWS * COLUMNS  # of a piece
    lane = tl.program_id(1).to(tl.int64)
    out = tl.program_id(0) % GROUPS * GROUP
    channel = tl.program_id(0) // GROUPS % CHANNELS
    piece = tl.program_id(0) // (GROUPS * CHANNELS)
    grads_at += lane * lane_by[0] + piece * SAMPLES * grads_by[1] + out * grads_by[2]
    corners_at += lane * lane_by[1] + piece * SAMPLES * corners_by[1] + out * corners_by[2]
    x_at += lane * lane_by[2] + piece * SAMPLES * x_by[1] + channel * x_by[2]
    sums = _zeros(GROUP * TAPS, M)
    biases = _zeros(GROUP, M)
    for begin in range(0, END, M):
        position = begin + tl.arange(0, M)
        inside = position < END
        position = tl.minimum(position, END - 1)  # so that loads need no mask
        sample, row, column = _coordinates(position, ROWS, COLUMNS)
        top = row * SIDE - PADDING
        left = column * SIDE - PADDING
        at = sample * x_by[1] + top * x_by[3] + left * x_by[4]
        values = _window(x_at + at, top, left, x_by, HEIGHT, WIDTH, PADDING > 0, SEE)
        before = sums
        earlier = biases
        sums = ()
        biases = ()
        for o in tl.static_range(GROUP):
            at = sample * corners_by[1] + row * corners_by[3] + column * corners_by[4] + o * corners_by[2]
            corner = tl.load(corners_at + at).to(tl.int32)
            at = sample * grads_by[1] + row * grads_by[3] + column * grads_by[4] + o * grads_by[2]
            grads = tl.where(inside & (corner < 4), tl.load(grads_at + at).to(tl.float32), 0.0)
            biases += (earlier[o] + grads,)
            spread = ()
            for which in tl.static_range(CORNERS):
                spread += (tl.where(corner == which, grads, 0.0),)
            for tap in tl.static_range(TAPS):
                total = before[o * TAPS + tap]
                for which in tl.static_range(CORNERS):
                    total = tl.fma(values[_input_of(tap, which, KERNEL, SIDE)], spread[which], total)
                sums += (total,)
    parts_at += lane * lane_by[3] + piece * parts_by[1] + out * parts_by[2] + channel * parts_by[3]
    biases_at += lane * lane_by[4] + piece * biases_by[1] + out
    if FOLDED:
        sums += biases
        for begin in tl.static_range(0, GROUP * TAPS + GROUP, 32):
            total = _totals(sums, begin, GROUP * TAPS + GROUP)
            which = begin + tl.arange(0, 32)
            at = which // TAPS * parts_by[2] + which % TAPS
            tl.store(parts_at + at, total, which < GROUP * TAPS)
            o = which - GROUP * TAPS
            tl.store(biases_at + o, total, (o >= 0) & (o < tl.where(channel == 0, GROUP, 0)))
    else:
        for o in tl.static_range(GROUP):
            tl.store(biases_at + o, tl.sum(biases[o], 0), channel == 0)
            for tap in tl.static_range(TAPS):
                tl.store(parts_at + o * parts_by[2] + tap, tl.sum(sums[o * TAPS + tap], 0))


def forward(
    x: Any, weight: Any, bias: Any, out: Any, corners: Any, *, padding: int, pool: bool, tile: Tile | None = None
) -> None:
    """Fill `out` and `corners` (uint8, strides as those of `out`) [lane, sample, out, row, column]."""
    lanes, samples, channels, height, width = x.shape
    outs, kernel = weight.shape[1], weight.shape[3]
    positions = samples * out.shape[3] * out.shape[4]
    tile = tile or _tile(lanes * positions * outs, Tile(64, 16, 2), Tile(32, 4, 1))
    group = _divisor(outs, tile.group)
    grid = (triton.cdiv(positions, tile.positions) * (outs // group), lanes)
    _forward[grid](
        x, weight, bias, out, corners, samples, lane_strides(x, weight, bias, out),
        x_by=strides(x), weight_by=strides(weight), bias_by=strides(bias), out_by=strides(out),
        HEIGHT=height, WIDTH=width, CHANNELS=channels, OUTS=outs, KERNEL=kernel, PADDING=padding,
        SIDE=2 if pool else 1, M=tile.positions, GROUP=group, num_warps=tile.warps,
    )  # fmt: skip


def backward_inputs(
    grads: Any, corners: Any, weight: Any, out: Any, *, padding: int, pool: bool, tile: Tile | None = None
) -> None:
    """Fill `out` with the gradient of the input [lane, sample, channel, row, column]."""
    lanes, samples, channels, height, width = out.shape
    outs, kernel, side = weight.shape[1], weight.shape[3], 2 if pool else 1
    positions = samples * triton.cdiv(height, side) * triton.cdiv(width, side)
    tile = tile or _tile(lanes * positions * channels, Tile(64, 6, 2), Tile(32, 2, 1))
    group = _divisor(channels, tile.group)
    low, high = (padding - kernel + 1) // side, (side - 1 + padding) // side
    _backward_inputs[(triton.cdiv(positions, tile.positions) * (channels // group), lanes)](
        grads, corners, weight, out, samples, lane_strides(grads, corners, weight, out),
        grads_by=strides(grads), corners_by=strides(corners), weight_by=strides(weight), out_by=strides(out),
        HEIGHT=height, WIDTH=width, CHANNELS=channels, OUTS=outs, KERNEL=kernel, PADDING=padding,
        SIDE=side, LOW=low, SEE=high - low + 1, M=tile.positions, GROUP=group, num_warps=tile.warps,
    )  # fmt: skip


def backward_weights(
    grads: Any, corners: Any, x: Any, parts: Any, biases: Any, *, padding: int, pool: bool, tile: Tile | None = None
) -> None:
    """Fill `parts` [lane, piece, out, in, k, k] and `biases` [lane, piece, out] with sums over pieces of the batch."""
    lanes, samples, channels, height, width = x.shape
    pieces, outs, kernel = parts.shape[1], parts.shape[2], parts.shape[4]
    tile = tile or Tile(32, 4 if kernel > 3 else 16, 1)  # a thread keeps one sum for each tap of a group
    group = _divisor(outs, tile.group)
    _backward_weights[(pieces * channels * (outs // group), lanes)](
        grads, corners, x, parts, biases, lane_strides(grads, corners, x, parts, biases),
        grads_by=strides(grads), corners_by=strides(corners), x_by=strides(x), parts_by=strides(parts),
        biases_by=strides(biases), SAMPLES=samples // pieces, HEIGHT=height, WIDTH=width, CHANNELS=channels,
        OUTS=outs, KERNEL=kernel, PADDING=padding, SIDE=2 if pool else 1,
        M=tile.positions, GROUP=group, FOLDED=FOLDED and tile.positions == 32 and tile.warps == 1,
        num_warps=tile.warps,
    )  # fmt: skip


def _tile(sums: int, large: Tile, small: Tile) -> Tile:
    """The tile of a pass with so many sums; small where there are too few sums to fill a GPU."""
    return large if sums >= 1 << 20 else small


def _divisor(size: int, most: int) -> int:
    return max(part for part in range(1, most + 1) if size % part == 0)
