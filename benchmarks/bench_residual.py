"""ResNet18's passes on a GPU in bfloat16: own convolutions of all lanes beside cuDNN, norms beside their bandwidth.

    python benchmarks/bench_residual.py              # about a minute, most of it compiling

A pass is first compared with cuDNN's (column "off") and then timed as a captured graph of all lanes. Microseconds are
of one lane's batch of 64. A row that fails loses itself only.
"""

import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from torch import Tensor
from workloads import RESNET_LAYERS, graph_seconds, header, parser

from fedgma.training.fast import torch_ops
from fedgma.training.fast.gpu import conv_3x3, group_norm
from fedgma.training.fast.layers import pieces_of

Tile = conv_3x3.Tile
MOST = [Tile(256, 128, 64, 8, 3), Tile(128, 128, 64, 4, 3), Tile(256, 128, 64, 8, 4), Tile(128, 128, 64, 8, 3)]
CONVOLUTIONS = {
    (32, 64): [Tile(256, 64, 64, 4, 2), Tile(128, 64, 64, 4, 3), Tile(256, 64, 64, 8, 2), Tile(256, 64, 64, 8, 4)],
    (16, 128): MOST,
    (8, 256): [*MOST, Tile(128, 256, 64, 8, 3)],
    (4, 512): [*MOST, Tile(128, 256, 64, 8, 3)],
}
MOST_WEIGHTS = [(Tile(64, 128, 64, 8, 3), 3), (Tile(64, 64, 64, 8, 3), 9), (Tile(64, 128, 128, 8, 3), 3),
                (Tile(64, 128, 128, 8, 4), 1), (Tile(64, 128, 128, 4, 3), 1)]  # fmt: skip
WEIGHTS = {
    (32, 64): [(Tile(64, 64, 64, 8, 3), 9), (Tile(64, 64, 64, 4, 3), 3), (Tile(64, 64, 64, 8, 4), 9)],
    (16, 128): MOST_WEIGHTS,
    (8, 256): [*MOST_WEIGHTS, (Tile(64, 128, 256, 8, 3), 1)],
    (4, 512): [*MOST_WEIGHTS, (Tile(64, 128, 256, 8, 3), 1)],
}
CUTS = [group_norm.Cut(each, warps) for each in (8, 16) for warps in (8, 16)]
PROGRAMS = 264


def row(begin: str, work: Callable[[], Tensor], wanted: Tensor | None, lanes: int, flops: float, size: float) -> None:
    """One line: how far off, microseconds a lane, TFLOP/s and TB/s."""
    try:
        off = float("nan") if wanted is None else ((work() - wanted).float().norm() / wanted.float().norm()).item()
        spent = graph_seconds(work, "cuda") / lanes
        print(f"| {begin} | {off:.0e} | {spent * 1e6:.2f} | {flops / spent / 1e12:.0f} | {size / spent / 1e12:.2f} |")
    except Exception as error:
        traceback.print_exc(limit=-2)
        print(f"| {begin} | failed: {type(error).__name__} {str(error)[:80]!r} |")
    sys.stdout.flush()


