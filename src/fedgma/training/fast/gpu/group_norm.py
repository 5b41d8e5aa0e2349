"""Group normalisation of many lanes with shortcut and ReLU: one triton kernel forward, one backward.

Activations are [lane, sample, row, column, channel], contiguous; positions and channels of a group are powers of two. A
program has one group of one sample, so no sum leaves it. Sums are float32.

Buys, on an H200: 1.02 with 10 lanes of ResNet18 in bfloat16 (`benchmarks/bench_parts.py`); with 80 lanes, measured
before and apart, 66,600 against 53,600 images a second.
"""

from typing import Any

import triton
import triton.language as tl

# how to tell what ReLU set to zero: there was no ReLU, compute its input again, or look at its output
NONE, BY_INPUT, BY_OUTPUT = 0, 1, 2


@triton.jit
def _forward(
    x_at, weight_at, bias_at, shortcut_at, out_at, mean_at, scale_at, samples, epsilon,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, SHORTCUT: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    channel = group * SIZE + tl.arange(0, SIZE)[None, :]
    at = sample * (POSITIONS * CHANNELS) + (tl.arange(0, POSITIONS)[:, None] * CHANNELS + channel)
    x = tl.load(x_at + at).to(tl.float32)
    mean = tl.sum(x) / (POSITIONS * SIZE)
    off = x - mean
    scale = 1 / tl.sqrt_rn(tl.sum(off * off) / (POSITIONS * SIZE) + epsilon)
    per_channel = sample // samples * CHANNELS + channel
    weight = tl.load(weight_at + per_channel).to(tl.float32)
    out = off * scale * weight + tl.load(bias_at + per_channel).to(tl.float32)
    if SHORTCUT:
        out += tl.load(shortcut_at + at).to(tl.float32)
    if RELU:
        out = tl.where(out < 0, 0.0, out)  # NaN stays NaN
    tl.store(out_at + at, out.to(out_at.dtype.element_ty))
    statistic = sample * (CHANNELS // SIZE) + group
    tl.store(mean_at + statistic, mean)
    tl.store(scale_at + statistic, scale)


@triton.jit
def _load(
    grads_at, more_at, out_at, x_at, at, mean, scale, weight, bias,
    MORE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """The normalised input, and the gradient of the output before its ReLU."""
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
    grads_at, more_at, out_at, x_at, mean_at, scale_at, weight_at, bias_at, shortcut_at, inner_at, plain_at, scaled_at,
    samples, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
    MORE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """A group that is too large for the registers is read twice, the second time from the caches."""
    sample = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    channel = group * SIZE + tl.arange(0, SIZE)
    at = sample * (POSITIONS * CHANNELS) + (tl.arange(0, STEP)[:, None] * CHANNELS + channel[None, :])
    per_channel = sample // samples * CHANNELS + channel
    weight = tl.load(weight_at + per_channel).to(tl.float32)
    bias = tl.load(bias_at + per_channel).to(tl.float32)
    mean = tl.load(mean_at + sample * (CHANNELS // SIZE) + group)
    scale = tl.load(scale_at + sample * (CHANNELS // SIZE) + group)
    plain = tl.zeros([SIZE], tl.float32)
    scaled = tl.zeros([SIZE], tl.float32)
    unit = tl.zeros([STEP, SIZE], tl.float32)
    grads = tl.zeros([STEP, SIZE], tl.float32)
    for position in tl.static_range(0, POSITIONS, STEP):
        here = at + position * CHANNELS
        unit, grads = _load(grads_at, more_at, out_at, x_at, here, mean, scale, weight, bias, MORE, MASK)
        if MASK == 2:
            rounded = grads.to(shortcut_at.dtype.element_ty)
            tl.store(shortcut_at + here, rounded)
            grads = rounded.to(tl.float32)
        plain += tl.sum(grads, 0)
        scaled += tl.sum(grads * unit, 0)
    tl.store(plain_at + sample * CHANNELS + channel, plain)
    tl.store(scaled_at + sample * CHANNELS + channel, scaled)
    level = tl.sum(plain * weight) / (POSITIONS * SIZE)
    slope = tl.sum(scaled * weight) / (POSITIONS * SIZE)
    if POSITIONS > STEP and MASK == 2:
        tl.debug_barrier()  # what other threads of this program wrote is read below
    for position in tl.static_range(0, POSITIONS, STEP):
        here = at + position * CHANNELS
        if POSITIONS > STEP:
            if MASK == 2:
                unit, grads = _load(shortcut_at, more_at, out_at, x_at, here, mean, scale, weight, bias, False, 0)
            else:
                unit, grads = _load(grads_at, more_at, out_at, x_at, here, mean, scale, weight, bias, MORE, MASK)
        inner = scale * (grads * weight[None, :] - level - unit * slope)
        tl.store(inner_at + here, inner.to(inner_at.dtype.element_ty))


def forward(
    x: Any, weight: Any, bias: Any, shortcut: Any, out: Any, mean: Any, scale: Any, *, epsilon: float, relu: bool
) -> None:
    """Fill `out` like x, `mean` and `scale` [lane, sample, group]; a shortcut is added before ReLU."""
    lanes, samples, rows, columns, channels = x.shape
    groups, values = mean.shape[2], rows * columns * channels // mean.shape[2]
    _forward[(lanes * samples, groups)](
        x, weight, bias, x if shortcut is None else shortcut, out, mean, scale, samples, epsilon,
        POSITIONS=rows * columns, CHANNELS=channels, SIZE=channels // groups, SHORTCUT=shortcut is not None, RELU=relu,
        num_warps=_warps(values),
    )  # fmt: skip


def backward(
    grads: Any, more: Any, out: Any, x: Any, mean: Any, scale: Any, weight: Any, bias: Any, shortcut: Any, inner: Any,
    plain: Any, scaled: Any, *, mask: int, step: int = 16384,
) -> None:  # fmt: skip
    """Fill `inner`, the gradient of x, and by sample and channel `plain` and `scaled`, those of bias and weight.

    The gradient of the output is `grads` plus `more`, if there is more. With BY_OUTPUT the part of it that ReLU passes
    is written to `shortcut`.
    """
    lanes, samples, rows, columns, channels = x.shape
    groups, size = mean.shape[2], channels // mean.shape[2]
    positions = min(rows * columns, max(1, step // size))
    _backward[(lanes * samples, groups)](
        grads, grads if more is None else more, out if mask == BY_OUTPUT else x, x, mean, scale, weight, bias,
        shortcut if mask == BY_OUTPUT else x, inner, plain, scaled, samples,
        POSITIONS=rows * columns, CHANNELS=channels, SIZE=size, STEP=positions, MORE=more is not None, MASK=mask,
        num_warps=_warps(positions * size, 64 if positions < rows * columns else 32),  # registers hold a group twice
    )  # fmt: skip


def _warps(values: int, each: int = 64) -> int:
    """Warps of a program, so that a thread has no more than `each` values; 4 to 16."""
    return int(min(16, max(4, triton.next_power_of_2(values // (32 * each)))))
