"""Group normalisation of ResNet18's layers on a GPU in bfloat16: each kernel beside the bandwidth of the memory.

    python benchmarks/bench_group_norm.py            # about half a minute, most of it compiling

The kernels are first compared with plain torch in float64 (column "off") and then timed as captured graphs of all
lanes. Microseconds are of one lane's batch of 64; TB/s counts each array that a perfect pass reads or writes once. On a
CPU (`--device cpu` under TRITON_INTERPRET=1) small shapes only show that the kernels are right.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import torch
from torch import Tensor
from workloads import RESNET_LAYERS, graph_seconds, header, parser

from fedgma.training.fast import normalisations
from fedgma.training.fast.gpu import group_norm
from fedgma.training.fast.normalisations import Norm, normalise, normalise_back

NORM = Norm(groups=2, epsilon=1e-5)
# how the backward kernel tells what ReLU set to zero, and how many arrays it then reads or writes
MASKS = {"no ReLU": (group_norm.NONE, 3), "by input": (group_norm.BY_INPUT, 3), "by output": (group_norm.BY_OUTPUT, 5)}


def worst_distance(columns: int, channels: int, device: str, kind: torch.dtype) -> float:
    """The largest distance of output and gradients from plain torch in float64, with shortcut and without."""
    some = lambda *shape: torch.randn(shape, device=device).to(kind)  # noqa: E731
    x, shortcut, grads = (some(2, 3, columns, columns, channels) for _ in range(3))
    weight, bias = some(2, channels), some(2, channels)
    state = {"n.weight": weight.double(), "n.bias": bias.double()}
    off = []
    for added in (None, shortcut):
        exact = None if added is None else added.double()
        out, saved = normalise(NORM, x.double(), state, "n", None, shortcut=exact, relu=True)
        by_name: dict[str, Tensor] = {}
        inner, _ = normalise_back(NORM, [grads.double()], saved, state, "n", by_name)
        ours, mean, scale = normalisations._fused(x, weight, bias, added, NORM.groups, NORM.epsilon, True)
        cut = None if added is None else ours
        back = normalisations._fused_back(grads, None, cut, x, mean, scale, weight, bias, True)
        results = (ours, back[0], back[2].sum(1), back[3].sum(1))
        expected = (out, inner, by_name["n.bias"], by_name["n.weight"])
        off += [((a - b).norm() / b.norm()).item() for a, b in zip(results, expected, strict=True)]
    return max(off)


def rows(layer: tuple[int, int], lanes: int, batch: int, device: str) -> None:
    columns, channels = layer
    kind = torch.bfloat16 if device == "cuda" else torch.float32
    off = worst_distance(columns, channels, device, kind)
    some = lambda: torch.randn((lanes, batch, columns, columns, channels), device=device).to(kind)  # noqa: E731
    x, shortcut, grads, out, inner = (some() for _ in range(5))
    weight, bias = (torch.randn((lanes, channels), device=device).to(kind) for _ in range(2))
    mean, scale = (torch.ones((lanes, batch, 2), device=device) for _ in range(2))
    plain, scaled = (torch.empty((lanes, batch, channels), device=device) for _ in range(2))
    size = x.numel() * x.element_size()

    def row(which: str, work: Callable[[], None], arrays: int) -> None:
        spent = graph_seconds(work, device)
        figures = f"{off:.0e} | {spent / lanes * 1e6:.2f} | {arrays * size / spent / 1e12:.2f}"
        print(f"| {layer} | {which} | {figures} |", flush=True)

    how = {"epsilon": NORM.epsilon, "relu": True}
    for name, added, arrays in (("forward", None, 2), ("forward, shortcut", shortcut, 3)):
        row(name, lambda a=added: group_norm.forward(x, weight, bias, a, out, mean, scale, **how), arrays)
    for name, (mask, arrays) in MASKS.items():
        given = (out, x, mean, scale, weight, bias, shortcut, inner, plain, scaled)
        row(f"backward, {name}", lambda m=mask, g=given: group_norm.backward(grads, None, *g, mask=m), arrays)


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--lanes", type=int, default=40)
    arguments = made.parse_args()
    cpu = arguments.device == "cpu"
    lanes, batch = (1, 4) if cpu else (arguments.lanes, 64)
    print(f"{header(arguments.device)}; {lanes} lanes, batch {batch}\n")
    print("| layer | kernel | off | us a lane | TB/s |\n| --- | --- | --- | --- | --- |")
    for layer in [(16, 128)] if cpu else RESNET_LAYERS:
        rows(layer, lanes, batch, arguments.device)


if __name__ == "__main__":
    main()
