"""Group normalisation with shortcut and ReLU over lanes against autograd; `residual_cases` has the GPU kernels."""

import pytest
import torch

from fedgma.training.fast import gpu
from fedgma.training.fast.normalisations import Norm, by_kernel
from group_norm_cases import CASES, distances, draw, found_by_form, wanted


@pytest.mark.parametrize("case", CASES, ids=str)
def test_group_normalisation_has_the_gradients_of_autograd(case):
    drawn = draw(case, dtype=torch.float64)
    assert max(distances(wanted(case, *drawn), found_by_form(case, *drawn)).values()) < 1e-12


def test_a_gpu_takes_groups_of_powers_of_two_in_bfloat16(monkeypatch):
    class Here:
        def __init__(self, *shape, device="cuda", dtype=torch.bfloat16):
            self.shape, self.device, self.dtype = shape, torch.device(device), dtype

    def taken(*shape, **kind):
        return by_kernel(2, Here(*shape, **kind))

    monkeypatch.setattr(gpu, "KERNELS", ("group_norm",))
    assert taken(1, 1, 32, 32, 64)
    assert not taken(1, 1, 28, 28, 64)
    assert not taken(1, 1, 64, 64, 64)  # more than the caches hold
    assert not taken(1, 1, 32, 32, 64, device="cpu")
    assert not taken(1, 1, 32, 32, 64, dtype=torch.float32)
    monkeypatch.setattr(gpu, "KERNELS", ())
    assert not taken(1, 1, 32, 32, 64)


def test_what_the_kernels_fill_has_the_shapes_that_a_compiler_is_told():
    x, per_channel = torch.empty(2, 3, 4, 4, 8, device="meta"), torch.empty(2, 8, device="meta")
    norm = Norm(2, 1e-5)
    out, mean, scale = torch.ops.fedgma.group_norm(x, per_channel, per_channel, x, norm.groups, norm.epsilon, True)
    assert (out.shape, mean.shape, scale.shape) == (x.shape, (2, 3, 2), (2, 3, 2))
    for cut, beside in ((out, x.shape), (None, (0,))):
        found = torch.ops.fedgma.group_norm_back(x, None, cut, x, mean, scale, per_channel, per_channel, True)
        assert [tuple(value.shape) for value in found] == [x.shape, beside, (2, 3, 8), (2, 3, 8)]
