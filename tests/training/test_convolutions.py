"""Convolution, ReLU and pooling over lanes against autograd; the GPU kernels through triton's interpreter."""

import pytest
import torch

from convolution_cases import CASES, draw, wanted
from fedgma.training.cuda_graphs import float32_precision
from fedgma.training.fast import convolutions, gpu
from fedgma.training.fast.convolutions import CUT, convolve, convolve_back
from interpreted import check_cases, needs_triton


def passes(case, x, weight, bias, grads):
    out, seen = convolve(x, weight, bias, padding=case.padding, pool=case.pool)
    return [out, *convolve_back(grads, seen, inputs=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_convolutions_have_the_gradients_of_autograd(case):
    given = draw(case)
    for one, other in zip(passes(case, *given), wanted(case, *given), strict=True):
        assert torch.equal(one.double(), other)


def test_a_compiler_takes_them_as_they_are_at_every_precision():
    case = CASES[0]._replace(outs=33)
    given = draw(case)
    compiled = torch.compile(passes, backend="aot_eager", fullgraph=True, dynamic=False)
    for precision in ("fp32", "tf32", "fp32"):
        with float32_precision(precision):
            for one, other in zip(compiled(case, *given), passes(case, *given), strict=True):
                assert torch.equal(one, other)
                assert one.stride() == other.stride()


def test_a_batch_in_pieces_has_the_same_sum():
    case, given = CASES[0], draw(CASES[0])
    _, seen = convolve(*given[:3], padding=case.padding, pool=case.pool)
    arguments = (given[3], seen.corners, seen.x, seen.weight, case.padding, case.pool)
    *parts, inner = torch.ops.fedgma.relu_convolve_back(*arguments, 2, True)
    *whole, same = convolve_back(given[3], seen, inputs=True)
    assert torch.equal(inner, same)
    for found, wanted_sum in zip(parts, whole, strict=True):
        assert found.shape[1] == 2
        assert torch.equal(found.sum(1), wanted_sum)


def test_the_first_of_equal_corners_wins_and_relu_cuts_at_zero():
    image = torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 0], [0, 5, -1, -2], [5, 0, -3, -4]]).view(1, 1, 1, 4, 4)
    out, seen = convolve(image, torch.ones(1, 1, 1, 1, 1), torch.zeros(1, 1), pool=True)
    assert out.flatten().tolist() == [1, 0, 5, 0]
    assert seen.corners.flatten().tolist() == [0, CUT, 1, CUT]


@pytest.mark.parametrize(("precision", "outs", "last"), [("tf32", 64, True), ("tf32", 16, False), ("fp32", 64, True)])
def test_channels_lie_together_where_matrix_units_read_them(precision, outs, last, monkeypatch):
    monkeypatch.setattr(gpu, "KERNELS", ("conv_matrix", "conv_thread"))
    with float32_precision(precision):
        out, seen = convolve(torch.zeros(2, 1, 3, 4, 4), torch.zeros(2, outs, 3, 3, 3), torch.zeros(2, outs))
        *_, inner = convolve_back(torch.ones_like(out), seen, inputs=True)
    assert (out.stride(2) == 1) == last
    assert out.stride() == seen.corners.stride()
    assert inner.stride() == seen.x.stride()


def test_without_the_kernels_channels_lie_as_torch_has_them(monkeypatch):
    monkeypatch.setattr(gpu, "KERNELS", ())
    out, _ = convolve(torch.zeros(2, 1, 3, 4, 4), torch.zeros(2, 64, 3, 3, 3), torch.zeros(2, 64))
    assert out.is_contiguous()


def test_few_lanes_are_cut_into_pieces_and_many_are_not():
    def pieces(lanes, channels, outs, side):
        weight, corners = torch.empty(lanes, outs, channels, 5, 5), torch.empty(lanes, 32, outs, side, side)
        return convolutions._pieces(convolutions.Saved(weight, weight, corners, 0, True))

    assert [pieces(lanes, 1, 6, 14) for lanes in (10, 100, 1600)] == [32, 32, 2]
    assert [pieces(lanes, 6, 16, 5) for lanes in (10, 100, 1600)] == [4, 2, 1]  # 200 positions are the least
    assert pieces(10, 32, 64, 5) == 8


@needs_triton
def test_the_gpu_kernels_give_the_same_in_the_interpreter():
    check_cases("convolution_cases")
