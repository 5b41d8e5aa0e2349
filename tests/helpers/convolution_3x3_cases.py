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
