"""Layers of small networks on the CPU, forward and backward, with the batch as the innermost axis.

Activations are flat float32 arrays, read as `[channel][row][column][SLOTS]` (convolutions: sixteen samples at a time)
or `[feature][batch]` (dense layers: the whole batch, padded to a multiple of SLOTS). So every inner loop is a full
vector, a convolution needs no patches and no transposed copies, and padding costs nothing but its zero gradient.
Weights have torch's layout. Kernels are 5x5, pooling windows 2x2.
"""

import math
from typing import Any

import numpy as np

from fedgma.training.fast.cpu.simd import (
    ONE,
    PART,
    POSITIONS,
    SLOTS,
    STRIDE,
    WHOLE,
    WIDTH,
    add_sums,
    biases,
    both,
    compiled,
    floor,
    larger,
    outer,
    products,
    put,
    put_pooled,
    spread,
    zeros,
)

Array = np.ndarray[Any, Any]
Rows = tuple[int, ...]
TAPS = tuple(range(0, 5 * SLOTS, SLOTS))  # the five columns of a kernel row, as offsets in floats
SIX = (0, 1, 2, 3, 4, 5)
BLOCK = SLOTS * STRIDE


def aligned(*shape: int) -> Array:
    """Zeros, float32, at an address that is a multiple of 64: no vector straddles two cache lines."""
    raw = np.zeros(math.prod(shape) + SLOTS, np.float32)
    skip = -raw.ctypes.data % 64 // 4
    return raw[skip : raw.size - SLOTS + skip].reshape(shape)


@both
def wide(inputs: int) -> int:
    """Row length that holds `inputs` floats in whole blocks of vectors."""
    return (inputs + BLOCK - 1) // BLOCK * BLOCK


