"""3x3 convolutions of ResNets, one call for each lane, against autograd."""

import pytest
import torch

from convolution_3x3_cases import CASES, draw, wanted
from fedgma.training.fast.torch_ops import convolve, convolve_inputs, convolve_weights


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_a_lane_has_the_gradients_of_autograd(case):
    x, weight, grads = draw(case)
    found = [convolve(x, weight), convolve_inputs(grads, weight, *x.shape[2:4]), convolve_weights(grads, x)]
    for one, other in zip(wanted(x, weight, grads), found, strict=True):
        assert torch.equal(one.float(), other)
