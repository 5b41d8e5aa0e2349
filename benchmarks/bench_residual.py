"""ResNet18's passes on a GPU in bfloat16: own convolutions of all lanes beside cuDNN, norms beside their bandwidth.

    python benchmarks/bench_residual.py              # about a minute, most of it compiling
    python benchmarks/bench_residual.py --imagenet   # only the norms of the network as for ImageNet

A pass is first compared with cuDNN's (column "off") and then timed as a captured graph of all lanes. Microseconds are
of one lane's batch of 64. A row that fails loses itself only.
"""

import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from torch import Tensor
from workloads import RESNET_LAYERS, graph_seconds, header, parser

from fedgma.training.fast import gpu, torch_ops
from fedgma.training.fast.gpu import conv_3x3, group_norm
from fedgma.training.fast.layers import pieces_of

Tile = conv_3x3.Tile
MOST = [Tile(128, 128, 64, 4, 3), Tile(256, 128, 64, 8, 4), Tile(256, 128, 64, 8, 3)]
CONVOLUTIONS = {
    (32, 64): [Tile(128, 64, 64, 4, 3), Tile(128, 64, 64, 4, 4), Tile(64, 64, 64, 4, 4)],
    (16, 128): [*MOST, Tile(128, 64, 64, 4, 3)],
    (8, 256): MOST,
    (4, 512): MOST,
}
MOST_WEIGHTS = [(Tile(64, 128, 128, 4, 3), 1), (Tile(64, 64, 64, 4, 3), 3), (Tile(64, 128, 64, 4, 3), 1)]
WEIGHTS = {
    (32, 64): [(Tile(64, 64, 64, 4, 3), 3), (Tile(128, 64, 64, 4, 2), 3), (Tile(64, 64, 64, 4, 4), 1)],
    (16, 128): MOST_WEIGHTS,
    (8, 256): [*MOST_WEIGHTS, (Tile(64, 128, 256, 8, 3), 1)],
    (4, 512): [*MOST_WEIGHTS, (Tile(64, 128, 256, 8, 3), 1)],
}
CUTS = [group_norm.Cut(each, warps) for each in (8, 16) for warps in (8, 16)]
IMAGENET = [(16, 64), (8, 64), (4, 128), (2, 256), (1, 512)]  # maps of ResNet18 as for ImageNet, images of 32 x 32
SMALL_CUTS = [group_norm.Cut(8, 16, share) for share in (16, 32, 64)] + [group_norm.Cut(8, 4, 16)]
PROGRAMS = [132, 264]


Row = tuple[str, Callable[[], Tensor], Tensor | None, float, float]  # name, call, what it should give, FLOP, bytes


def report(rows: list[Row], lanes: int) -> None:
    """One line for each: how far off, microseconds a lane, TFLOP/s and TB/s; kernels are compiled at the same time."""
    gpu.rehearse(lambda: [call() for name, call, *_ in rows if "cuDNN" not in name])
    for name, call, wanted, flops, size in rows:
        try:
            off = float("nan") if wanted is None else ((call() - wanted).float().norm() / wanted.float().norm()).item()
            spent = graph_seconds(call, "cuda") / lanes
            figures = f"{off:.0e} | {spent * 1e6:.2f} | {flops / spent / 1e12:.0f} | {size / spent / 1e12:.2f}"
            print(f"| {lanes} | {name} | {figures} |", flush=True)
        except Exception as error:
            traceback.print_exc(limit=-2)
            print(f"| {lanes} | {name} | failed: {type(error).__name__} {str(error)[:80]!r} |", flush=True)


