"""Convolutions of small images as products with windows, and pooling, against autograd."""

import pytest
import torch
from torch.nn import functional as F

from fedgma.training.fast import windows

# samples, rows, columns, inputs, outputs, stride; whole numbers, on which all ways agree to the bit
SHAPES = [
    *((3, side, side, 5, 4, stride) for side in (2, 4, 8) for stride in (1, 2)),
    (3, 1, 1, 5, 4, 1),
    (2, 1, 4, 3, 2, 1),
    (50, 4, 2, 3, 2, 1),
    (50, 4, 2, 3, 2, 2),
]


def by_torch(x, weight, grads, stride):
    """Output and the gradients of input and weight, lane by lane."""
    x, weight = (value.double().requires_grad_() for value in (x, weight))
    first = lambda value: value.permute(0, 3, 1, 2)  # noqa: E731
    lanes = [F.conv2d(first(a), first(w), stride=stride, padding=1) for a, w in zip(x, weight, strict=True)]
    out = torch.stack(lanes).permute(0, 1, 3, 4, 2)
    return [out, *torch.autograd.grad(out, [x, weight], grads.double())]


@pytest.mark.parametrize(("samples", "rows", "columns", "inputs", "outs", "stride"), SHAPES)
def test_products_with_windows_have_the_gradients_of_autograd(samples, rows, columns, inputs, outs, stride):
    generator = torch.Generator().manual_seed(2)
    whole = lambda *shape: torch.randint(-1, 2, shape, generator=generator).float()  # noqa: E731
    x, weight = whole(2, samples, rows, columns, inputs), whole(2, outs, 3, 3, inputs)
    grads = whole(2, samples, rows // stride, columns // stride, outs)
    found = [
        windows.convolve(x, weight, stride),
        windows.convolve_inputs(grads, weight, rows, columns, stride),
        windows.convolve_weights(grads, x, stride),
    ]
    out, of_inputs, of_weights = by_torch(x, weight, grads, stride)
    used = (..., *windows.used_taps(rows, columns, stride), slice(None))
    for one, other in zip((out, of_inputs, of_weights[used]), found, strict=True):
        assert torch.equal(one.float(), other)
    of_weights[used] = 0
    assert not of_weights.any()  # no other tap has a gradient
    assert torch.equal(windows.convolve(x, weight[used], stride), found[0])
    assert torch.equal(windows.convolve_inputs(grads, weight[used], rows, columns, stride), found[1])


def test_pooling_has_the_gradients_of_autograd():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((2, 3, 8, 4, 5), generator=generator).relu().requires_grad_()
    flat = x.flatten(0, 1).permute(0, 3, 1, 2)
    wanted = F.max_pool2d(flat, 3, 2, 1).permute(0, 2, 3, 1).reshape(2, 3, 4, 2, 5)
    out, taps = windows.pool(x.detach())
    assert torch.equal(wanted, out)
    grads = torch.randint(-4, 5, out.shape, generator=generator).float()
    (by_autograd,) = torch.autograd.grad(wanted, x, grads)
    positive = x > 0  # among zeros the choice is free: the ReLU before lets no gradient through there
    assert torch.equal(torch.where(positive, by_autograd, 0), torch.where(positive, windows.pool_back(grads, taps), 0))
