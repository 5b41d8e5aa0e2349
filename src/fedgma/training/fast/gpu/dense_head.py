"""Three dense layers with ReLU and the loss of many lanes in triton: forward and back in three kernels.

The first kernel is the first layer, a program for each block of outputs. In the second a program has some samples of a
lane, and nothing of them leaves it: the other two layers, the loss, and back to the gradient of the first layer's
output. The third is the gradient of the input, a program for each block of its columns. Weight gradients are left as
pairs of factors. Sums are float32; rows past a lane's count are padding and have no gradient.

Buys, on an H200: 1.19 for LeNet with 10 lanes; with `sgd_step` 1.34 to 1.37, 1.00 to 1.05 with 640 lanes, whose time is
that of their convolutions, and 2.36 before the step is compiled (`benchmarks/bench_parts.py --groups head`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fedgma.training.fast.gpu.conv_matrix import _exact, _wide

MANY = 128  # lanes from which each fills a processor by itself


class Cut(NamedTuple):
    """The work of one program, and how it runs."""

    size: int  # outputs, samples or columns
    entries: int = 32  # of the first layer's outputs or inputs at a time
    warps: int = 4
    stages: int = 3
    precision: str | None = None  # of products, instead of torch's setting


@triton.jit
def _first(
    x_at, weight_at, bias_at, out_at, samples,
    INS: tl.constexpr, OUTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(1).to(tl.int64)
    m = tl.arange(0, M)[:, None]
    n = tl.program_id(0) * N + tl.arange(0, N)[None, :]
    x_at += lane * samples * INS
    weight_at += lane * (OUTS * INS)
    total = tl.zeros([M, N], tl.float32)
    for begin in range(0, INS, K):
        k = begin + tl.arange(0, K)
        x = tl.load(x_at + m * INS + k[None, :], (m < samples) & (k[None, :] < INS), 0.0)
        weight = tl.load(weight_at + n * INS + k[:, None], (n < OUTS) & (k[:, None] < INS), 0.0)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
    total += tl.load(bias_at + lane * OUTS + n, n < OUTS, 0.0)
    total = tl.where(total < 0, 0.0, total)  # NaN stays NaN
    tl.store(out_at + lane * samples * OUTS + m * OUTS + n, total, (m < samples) & (n < OUTS))


@triton.jit
def _middle(
    h1_at, weight2_at, bias2_at, weight3_at, bias3_at, y_at, count_at, h2_at, g1_at, g2_at, g3_at, losses_at, right_at,
    samples, smoothing, H1: tl.constexpr, H2: tl.constexpr, CLASSES: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    C: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * M + tl.arange(0, M)
    m = (lane * samples + row)[:, None]
    inside = (row < samples)[:, None]
    j = tl.arange(0, N)
    c = tl.arange(0, C)
    count = tl.load(count_at + lane)
    weight2_at += lane * (H2 * H1)
    weight3_at += lane * (CLASSES * H2)
    weight3 = tl.load(weight3_at + c[:, None] * H2 + j[None, :], (c[:, None] < CLASSES) & (j[None, :] < H2), 0.0)
    h2 = tl.zeros([M, N], tl.float32)
    for begin in range(0, H1, K):
        i = begin + tl.arange(0, K)
        h1 = tl.load(h1_at + m * H1 + i[None, :], inside & (i[None, :] < H1), 0.0)
        weight2 = tl.load(weight2_at + j[None, :] * H1 + i[:, None], (j[None, :] < H2) & (i[:, None] < H1), 0.0)
        h2 = tl.dot(h1, weight2, h2, input_precision=PRECISION)
    h2 += tl.load(bias2_at + lane * H2 + j, j < H2, 0.0)[None, :]
    h2 = tl.where(h2 < 0, 0.0, h2)
    tl.store(h2_at + m * H2 + j[None, :], h2, inside & (j[None, :] < H2))
    logits = tl.dot(h2, tl.trans(weight3), input_precision=PRECISION)
    logits += tl.load(bias3_at + lane * CLASSES + c, c < CLASSES, 0.0)[None, :]
    logits = tl.where(c[None, :] < CLASSES, logits, float("-inf"))
    y = tl.load(y_at + lane * samples + row, row < samples, 0)
    most = tl.max(logits, 1)[:, None]
    logs = logits - most
    logs -= tl.log(tl.sum(tl.exp(logs), 1))[:, None]
    logs = tl.where(c[None, :] < CLASSES, logs, 0.0)
    targets = tl.where(c[None, :] == y[:, None], 1 - smoothing, 0.0) + smoothing / CLASSES
    loss = -tl.sum(tl.where(c[None, :] < CLASSES, targets, 0.0) * logs, 1)
    real = row < count
    tl.store(losses_at + lane * samples + row, tl.where(real, loss, 0.0), row < samples)
    first = tl.min(tl.where(logits == most, c[None, :], C), 1)
    tl.store(right_at + lane * samples + row, (real & (first == y)).to(tl.uint8), row < samples)
    divisor = tl.maximum(count, 1).to(tl.float32)
    g3 = tl.where(real[:, None] & (c[None, :] < CLASSES), (tl.exp(logs) - targets) / divisor, 0.0)
    tl.store(g3_at + m * CLASSES + c[None, :], g3, inside & (c[None, :] < CLASSES))
    g2 = tl.where(h2 > 0, tl.dot(g3, weight3, input_precision=PRECISION), 0.0)
    tl.store(g2_at + m * H2 + j[None, :], g2, inside & (j[None, :] < H2))
    for begin in range(0, H1, K):
        i = begin + tl.arange(0, K)[None, :]
        weight2 = tl.load(weight2_at + j[:, None] * H1 + i, (j[:, None] < H2) & (i < H1), 0.0)
        h1 = tl.load(h1_at + m * H1 + i, inside & (i < H1), 0.0)
        g1 = tl.where(h1 > 0, tl.dot(g2, weight2, input_precision=PRECISION), 0.0)
        tl.store(g1_at + m * H1 + i, g1, inside & (i < H1))


@triton.jit
def _inputs(
    g1_at, weight_at, out_at, losses_at, right_at, total_at, hits_at, samples,
    INS: tl.constexpr, OUTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The first program of a lane also adds up its losses and hits."""
    lane = tl.program_id(1).to(tl.int64)
    m = tl.arange(0, M)[:, None]
    n = tl.program_id(0) * N + tl.arange(0, N)[None, :]
    weight_at += lane * (OUTS * INS)
    out = tl.zeros([M, N], tl.float32)
    for begin in range(0, OUTS, K):
        k = begin + tl.arange(0, K)
        g1 = tl.load(g1_at + (lane * samples + m) * OUTS + k[None, :], (m < samples) & (k[None, :] < OUTS), 0.0)
        weight = tl.load(weight_at + k[:, None] * INS + n, (k[:, None] < OUTS) & (n < INS), 0.0)
        out = tl.dot(g1, weight, out, input_precision=PRECISION)
    tl.store(out_at + (lane * samples + m) * INS + n, out, (m < samples) & (n < INS))
    if tl.program_id(0) == 0:
        row = tl.arange(0, M)
        losses = tl.load(losses_at + lane * samples + row, row < samples, 0.0)
        tl.store(total_at + lane, tl.sum(losses, 0))
        right = tl.load(right_at + lane * samples + row, row < samples, 0).to(tl.int64)
        tl.store(hits_at + lane, tl.sum(right, 0))


