# ruff: noqa
"""Products of few lanes: torch's, and a kernel of triton, captured 20 times in a graph."""

import itertools
import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

import torch
import triton
import triton.language as tl
from workloads import graph_seconds, header

LANES, SAMPLES, REPEATS = 10, 32, 20
LAYERS = [(400, 120), (120, 84), (84, 10)]


@triton.jit
def _product(
    a_at, b_at, bias_at, out_at, a_lane, b_lane, bias_lane, out_lane,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    a_row: tl.constexpr, a_deep: tl.constexpr, b_deep: tl.constexpr, b_column: tl.constexpr,
    BIAS: tl.constexpr, RELU: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(1)
    ACROSS: tl.constexpr = (COLUMNS + N - 1) // N
    m = tl.program_id(0) // ACROSS * M + tl.arange(0, M)[:, None]
    n = tl.program_id(0) % ACROSS * N + tl.arange(0, N)[None, :]
    a_at += lane * a_lane
    b_at += lane * b_lane
    total = tl.zeros([M, N], tl.float32)
    for begin in range(0, DEPTH, K):
        across = begin + tl.arange(0, K)[None, :]
        down = begin + tl.arange(0, K)[:, None]
        a = tl.load(a_at + m * a_row + across * a_deep, (m < ROWS) & (across < DEPTH), 0.0)
        b = tl.load(b_at + down * b_deep + n * b_column, (down < DEPTH) & (n < COLUMNS), 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias_at + lane * bias_lane + n, n < COLUMNS, 0.0)
    if RELU:
        total = tl.where(total > 0, total, 0.0)
    tl.store(out_at + lane * out_lane + m * COLUMNS + n, total, (m < ROWS) & (n < COLUMNS))


def product(a, b, out, tile, bias=None, relu=False):
    M, N, K, warps, stages = tile
    rows, depth, columns = a.shape[1], a.shape[2], b.shape[2]
    _product[(triton.cdiv(rows, M) * triton.cdiv(columns, N), len(a))](
        a, b, out if bias is None else bias, out, a.stride(0), b.stride(0), columns, out.stride(0),
        ROWS=rows, COLUMNS=columns, DEPTH=depth, a_row=a.stride(1), a_deep=a.stride(2), b_deep=b.stride(1),
        b_column=b.stride(2), BIAS=bias is not None, RELU=relu, M=M, N=N, K=K, num_warps=warps, num_stages=stages,
    )  # fmt: skip


TILES = {
    "forward": [
        (32, 16, 64, 4, 1),
        (32, 16, 64, 2, 1),
        (32, 16, 32, 4, 3),
        (32, 8, 64, 2, 1),
        (32, 16, 128, 4, 1),
        (16, 16, 64, 2, 1),
        (32, 32, 64, 4, 1),
    ],
    "inputs": [(32, 16, 64, 4, 1), (32, 32, 64, 4, 1), (32, 16, 128, 4, 1), (32, 32, 32, 4, 1)],
    "weights": [(32, 32, 32, 4, 1), (32, 64, 32, 4, 1), (64, 64, 32, 4, 1), (16, 32, 32, 2, 1)],
}


def case(which, ins, outs):
    make = lambda *shape: torch.randn(LANES, *shape, device="cuda")  # noqa: E731
    x, weight, grads, bias = make(SAMPLES, ins), make(outs, ins) / ins**0.5, make(SAMPLES, outs), make(outs)
    if which == "forward":
        return x, weight.transpose(1, 2), bias
    return (grads, weight, None) if which == "inputs" else (grads.transpose(1, 2), x, None)


def build(job):
    which, layer, tile = job
    a, b, bias = case(which, *layer)
    out = torch.empty(LANES, a.shape[1], b.shape[2], device="cuda")
    product(a, b, out, tile, bias)


def timed(call):
    def repeat():
        for _ in range(REPEATS):
            call()

    return 1e6 * graph_seconds(repeat, "cuda") / REPEATS


def main():
    begun = time.perf_counter()
    print(header("cuda"), flush=True)
    jobs = [(which, layer, tile) for which, tiles in TILES.items() for layer in LAYERS for tile in tiles]
    with ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(build, job) for job in jobs]:
            future.exception()
    print(f"compiled in {time.perf_counter() - begun:.0f} s")
    for (which, layer), group in itertools.groupby(jobs, key=lambda job: job[:2]):
        try:
            a, b, bias = case(which, *layer)
            plain = a @ b
            out = torch.empty_like(plain)
            print(which, layer, f"bmm {timed(lambda: torch.bmm(a, b, out=plain)):.2f} us", end="  ")
            wanted = plain
            if bias is not None:
                wanted = torch.baddbmm(bias[:, None], a, b)
                same = torch.equal(wanted, plain + bias[:, None])
                print(
                    f"baddbmm {timed(lambda: torch.baddbmm(bias[:, None], a, b)):.2f} us, sum {'same' if same else 'OTHER'}",
                    end="  ",
                )
            print(flush=True)
            for *_, tile in group:
                product(a, b, out, tile, bias)
                off, same = (out - wanted).abs().max().item(), torch.equal(out, wanted)
                spent = timed(lambda: product(a, b, out, tile, bias))
                print(f"   {tile}: {spent:.2f} us, off {off:.1e}, {'same' if same else 'OTHER'}", flush=True)
        except Exception as error:
            print(which, layer, "failed", type(error).__name__, str(error)[:200], flush=True)
    print(f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
