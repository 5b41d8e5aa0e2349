"""Layers of small whole numbers, on which every way of convolving must agree with autograd to the bit.

Run as a script under TRITON_INTERPRET=1 it takes the GPU kernels through triton's interpreter (`test_convolutions`).
"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from fedgma.training.fast.convolutions import _empty, _outputs


class Case(NamedTuple):
    lanes: int
    samples: int
    channels: int
    height: int
    width: int
    outs: int
    kernel: int
    padding: int
    pool: bool
    last: bool = False  # channels lie together in memory


NARROW = [
    Case(2, 2, 1, 6, 8, 3, 5, 2, True),
    Case(1, 3, 3, 7, 6, 2, 3, 0, False),
    Case(2, 2, 2, 6, 5, 4, 3, 1, True, last=True),  # pooling drops a column
    Case(1, 1, 2, 4, 5, 2, 3, 2, True),  # as much padding as a kernel can see of
    Case(1, 1, 1, 4, 5, 2, 1, 1, True),  # and more
]
WIDE = [  # more channels or outputs than the narrowest tile of a matrix unit
    Case(1, 2, 17, 5, 5, 2, 2, 0, True, last=True),
    Case(1, 1, 1, 4, 4, 17, 3, 1, False, last=True),
]
CASES = NARROW + WIDE


def draw(case, device="cpu", dtype=torch.float32):
    """Input, weight, bias and the gradient of the output; sample 0 of lane 0 is an image of zeros: all ties."""
    generator = torch.Generator().manual_seed(1)
    lanes, samples, channels, height, width, outs, kernel, padding, pool, last = case
    whole = lambda *shape: torch.randint(-2, 3, shape, generator=generator).to(device, dtype)  # noqa: E731
    x = whole(lanes, samples, channels, height, width)
    x[0, 0] = 0
    if last:
        x = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    weight, bias = whole(lanes, outs, channels, kernel, kernel), whole(lanes, outs).abs()
    return x, weight, bias, whole(*_outputs(x, weight, bias, padding, pool)[0].shape)


def wanted(case, x, weight, bias, grads):
    """Output and gradients of weight, bias and input, by autograd, lane by lane."""
    x, weight, bias = (value.double().requires_grad_() for value in (x, weight, bias))
    found = [F.conv2d(*one, padding=case.padding).relu() for one in zip(x, weight, bias, strict=True)]
    out = torch.stack([F.max_pool2d(one, 2) if case.pool else one for one in found])
    return [out, *torch.autograd.grad(out, [weight, bias, x], grads.double())]


def by_kernels(family, case, x, weight, bias, grads, *, pieces=1, tile=None):
    """The same by a family of GPU kernels; what they must not touch is filled with a strange number."""
    options = {"padding": case.padding, "pool": case.pool, "tile": tile}
    out, corners = (_empty(x, list(grads.shape), case.last, kind).fill_(77) for kind in (x.dtype, torch.uint8))
    family.forward(x, weight, bias, out, corners, **options)
    inner = _empty(x, list(x.shape), case.last).fill_(77)
    family.backward_inputs(grads, corners, weight, inner, **options)
    parts = [torch.full((len(x), pieces, *value.shape[1:]), 77.0, device=x.device) for value in (weight, bias)]
    family.backward_weights(grads, corners, x, *parts, **options)
    return [out, parts[0].sum(1), parts[1].sum(1), inner]


def main():
    from fedgma.training.fast.gpu import conv_matrix, conv_thread

    for family, tile, cases in ((conv_thread, (32, 3, 1), NARROW), (conv_matrix, (32, 16), [*NARROW[1:4], *WIDE])):
        for case in cases:
            given = draw(case)
            pieces = 2 if case.samples == 2 else 1
            found = by_kernels(family, case, *given, pieces=pieces, tile=family.Tile(*tile))
            for name, one, other in zip(("out", "weight", "bias", "x"), found, wanted(case, *given), strict=True):
                assert torch.equal(one.double(), other), (family.__name__, case, name)


if __name__ == "__main__":
    main()
