"""The 3x3 convolutions of ResNet18 on a GPU in bfloat16: our own kernels beside cuDNN, pass by pass.

    python benchmarks/bench_conv_3x3.py              # about a minute, most of it compiling

Every pass is first compared with cuDNN's (column "off") and then timed as a captured graph of all lanes. Microseconds
are of one lane's batch of 64. cuDNN's input gradient is a forward pass with flipped weights; the time to flip them is
not included. On a CPU (`--device cpu` under TRITON_INTERPRET=1) small shapes only show that the passes agree.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from torch import Tensor
from workloads import RESNET_LAYERS, graph_seconds, header, parser

from fedgma.training.fast import gpu, torch_ops
from fedgma.training.fast.gpu import conv_3x3

TILES = {  # to try beside the present ones
    (32, 64): [(256, 64, 64, 8, 3), (128, 64, 64, 8, 3), (64, 64, 64, 4, 3)],
    (16, 128): [(128, 128, 64, 8, 2), (128, 64, 64, 8, 3)],
    (8, 256): [(128, 128, 32, 8, 3), (128, 64, 64, 8, 3)],
    (4, 512): [(64, 128, 64, 8, 3), (128, 128, 64, 8, 2)],
}
WEIGHT_TILES = [(64, 64, 32, 4, 3), (64, 64, 64, 8, 3), (64, 128, 32, 8, 3)]


def distance(result: Tensor, expected: Tensor) -> float:
    return ((result - expected).float().norm() / expected.float().norm()).item()


def rows(layer: tuple[int, int], lanes: int, batch: int, device: str) -> None:
    columns, channels = layer
    draw = torch.Generator(device).manual_seed(0)
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    some = lambda *shape: torch.randn(shape, generator=draw, device=device).to(kind)  # noqa: E731
    x, grads = (some(lanes, batch, columns, columns, channels) for _ in range(2))
    weight, out = some(lanes, channels, 3, 3, channels) / (3 * channels**0.5), torch.empty_like(x)
    flipped = torch_ops.flipped(weight)
    flops = 2 * batch * columns**2 * 9 * channels**2

    def row(which: str, way: str, work: Callable[[], Tensor], expected: Tensor) -> None:
        off, spent = distance(work(), expected), graph_seconds(work, device) / lanes
        figures = f"{off:.0e} | {spent * 1e6:.2f} | {flops / spent / 1e12:.0f}"
        print(f"| {layer} | {which} | {way} | {figures} |", flush=True)

    def ours(which: str, tile: conv_3x3.Tile) -> Tensor:
        if which == "weights":
            return torch_ops._sum_weights(conv_3x3, tile, grads, x)
        conv_3x3.forward(x if which == "forward" else grads, weight, out, tile, flipped=which == "inputs")
        return out

    libraries = {
        "forward": lambda: torch_ops._convolve(x, weight, 1),
        "inputs": lambda: torch_ops._convolve(grads, flipped, 1),
        "weights": lambda: torch_ops._convolve_weights(grads, x, 1),
    }
    for which, work in libraries.items():
        expected = work()
        row(which, "cuDNN" if device == "cuda" else "torch", work, expected)
        present = (torch_ops.OWN_WEIGHTS if which == "weights" else torch_ops.OWN).get(layer)
        others = WEIGHT_TILES if which == "weights" else TILES[layer]
        for cut in dict.fromkeys([*([present] if present else []), *others]):
            tile = conv_3x3.Tile(*cut)
            if conv_3x3.fits(tile, batch * columns**2, columns, channels, channels):
                way = f"{'present' if cut == present else 'tried'} {cut}"
                row(which, way, lambda w=which, t=tile: ours(w, t), expected)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--lanes", type=int, default=40)
    arguments = made.parse_args()
    gpu.KERNELS = ()  # what is called through torch_ops here is the library's
    cpu = arguments.device == "cpu"
    lanes, batch = (1, 4) if cpu else (arguments.lanes, 64)
    print(f"{header(arguments.device)}; {lanes} lanes, batch {batch}\n")
    print("| layer | pass | way | off | us a lane | TFLOP/s |\n| --- | --- | --- | --- | --- | --- |")
    for layer in [(16, 128)] if cpu else RESNET_LAYERS:
        rows(layer, lanes, batch, arguments.device)


if __name__ == "__main__":
    main()
