"""Low-rank adapters on the layers of any module."""

import pytest
import torch
from torch import nn

from fedgma.errors import ConfigError
from fedgma.training.adapters import Adapted, with_adapters
from fedgma.training.models import parameter_count


def base() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))


def test_adapters_change_nothing_at_first_and_leave_the_module_as_it_is():
    plain, x = base(), torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    adapted = with_adapters(plain, rank=2)
    torch.testing.assert_close(adapted(x), plain(x))
    assert isinstance(plain[0], nn.Linear)
    assert all(value.requires_grad for value in plain.parameters())
    assert parameter_count(adapted) == 2 * (6 + 4) + 2 * (4 + 3)


def test_an_adapter_is_a_linear_layer_of_base_and_scaled_product():
    layer = with_adapters(base(), "0", rank=2, alpha=6.0)[0]
    generator = torch.Generator().manual_seed(2)
    layer.lora_B.data.copy_(torch.randn(4, 2, generator=generator))
    x = torch.randn(5, 6, generator=generator)
    weight = layer.base.weight + 3.0 * layer.lora_B @ layer.lora_A
    torch.testing.assert_close(layer(x), x @ weight.T + layer.base.bias)
    torch.testing.assert_close(layer.weight, weight)


def test_patterns_choose_layers_and_the_seed_decides_the_first_a():
    first, second, other = (with_adapters(base(), "2", rank=2, seed=seed) for seed in (0, 0, 1))
    assert isinstance(first[2], Adapted)
    assert isinstance(first[0], nn.Linear)
    assert torch.equal(first[2].lora_A, second[2].lora_A)
    assert not torch.equal(first[2].lora_A, other[2].lora_A)


def test_a_transformer_layer_that_reads_the_weights_of_its_layers_is_adapted():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        adapted = with_adapters(layer, "linear*", rank=2)
        x = torch.randn(2, 3, 8)
        nn.init.normal_(adapted.linear1.lora_B)
    trained = adapted.train()(x)
    with torch.no_grad():  # the fast path
        torch.testing.assert_close(adapted.eval()(x), trained, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [0, True, 1.5])
def test_a_rank_that_is_none_is_refused(rank):
    with pytest.raises(ConfigError, match="rank"):
        with_adapters(base(), rank=rank)


def test_a_pattern_without_a_layer_is_refused_with_the_layers_that_there_are():
    with pytest.raises(ConfigError, match="there are: 0, 2"):
        with_adapters(base(), "query")
    with pytest.raises(ConfigError, match="the module itself"):
        with_adapters(nn.Linear(2, 2))