def first(x: Any, weight: Any, bias: Any, out: Any, *, cut: Cut | None = None) -> None:
    """Fill `out` [lane, sample, out] with a dense layer of x and its ReLU."""
    lanes, samples, ins = x.shape
    outs = weight.shape[1]
    cut = cut or (Cut(64) if lanes >= MANY else Cut(16, 64, warps=2, stages=4))
    _first[(triton.cdiv(outs, cut.size), lanes)](
        x, weight, bias, out, samples, INS=ins, OUTS=outs, M=_wide(samples), N=cut.size, K=cut.entries, **_options(cut)
    )


def middle(
    h1: Any, second: tuple[Any, Any], third: tuple[Any, Any], y: Any, count: Any, h2: Any, grads: tuple[Any, Any, Any],
    losses: Any, right: Any, *, smoothing: float, cut: Cut | None = None,
) -> None:  # fmt: skip
    """From the first layer's output to the loss and back.

    `second` and `third` are weight and bias of the other layers. Fills `h2`, the second layer's output, `grads`, the
    gradients of the three layers before their ReLU, and by sample `losses` and `right`, whether it was right (uint8).
    """
    lanes, samples, h1_size = h1.shape
    h2_size, classes = second[0].shape[1], third[0].shape[1]
    cut = cut or (Cut(16, warps=2) if lanes >= MANY else Cut(16, 64))
    _middle[(triton.cdiv(samples, cut.size), lanes)](
        h1, *second, *third, y, count, h2, *grads, losses, right, samples, smoothing, H1=h1_size, H2=h2_size,
        CLASSES=classes, M=cut.size, N=_wide(h2_size), C=_wide(classes), K=cut.entries, **_options(cut),
    )  # fmt: skip


def inputs(
    grads: Any, weight: Any, losses: Any, right: Any, out: Any, total: Any, hits: Any, *, cut: Cut | None = None
) -> None:
    """Fill `out` with the gradient of the input, and `total` and `hits` [lane] with the sums of losses and hits."""
    lanes, samples, outs = grads.shape
    ins = weight.shape[2]
    cut = cut or (Cut(64, stages=4) if lanes >= MANY else Cut(32, warps=2, stages=4))
    _inputs[(triton.cdiv(ins, cut.size), lanes)](
        grads, weight, out, losses, right, total, hits, samples,
        INS=ins, OUTS=outs, M=_wide(samples), N=cut.size, K=cut.entries, **_options(cut),
    )  # fmt: skip


def _options(cut: Cut) -> dict[str, Any]:
    precision = cut.precision or ("tf32x3" if _exact() else "tf32")  # three TF32 products are as exact as float32
    return {"PRECISION": precision, "num_warps": cut.warps, "num_stages": cut.stages}