@compiled
def conv_pool(
    x: Array, sizes: tuple[int, int, int], w: Array, b: Array, rows: Rows, y: Array, y_step: int, winner: Array
) -> None:
    """Convolution, ReLU and pooling in one pass: `[C][H][W][SLOTS]` to `[O][(H-4)/2][(W-4)/2]`, y_step apart.

    `winner` keeps which of a window's four positions held the maximum (4: none was positive) for the backward pass.
    """
    channels, height, width = sizes
    pooled, step = (width - 4) // 2, channels * 25
    plane = (height - 4) // 2 * pooled
    for r in range(0, height - 4, 2):
        for q in range(0, width - 4, 2):
            cell = (r // 2) * pooled + q // 2
            for o in range(0, b.shape[0], len(rows)):
                best = floor(rows)
                for number in range(0, 4, STRIDE):
                    tile = biases(b, o, 1, rows, POSITIONS)
                    for c in range(channels):
                        for i in range(5):
                            at = ((c * height + r + (number >> 1) + i) * width + q + (number & 1)) * SLOTS
                            w_at = ((o * channels + c) * 5 + i) * 5
                            for j in range(5):
                                tile = outer(tile, x, at + j * SLOTS, POSITIONS, w, w_at + j, step)
                    best = larger(best, tile, number)
                f = o * plane + cell
                put_pooled(y, f * y_step, plane * y_step, winner, f * SLOTS, plane * SLOTS, best)


@compiled
def unpool(
    dy: Array, dy_step: int, winner: Array, sizes: tuple[int, int, int], d: Array, border: int, g_bias: Array
) -> None:
    """A pooled gradient back to the position of each maximum; adds its sums to the gradient of the bias.

    d has `border` zero columns on either side.
    """
    outputs, height, width = sizes
    row = 2 * (width + border) * SLOTS
    for o in range(outputs):
        total = zeros(WHOLE, ONE, ONE)
        for r in range(o * height, (o + 1) * height):
            for q in range(width):
                f, at = r * width + q, 2 * r * row + (border + 2 * q) * SLOTS
                corners = (at, at + SLOTS, at + row, at + row + SLOTS)
                total = spread(total, dy, f * dy_step, winner, f * SLOTS, d, corners)
        add_sums(g_bias, o, 0, ONE, total)


@compiled
def conv_weight_gradient(
    x: Array, sizes: tuple[int, int, int], d: Array, border: int, outputs: int, rows: Rows, g: Array
) -> None:
    """Adds the gradient of a convolution's weights; `len(rows)` outputs times one kernel row stay in registers."""
    channels, height, width = sizes
    row = width - 4 + 2 * border
    plane = (height - 4) * row * SLOTS
    for o in range(0, outputs, len(rows)):
        for c in range(channels):
            for i in range(5):
                tile = zeros(PART, rows, TAPS)
                for r in range(height - 4):
                    a_at = o * plane + (r * row + border) * SLOTS
                    b_at = (c * height + r + i) * width * SLOTS
                    for k in range(0, (width - 4) * SLOTS, WIDTH):
                        tile = products(tile, d, a_at + k, plane, x, b_at + k, TAPS)
                add_sums(g, ((o * channels + c) * 5 + i) * 5, channels * 25, TAPS, tile)


@compiled
def conv_input_gradient(d: Array, outputs: int, w: Array, rows: Rows, dx: Array, sizes: tuple[int, int, int]) -> None:
    """The gradient of a convolution's input; d has one zero column on either side (`border=1`)."""
    channels, height, width = sizes
    row, plane = width - 2, (height - 4) * (width - 2)
    for r in range(height):
        for q in range(0, width, STRIDE):
            for c in range(0, channels, len(rows)):
                tile = zeros(WHOLE, rows, POSITIONS)
                for o in range(outputs):
                    for i in range(max(0, r - height + 5), min(4, r) + 1):
                        at = (o * plane + (r - i) * row + q + 1) * SLOTS
                        w_at = ((o * channels + c) * 5 + i) * 5
                        # kernel columns that reach the output from at least one of the tile's positions
                        for j in range(max(0, q - width + 5), min(4, q + STRIDE - 1) + 1):
                            tile = outer(tile, d, at - j * SLOTS, POSITIONS, w, w_at + j, 25)
                put(dx, ((c * height + r) * width + q) * SLOTS, height * width * SLOTS, POSITIONS, tile)


@compiled
def _dense_rows(
    x: Array, batch: int, w: Array, steps: tuple[int, int], b: Array, b_step: int, first: int, rows: Rows, y: Array
) -> None:
    k_step, i_step = steps
    inputs = x.shape[0] // batch
    for s in range(0, batch - BLOCK + 1, BLOCK):
        tile = biases(b, first * b_step, b_step, rows, POSITIONS)
        for i in range(inputs):
            tile = outer(tile, x, i * batch + s, POSITIONS, w, first * k_step + i * i_step, k_step)
        put(y, first * batch + s, batch, POSITIONS, tile)
    for s in range(batch // BLOCK * BLOCK, batch, SLOTS):
        last = biases(b, first * b_step, b_step, rows, ONE)
        for i in range(inputs):
            last = outer(last, x, i * batch + s, ONE, w, first * k_step + i * i_step, k_step)
        put(y, first * batch + s, batch, ONE, last)


@compiled
def dense(x: Array, batch: int, w: Array, steps: tuple[int, int], b: Array, b_step: int, y: Array) -> None:
    """y[k] = b[k*b_step] + sum over i of w[k*steps[0] + i*steps[1]] * x[i], for `[feature][batch]` arrays.

    Steps (inputs, 1) give a dense layer; (1, inputs) give the gradient of its input from that of its output.
    """
    outputs = y.shape[0] // batch
    for k in range(0, outputs - 5, 6):
        _dense_rows(x, batch, w, steps, b, b_step, k, SIX, y)
    for k in range(outputs // 6 * 6, outputs):
        _dense_rows(x, batch, w, steps, b, b_step, k, ONE, y)


@compiled
def _weight_rows(xt: Array, wide: int, dy: Array, batch: int, inputs: int, first: int, rows: Rows, g: Array) -> None:
    spare = np.empty(6 * BLOCK, np.float32)
    for i in range(0, inputs, BLOCK):
        tile = zeros(WHOLE, rows, POSITIONS)
        for s in range(batch):
            tile = outer(tile, xt, s * wide + i, POSITIONS, dy, first * batch + s, batch)
        if i + BLOCK <= inputs:
            put(g, first * inputs + i, inputs, POSITIONS, tile)
        else:
            put(spare, 0, BLOCK, POSITIONS, tile)
            for k in range(len(rows)):
                for rest in range(inputs - i):
                    g[(first + k) * inputs + i + rest] = spare[k * BLOCK + rest]


@compiled
def dense_gradient(xt: Array, wide: int, dy: Array, batch: int, inputs: int, g: Array, g_bias: Array) -> None:
    """Gradients of a dense layer's weights and bias; xt is the input as rows, `[batch][wide]`."""
    outputs = g_bias.shape[0]
    for o in range(0, outputs - 5, 6):
        _weight_rows(xt, wide, dy, batch, inputs, o, SIX, g)
    for o in range(outputs // 6 * 6, outputs):
        _weight_rows(xt, wide, dy, batch, inputs, o, ONE, g)
    for o in range(outputs):
        total = np.float32(0)
        for s in range(batch):
            total += dy[o * batch + s]
        g_bias[o] = total


@compiled
def relu(y: Array) -> None:
    """Negative entries become zero, in place."""
    for k in range(y.shape[0]):
        y[k] = np.float32(0) if y[k] < 0 else y[k]


@compiled
def relu_gradient(d: Array, y: Array) -> None:
    """The gradient stops, in place, where the activation was not positive."""
    for k in range(y.shape[0]):
        d[k] = d[k] if y[k] > 0 else np.float32(0)


@compiled
def transpose(x: Array, batch: int, xt: Array, wide: int) -> None:
    """`[feature][batch]` to `[batch][wide]`."""
    for i in range(x.shape[0] // batch):
        for s in range(batch):
            xt[s * wide + i] = x[i * batch + s]


@compiled
def columns(xt: Array, wide: int, x: Array, batch: int) -> None:
    """`[batch][wide]` to `[feature][batch]`."""
    for i in range(x.shape[0] // batch):
        for s in range(batch):
            x[i * batch + s] = xt[s * wide + i]


@compiled
def cross_entropy(z: Array, batch: int, labels: Array, weights: Array, dz: Array) -> tuple[float, float]:
    """Weighted sums of the loss and of the hits; dz becomes the gradient of the loss in the logits z."""
    classes = z.shape[0] // batch
    loss, hits = 0.0, 0.0
    for s in range(batch):
        top, best = z[s], 0
        for k in range(1, classes):
            if z[k * batch + s] > top:
                top, best = z[k * batch + s], k
        total = np.float32(0)
        for k in range(classes):
            e = math.exp(z[k * batch + s] - top)
            dz[k * batch + s] = e
            total += e
        scale = weights[s] / total
        for k in range(classes):
            dz[k * batch + s] *= scale
        label = labels[s]
        dz[label * batch + s] -= weights[s]
        if weights[s] > 0:
            loss += weights[s] * (math.log(total) + top - z[label * batch + s])
            hits += weights[s] if best == label else 0.0
    return loss, hits


@compiled
def _clip(g: Array, bound: float) -> None:
    """Scale the gradient down to a norm of at most `bound`, as torch does."""
    total = 0.0
    for k in range(g.shape[0]):
        total += np.float64(g[k]) * np.float64(g[k])
    factor = np.float32(bound / (math.sqrt(total) + 1e-6))
    if factor < 1:
        for k in range(g.shape[0]):
            g[k] *= factor


@compiled
def sgd(p: Array, m: Array, g: Array, start: Array, correction: Array, lr: float, rates: Array, bound: float) -> None:
    """One step in place: proximal term, clipping, SCAFFOLD's correction (empty for none), weight decay, momentum.

    `rates` holds momentum, mu, weight decay, and 1 for Nesterov's step or 0; an infinite `bound` clips nothing.
    """
    momentum, mu, decay, nesterov = rates[0], rates[1], rates[2], rates[3]
    if mu != 0:
        for k in range(p.shape[0]):
            g[k] += mu * (p[k] - start[k])
    if bound < np.inf:
        _clip(g, bound)
    for k in range(correction.shape[0]):
        g[k] += correction[k]
    if decay != 0:
        for k in range(p.shape[0]):
            g[k] += decay * p[k]
    if nesterov != 0:
        for k in range(p.shape[0]):
            m[k] = momentum * m[k] + g[k]
            p[k] -= lr * (g[k] + momentum * m[k])
        return
    for k in range(p.shape[0]):
        m[k] = momentum * m[k] + g[k]
        p[k] -= lr * m[k]


# loops, not slices: assigning to a slice compiles numba's checks of shapes and their messages with it, some 2 s
@compiled
def fill(x: Array, value: float) -> None:
    """Every entry becomes `value`."""
    for k in range(x.shape[0]):
        x[k] = value


@compiled
def copy(source: Array, to: Array) -> None:
    """Every entry of `to` becomes that of `source`."""
    for k in range(to.shape[0]):
        to[k] = source[k]


@compiled
def subtract(a: Array, b: Array, to: Array) -> None:
    """`to` becomes a - b."""
    for k in range(to.shape[0]):
        to[k] = a[k] - b[k]


@compiled
def rows_of(z: Array, batch: int, out: Array) -> None:
    """Columns [class][batch] as rows [sample, class]."""
    for sample in range(out.shape[0]):
        for label in range(out.shape[1]):
            out[sample, label] = z[label * batch + sample]
