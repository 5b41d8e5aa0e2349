"""The samples of a batch: which they are, and their images as the layers read them."""

from typing import Any, NamedTuple

import numpy as np

from fedgma.training.fast.cpu.layers import aligned
from fedgma.training.fast.cpu.simd import SLOTS, compiled

Array = np.ndarray[Any, Any]


class Pixels(NamedTuple):
    """A data set's images as rows: bytes and a table of their values, or floats; arrays that are not used are empty.

    All arrays are always given, so that the kernels are compiled once.
    """

    bytes: Array  # uint8 [sample, channel * height * width], or [sample, height * width] of grey images with a tint
    floats: Array  # float32 [sample, channel * height * width]
    table: Array  # float32 [channel, 256]
    tint: Array  # float32 [sample, 2, channel]: what black is, and what full white adds to it


def batch_space(slots: int) -> tuple[Array, Array, Array]:
    """Scratch for `take`: samples, labels and weights."""
    return np.zeros(slots, np.int64), np.zeros(slots, np.int64), aligned(slots)


@compiled
def take(batch: Array, y: Array, samples: Array, labels: Array, weights: Array) -> int:
    """The samples of a batch and their weights; -1 and padding weigh nothing. Returns the number of real samples."""
    count = 0
    for b in range(batch.shape[0]):
        count += 1 if batch[b] >= 0 else 0
    for b in range(samples.shape[0]):
        real = b < batch.shape[0] and batch[b] >= 0
        samples[b] = batch[b] if real else 0
        labels[b] = y[samples[b]]
        weights[b] = 1 / count if real else 0
    return count


@compiled
def load_images(x: Pixels, samples: Array, sizes: tuple[int, int, int], pad: int, out: Array) -> None:
    """SLOTS images into `[channel][row][column][SLOTS]` with a border of `pad`, which stays as it is (zero)."""
    channels, height, width = sizes
    if x.tint.shape[0] > 0:
        return _load_tinted(x, samples, sizes, pad, out)
    for c in range(channels):
        for r in range(height):
            at = ((c * (height + 2 * pad) + r + pad) * (width + 2 * pad) + pad) * SLOTS
            first = (c * height + r) * width
            for q in range(width):
                if x.bytes.shape[0] > 0:
                    for b in range(SLOTS):
                        out[at + q * SLOTS + b] = x.table[c, x.bytes[samples[b], first + q]]
                else:
                    for b in range(SLOTS):
                        out[at + q * SLOTS + b] = x.floats[samples[b], first + q]


@compiled
def _load_tinted(x: Pixels, samples: Array, sizes: tuple[int, int, int], pad: int, out: Array) -> None:
    channels, height, width = sizes
    plane = (height + 2 * pad) * (width + 2 * pad) * SLOTS
    for b in range(SLOTS):
        sample = samples[b]
        for r in range(height):
            at = ((r + pad) * (width + 2 * pad) + pad) * SLOTS + b
            for q in range(width):
                level = x.table[0, x.bytes[sample, r * width + q]]
                for c in range(channels):
                    out[c * plane + at + q * SLOTS] = x.tint[sample, 0, c] + level * x.tint[sample, 1, c]


@compiled
def load_rows(x: Pixels, samples: Array, area: int, out: Array, wide: int) -> None:
    """Samples as rows of `out`, `[batch][wide]`; `area` pixels share a channel's table."""
    for b in range(samples.shape[0]):
        if x.tint.shape[0] > 0:
            for c in range(x.tint.shape[2]):
                for pixel in range(area):
                    level = x.table[0, x.bytes[samples[b], pixel]]
                    out[b * wide + c * area + pixel] = x.tint[samples[b], 0, c] + level * x.tint[samples[b], 1, c]
        elif x.bytes.shape[0] > 0:
            for pixel in range(x.bytes.shape[1]):
                out[b * wide + pixel] = x.table[pixel // area, x.bytes[samples[b], pixel]]
        else:
            for pixel in range(x.floats.shape[1]):
                out[b * wide + pixel] = x.floats[samples[b], pixel]
