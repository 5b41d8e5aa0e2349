"""Convolutions of any module in lanes, as the compiler is told to do them, against torch's grouped ones."""

import pytest
import torch
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fedgma.training.fast import grouped


def draw(lanes, *shapes):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn((lanes, *shape), generator=generator, dtype=torch.float64) for shape in shapes]


def operators_of(graph):
    return [str(node.target) for node in graph.graph.nodes if "conv" in str(node.target)]


@pytest.mark.parametrize(("inputs", "stride"), [(3, 1), (8, 1), (16, 2)])
def test_lanes_are_taken_apart_and_gradients_stay(monkeypatch, inputs, stride):
    def loss(weight, bias, second, x):
        inner = F.conv2d(x, weight, bias, stride=stride, padding=1).relu()
        return F.conv2d(inner, second, padding=1).square().mean()

    monkeypatch.setattr(grouped, "does", lambda *_: True)
    given = draw(3, (8, inputs, 3, 3), (8,), (8, 8, 3, 3), (2, inputs, 8, 8))
    work = vmap(grad(loss, argnums=(0, 1, 2)))
    graph = make_fx(work, decomposition_table=grouped.with_lanes({}))(*given)
    assert {name.split(".")[0] for name in operators_of(graph)} == {"fedgma"}
    for actual, expected in zip(graph(*given), work(*given), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"padding": 0},
        {"padding": 1, "dilation": 2},
        {"padding": 1, "stride": (1, 2)},
        {"padding": 1, "groups": 1},
        {"padding": 2, "weight": (8, 8, 5, 5)},
    ],
    ids=str,
)
def test_other_convolutions_stay_as_they_are(monkeypatch, options):
    monkeypatch.setattr(grouped, "does", lambda *_: True)
    options, groups = dict(options), options.get("groups", 2)
    shape = options.pop("weight", (8, 8, 3, 3))
    x, weight = draw(1, (2, groups * 8, 8, 8), shape)
    work = lambda x, weight: F.conv2d(x, weight, **{"groups": groups, **options})  # noqa: E731
    graph = make_fx(work, decomposition_table=grouped.with_lanes({}))(x[0], weight[0])
    assert operators_of(graph) == ["aten.convolution.default"]


def test_a_table_keeps_what_it_did_with_other_convolutions():
    before = {torch.ops.aten.convolution.default: lambda *_: "before"}
    table = grouped.with_lanes(before)
    x, weight = draw(1, (2, 16, 8, 8), (8, 8, 3, 3))
    arguments = (x[0], weight[0], None, [1, 1], [1, 1], [1, 1], False, [0, 0], 2)  # float64 on a CPU
    assert table[torch.ops.aten.convolution.default](*arguments) == "before"
