"""Three dense layers with ReLU over lanes, the loss behind them, and back to the gradient of their input.

`forward` and `back` are written in torch, for evaluation and for any device and type. `passes` does all of a training
step: on a GPU in float32 as three kernels (`gpu.dense_head`), elsewhere by the other two.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedgma.training.fast import gpu
from fedgma.training.fast.layers import dense, loss_back
from fedgma.training.stacked import Stacked

MOST = 64  # samples or classes that a program of the kernels has room for

_library: Any = torch.library.Library("fedgma", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "head(Tensor x, Tensor[] weights, Tensor[] biases, Tensor y, Tensor count, float smoothing)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=(torch.Tag.flexible_layout,),  # else the compiler makes further copies of labels and counts
)


class Layers(NamedTuple):
    """Weights [lane, out, in] and biases [lane, out] of three dense layers."""

    weights: tuple[Tensor, Tensor, Tensor]
    biases: tuple[Tensor, Tensor, Tensor]


class Passes(NamedTuple):
    """What a training step needs of forward and backward pass: weight gradients are products of the first two."""

    grads: tuple[Tensor, ...]  # [lane, sample, out] of every layer, before its ReLU
    inputs: tuple[Tensor, ...]  # [lane, sample, in] of every layer
    inner: Tensor  # the gradient of the first layer's input
    total: Tensor  # [lane], sum of losses
    hits: Tensor  # [lane, 1]


def layers_of(params: Stacked, names: Sequence[str]) -> Layers:
    """The layers of these names."""
    first, second, third = names
    weights, biases = ([params[f"{name}.{kind}"] for name in (first, second, third)] for kind in ("weight", "bias"))
    return Layers((weights[0], weights[1], weights[2]), (biases[0], biases[1], biases[2]))


def forward(x: Tensor, layers: Layers) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Logits, and the input of every layer."""
    weights, biases = layers
    h1 = dense(x, weights[0], biases[0]).relu()
    h2 = dense(h1, weights[1], biases[1]).relu()
    return dense(h2, weights[2], biases[2]), (x, h1, h2)


def back(grads: Tensor, inputs: tuple[Tensor, ...], layers: Layers) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The gradients of every layer before its ReLU, and that of the input, from those of the logits."""
    weights, (_, h1, h2) = layers.weights, inputs
    g2 = torch.where(h2 > 0, grads @ weights[2], 0.0)
    g1 = torch.where(h1 > 0, g2 @ weights[1], 0.0)
    return (g1, g2, grads), g1 @ weights[0]


def passes(x: Tensor, layers: Layers, y: Tensor, count: Tensor, smoothing: float = 0.0) -> Passes:
    """Forward and backward pass of a batch whose rows past `count` are padding."""
    call = torch.ops.fedgma.head if by_kernels(x, layers) else _plain
    h1, h2, g1, g2, g3, inner, total, hits = call(x, *layers, y, count, smoothing)
    return Passes((g1, g2, g3), (x, h1, h2), inner, total, hits)


def by_kernels(x: Tensor, layers: Layers) -> bool:
    """Whether the kernels do a batch like this one."""
    small = x.shape[1] <= MOST and layers.biases[2].shape[1] <= MOST
    return "dense_head" in gpu.KERNELS and x.device.type == "cuda" and x.dtype == torch.float32 and small


Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _plain(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], y: Tensor, count: Tensor, smoothing: float
) -> Results:
    """By torch: outputs of the first two layers, gradients of all, that of the input, losses and hits."""
    layers = Layers((weights[0], weights[1], weights[2]), (biases[0], biases[1], biases[2]))
    logits, inputs = forward(x, layers)
    grads, total, hits = loss_back(logits, y, count, smoothing)
    of_layers, inner = back(grads, inputs, layers)
    return (*inputs[1:], *of_layers, inner, total, hits)


def _empty(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], y: Tensor, count: Tensor, smoothing: float
) -> Results:
    """The same, not filled."""
    lanes, samples = x.shape[:2]
    h1, h2, g3 = (x.new_empty((lanes, samples, bias.shape[1])) for bias in biases)
    inner, total = torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(lanes)
    hits = count.new_empty((lanes, 1))
    return h1, h2, torch.empty_like(h1), torch.empty_like(h2), g3, inner, total, hits


def _fused(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], y: Tensor, count: Tensor, smoothing: float
) -> Results:
    kernels = gpu.kernels("dense_head")
    if kernels is None:
        return _plain(x, weights, biases, y, count, smoothing)
    filled = _empty(x, weights, biases, y, count, smoothing)
    h1, h2, g1, g2, g3, inner, total, hits = filled
    x, y, count = x.contiguous(), y.contiguous(), count.contiguous()
    weights, biases = ([value.contiguous() for value in values] for values in (weights, biases))
    losses, right = x.new_empty(y.shape), torch.empty_like(y, dtype=torch.uint8)
    kernels.first(x, weights[0], biases[0], h1)
    second, third = zip(weights[1:], biases[1:], strict=True)
    kernels.middle(h1, second, third, y, count, h2, (g1, g2, g3), losses, right, smoothing=smoothing)
    kernels.inputs(g1, weights[0], losses, right, inner, total, hits)
    return filled


for _device, _call in (("CPU", _plain), ("CUDA", _fused), ("Meta", _empty)):  # the last is for the compiler: shapes
    _library.impl("head", _call, _device)
