"""3x3 convolutions of ResNets: which layers go by our own GPU kernels, and those kernels by triton's interpreter."""

from types import SimpleNamespace

import pytest
import torch

from convolution_3x3_cases import CASES, draw, wanted
from fedgma.training.fast import gpu
from fedgma.training.fast import torch_ops as operators
from fedgma.training.fast.torch_ops import convolve, convolve_inputs, convolve_weights
from interpreted import check_cases, needs_triton


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_a_lane_has_the_gradients_of_autograd(case):
    x, weight, grads = draw(case)
    found = [convolve(x, weight), convolve_inputs(grads, weight, *x.shape[2:4]), convolve_weights(grads, x)]
    for one, other in zip(wanted(x, weight, grads), found, strict=True):
        assert torch.equal(one.float(), other)


def test_our_own_kernels_take_the_layers_that_they_are_faster_at(monkeypatch):
    class Here:
        def __init__(self, *shape, device="cuda", dtype=torch.bfloat16):
            self.shape, self.device, self.dtype = shape, torch.device(device), dtype

    def taken(side, inputs, outs, stride=1, **kind):
        return operators._own(
            {(16, 128): ()}, Here(4, 8, side, side, inputs, **kind), Here(4, outs, 3, 3, inputs), stride
        )

    monkeypatch.setattr(gpu, "KERNELS", ("conv_3x3",))
    assert taken(16, 128, 128)
    assert not taken(16, 64, 128)
    assert not taken(8, 128, 128)
    assert not taken(16, 128, 128, stride=2)
    assert not taken(16, 128, 128, dtype=torch.float32)
    assert not taken(16, 128, 128, device="cpu")
    monkeypatch.setattr(gpu, "KERNELS", ())
    assert not taken(16, 128, 128)


@pytest.mark.parametrize(("room", "taken"), [(232_448, True), (166_912, False), (101_376, False)])
def test_tiles_need_a_gpu_with_room_for_them(monkeypatch, room, taken):
    fused = SimpleNamespace(Tile=lambda *cut: cut, fits=lambda *_: True)
    monkeypatch.setattr(operators, "_own", lambda *_: True)
    monkeypatch.setattr(operators, "_shared_memory", lambda device: room)
    monkeypatch.setattr(gpu, "kernels", lambda name: fused)
    x, weight = torch.empty(2, 1, 16, 16, 128), torch.empty(2, 128, 3, 3, 128)
    found = operators._kernels(operators.OWN, x, weight, 1)
    assert found == ((fused, operators.OWN[16, 128]) if taken else None)


@needs_triton
def test_the_gpu_kernels_give_the_same_in_the_interpreter():
    check_cases("convolution_3x3_cases")