def some(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def convolution_rows(layer: tuple[int, int], lanes: int, batch: int, few: bool, stride: int = 1) -> list[Row]:
    columns, outs = layer
    inputs = outs // stride
    x = some(lanes, batch, columns * stride, columns * stride, inputs)
    grads, weight = some(lanes, batch, columns, columns, outs), some(lanes, outs, 3, 3, inputs) / (3 * inputs**0.5)
    out, inner = torch.empty_like(grads), torch.empty_like(x)
    flops, size = 2 * batch * columns**2 * 9 * inputs * outs, (x.numel() + out.numel()) * 2 / lanes

    def ours(which: str, tile: Tile) -> Tensor:
        if which == "forward":
            conv_3x3.forward(x, weight, out, tile, stride=stride)
            return out
        conv_3x3.backward_inputs(grads, weight, inner, tile, stride=stride)
        return inner

    def our_weights(tile: Tile, taps: int, least: int) -> Tensor:
        pieces = pieces_of(lanes * conv_3x3.programs(tile, taps, weight), conv_3x3.tiles(tile, grads), least=least)
        kind = torch.bfloat16 if pieces == 1 else torch.float32
        parts = torch.empty((lanes, pieces, *weight.shape[1:]), device="cuda", dtype=kind)
        conv_3x3.backward_weights(grads, x, parts, tile, taps=taps, stride=stride)
        return parts[:, 0] if pieces == 1 else parts.sum(1).to(weight.dtype)

    libraries = {
        "forward": lambda: torch_ops._convolve(x, weight, stride),
        "inputs": lambda: torch_ops._convolve_inputs(grads, weight, *x.shape[2:4], stride),
        "weights": lambda: torch_ops._convolve_weights(grads, x, stride),
    }
    rows: list[Row] = []
    for which, work in libraries.items():

        def cudnn(work: Callable[[], Tensor] = work) -> Tensor:
            own, gpu.KERNELS = gpu.KERNELS, ()
            try:
                return work()
            finally:
                gpu.KERNELS = own

        wanted, name = cudnn(), f"{layer}{' stride 2' if stride == 2 else ''} | {which}"
        rows.append((f"{name} | cuDNN", cudnn, wanted, flops, size))
        if which == "weights":
            tried = [
                (f"{tuple(t)} {n} {least}", partial(our_weights, t, n, least))
                for t, n in WEIGHTS[layer]
                for least in PROGRAMS[: 2 if few else 1]
            ]
        else:
            tried = [(f"{tuple(t)}", partial(ours, which, t)) for t in CONVOLUTIONS[layer]]
        rows += [(f"{name} | {text}", call, wanted, flops, size) for text, call in tried]
    return rows


def norm_rows(layer: tuple[int, int], lanes: int, batch: int, cuts: list[group_norm.Cut]) -> list[Row]:
    columns, channels = layer
    x, shortcut, grads, more, out, inner = (some(lanes, batch, columns, columns, channels) for _ in range(6))
    weight, bias = some(lanes, channels), some(lanes, channels)
    mean, scale = (torch.ones((lanes, batch, 2), device="cuda") for _ in range(2))
    plain, scaled = (torch.empty((lanes, batch, channels), device="cuda") for _ in range(2))
    size = x.numel() * x.element_size() / lanes
    how, rest = {"epsilon": 1e-5, "relu": True}, (x, mean, scale, weight, bias, shortcut, inner, plain, scaled)
    passes = {
        "norm": (2, lambda c: group_norm.forward(x, weight, bias, None, out, mean, scale, **how, cut=c)),
        "norm, shortcut": (3, lambda c: group_norm.forward(x, weight, bias, shortcut, out, mean, scale, **how, cut=c)),
        "norm back, by input": (3, lambda c: group_norm.backward(grads, None, out, *rest, mask=1, cut=c)),
        "norm back, two": (6, lambda c: group_norm.backward(grads, more, out, *rest, mask=2, cut=c)),
    }
    return [
        (f"{layer} | {name} | {tuple(cut)}", lambda w=work, c=cut: w(c) or out, None, 0, arrays * size)
        for name, (arrays, work) in passes.items()
        for cut in cuts
    ]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--lanes", type=int, nargs="+", default=[80, 10])
    made.add_argument("--imagenet", action="store_true", help="only the norms of the network as for ImageNet")
    arguments = made.parse_args()
    begun = time.time()
    print(f"{header('cuda')}\n\n| lanes | layer | pass | way | off | us a lane | TFLOP/s | TB/s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for number, lanes in enumerate(arguments.lanes):
        for layer in IMAGENET if arguments.imagenet else ():
            report(norm_rows(layer, lanes, 64, SMALL_CUTS), lanes)
            torch.cuda.empty_cache()
        for layer in () if arguments.imagenet else RESNET_LAYERS:
            report(convolution_rows(layer, lanes, 64, number > 0), lanes)
            if layer[0] < 32:
                report(convolution_rows(layer, lanes, 64, True, stride=2), lanes)
            report(norm_rows(layer, lanes, 64, CUTS), lanes)
            torch.cuda.empty_cache()
        print(f"{time.time() - begun:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
