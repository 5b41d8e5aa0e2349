"""3x3 convolutions with a border of small whole numbers, on which every way must agree with autograd to the bit."""

from typing import NamedTuple

import torch
from torch.nn import functional as F


class Case(NamedTuple):
    lanes: int
    samples: int
    rows: int
    columns: int
    inputs: int
    outs: int
    stride: int = 1


CASES = [Case(2, 2, 4, 4, 16, 16), Case(1, 3, 4, 4, 24, 40), Case(2, 1, 8, 8, 16, 16, 2)]


def draw(case, device="cpu", dtype=torch.float32):
    """Input, weight and the gradient of the output; whole numbers small enough for bfloat16 and its sums."""
    generator = torch.Generator().manual_seed(2)
    whole = lambda *shape: torch.randint(-1, 2, shape, generator=generator).to(device, dtype)  # noqa: E731
    x = whole(case.lanes, case.samples, case.rows, case.columns, case.inputs)
    rows, columns = case.rows // case.stride, case.columns // case.stride
    grads = whole(case.lanes, case.samples, rows, columns, case.outs)
    return x, whole(case.lanes, case.outs, 3, 3, case.inputs), grads


def wanted(case, x, weight, grads):
    """Output and the gradients of input and weight, by autograd, lane by lane."""
    x, weight = (value.double().requires_grad_() for value in (x, weight))
    lanes = [
        F.conv2d(a.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), stride=case.stride, padding=1)
        for a, w in zip(x, weight, strict=True)
    ]
    out = torch.stack(lanes).permute(0, 1, 3, 4, 2)
    return [out, *torch.autograd.grad(out, [x, weight], grads.double())]


def by_kernels(case, x, weight, grads, tile, taps):
    """The same by the kernels, the weights' gradient once for each number of taps, its sums in pieces."""
    from fedgma.training.fast.gpu import conv_3x3 as own

    out, inner = torch.full_like(grads, 7), torch.full_like(x, 7)
    own.forward(x, weight, out, tile, stride=case.stride)
    own.backward_inputs(grads, weight, inner, tile, stride=case.stride)
    parts = [x.new_empty((len(x), own.tiles(tile, grads), *weight.shape[1:]), dtype=torch.float32) for _ in taps]
    for some, found in zip(taps, parts, strict=True):
        own.backward_weights(grads, x, found, tile, taps=some, stride=case.stride)
    return [out, inner, *(found.sum(1) for found in parts)]


def main():
    from fedgma.training.fast.gpu.conv_3x3 import Tile

    for case in CASES:
        taps, drawn = (1, 3), draw(case)
        out, *inner, by_weight = wanted(case, *drawn)
        actual = by_kernels(case, *drawn, Tile(32, 16, 16, 4, 2), taps)
        expected = [out, *inner, *[by_weight] * len(taps)]
        for which, (one, other) in enumerate(zip(expected, actual, strict=True)):
            assert torch.equal(one.float(), other), (case, which)
