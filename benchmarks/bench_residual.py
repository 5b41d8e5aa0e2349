"""ResNet18's passes on a GPU in bfloat16: our 3x3 convolutions beside cuDNN, group normalisation beside its bandwidth.

    python benchmarks/bench_residual.py              # about a minute, most of it compiling

A pass is first compared, convolutions with cuDNN's and normalisation with autograd in float64 (column "off"), and then
timed as a captured graph of all lanes. Microseconds are of one lane's batch of 64. cuDNN's input gradient is a forward
pass with the weights turned round, whose turning is not in its time. Small shapes on a CPU (`--device cpu` under
TRITON_INTERPRET=1) only show that the passes agree.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

import torch
from torch import Tensor
from workloads import header, parser

import group_norm_cases as norms
from fedgma.training.fast import torch_ops as operators
from fedgma.training.fast.gpu import conv_3x3 as convolutions
from fedgma.training.fast.gpu import group_norm as group_norms

OWN, OWN_WEIGHTS = operators.OWN, operators.OWN_WEIGHTS
LAYERS = [(32, 64), (16, 128), (8, 256), (4, 512)]  # columns and channels
TILES = {  # to try beside the present ones
    (32, 64): [(256, 64, 64, 8, 3), (128, 64, 64, 8, 3), (64, 64, 64, 4, 3)],
    (16, 128): [(128, 128, 64, 8, 2), (128, 64, 64, 8, 3)],
    (8, 256): [(128, 128, 32, 8, 3), (128, 64, 64, 8, 3)],
    (4, 512): [(64, 128, 64, 8, 3), (128, 128, 64, 8, 2)],
}
WEIGHT_TILES = [(64, 64, 32, 4, 3), (64, 64, 64, 8, 3), (64, 128, 32, 8, 3)]
MASKS = {"none": (group_norms.NONE, 3), "own": (group_norms.OWN, 3), "out": (group_norms.OUT, 5)}  # and arrays moved


def seconds(work: Callable[[], Any], device: str, repeats: int = 5) -> float:
    """Of one call; on a GPU as a graph, so that launches do not count."""
    work()
    if device == "cpu":
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / repeats / 1e3


def off(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).float().norm() / wanted.float().norm()).item()


def convolution_rows(layer: tuple[int, int], lanes: int, batch: int, device: str) -> None:
    columns, channels = layer
    draw = torch.Generator(device).manual_seed(0)
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    some = lambda *shape: torch.randn(shape, generator=draw, device=device).to(kind)  # noqa: E731
    x, grads = (some(lanes, batch, columns, columns, channels) for _ in range(2))
    weight, out = some(lanes, channels, 3, 3, channels) / (3 * channels**0.5), torch.empty_like(x)
    turned = operators.turned(weight)
    flops = 2 * batch * columns**2 * 9 * channels**2

    def row(which: str, way: str, work: Callable[[], Tensor], wanted: Tensor) -> None:
        apart, spent = off(work(), wanted), seconds(work, device) / lanes
        figures = f"{apart:.0e} | {spent * 1e6:.2f} | {flops / spent / 1e12:.0f}"
        print(f"| {layer} | {which} | {way} | {figures} |", flush=True)

    def ours(which: str, tile: convolutions.Tile) -> Tensor:
        given = x if which == "forward" else grads
        convolutions.forward(given, weight, out, tile, turned=which == "inputs")
        return out

    def our_weights(tile: convolutions.Tile) -> Tensor:
        return operators._sum_weights(convolutions, tile, grads, x)

    libraries = {
        "forward": lambda: operators._convolve(x, weight, 1),
        "inputs": lambda: operators._convolve(grads, turned, 1),
        "weights": lambda: operators._convolve_weights(grads, x, 1),
    }
    wanted = {which: work() for which, work in libraries.items()}
    for which, work in libraries.items():
        row(which, "cuDNN" if device == "cuda" else "torch", work, wanted[which])
        tiles = WEIGHT_TILES if which == "weights" else TILES[layer]
        present = (OWN_WEIGHTS if which == "weights" else OWN).get(layer)
        for cut in dict.fromkeys([*([present] if present else []), *tiles]):
            tile = convolutions.Tile(*cut)
            if not convolutions.fits(tile, batch * columns**2, columns, channels, channels):
                continue
            call = (lambda t=tile: our_weights(t)) if which == "weights" else (lambda t=tile, w=which: ours(w, t))
            row(which, f"{'present' if cut == present else 'tried'} {cut}", call, wanted[which])


def norm_rows(layer: tuple[int, int], lanes: int, batch: int, device: str) -> None:
    columns, channels = layer
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    worst = 0.0
    for relu, beside, parts in ((False, False, 1), (True, False, 1), (True, True, 2)):
        case = norms.Case(2, 3, columns, channels, 2, relu, beside, parts)
        drawn = norms.draw(case, device, kind)
        worst = max(worst, *norms.distances(norms.wanted(case, *drawn), norms.found_by_kernels(case, *drawn)).values())
    some = lambda: torch.randn((lanes, batch, columns, columns, channels), device=device).to(kind)  # noqa: E731
    x, beside, grads, out, inner = (some() for _ in range(5))
    weight, bias = (torch.randn((lanes, channels), device=device).to(kind) for _ in range(2))
    mean, scale = (torch.ones((lanes, batch, 2), device=device) for _ in range(2))
    plain, along = (torch.empty((lanes, batch, channels), device=device) for _ in range(2))
    size = x.numel() * x.element_size()

    def row(which: str, work: Callable[[], None], passes: int) -> None:
        spent = seconds(work, device)
        figures = f"{worst:.0e} | {spent / lanes * 1e6:.2f} | {passes * size / spent / 1e12:.2f}"
        print(f"| {layer} | {which} | {figures} |", flush=True)

    how = {"epsilon": 1e-5, "relu": True}
    for name, added, passes in (("forward", None, 2), ("forward, shortcut", beside, 3)):
        row(name, lambda a=added: group_norms.forward(x, weight, bias, a, out, mean, scale, **how), passes)
    for name, (mask, passes) in MASKS.items():
        given = (out, x, mean, scale, weight, bias, beside, inner, plain, along)
        row(f"back, {name}", lambda m=mask, g=given: group_norms.backward(grads, None, *g, mask=m), passes)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--lanes", type=int, default=40)
    arguments = made.parse_args()
    operators.OWN = operators.OWN_WEIGHTS = {}  # what is called through the operators here is the library's
    cpu = arguments.device == "cpu"
    lanes, batch = (1, 4) if cpu else (arguments.lanes, 64)
    layers = [(16, 128)] if cpu else LAYERS
    print(f"{header(arguments.device)}; {lanes} lanes, batch {batch}\n")
    print("| layer | pass | way | off | us a lane | TFLOP/s |\n| --- | --- | --- | --- | --- | --- |")
    for layer in layers:
        convolution_rows(layer, lanes, batch, arguments.device)
    print("\n| layer | normalisation | off | us a lane | TB/s |\n| --- | --- | --- | --- | --- |")
    for layer in layers:
        norm_rows(layer, lanes, batch, arguments.device)


if __name__ == "__main__":
    main()
