"""Hand-written lane forms of the small models: same gradients as `lane_gradients`, by batched matrix products.

A form is two functions of stacked parameters: forward to logits and a tape, and back from the logits' gradient. The
generic path is always there, and tests compare the two. Each form is made once, so that it is compiled once.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedgma.models import LeNet, Logistic, SmallCNN
from fedgma.trainers.cohorts import Stacked
from fedgma.trainers.gradients import Found, GradientFunction, Gradients, Product
from fedgma.trainers.layers import (
    bias_back,
    channels_last,
    convolve,
    convolve_back,
    dense,
    dense_back,
    loss_back,
    relu_pool,
    relu_pool_back,
)

Tape = tuple[Any, ...]


class Form(NamedTuple):
    """A model over lanes: `forward(params, x, training)` to logits and tape, `back(params, tape, grads)`."""

    forward: Callable[[Stacked, Tensor, bool], tuple[Tensor, Tape]]
    back: Callable[[Stacked, Tape, Tensor], Found]


class Blocks(NamedTuple):
    """Neighbouring outputs computed together by the first and the second convolution."""

    first: int
    second: int


@functools.cache
def logistic_form() -> Form:
    """One dense layer."""

    def forward(params: Stacked, x: Tensor, training: bool) -> tuple[Tensor, Tape]:
        flat = x.flatten(2)
        return dense(flat, params["linear.weight"], params["linear.bias"]), (flat,)

    def back(params: Stacked, tape: Tape, grads: Tensor) -> Found:
        weight, bias = dense_back(grads, tape[0])
        return {"linear.weight": weight, "linear.bias": bias}

    return Form(forward, back)


@functools.cache
def lenet_form(blocks: Blocks) -> Form:
    """Two convolutions with pooling and three dense layers."""

    def forward(params: Stacked, x: Tensor, training: bool) -> tuple[Tensor, Tape]:
        one, first = convolve(channels_last(x, 2), params["conv1.weight"], blocks.first)
        small, most1 = relu_pool(one, params["conv1.bias"])
        two, second = convolve(small, params["conv2.weight"], blocks.second)
        pooled, most2 = relu_pool(two, params["conv2.bias"])
        flat = pooled.permute(0, 1, 4, 2, 3).flatten(2)  # torch flattens channels first
        h1 = dense(flat, params["fc1.weight"], params["fc1.bias"]).relu()
        h2 = dense(h1, params["fc2.weight"], params["fc2.bias"]).relu()
        logits = dense(h2, params["fc3.weight"], params["fc3.bias"])
        return logits, (one, first, small, most1, two, second, pooled, most2, flat, h1, h2)

    def back(params: Stacked, tape: Tape, grads: Tensor) -> Found:
        one, first, small, most1, two, second, pooled, most2, flat, h1, h2 = tape
        found: dict[str, Tensor | Product] = {}
        found["fc3.weight"], found["fc3.bias"] = dense_back(grads, h2)
        grads = torch.where(h2 > 0, grads @ params["fc3.weight"], 0.0)
        found["fc2.weight"], found["fc2.bias"] = dense_back(grads, h1)
        grads = torch.where(h1 > 0, grads @ params["fc2.weight"], 0.0)
        found["fc1.weight"], found["fc1.bias"] = dense_back(grads, flat)
        wide = _unflattened(grads @ params["fc1.weight"], pooled)
        found["conv2.bias"] = bias_back(wide, pooled)
        down = relu_pool_back(wide, two, pooled, most2)
        found["conv2.weight"], inner = convolve_back(down, second, inputs=True)
        assert inner is not None
        found["conv1.bias"] = bias_back(inner, small)
        down = relu_pool_back(inner, one, small, most1)
        found["conv1.weight"], _ = convolve_back(down, first, inputs=False)
        return found

    return Form(forward, back)


@functools.cache
def cnn_form(blocks: Blocks, dropout: tuple[float, float]) -> Form:
    """Two convolutions, one pooling, two dense layers with dropout."""

    def forward(params: Stacked, x: Tensor, training: bool) -> tuple[Tensor, Tape]:
        one, first = convolve(channels_last(x), params["conv1.weight"], blocks.first)
        one = (one + params["conv1.bias"][:, None, None, None]).relu()
        two, second = convolve(one, params["conv2.weight"], blocks.second)
        pooled, most = relu_pool(two, params["conv2.bias"])
        flat = pooled.permute(0, 1, 4, 2, 3).flatten(2)
        keep1 = _kept(flat, dropout[0], training)
        flat = flat * keep1
        h1 = dense(flat, params["fc1.weight"], params["fc1.bias"]).relu()
        keep2 = _kept(h1, dropout[1], training)
        h2 = h1 * keep2
        logits = dense(h2, params["fc2.weight"], params["fc2.bias"])
        return logits, (one, first, two, second, pooled, most, flat, keep1, h1, keep2, h2)

    def back(params: Stacked, tape: Tape, grads: Tensor) -> Found:
        one, first, two, second, pooled, most, flat, keep1, h1, keep2, h2 = tape
        found: dict[str, Tensor | Product] = {}
        found["fc2.weight"], found["fc2.bias"] = dense_back(grads, h2)
        grads = torch.where(h1 > 0, (grads @ params["fc2.weight"]) * keep2, 0.0)
        found["fc1.weight"], found["fc1.bias"] = dense_back(grads, flat)
        wide = _unflattened((grads @ params["fc1.weight"]) * keep1, pooled)
        found["conv2.bias"] = bias_back(wide, pooled)
        down = relu_pool_back(wide, two, pooled, most)
        found["conv2.weight"], inner = convolve_back(down, second, inputs=True)
        assert inner is not None
        found["conv1.bias"] = bias_back(inner, one)
        down = torch.where(one > 0, inner, 0.0)
        found["conv1.weight"], _ = convolve_back(down, first, inputs=False)
        return found

    return Form(forward, back)


def _unflattened(grads: Tensor, like: Tensor) -> Tensor:
    """[lane, sample, channel * row * column] as [lane, sample, row, column, channel]."""
    lanes, samples, rows, columns, channels = like.shape
    return grads.view(lanes, samples, channels, rows, columns).permute(0, 1, 3, 4, 2)


def _kept(x: Tensor, rate: float, training: bool) -> Tensor | float:
    """What dropout multiplies by."""
    if not training or rate == 0:
        return 1.0
    return (torch.rand(x.shape, device=x.device) >= rate).to(x.dtype) / (1 - rate)


def form_of(model: nn.Module, blocks: Blocks | None = None) -> Form | None:
    """The hand-written form of a model, or None where there is none for it or its images."""
    if type(model) is Logistic:
        return logistic_form()
    if type(model) is LeNet:
        _, height, width = model.shape
        if height % 4 or width % 4:
            return None  # pooling would drop a row
        return lenet_form(blocks or Blocks(_divisor(width, 4), _divisor(width // 2 - 4, 2)))
    if type(model) is SmallCNN:
        _, height, width = model.shape
        return None if height % 2 or width % 2 else cnn_form(blocks or Blocks(1, 1), model.dropout)
    return None


def _divisor(columns: int, most: int) -> int:
    return max(size for size in range(1, most + 1) if columns % size == 0)


@functools.cache
def form_gradients(form: Form, precision: str = "fp32") -> GradientFunction:
    """The gradient function of a form; with "bf16" everything but the weights' sums is computed in half precision."""
    half = precision == "bf16"

    def gradients(params: Stacked, buffers: Stacked, x: Tensor, y: Tensor, count: Tensor) -> Gradients:
        used = {name: value.bfloat16() for name, value in params.items()} if half else params
        logits, tape = form.forward(used, x.bfloat16() if half else x, True)
        grads, total, hits = loss_back(logits, y, count)
        found = form.back(used, tape, grads)
        return {name: _single(found[name]) for name in params}, {}, total, hits

    return gradients


def _single(found: Tensor | Product) -> Tensor | Product:
    return found if isinstance(found, Product) else found.float()
