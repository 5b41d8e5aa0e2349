"""Group normalisation of many lanes with shortcut and ReLU: one triton kernel forward, one backward.

Activations are [lane, sample, row, column, channel], contiguous; positions and channels of a group are powers of two. A
program has one group of one sample, so no sum leaves it. It passes over the group two or three times, the first time
from memory and then from the caches: registers that hold a whole group leave a processor with too few threads. Sums
are float32.

Buys, with `conv_3x3` and weights in its order, on an H200: 1.43 for ResNet18 in bfloat16, 10 lanes (93.3 against 65.3
ms a round, in two calls). Rows "gpu/group_norm" of `benchmarks/bench_parts.py` measure it alone.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# how to tell what ReLU set to zero: there was no ReLU, compute its input again, or look at its output
NONE, BY_INPUT, BY_OUTPUT = 0, 1, 2


class Cut(NamedTuple):
    """How a group is passed over."""

    each: int = 8  # values of a thread at a time
    warps: int = 16  # of a program, at most
    share: int = 16  # values of each thread in all, as far as the number of warps allows


FORWARD, BACKWARD = Cut(), Cut(share=32)


@triton.jit
def _add(first, second, third, fourth):
    return first + third, second + fourth


@triton.jit
def _forward(
    x_at, weight_at, bias_at, shortcut_at, out_at, mean_at, scale_at, samples, epsilon,
    POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr, SHORTCUT: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    offset = tl.arange(0, STEP)[:, None] * CHANNELS + tl.arange(0, SIZE)[None, :]
    begin = sample * (POSITIONS * CHANNELS) + group * SIZE
    x_at += begin
    out_at += begin
    shortcut_at += begin
    total = tl.zeros([STEP, SIZE], tl.float32)
    for position in range(0, POSITIONS, STEP):
        total += tl.load(x_at + position * CHANNELS + offset).to(tl.float32)
    mean = tl.sum(total) / (POSITIONS * SIZE)
    squares = tl.zeros([STEP, SIZE], tl.float32)
    for position in range(0, POSITIONS, STEP):
        off = tl.load(x_at + position * CHANNELS + offset).to(tl.float32) - mean
        squares += off * off
    scale = 1 / tl.sqrt_rn(tl.sum(squares) / (POSITIONS * SIZE) + epsilon)
    # loaded for every position of a tile, so that threads find them where they need them
    channel = sample // samples * CHANNELS + group * SIZE + offset % CHANNELS
    times = tl.load(weight_at + channel).to(tl.float32) * scale
    plus = tl.load(bias_at + channel).to(tl.float32) - mean * times
    for position in range(0, POSITIONS, STEP):
        here = position * CHANNELS + offset
        out = tl.load(x_at + here).to(tl.float32) * times + plus
        if SHORTCUT:
            out += tl.load(shortcut_at + here).to(tl.float32)
        if RELU:
            out = tl.where(out < 0, 0.0, out)  # NaN stays NaN
        tl.store(out_at + here, out.to(out_at.dtype.element_ty))
    statistic = sample * (CHANNELS // SIZE) + group
    tl.store(mean_at + statistic, mean)
    tl.store(scale_at + statistic, scale)


@triton.jit
def _load(
    grads_at, more_at, out_at, x_at, at, times, plus, MORE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """The input, and the gradient of the output before its ReLU."""
    x = tl.load(x_at + at).to(tl.float32)
    grads = tl.load(grads_at + at).to(tl.float32)
    if MORE:
        grads += tl.load(more_at + at).to(tl.float32)
    if MASK == 1:
        grads = tl.where(x * times + plus > 0, grads, 0.0)  # as the forward pass computes it
    if MASK == 2:
        grads = tl.where(tl.load(out_at + at).to(tl.float32) > 0, grads, 0.0)
    return x, grads


@triton.jit
def _backward(
    grads_at, more_at, out_at, x_at, mean_at, scale_at, weight_at, bias_at, shortcut_at, inner_at, plain_at, scaled_at,
    samples, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
    MORE: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    sample = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    offset = tl.arange(0, STEP)[:, None] * CHANNELS + tl.arange(0, SIZE)[None, :]
    begin = sample * (POSITIONS * CHANNELS) + group * SIZE
    grads_at += begin
    more_at += begin
    out_at += begin
    x_at += begin
    shortcut_at += begin
    inner_at += begin
    channel = sample // samples * CHANNELS + group * SIZE + offset % CHANNELS
    mean = tl.load(mean_at + sample * (CHANNELS // SIZE) + group)
    scale = tl.load(scale_at + sample * (CHANNELS // SIZE) + group)
    times = tl.load(weight_at + channel).to(tl.float32) * scale
    plus = tl.load(bias_at + channel).to(tl.float32) - mean * times
    plain = tl.zeros([STEP, SIZE], tl.float32)
    scaled = tl.zeros([STEP, SIZE], tl.float32)
    for position in range(0, POSITIONS, STEP):
        here = position * CHANNELS + offset
        x, grads = _load(grads_at, more_at, out_at, x_at, here, times, plus, MORE, MASK)
        if MASK == 2:
            rounded = grads.to(shortcut_at.dtype.element_ty)
            tl.store(shortcut_at + here, rounded)
            grads = rounded.to(tl.float32)
        plain += grads
        scaled += grads * (x - mean)
    level, slope = tl.reduce((tl.ravel(plain * times), tl.ravel(scaled * times)), 0, _add)
    slope *= scale * scale / (POSITIONS * SIZE)
    level = level / (POSITIONS * SIZE) - mean * slope
    if MASK == 2:
        tl.debug_barrier()  # what other threads of this program wrote is read below
    for position in range(0, POSITIONS, STEP):
        here = position * CHANNELS + offset
        if MASK == 2:
            x, grads = _load(shortcut_at, more_at, out_at, x_at, here, times, plus, False, 0)
        else:
            x, grads = _load(grads_at, more_at, out_at, x_at, here, times, plus, MORE, MASK)
        inner = grads * times - (x * slope + level)
        tl.store(inner_at + here, inner.to(inner_at.dtype.element_ty))
    at = sample * CHANNELS + group * SIZE + tl.arange(0, SIZE)
    plain_sum, scaled_sum = tl.reduce((plain, scaled), 0, _add)
    tl.store(plain_at + at, plain_sum)
    tl.store(scaled_at + at, scaled_sum * scale)


def forward(
    x: Any, weight: Any, bias: Any, shortcut: Any, out: Any, mean: Any, scale: Any, *, epsilon: float, relu: bool,
    cut: Cut = FORWARD,
) -> None:  # fmt: skip
    """Fill `out` like x, `mean` and `scale` [lane, sample, group]; a shortcut is added before ReLU."""
    lanes, samples, rows, columns, channels = x.shape
    groups = mean.shape[2]
    step, warps = _cut(rows * columns, channels // groups, cut)
    _forward[(lanes * samples, groups)](
        x, weight, bias, x if shortcut is None else shortcut, out, mean, scale, samples, epsilon,
        POSITIONS=rows * columns, CHANNELS=channels, SIZE=channels // groups, STEP=step, SHORTCUT=shortcut is not None,
        RELU=relu, num_warps=warps,
    )  # fmt: skip


def backward(
    grads: Any, more: Any, out: Any, x: Any, mean: Any, scale: Any, weight: Any, bias: Any, shortcut: Any, inner: Any,
    plain: Any, scaled: Any, *, mask: int, cut: Cut = BACKWARD,
) -> None:  # fmt: skip
    """Fill `inner`, the gradient of x, and by sample and channel `plain` and `scaled`, those of bias and weight.

    The gradient of the output is `grads` plus `more`, if there is more. With BY_OUTPUT the part of it that ReLU passes
    is written to `shortcut`.
    """
    lanes, samples, rows, columns, channels = x.shape
    groups = mean.shape[2]
    step, warps = _cut(rows * columns, channels // groups, cut)
    _backward[(lanes * samples, groups)](
        grads, grads if more is None else more, out if mask == BY_OUTPUT else x, x, mean, scale, weight, bias,
        shortcut if mask == BY_OUTPUT else x, inner, plain, scaled, samples,
        POSITIONS=rows * columns, CHANNELS=channels, SIZE=channels // groups, STEP=step, MORE=more is not None,
        MASK=mask, num_warps=warps,
    )  # fmt: skip


def _cut(positions: int, channels: int, cut: Cut) -> tuple[int, int]:
    """Positions of a group at a time, and warps.

    >>> _cut(1024, 32, FORWARD), _cut(16, 64, FORWARD), _cut(16, 64, BACKWARD)
    ((128, 16), (8, 2), (4, 1))
    """
    warps = int(min(cut.warps, max(1, positions * channels // (32 * cut.share))))
    return min(positions, max(1, warps * 32 * cut.each // channels)), warps
