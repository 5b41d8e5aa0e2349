"""Max pooling by way of channels last gives the bits of torch's own, forward and backward."""

import copy

import pytest
import torch
from torch import nn

from fedgma.training.threads.pooling import FEWEST, pool_in_vectors


def both(layer, x):
    """Outputs and gradients of the layer as it is and of the quicker one."""
    results = []
    for one in (layer, pool_in_vectors(copy.deepcopy(layer))):
        given = x.clone().requires_grad_()
        out = one(given)
        out.backward(torch.arange(out.numel(), dtype=x.dtype).reshape(out.shape).sin())
        results.append((out, given.grad))
    return results


@pytest.mark.parametrize(
    "settings",
    [(2,), (3, 2, 1), ((2, 3), (1, 2), (1, 0)), (2, 2, 0, 2), (3, 2, 0, 1, False, True)],
    ids=str,
)
@pytest.mark.parametrize("channels", [1, FEWEST, 33])
def test_outputs_and_gradients_have_the_bits_of_torch(settings, channels):
    x = torch.randn(3, channels, 7, 8, generator=torch.Generator().manual_seed(0)).relu()  # many ties at zero
    for first, second in zip(*both(nn.MaxPool2d(*settings), x), strict=True):
        assert torch.equal(first, second)
        assert first.stride() == second.stride()


def test_nan_and_infinities_pass_as_in_torch():
    x = torch.randn(2, FEWEST, 4, 4, generator=torch.Generator().manual_seed(0))
    x[0, :, 0, 1], x[1, :, :2, :2], x[0, :, 2, 2] = torch.nan, -torch.inf, torch.inf
    for first, second in zip(*both(nn.MaxPool2d(2), x), strict=True):
        assert torch.equal(first.nan_to_num(7), second.nan_to_num(7))


def test_other_inputs_take_the_way_of_torch():
    layer = pool_in_vectors(nn.MaxPool2d(2))
    last = torch.randn(2, FEWEST, 4, 4).contiguous(memory_format=torch.channels_last)
    assert layer(last).is_contiguous(memory_format=torch.channels_last)
    assert layer(torch.randn(FEWEST, 4, 4)).shape == (FEWEST, 2, 2)


def test_only_plain_layers_change():
    class Own(nn.MaxPool2d):
        def forward(self, x):
            return super().forward(x) + 1

    model = nn.ModuleList([nn.MaxPool2d(2), Own(2), nn.MaxPool2d(2, return_indices=True), nn.AvgPool2d(2)])
    assert ["forward" in vars(part) for part in pool_in_vectors(model)] == [True, False, False, False]
    changed = nn.MaxPool2d(2)
    changed.forward = torch.neg
    assert pool_in_vectors(changed).forward is torch.neg


def test_a_gradient_of_a_gradient_is_that_of_torch():
    found = []
    for layer in (nn.MaxPool2d(2), pool_in_vectors(nn.MaxPool2d(2))):
        x = torch.linspace(-1, 1, 2 * FEWEST * 16).reshape(2, FEWEST, 4, 4).requires_grad_()
        (slope,) = torch.autograd.grad(layer(x * x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
