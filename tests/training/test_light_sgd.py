"""The light optimiser gives the bits of torch's."""

import pytest
import torch
from torch import nn

from fedgma.training.threads import light_sgd
from fedgma.training.threads.light_sgd import LightSGD, Rates

SHAPES = [(8, 8), (3, 64), (5,), (1,), (7, 9), (128,)]  # whole vectors, and some that are not


def trained(make, kind):
    draw = torch.Generator().manual_seed(3)
    values = [nn.Parameter(torch.randn(shape, generator=draw, dtype=kind)) for shape in SHAPES]
    values.append(nn.Parameter(torch.randn(16, 8, generator=draw, dtype=kind).t()))
    optimizer = make(values)
    for step in range(4):
        optimizer.zero_grad()
        assert all(value.grad is None for value in values)
        for value in values:
            value.grad = torch.randn(value.shape, generator=draw, dtype=kind)
        values[0].grad = values[0].grad.t()  # not in one piece
        optimizer.param_groups[0]["lr"] = 0.3 / (step + 3)
        optimizer.step()
    return torch.cat([value.detach().flatten() for value in values])


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "rates",
    [Rates(0.0, 0.0, False), Rates(0.9, 0.0, False), Rates(0.9, 0.01, False), Rates(0.8, 0.1, True)],
    ids=str,
)
def test_steps_have_the_bits_of_torch(rates, fused, kind, monkeypatch):
    if not fused:
        monkeypatch.setattr(light_sgd, "fused_has_the_same_bits", lambda: False)
    wanted = trained(lambda values: torch.optim.SGD(values, lr=1.0, foreach=True, **rates._asdict()), kind)
    assert torch.equal(trained(lambda values: LightSGD(values, rates), kind), wanted)


def test_the_fused_step_is_used_for_whole_vectors_alone_and_only_if_its_bits_are_the_same(monkeypatch):
    values = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    monkeypatch.setattr(light_sgd, "fused_has_the_same_bits", lambda: True)
    groups = LightSGD(values, Rates(0.9, 0.0, False)).groups
    assert [(step.__name__, [len(value) for value in chosen]) for step, chosen, _ in groups] == [
        ("fused_step", [8, 3, 128]),
        ("plain_step", [5, 1, 7]),
    ]
    monkeypatch.setattr(light_sgd, "fused_has_the_same_bits", lambda: False)
    assert [step.__name__ for step, _, _ in LightSGD(values, Rates(0.9, 0.0, False)).groups] == ["plain_step"]


def test_a_fused_step_that_rounds_otherwise_is_found(monkeypatch):
    light_sgd.fused_has_the_same_bits.cache_clear()
    try:
        plain = light_sgd.plain_step
        monkeypatch.setattr(light_sgd, "fused_step", lambda v, g, b, lr, rates: plain(v, g, b, lr * 1.0000002, rates))
        assert not light_sgd.fused_has_the_same_bits()
        light_sgd.fused_has_the_same_bits.cache_clear()
        monkeypatch.setattr(light_sgd, "fused_step", plain)
        assert light_sgd.fused_has_the_same_bits()
    finally:
        light_sgd.fused_has_the_same_bits.cache_clear()
