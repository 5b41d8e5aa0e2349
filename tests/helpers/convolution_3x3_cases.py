"""3x3 convolutions with a border of small whole numbers: by the GPU kernels and by autograd, to the bit.

Run as a script under TRITON_INTERPRET=1 it takes the kernels through triton's interpreter (`test_convolutions_3x3`).
"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))


class Case(NamedTuple):
    lanes: int
    samples: int
    rows: int
    columns: int
    inputs: int
    outs: int


CASES = [Case(2, 2, 4, 4, 16, 32), Case(1, 2, 8, 16, 32, 16), Case(1, 1, 2, 32, 16, 16)]


def draw(case, device="cpu", dtype=torch.float32):
    """Input, weight and the gradient of the output; whole numbers small enough for bfloat16 and its sums."""
    generator = torch.Generator().manual_seed(2)
    whole = lambda *shape: torch.randint(-1, 2, shape, generator=generator).to(device, dtype)  # noqa: E731
    at = (case.lanes, case.samples, case.rows, case.columns)
    return whole(*at, case.inputs), whole(case.lanes, case.outs, 3, 3, case.inputs), whole(*at, case.outs)


def wanted(x, weight, grads):
    """Output and the gradients of input and weight, by autograd, lane by lane."""
    x, weight = (value.double().requires_grad_() for value in (x, weight))
    lanes = [F.conv2d(a.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), padding=1) for a, w in zip(x, weight, strict=True)]
    out = torch.stack(lanes).permute(0, 1, 3, 4, 2)
    return [out, *torch.autograd.grad(out, [x, weight], grads.double())]


def by_kernels(x, weight, grads, tile, tile_of_weights, pieces=2):
    """The same by the kernels; the sums of the weights' gradient are in pieces."""
    from fedgma.training.fast.gpu import conv_3x3 as fused

    out, inner = torch.empty_like(grads), torch.empty_like(x)
    fused.forward(x, weight, out, tile)
    fused.forward(grads, weight, inner, tile._replace(outs=tile.inputs, inputs=tile.outs), flipped=True)
    parts = x.new_empty((len(x), pieces, *weight.shape[1:]), dtype=torch.float32)
    fused.backward_weights(grads, x, parts, tile_of_weights)
    return [out, inner, parts.sum(1)]


def main():
    from fedgma.training.fast.gpu.conv_3x3 import Tile

    for case in CASES:
        half = case.samples * case.rows * case.columns // 2
        tile = Tile(max(half // 2, case.columns), case.outs, 16, 4, 2)
        drawn = draw(case)
        found = by_kernels(*drawn, tile, Tile(16, 16, 16, 4, 2))
        for name, one, other in zip(("out", "input", "weight"), wanted(*drawn), found, strict=True):
            assert torch.equal(one.float(), other), (case, name)


if __name__ == "__main__":
    main()
