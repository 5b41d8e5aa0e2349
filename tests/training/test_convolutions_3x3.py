"""3x3 convolutions of ResNets, one call for each lane or as products with windows, and pooling, against autograd."""

import pytest
import torch
from torch.nn import functional as F

from convolution_3x3_cases import CASES, Case, draw, wanted
from fedgma.training.fast import windows
from fedgma.training.fast.torch_ops import convolve, convolve_inputs, convolve_weights


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_a_lane_has_the_gradients_of_autograd(case):
    x, weight, grads = draw(case)
    found = [convolve(x, weight), convolve_inputs(grads, weight, *x.shape[2:4]), convolve_weights(grads, x)]
    for one, other in zip(wanted(x, weight, grads), found, strict=True):
        assert torch.equal(one.float(), other)


SMALL = [*CASES, Case(2, 3, 1, 1, 5, 4), Case(2, 3, 2, 2, 5, 4), Case(1, 2, 1, 4, 3, 2), Case(1, 50, 4, 2, 3, 2)]


STRIDED = [(case, 1) for case in SMALL] + [(case, 2) for case in SMALL if case.rows % 2 == 0]


@pytest.mark.parametrize(("case", "stride"), STRIDED, ids=str)
def test_products_with_windows_have_the_gradients_of_autograd(case, stride):
    x, weight, grads = draw(case)
    grads = grads[:, :, ::stride, ::stride]
    found = [
        windows.convolve(x, weight, stride),
        windows.convolve_inputs(grads, weight, *x.shape[2:4], stride),
        windows.convolve_weights(grads, x, stride),
    ]
    for one, other in zip(wanted(x, weight, grads, stride), found, strict=True):
        assert torch.equal(one.float(), other)


def test_pooling_has_the_gradients_of_autograd():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((2, 3, 8, 4, 5), generator=generator).relu().requires_grad_()
    flat = x.flatten(0, 1).permute(0, 3, 1, 2)
    wanted = F.max_pool2d(flat, 3, 2, 1).permute(0, 2, 3, 1).reshape(2, 3, 4, 2, 5)
    out, taps = windows.pool(x.detach())
    assert torch.equal(wanted, out)
    grads = torch.randint(-4, 5, out.shape, generator=generator).float()
    (by_torch,) = torch.autograd.grad(wanted, x, grads)
    positive = x > 0  # among zeros the choice is free: the ReLU before lets no gradient through there
    assert torch.equal(torch.where(positive, by_torch, 0), torch.where(positive, windows.pool_back(grads, taps), 0))
