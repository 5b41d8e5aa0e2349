"""3x3 convolutions of ResNets and pooling against autograd: a call a lane, products with windows, GPU kernels."""

import pytest
import torch
from torch.nn import functional as F

from convolution_3x3_cases import CASES, Case, draw, wanted
from fedgma.training.fast import gpu, torch_ops, windows
from fedgma.training.fast.torch_ops import convolve, convolve_inputs, convolve_weights
from interpreted import check_cases, needs_triton


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_a_lane_has_the_gradients_of_autograd(case):
    x, weight, grads = draw(case)
    found = [
        convolve(x, weight, case.stride),
        convolve_inputs(grads, weight, *x.shape[2:4], case.stride),
        convolve_weights(grads, x, case.stride),
    ]
    for one, other in zip(wanted(case, x, weight, grads), found, strict=True):
        assert torch.equal(one.float(), other)


@needs_triton
def test_our_own_kernels_take_bfloat16_on_a_gpu_that_copies_blocks(monkeypatch):
    class Here:
        def __init__(self, *shape, device="cuda", dtype=torch.bfloat16):
            self.shape, self.device, self.dtype = shape, torch.device(device), dtype

    def taken(side, inputs, outs, stride=1, **kind):
        x, out = Here(4, 8, stride * side, stride * side, inputs, **kind), Here(4, 8, side, side, outs)
        return torch_ops._own(x, out, stride) is not None

    monkeypatch.setattr(torch_ops, "_copies_blocks", lambda device: True)
    assert taken(16, 64, 128)
    assert taken(4, 512, 512, stride=2)
    assert not taken(14, 64, 64)
    assert not taken(32, 3, 64)
    assert taken(32, 24, 40)
    assert not taken(32, 24, 40, stride=2)
    assert not taken(16, 64, 128, dtype=torch.float32)
    assert not taken(16, 64, 128, device="cpu")
    monkeypatch.setattr(torch_ops, "_copies_blocks", lambda device: False)
    assert not taken(16, 64, 128)
    monkeypatch.setattr(torch_ops, "_copies_blocks", lambda device: True)
    monkeypatch.setattr(gpu, "KERNELS", ())
    assert not taken(16, 64, 128)


@needs_triton
def test_the_gpu_kernels_give_the_same_in_the_interpreter():
    check_cases("convolution_3x3_cases")


SMALL = [Case(2, 3, 1, 1, 5, 4), Case(2, 3, 2, 2, 5, 4), Case(1, 2, 1, 4, 3, 2), Case(1, 50, 4, 2, 3, 2)]
STRIDED = [*CASES, *SMALL, *(case._replace(stride=2) for case in SMALL if case.rows % 2 == 0)]


@pytest.mark.parametrize("case", STRIDED, ids=str)
def test_products_with_windows_have_the_gradients_of_autograd(case):
    x, weight, grads = draw(case)
    found = [
        windows.convolve(x, weight, case.stride),
        windows.convolve_inputs(grads, weight, *x.shape[2:4], case.stride),
        windows.convolve_weights(grads, x, case.stride),
    ]
    for one, other in zip(wanted(case, x, weight, grads), found, strict=True):
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
