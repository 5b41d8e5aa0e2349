"""Group normalisation with shortcut and ReLU: as written over lanes, by the kernels, and by autograd in float64."""

import itertools
from typing import NamedTuple

import torch
from torch.nn import functional as F

from fedgma.training.fast.normalisations import Norm, normalise, normalise_back

NAMES = ("out", "inner", "beside", "weight", "bias")


class Case(NamedTuple):
    lanes: int
    samples: int
    side: int
    channels: int
    groups: int
    relu: bool
    beside: bool
    parts: int  # of the output's gradient


SHAPES = ((2, 3, 4, 4, 2), (1, 2, 2, 32, 2), (2, 1, 8, 8, 1))
CASES = [
    Case(*shape, relu, beside, parts)
    for shape, (relu, beside, parts) in itertools.product(SHAPES, [(0, 0, 1), (1, 0, 1), (1, 1, 1), (1, 1, 2)])
]


def draw(case, device="cpu", dtype=torch.float32):
    """Input, what is beside it, weight, bias and the parts of the output's gradient."""
    generator = torch.Generator().manual_seed(3)
    some = lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)  # noqa: E731
    shape = (case.lanes, case.samples, case.side, case.side, case.channels)
    x, beside = 2 * some(*shape) + 1, some(*shape) if case.beside else None
    weight, bias = some(case.lanes, case.channels), some(case.lanes, case.channels)
    return x, beside, weight, bias, [some(*shape) for _ in range(case.parts)]


def wanted(case, x, beside, weight, bias, grads):
    """Output and gradients by autograd in float64, lane by lane; the gradient of `beside` is that after ReLU."""
    double = [None if v is None else v.double().requires_grad_() for v in (x, beside, weight, bias)]
    x, beside, weight, bias = double
    normal = [
        F.group_norm(one.permute(0, 3, 1, 2), case.groups, w, b, eps=1e-5).permute(0, 2, 3, 1)
        for one, w, b in zip(x, weight, bias, strict=True)
    ]
    out = torch.stack(normal) if beside is None else torch.stack(normal) + beside
    out = out.relu() if case.relu else out
    leaves = [v for v in double if v is not None]
    found = torch.autograd.grad(out, leaves, sum(part.double() for part in grads))
    of_x, *rest = found
    of_beside = rest.pop(0) if beside is not None else None
    return dict(zip(NAMES, (out, of_x, of_beside, *rest), strict=True))


def found_by_form(case, x, beside, weight, bias, grads):
    """The same by `normalisations`, as the models call it."""
    norm, state, found = Norm(case.groups, 1e-5), {"n.weight": weight, "n.bias": bias}, {}
    out, kept = normalise(norm, x, state, "n", None, shortcut=beside, relu=bool(case.relu))
    inner, other = normalise_back(norm, grads, kept, state, "n", found)
    values = (out, inner, other if case.beside else None, found["n.weight"], found["n.bias"])
    return dict(zip(NAMES, values, strict=True))


def found_by_kernels(case, x, beside, weight, bias, grads):
    """The same by the operators of the kernels, whatever the device."""
    from fedgma.training.fast.normalisations import _fused, _fused_back

    out, mean, scale = _fused(x, weight, bias, beside, case.groups, 1e-5, bool(case.relu))
    first, second = (*grads, None)[:2]
    cut = out if case.beside else None
    inner, other, plain, along = _fused_back(first, second, cut, x, mean, scale, weight, bias, bool(case.relu))
    return dict(zip(NAMES, (out, inner, other if case.beside else None, along.sum(1), plain.sum(1)), strict=True))


def distances(expected, actual):
    """How far each result is from the wanted one, relative to the largest value of it."""
    assert {name for name in NAMES if expected[name] is None} == {name for name in NAMES if actual[name] is None}
    there = [name for name in NAMES if expected[name] is not None]
    return {name: ((actual[name] - expected[name]).abs().max() / expected[name].abs().max()).item() for name in there}


def main():
    for dtype, bound, cases in ((torch.float32, 2e-6, CASES[4:8]), (torch.bfloat16, 2e-2, CASES[2:4])):
        for case in cases:
            drawn = draw(case, dtype=dtype)
            off = distances(wanted(case, *drawn), found_by_kernels(case, *drawn))
            assert max(off.values()) < bound, (case, dtype, off)
