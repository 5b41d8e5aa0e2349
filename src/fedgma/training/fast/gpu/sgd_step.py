"""A step of SGD of all small parameters of many lanes as one triton kernel, gradients included.

A gradient is given by what it is a sum of: over samples, of products of two factors; or of pieces. It is summed in
registers, added to the momentum and subtracted from the weights, and never written to memory. A program has a block of
one parameter of one lane. Lanes without samples stay as they are.

Buys, on an H200: 1.20 for LeNet with 10 lanes (`benchmarks/bench_parts.py --groups head`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from fedgma.training.fast.gpu.conv_matrix import _exact, _wide


class Cut(NamedTuple):
    """The work of one program, and how it runs."""

    rows: int = 32  # outputs of a dense layer
    columns: int = 64  # its inputs
    loaded: int = 4096  # values of pieces
    warps: int = 4
    precision: str | None = None  # of products, instead of torch's setting


class Parameter(NamedTuple):
    """A parameter [lane, ...] with its velocity and what its gradient is a sum of."""

    weight: Any
    velocity: Any  # None without momentum
    left: Any  # [lane, sample, out], or pieces [lane, piece, ...]
    right: Any  # [lane, sample, in]; None for pieces


@triton.jit
def _move(weight_at, velocity_at, grads, inside, lr, momentum, MOMENTUM: tl.constexpr):
    """Momentum and weights, once the gradient is known."""
    weight = tl.load(weight_at, inside, 0.0)
    if MOMENTUM:
        grads += momentum * tl.load(velocity_at, inside, 0.0)
        tl.store(velocity_at, grads, inside)
    tl.store(weight_at, weight - lr * grads, inside)


@triton.jit
def _product(
    weight_at, velocity_at, left_at, right_at, lane, block, busy, lr, momentum, OUTS: tl.constexpr, INS: tl.constexpr,
    TERMS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, MOMENTUM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of M x N weights of a dense layer."""
    ACROSS: tl.constexpr = (INS + N - 1) // N
    m = block // ACROSS * M + tl.arange(0, M)[:, None]
    n = block % ACROSS * N + tl.arange(0, N)[None, :]
    k = tl.arange(0, K)
    left = tl.load(left_at + (lane * TERMS + k[None, :]) * OUTS + m, (k[None, :] < TERMS) & (m < OUTS), 0.0)
    right = tl.load(right_at + (lane * TERMS + k[:, None]) * INS + n, (k[:, None] < TERMS) & (n < INS), 0.0)
    grads = tl.dot(left, right, input_precision=PRECISION)
    at = lane * (OUTS * INS) + m * INS + n
    _move(weight_at + at, velocity_at + at, grads, (m < OUTS * busy) & (n < INS), lr, momentum, MOMENTUM)


@triton.jit
def _pieces(
    weight_at, velocity_at, pieces_at, lane, block, busy, lr, momentum, SIZE: tl.constexpr, TERMS: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, MOMENTUM: tl.constexpr,
):  # fmt: skip
    """N entries of another parameter."""
    n = block * N + tl.arange(0, N)
    k = tl.arange(0, K)[:, None]
    pieces = tl.load(pieces_at + (lane * TERMS + k) * SIZE + n[None, :], (k < TERMS) & (n[None, :] < SIZE), 0.0)
    at = lane * SIZE + n
    _move(weight_at + at, velocity_at + at, tl.sum(pieces, 0), n < SIZE * busy, lr, momentum, MOMENTUM)


@triton.jit
def _step(
    weights, velocities, lefts, rights, lr_at, momentum_at, count_at,
    BEGIN: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, TERMS: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, MOMENTUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Parameter s has the programs from BEGIN[s] to BEGIN[s + 1] of a lane; OUTS is 0 for pieces."""
    program = tl.program_id(0)
    lane = tl.program_id(1).to(tl.int64)
    lr = tl.load(lr_at + lane)
    momentum = tl.load(momentum_at + lane)
    busy = (tl.load(count_at + lane) > 0).to(tl.int32)
    for s in tl.static_range(len(OUTS)):
        if (program >= BEGIN[s]) & (program < BEGIN[s + 1]):
            if OUTS[s] > 0:
                _product(
                    weights[s], velocities[s], lefts[s], rights[s], lane, program - BEGIN[s], busy, lr, momentum,
                    OUTS[s], INS[s], TERMS[s], M[s], N[s], K[s], MOMENTUM, PRECISION,
                )  # fmt: skip
            else:
                _pieces(
                    weights[s], velocities[s], lefts[s], lane, program - BEGIN[s], busy, lr, momentum,
                    INS[s], TERMS[s], N[s], K[s], MOMENTUM,
                )  # fmt: skip


def step(parameters: Sequence[Parameter], lr: Any, momentum: Any, count: Any, *, cut: Cut | None = None) -> None:
    """Change weights and velocities in place; `lr`, `momentum` and `count` are [lane]."""
    cut = cut or Cut()
    sizes = [_size(parameter, cut) for parameter in parameters]
    outs, ins, terms, m, n, k = (tuple(column) for column in zip(*sizes, strict=True))
    begin = [0]
    for size in sizes:
        begin.append(begin[-1] + triton.cdiv(max(1, size[0]), size[3]) * triton.cdiv(size[1], size[4]))
    weights, velocities, lefts, rights = (tuple(column) for column in zip(*parameters, strict=True))
    moves = velocities[0] is not None
    precision = cut.precision or ("tf32x3" if _exact() else "tf32")
    _step[(begin[-1], len(count))](
        weights, velocities if moves else weights, lefts, _given(rights, lefts), lr, momentum, count,
        BEGIN=tuple(begin), OUTS=outs, INS=ins, TERMS=terms, M=m, N=n, K=k, MOMENTUM=moves, PRECISION=precision,
        num_warps=cut.warps,
    )  # fmt: skip


def _given(rights: Sequence[Any], lefts: Sequence[Any]) -> tuple[Any, ...]:
    """The right factors, with something that is never read where there is none."""
    return tuple(left if right is None else right for right, left in zip(rights, lefts, strict=True))


def _size(parameter: Parameter, cut: Cut) -> tuple[int, int, int, int, int, int]:
    """Outputs (0 for pieces), inputs or entries, terms of the sum, and the block that a program takes of each."""
    terms = parameter.left.shape[1]
    if parameter.right is None:
        entries = parameter.weight[0].numel()
        together = int(triton.next_power_of_2(terms))
        return 0, entries, terms, 1, min(max(32, cut.loaded // together), _wide(entries)), together
    outs, ins = parameter.weight.shape[1:]
    return outs, ins, terms, min(cut.rows, _wide(outs)), min(cut.columns, _wide(ins)), _wide(terms)
