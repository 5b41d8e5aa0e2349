"""LeNet on the CPU: one client's local training, and evaluation, as compiled functions.

The network is conv 5x5 to 6 (padding 2), pool, conv 5x5 to 16, pool, dense 120, dense 84, dense classes, with ReLU and
max pooling. Parameters are one flat vector in the order of torch's `state_dict`.

Buys, over the plain torch loop: 5.9 in processor time on one core, 8 to 9 on two quiet cores.
"""

from typing import Any, NamedTuple

import numpy as np

from fedgma.training.fast.cpu import layers, pixels
from fedgma.training.fast.cpu.simd import SLOTS, WIDE, compiled, compiled_to_disk, inlined

Array = np.ndarray[Any, Any]
# outputs of a convolution that stay in registers together
_FORWARD = (0, 1, 2, 3, 4, 5, 6, 7) if WIDE else (0, 1, 2, 3)
_GRADIENT1 = (0, 1, 2) if WIDE else (0, 1)
_GRADIENT2 = (0, 1, 2, 3) if WIDE else (0, 1)


class Shape(NamedTuple):
    """What the network is given and asked for; height and width are multiples of 4."""

    channels: int
    height: int
    width: int
    classes: int


class Parts(NamedTuple):
    """The layers' weights and biases, as views of one flat vector."""

    w1: Array
    b1: Array
    w2: Array
    b2: Array
    w3: Array
    b3: Array
    w4: Array
    b4: Array
    w5: Array
    b5: Array


class Space(NamedTuple):
    """Scratch of one thread. x, a1, n1 and n2 have a row for each group of SLOTS samples."""

    x: Array
    a1: Array
    n1: Array
    a2: Array
    n2: Array
    d1: Array
    d2: Array
    da1: Array
    h1: Array
    h2: Array
    z: Array
    da2: Array
    dh1: Array
    dh2: Array
    dz: Array
    rows: Array
    zero: Array
    p: Array
    m: Array
    g: Array
    samples: Array
    labels: Array
    weights: Array


