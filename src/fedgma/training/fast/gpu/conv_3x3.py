"""3x3 convolutions with a border of zeros of many lanes in bfloat16, each lane with its own weights, in triton.

One call does all lanes. The copy units of an H100 (TMA) fetch a block of positions for each tap and put zeros where it
reaches over the border of an image, so there are neither patches in memory nor masks. With stride 2, an image is seen
as four images of every second row and column. Activations are [lane, sample, row, column, channel], weights [lane, out,
row, column, in].

Buys, with `group_norm` and weights in this order, on an H200: 1.43 for ResNet18 in bfloat16, 10 lanes (93.3 against
65.3 ms a round, in two calls). Rows "gpu/conv_3x3" of `benchmarks/bench_parts.py` measure it alone.
"""

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

MANY = 1000  # programs from which large tiles pay
PROGRAMS = 132  # that a weight gradient is split into at least, where the batch allows: one for each processor


class Tile(NamedTuple):
    """The size of one program's work, and how it runs."""

    positions: int  # at a time, in whole rows
    outs: int
    inputs: int  # at a time
    warps: int
    stages: int


@triton.jit
def _window(
    x_at, lane, sample, row, down, across, k,
    SAMPLES: tl.constexpr, INPUTS: tl.constexpr, STRIDE: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The inputs of a block of outputs for one tap: [position, input]."""
    if STRIDE == 1:
        return x_at.load([lane, sample, row + down - 1, across - 1, k]).reshape([M, K])
    up = row + (down + 1) // 2 - 1
    column = (across + 1) // 2 - 1
    odd = (across + 1) % 2
    return x_at.load([lane * SAMPLES + sample, up, (down + 1) % 2, column, odd * INPUTS + k]).reshape([M, K])


@triton.jit
def _convolve(
    x_at, weight_at, out_at, BANDS: tl.constexpr, SAMPLES: tl.constexpr, INPUTS: tl.constexpr, OUTS: tl.constexpr,
    STRIDE: tl.constexpr, FLIPPED: tl.constexpr, S: tl.constexpr, R: tl.constexpr, C: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    """A program has a band of R rows of S samples, and N outputs."""
    M: tl.constexpr = S * R * C
    lane = tl.program_id(1)
    n = tl.program_id(0) % tl.cdiv(OUTS, N) * N
    tile = tl.program_id(0) // tl.cdiv(OUTS, N)
    sample = tile // BANDS * S
    row = tile % BANDS * R
    total = tl.zeros([N, M], tl.float32)  # weights are the left factor: blocks of images can only be the right one
    for step in range(9 * tl.cdiv(INPUTS, K)):
        tap = step % 9
        k = step // 9 * K
        x = _window(x_at, lane, sample, row, tap // 3, tap % 3, k, SAMPLES, INPUTS, STRIDE, M, K)
        if FLIPPED:
            weight = weight_at.load([lane * INPUTS + k, (8 - tap) * OUTS + n]).T
        else:
            weight = weight_at.load([lane * OUTS + n, tap * INPUTS + k])
        total = tl.dot(weight, x.T, total)
    out_at.store([lane, sample, row, 0, n], total.to(out_at.dtype).T.reshape([1, S, R, C, N]))


@triton.jit
def _inputs_of_two(
    grads_at, weight_at, out_at, BANDS: tl.constexpr, SAMPLES: tl.constexpr, INPUTS: tl.constexpr, OUTS: tl.constexpr,
    S: tl.constexpr, R: tl.constexpr, C: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The input gradient with stride 2; a program has every second row and column, so it sees 1, 2 or 4 taps."""
    M: tl.constexpr = S * R * C
    lane = tl.program_id(1)
    n = tl.program_id(0) % (OUTS // N) * N
    tile = tl.program_id(0) // (OUTS // N)
    odd_row = tile % 2
    odd_column = tile // 2 % 2
    sample = tile // 4 // BANDS * S
    row = tile // 4 % BANDS * R
    taps = (1 + odd_row) * (1 + odd_column)
    total = tl.zeros([N, M], tl.float32)
    for step in range(taps * (INPUTS // K)):
        down = step % taps // (1 + odd_column)
        across = step % taps % (1 + odd_column)
        k = step // taps * K
        grads = grads_at.load([lane, sample, row + odd_row - down, odd_column - across, k]).reshape([M, K])
        tap = 3 * (1 - odd_row + 2 * down) + 1 - odd_column + 2 * across
        weight = weight_at.load([lane * INPUTS + k, tap * OUTS + n]).T
        total = tl.dot(weight, grads.T, total)
    at = [lane * SAMPLES + sample, row, odd_row, 0, odd_column * OUTS + n]
    out_at.store(at, total.to(out_at.dtype).T.reshape([S, R, 1, C, N]))


@triton.jit
def _weights(
    grads_at, x_at, parts_at, pieces, TILES: tl.constexpr, BANDS: tl.constexpr, SAMPLES: tl.constexpr,
    INPUTS: tl.constexpr, OUTS: tl.constexpr, STRIDE: tl.constexpr, TAPS: tl.constexpr, S: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """One tap of the weight gradient, or the three of a column; gradients are [lane and position, out]."""
    WIDTH: tl.constexpr = (INPUTS + K - 1) // K
    BLOCKS: tl.constexpr = ((OUTS + N - 1) // N) * WIDTH * (9 // TAPS)
    P: tl.constexpr = S * R * C
    lane = tl.program_id(1)
    block = tl.program_id(0) % BLOCKS
    piece = tl.program_id(0) // BLOCKS
    first = block % (9 // TAPS)
    n = block // (9 // TAPS) // WIDTH * N
    k = block // (9 // TAPS) % WIDTH * K
    one = tl.zeros([N, K], tl.float32)
    two = tl.zeros([N, K], tl.float32)
    three = tl.zeros([N, K], tl.float32)
    for tile in range(piece * TILES, piece * TILES + TILES):
        sample = tile // BANDS * S
        row = tile % BANDS * R
        grads = grads_at.load([(lane * pieces * TILES + tile) * P, n]).T
        if TAPS == 1:
            x = _window(x_at, lane, sample, row, first // 3, first % 3, k, SAMPLES, INPUTS, STRIDE, P, K)
            one = tl.dot(grads, x, one)
        else:
            x = _window(x_at, lane, sample, row, 0, first, k, SAMPLES, INPUTS, STRIDE, P, K)
            one = tl.dot(grads, x, one)
            x = _window(x_at, lane, sample, row, 1, first, k, SAMPLES, INPUTS, STRIDE, P, K)
            two = tl.dot(grads, x, two)
            x = _window(x_at, lane, sample, row, 2, first, k, SAMPLES, INPUTS, STRIDE, P, K)
            three = tl.dot(grads, x, three)
    kind: tl.constexpr = parts_at.dtype.element_ty
    at = parts_at + (lane * pieces + piece).to(tl.int64) * (OUTS * 9 * INPUTS) + first * INPUTS
    at += ((n + tl.arange(0, N)) * (9 * INPUTS))[:, None] + (k + tl.arange(0, K))[None, :]
    inside = (n + tl.arange(0, N) < OUTS)[:, None] & (k + tl.arange(0, K) < INPUTS)[None, :]
    tl.store(at, one.to(kind), inside)
    if TAPS == 3:
        tl.store(at + 3 * INPUTS, two.to(kind), inside)
        tl.store(at + 6 * INPUTS, three.to(kind), inside)


def tile_of(out: Any) -> Tile:
    """The tile that fills such an output fastest on an H200; every tile sums in the same order."""
    lanes, samples, rows, columns, outs = out.shape
    if outs < 128:
        return Tile(128, 64, 64, 4, 3)
    many = lanes * samples * rows * columns // 256 * (outs // 128) > MANY
    return Tile(256, 128, 64, 8, 4) if many and outs > 128 else Tile(128, 128, 64, 4, 3)


def tile_of_weights(outs: int, inputs: int) -> tuple[Tile, int]:
    """The tile of a weight gradient, and how many taps a program has."""
    return (Tile(64, 64, 64, 4, 3), 3) if min(outs, inputs) < 128 else (Tile(64, 128, 128, 4, 3), 1)


def programs(tile: Tile, taps: int, weight: Any) -> int:
    """Programs of a weight gradient for each lane and piece."""
    outs, inputs = weight.shape[1], weight.shape[4]
    return triton.cdiv(outs, tile.outs) * triton.cdiv(inputs, _at_a_time(tile.inputs, inputs)) * (9 // taps)


def _at_a_time(most: int, inputs: int) -> int:
    """Inputs of a step; beyond the last one are zeros, so weights of the next tap may stand beside them."""
    return min(most, max(16, int(triton.next_power_of_2(inputs))))


def tiles(tile: Tile, grads: Any) -> int:
    """Tiles of a lane's batch, which pieces divide."""
    _, samples, rows, columns, _ = grads.shape
    s, r = cut(tile.positions, samples, rows, columns)
    return samples // s * (rows // r)


def forward(x: Any, weight: Any, out: Any, tile: Tile, *, stride: int = 1) -> None:
    """Fill `out` with the convolution of x."""
    _launch(x, weight, out, tile, stride, flipped=False)


def backward_inputs(grads: Any, weight: Any, out: Any, tile: Tile, *, stride: int = 1) -> None:
    """Fill `out` with the gradient of the input."""
    if stride == 1:
        return _launch(grads, weight, out, tile, stride, flipped=True)
    lanes, samples, rows, columns, inputs = grads.shape
    outs, (s, r) = out.shape[4], cut(tile.positions, samples, rows, columns)
    n, k = min(tile.outs, outs), min(tile.inputs, inputs)
    _inputs_of_two[(outs // n * (rows // r) * (samples // s) * 4, lanes)](
        TensorDescriptor.from_tensor(grads, [1, s, r, columns, k]), _matrix(weight, [k, n]),
        TensorDescriptor.from_tensor(_halves(out), [s, r, 1, columns, n]),
        BANDS=rows // r, SAMPLES=samples, INPUTS=inputs, OUTS=outs, S=s, R=r, C=columns, N=n, K=k,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _launch(x: Any, weight: Any, out: Any, tile: Tile, stride: int, *, flipped: bool) -> None:
    lanes, samples, rows, columns, outs = out.shape
    inputs, (s, r) = x.shape[4], cut(tile.positions, samples, rows, columns, whole=False)
    n, k = tile.outs, _at_a_time(tile.inputs, inputs)
    _convolve[(triton.cdiv(outs, n) * (rows // r) * triton.cdiv(samples, s), lanes)](
        _images(x, stride, s, r, columns, k), _matrix(weight, [k, n] if flipped else [n, k]),
        TensorDescriptor.from_tensor(out, [1, s, r, columns, n]),
        BANDS=rows // r, SAMPLES=samples, INPUTS=inputs, OUTS=outs, STRIDE=stride, FLIPPED=flipped, S=s, R=r,
        C=columns, N=n, K=k, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def backward_weights(grads: Any, x: Any, parts: Any, tile: Tile, *, taps: int = 3, stride: int = 1) -> None:
    """Fill `parts` [lane, piece, out, row, column, in] with sums over pieces of the batch; a program has some taps."""
    lanes, samples, rows, columns, outs = grads.shape
    pieces, inputs = parts.shape[1], x.shape[4]
    s, r = cut(tile.positions, samples, rows, columns)
    n, k = tile.outs, _at_a_time(tile.inputs, inputs)
    shared = {
        "TILES": samples // s * (rows // r) // pieces, "BANDS": rows // r, "INPUTS": inputs, "OUTS": outs,
        "S": s, "R": r, "C": columns, "N": n, "K": k, "num_warps": tile.warps, "num_stages": tile.stages,
    }  # fmt: skip
    grid, images = (programs(tile, taps, parts[:, 0]) * pieces, lanes), _images(x, stride, s, r, columns, k)
    flat = TensorDescriptor.from_tensor(grads.view(-1, outs), [s * r * columns, n])
    _weights[grid](flat, images, parts, pieces, SAMPLES=samples, STRIDE=stride, TAPS=taps, **shared)


def cut(positions: int, samples: int, rows: int, columns: int, *, whole: bool = True) -> tuple[int, int]:
    """How many samples, and rows of each, a tile of at most so many positions has; `whole` tiles divide the batch.

    >>> cut(256, 64, 32, 32), cut(256, 64, 4, 4), cut(256, 50, 4, 4), cut(256, 50, 4, 4, whole=False)
    ((1, 8), (16, 4), (2, 4), (16, 4))
    """
    band = min(rows, max(1, positions // columns))
    together = max(1, positions // (band * columns))
    return math.gcd(samples, together) if whole else together, band


def fits(rows: int, columns: int, inputs: int, outs: int, stride: int) -> bool:
    """Whether images can be cut into tiles: sides are powers of two, channels multiples of 8.

    With stride 2, channels are powers of two from 64 on.

    >>> fits(32, 32, 64, 128, 2), fits(32, 32, 32, 40, 1), fits(28, 28, 64, 64, 1), fits(32, 32, 3, 64, 1)
    (True, True, False, False)
    """
    sides = all(4 <= side <= 64 and side.bit_count() == 1 for side in (rows, columns))
    if stride == 1:
        return sides and inputs % 8 == 0 and outs % 8 == 0
    return sides and all(size >= 64 and size.bit_count() == 1 for size in (inputs, outs))


def _images(x: Any, stride: int, samples: int, rows: int, columns: int, channels: int) -> TensorDescriptor:
    """Blocks of images, or of every second row and column of them."""
    if stride == 1:
        return TensorDescriptor.from_tensor(x, [1, samples, rows, columns, channels])
    return TensorDescriptor.from_tensor(_halves(x), [samples, rows, 1, columns, channels])


def _halves(x: Any) -> Any:
    """[lane and sample, half a row, even or odd row, half a column, even or odd column and channel]."""
    lanes, samples, rows, columns, channels = x.shape
    return x.view(lanes * samples, rows // 2, 2, columns // 2, 2 * channels)


def _matrix(weight: Any, block: list[int]) -> TensorDescriptor:
    """Blocks of [lane and out, tap and in]."""
    return TensorDescriptor.from_tensor(weight.view(-1, 9 * weight.shape[4]), block)
