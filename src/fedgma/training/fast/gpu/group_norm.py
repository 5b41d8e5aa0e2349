"""Group normalisation of many lanes with a shortcut and ReLU as one GPU pass by triton, and the way back as another.

Activations are [lane, sample, row, column, channel], contiguous; places and channels of a group are powers of two. A
program has one group of one sample, so that no sum leaves it. Sums are float32.
"""

from typing import Any

import triton
import triton.language as tl

NONE, OWN, OUT = 0, 1, 2  # whether ReLU followed, and how to tell what it cut off: by its input again, or by its output


@triton.jit
def _forward(
    x_at, weight_at, bias_at, beside_at, out_at, mean_at, scale_at, samples, epsilon,
    PLACES: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, BESIDE: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    channel = group * SIZE + tl.arange(0, SIZE)[None, :]
    at = sample * (PLACES * CHANNELS) + (tl.arange(0, PLACES)[:, None] * CHANNELS + channel)
    x = tl.load(x_at + at).to(tl.float32)
    mean = tl.sum(x) / (PLACES * SIZE)
    off = x - mean
    scale = 1 / tl.sqrt_rn(tl.sum(off * off) / (PLACES * SIZE) + epsilon)
    per_channel = sample // samples * CHANNELS + channel
    weight = tl.load(weight_at + per_channel).to(tl.float32)
    out = off * scale * weight + tl.load(bias_at + per_channel).to(tl.float32)
    if BESIDE:
        out += tl.load(beside_at + at).to(tl.float32)
    if RELU:
        out = tl.where(out < 0, 0.0, out)  # and NaN stays NaN
    tl.store(out_at + at, out.to(out_at.dtype.element_ty))
    place = sample * (CHANNELS // SIZE) + group
    tl.store(mean_at + place, mean)
    tl.store(scale_at + place, scale)


@triton.jit
def _look(
    grads_at, more_at, out_at, x_at, at, mean, scale, weight, bias,
    MORE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Normalised input, and what came back to the output after its ReLU."""
    unit = (tl.load(x_at + at).to(tl.float32) - mean) * scale
    grads = tl.load(grads_at + at).to(tl.float32)
    if MORE:
        grads += tl.load(more_at + at).to(tl.float32)
    if MASK == 1:
        grads = tl.where(unit * weight[None, :] + bias[None, :] > 0, grads, 0.0)
    if MASK == 2:
        grads = tl.where(tl.load(out_at + at).to(tl.float32) > 0, grads, 0.0)
    return unit, grads


@triton.jit
def _backward(
    grads_at, more_at, out_at, x_at, mean_at, scale_at, weight_at, bias_at, beside_at, inner_at, plain_at, along_at,
    samples, PLACES: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
    MORE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """A group that is too large for the registers is looked at twice, the second time in the caches."""
    sample = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    channel = group * SIZE + tl.arange(0, SIZE)
    at = sample * (PLACES * CHANNELS) + (tl.arange(0, STEP)[:, None] * CHANNELS + channel[None, :])
    per_channel = sample // samples * CHANNELS + channel
    weight = tl.load(weight_at + per_channel).to(tl.float32)
    bias = tl.load(bias_at + per_channel).to(tl.float32)
    mean = tl.load(mean_at + sample * (CHANNELS // SIZE) + group)
    scale = tl.load(scale_at + sample * (CHANNELS // SIZE) + group)
    plain = tl.zeros([SIZE], tl.float32)
    along = tl.zeros([SIZE], tl.float32)
    unit = tl.zeros([STEP, SIZE], tl.float32)
    grads = tl.zeros([STEP, SIZE], tl.float32)
    for place in tl.static_range(0, PLACES, STEP):
        here = at + place * CHANNELS
        unit, grads = _look(grads_at, more_at, out_at, x_at, here, mean, scale, weight, bias, MORE, MASK)
        if MASK == 2:
            rounded = grads.to(beside_at.dtype.element_ty)
            tl.store(beside_at + here, rounded)
            grads = rounded.to(tl.float32)
        plain += tl.sum(grads, 0)
        along += tl.sum(grads * unit, 0)
    tl.store(plain_at + sample * CHANNELS + channel, plain)
    tl.store(along_at + sample * CHANNELS + channel, along)
    level = tl.sum(plain * weight) / (PLACES * SIZE)
    slope = tl.sum(along * weight) / (PLACES * SIZE)
    if PLACES > STEP and MASK == 2:
        tl.debug_barrier()  # what others of this program wrote is read below
    for place in tl.static_range(0, PLACES, STEP):
        here = at + place * CHANNELS
        if PLACES > STEP:
            if MASK == 2:
                unit, grads = _look(beside_at, more_at, out_at, x_at, here, mean, scale, weight, bias, False, 0)
            else:
                unit, grads = _look(grads_at, more_at, out_at, x_at, here, mean, scale, weight, bias, MORE, MASK)
        inner = scale * (grads * weight[None, :] - level - unit * slope)
        tl.store(inner_at + here, inner.to(inner_at.dtype.element_ty))


def forward(
    x: Any, weight: Any, bias: Any, beside: Any, out: Any, mean: Any, scale: Any, *, epsilon: float, relu: bool
) -> None:
    """Fill `out` like x, and `mean` and `scale` [lane, sample, group]; `beside`, if any, is added before ReLU."""
    lanes, samples, rows, columns, channels = x.shape
    groups, values = mean.shape[2], rows * columns * channels // mean.shape[2]
    _forward[(lanes * samples, groups)](
        x, weight, bias, x if beside is None else beside, out, mean, scale, samples, epsilon,
        PLACES=rows * columns, CHANNELS=channels, SIZE=channels // groups, BESIDE=beside is not None, RELU=relu,
        num_warps=_warps(values),
    )  # fmt: skip


def backward(
    grads: Any, more: Any, out: Any, x: Any, mean: Any, scale: Any, weight: Any, bias: Any, beside: Any, inner: Any,
    plain: Any, along: Any, *, mask: int, step: int = 16384,
) -> None:  # fmt: skip
    """Fill `inner`, the gradient of x, and per sample and channel `plain` and `along`: those of offset and scale.

    The gradient of the output is `grads`, with `more` added if there is more. With mask OUT what ReLU lets through of
    it is written to `beside`.
    """
    lanes, samples, rows, columns, channels = x.shape
    groups, size = mean.shape[2], channels // mean.shape[2]
    places = min(rows * columns, max(1, step // size))
    _backward[(lanes * samples, groups)](
        grads, grads if more is None else more, out if mask == OUT else x, x, mean, scale, weight, bias,
        beside if mask == OUT else x, inner, plain, along, samples,
        PLACES=rows * columns, CHANNELS=channels, SIZE=size, STEP=places, MORE=more is not None, MASK=mask,
        num_warps=_warps(places * size, 64 if places < rows * columns else 32),  # registers hold a group twice
    )  # fmt: skip


def _warps(values: int, each: int = 64) -> int:
    """So many that a thread has no more than `each` values, where there may be so many."""
    return int(min(16, max(4, triton.next_power_of_2(values // (32 * each)))))
