"""3x3 convolutions of ResNets against autograd: one call for each lane, and the GPU kernels by triton's interpreter."""

import pytest
import torch

from convolution_3x3_cases import CASES, draw, wanted
from fedgma.training.fast import gpu, torch_ops
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
def test_the_gpu_kernels_of_resnets_give_the_same_in_the_interpreter():
    check_cases("residual_cases")


def test_the_mark_that_the_compiler_reads_is_torchs():
    marked = torch.compiler.assume_constant_result(lambda: True)
    assert vars(marked).items() <= vars(torch_ops.by_own_kernels).items()