def some(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def convolution_rows(layer: tuple[int, int], lanes: int, batch: int, only: bool, stride: int = 1) -> None:
    columns, outs = layer
    inputs = outs // stride
    x = some(lanes, batch, columns * stride, columns * stride, inputs)
    grads, weight = some(lanes, batch, columns, columns, outs), some(lanes, outs, 3, 3, inputs) / (3 * inputs**0.5)
    out, inner, turned = torch.empty_like(grads), torch.empty_like(x), torch_ops.flipped(weight)
    flops, size = 2 * batch * columns**2 * 9 * inputs * outs, (x.numel() + out.numel()) * 2 / lanes

    def ours(which: str, tile: Tile) -> Tensor:
        if which == "forward":
            conv_3x3.forward(x, weight, out, tile, stride=stride)
            return out
        conv_3x3.backward_inputs(grads, weight, inner, tile, stride=stride)
        return inner

    def our_weights(tile: Tile, taps: int) -> Tensor:
        blocks = (outs // min(tile.outs, outs)) * (inputs // min(tile.inputs, inputs)) * (9 // taps)
        pieces = pieces_of(lanes * blocks, batch * columns**2 // tile.positions, least=PROGRAMS)
        kind = torch.bfloat16 if pieces == 1 else torch.float32
        parts = torch.empty((lanes, pieces, *weight.shape[1:]), device="cuda", dtype=kind)
        conv_3x3.backward_weights(grads, x, parts, tile, taps=taps, stride=stride)
        return parts[:, 0] if pieces == 1 else parts.sum(1).to(weight.dtype)

    libraries = {
        "forward": lambda: torch_ops._convolve(x, weight, stride),
        "inputs": lambda: (
            torch_ops._convolve(grads, turned, 1)
            if stride == 1
            else torch_ops._convolve_inputs(grads, weight, *x.shape[2:4], stride)
        ),
        "weights": lambda: torch_ops._convolve_weights(grads, x, stride),
    }
    for which, work in libraries.items():
        wanted = work()
        name = f"{lanes} | {layer}{' stride 2' if stride == 2 else ''} | {which}"
        row(f"{name} | cuDNN", work, wanted, lanes, flops, size)
        if which == "weights":
            for tile, taps in WEIGHTS[layer][: 2 if only else None]:
                if taps < 9 or stride == 1:
                    call = lambda t=tile, n=taps: our_weights(t, n)  # noqa: E731
                    row(f"{name} | {tuple(tile)} {taps}", call, wanted, lanes, flops, size)
            continue
        for tile in CONVOLUTIONS[layer][: 2 if only else None]:
            row(f"{name} | {tuple(tile)}", lambda t=tile, w=which: ours(w, t), wanted, lanes, flops, size)


def norm_rows(layer: tuple[int, int], lanes: int, batch: int) -> None:
    columns, channels = layer
    x, shortcut, grads, more, out, inner = (some(lanes, batch, columns, columns, channels) for _ in range(6))
    weight, bias = some(lanes, channels), some(lanes, channels)
    mean, scale = (torch.ones((lanes, batch, 2), device="cuda") for _ in range(2))
    plain, scaled = (torch.empty((lanes, batch, channels), device="cuda") for _ in range(2))
    size = x.numel() * x.element_size() / lanes

    def norm(name: str, arrays: int, work: Callable[[group_norm.Cut], None]) -> None:
        for cut in CUTS:
            call = lambda c=cut: work(c) or out  # noqa: E731
            row(f"{lanes} | {layer} | {name} | {tuple(cut)}", call, None, lanes, 0, arrays * size)

    how = {"epsilon": 1e-5, "relu": True}
    norm("norm", 2, lambda c: group_norm.forward(x, weight, bias, None, out, mean, scale, **how, cut=c))
    norm("norm, shortcut", 3, lambda c: group_norm.forward(x, weight, bias, shortcut, out, mean, scale, **how, cut=c))
    rest = (x, mean, scale, weight, bias, shortcut, inner, plain, scaled)
    norm("norm back, by input", 3, lambda c: group_norm.backward(grads, None, out, *rest, mask=1, cut=c))
    norm("norm back, two", 6, lambda c: group_norm.backward(grads, more, out, *rest, mask=2, cut=c))


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--lanes", type=int, nargs="+", default=[80, 10])
    arguments = made.parse_args()
    begun = time.time()
    torch.backends.cudnn.benchmark = False
    print(f"{header('cuda')}\n\n| lanes | layer | pass | way | off | us a lane | TFLOP/s | TB/s |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for number, lanes in enumerate(arguments.lanes):
        for layer in RESNET_LAYERS:
            convolution_rows(layer, lanes, 64, number > 0)
            if layer[0] < 32:
                convolution_rows(layer, lanes, 64, True, stride=2)
            norm_rows(layer, lanes, 64)
            torch.cuda.empty_cache()
    print(f"{time.time() - begun:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