def features(shape: Shape) -> int:
    """Inputs of the first dense layer: 400 for 28x28 images.

    >>> features(Shape(1, 28, 28, 10))
    400
    """
    return 16 * (shape.height // 4 - 2) * (shape.width // 4 - 2)


def size(shape: Shape) -> int:
    """Number of parameters.

    >>> size(Shape(1, 28, 28, 10)), size(Shape(3, 28, 28, 10))
    (61706, 62006)
    """
    dense = 120 * (features(shape) + 1) + 84 * 121 + shape.classes * 85
    return 6 * (25 * shape.channels + 1) + 16 * 151 + dense


def space(shape: Shape, batch: int) -> Space:
    """Scratch for batches of up to `batch` samples, zeroed: borders are never written again."""
    slots = -(-batch // SLOTS) * SLOTS
    groups, area, inputs = slots // SLOTS, shape.height * shape.width, features(shape)
    border = (shape.height + 4) * (shape.width + 4)
    plane2 = (shape.height // 2 - 4) * (shape.width // 2 - 2)
    counts = [6 * area * SLOTS, 16 * plane2 * SLOTS, 6 * area // 4 * SLOTS, 120 * slots, 84 * slots]
    counts += [shape.classes * slots, inputs * slots, 120 * slots, 84 * slots, shape.classes * slots]
    counts += [slots * layers.wide(max(inputs, 120)), 1, *(size(shape) for _ in range(3))]
    grouped = [
        layers.aligned(groups, shape.channels * border * SLOTS),
        layers.aligned(groups, 6 * area // 4 * SLOTS),
        np.zeros((groups, 6 * area // 4 * SLOTS), np.uint8),
        layers.aligned(inputs * slots),
        np.zeros((groups, inputs * SLOTS), np.uint8),
    ]
    return Space._make([*grouped, *(layers.aligned(count) for count in counts), *pixels.batch_space(slots)])


@compiled
def _parts(shape: Shape, flat: Array) -> Parts:
    inputs = 16 * (shape.height // 4 - 2) * (shape.width // 4 - 2)
    b1 = 150 * shape.channels
    w2, b2 = b1 + 6, b1 + 6 + 2400
    w3, b3 = b2 + 16, b2 + 16 + 120 * inputs
    w4, b4 = b3 + 120, b3 + 120 + 84 * 120
    w5, b5 = b4 + 84, b4 + 84 + shape.classes * 84
    return Parts(
        flat[:b1],
        flat[b1:w2],
        flat[w2:b2],
        flat[b2:w3],
        flat[w3:b3],
        flat[b3:w4],
        flat[w4:b4],
        flat[b4:w5],
        flat[w5:b5],
        flat[b5:],
    )


@inlined
def _forward(shape: Shape, w: Parts, x: pixels.Pixels, s: Space) -> None:
    batch = s.samples.shape[0]
    half = (6, shape.height // 2, shape.width // 2)
    padded = (shape.channels, shape.height + 4, shape.width + 4)
    for k in range(batch // SLOTS):
        chosen = s.samples[k * SLOTS : (k + 1) * SLOTS]
        pixels.load_images(x, chosen, (shape.channels, shape.height, shape.width), 2, s.x[k])
        layers.conv_pool(s.x[k], padded, w.w1, w.b1, layers.SIX, s.a1[k], SLOTS, s.n1[k])
        layers.conv_pool(s.a1[k], half, w.w2, w.b2, _FORWARD, s.a2[k * SLOTS :], batch, s.n2[k])
    layers.dense(s.a2, batch, w.w3, (s.a2.shape[0] // batch, 1), w.b3, 1, s.h1)
    layers.relu(s.h1)
    layers.dense(s.h1, batch, w.w4, (120, 1), w.b4, 1, s.h2)
    layers.relu(s.h2)
    layers.dense(s.h2, batch, w.w5, (84, 1), w.b5, 1, s.z)


@compiled
def _dense_backward(x: Array, w: Array, dy: Array, g: Array, g_bias: Array, dx: Array, s: Space) -> None:
    batch = s.samples.shape[0]
    inputs = x.shape[0] // batch
    layers.transpose(x, batch, s.rows, layers.wide(inputs))
    layers.dense_gradient(s.rows, layers.wide(inputs), dy, batch, inputs, g, g_bias)
    layers.dense(dy, batch, w, (1, inputs), s.zero, 0, dx)


@inlined
def _backward(shape: Shape, w: Parts, g: Parts, s: Space) -> None:
    batch = s.samples.shape[0]
    _dense_backward(s.h2, w.w5, s.dz, g.w5, g.b5, s.dh2, s)
    layers.relu_gradient(s.dh2, s.h2)
    _dense_backward(s.h1, w.w4, s.dh2, g.w4, g.b4, s.dh1, s)
    layers.relu_gradient(s.dh1, s.h1)
    _dense_backward(s.a2, w.w3, s.dh1, g.w3, g.b3, s.da2, s)
    half = (6, shape.height // 2, shape.width // 2)
    quarter = (16, shape.height // 4 - 2, shape.width // 4 - 2)
    padded = (shape.channels, shape.height + 4, shape.width + 4)
    for gradient in (g.w1, g.b1, g.w2, g.b2):
        layers.fill(gradient, 0)
    for k in range(batch // SLOTS):
        layers.unpool(s.da2[k * SLOTS :], batch, s.n2[k], quarter, s.d2, 1, g.b2)
        layers.conv_weight_gradient(s.a1[k], half, s.d2, 1, 16, _GRADIENT2, g.w2)
        layers.conv_input_gradient(s.d2, 16, w.w2, layers.SIX, s.da1, half)
        layers.unpool(s.da1, SLOTS, s.n1[k], half, s.d1, 0, g.b1)
        layers.conv_weight_gradient(s.x[k], padded, s.d1, 0, 6, _GRADIENT1, g.w1)


@compiled_to_disk
def train(sources: int) -> Any:
    """One client's local training: `update` becomes trained minus start; returns sums of loss, hits and samples."""

    def train(
        shape: Shape,
        start: Array,
        x: pixels.Pixels,
        y: Array,
        batches: Array,
        lr: Array,
        rates: Array,
        bound: float,
        correction: Array,
        s: Space,
        update: Array,
    ) -> tuple[float, float, float]:
        _ = sources
        layers.copy(start, s.p)
        layers.fill(s.m, 0)
        loss, hits, seen = 0.0, 0.0, 0.0
        for step in range(batches.shape[0]):
            count = pixels.take(batches[step], y, s.samples, s.labels, s.weights)
            if count == 0:
                continue
            weights = _parts(shape, s.p)
            _forward(shape, weights, x, s)
            mean_loss, hit_rate = layers.cross_entropy(s.z, s.samples.shape[0], s.labels, s.weights, s.dz)
            _backward(shape, weights, _parts(shape, s.g), s)
            layers.sgd(s.p, s.m, s.g, start, correction, lr[step], rates, bound)
            loss, hits, seen = loss + count * mean_loss, hits + count * hit_rate, seen + count
        layers.subtract(s.p, start, update)
        return loss, hits, seen

    return train


@compiled_to_disk
def logits(sources: int) -> Any:
    """Logits [sample, class] of the samples listed in `index`, into `out`."""

    def logits(shape: Shape, flat: Array, x: pixels.Pixels, y: Array, index: Array, s: Space, out: Array) -> None:
        _ = sources
        weights = _parts(shape, flat)
        for first in range(0, index.shape[0], s.samples.shape[0]):
            pixels.take(index[first : first + s.samples.shape[0]], y, s.samples, s.labels, s.weights)
            _forward(shape, weights, x, s)
            layers.rows_of(s.z, s.samples.shape[0], out[first : first + s.samples.shape[0]])

    return logits
