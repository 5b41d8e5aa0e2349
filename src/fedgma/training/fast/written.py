"""Hand-written lane forms of the small models: same gradients as `lane_gradients`, by batched matrix products.

A form is two functions of stacked parameters: forward to logits and a tape, and back from the logits' gradient. None
lets padding reach the real samples of a batch. The generic path is always there, and tests compare the two. Each form
is made once, so that it is compiled once.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedgma.training.fast.convolutions import convolve, convolve_back
from fedgma.training.fast.layers import dense, dense_back, loss_back, wide_type
from fedgma.training.gradients import Found, GradientFunction, Gradients, Product
from fedgma.training.models import LeNet, Logistic, SmallCNN
from fedgma.training.stacked import Stacked

Tape = tuple[Any, ...]


class Passed(NamedTuple):
    """What a forward pass gives: logits, the buffers that it moved, and what the way back needs."""

    logits: Tensor
    buffers: Stacked
    tape: Tape


class Form(NamedTuple):
    """A model over lanes: `forward(state, x, count)` and `back(params, tape, grads)`.

    The state is parameters and buffers; `count` is how many samples of each lane are real, None in evaluation.
    """

    forward: Callable[[Stacked, Tensor, Tensor | None], Passed]
    back: Callable[[Stacked, Tape, Tensor], Found]


@functools.cache
def logistic_form() -> Form:
    """One dense layer."""

    def forward(params: Stacked, x: Tensor, count: Tensor | None) -> Passed:
        flat = x.flatten(2)
        return Passed(dense(flat, params["linear.weight"], params["linear.bias"]), {}, (flat,))

    def back(params: Stacked, tape: Tape, grads: Tensor) -> Found:
        weight, bias = dense_back(grads, tape[0])
        return {"linear.weight": weight, "linear.bias": bias}

    return Form(forward, back)


@functools.cache
def lenet_form() -> Form:
    """Two convolutions with pooling and three dense layers."""

    def forward(params: Stacked, x: Tensor, count: Tensor | None) -> Passed:
        small, first = convolve(x, params["conv1.weight"], params["conv1.bias"], padding=2, pool=True)
        pooled, second = convolve(small, params["conv2.weight"], params["conv2.bias"], pool=True)
        flat = pooled.flatten(2)
        h1 = dense(flat, params["fc1.weight"], params["fc1.bias"]).relu()
        h2 = dense(h1, params["fc2.weight"], params["fc2.bias"]).relu()
        logits = dense(h2, params["fc3.weight"], params["fc3.bias"])
        return Passed(logits, {}, (first, second, pooled, flat, h1, h2))

    def back(params: Stacked, tape: Tape, grads: Tensor) -> Found:
        first, second, pooled, flat, h1, h2 = tape
        found: dict[str, Tensor | Product] = {}
        found["fc3.weight"], found["fc3.bias"] = dense_back(grads, h2)
        grads = torch.where(h2 > 0, grads @ params["fc3.weight"], 0.0)
        found["fc2.weight"], found["fc2.bias"] = dense_back(grads, h1)
        grads = torch.where(h1 > 0, grads @ params["fc2.weight"], 0.0)
        found["fc1.weight"], found["fc1.bias"] = dense_back(grads, flat)
        grads = (grads @ params["fc1.weight"]).view(pooled.shape)
        found["conv2.weight"], found["conv2.bias"], grads = convolve_back(grads, second, inputs=True)
        found["conv1.weight"], found["conv1.bias"], _ = convolve_back(grads, first, inputs=False)
        return found

    return Form(forward, back)


@functools.cache
def cnn_form(dropout: tuple[float, float]) -> Form:
    """Two convolutions, one pooling, two dense layers with dropout."""

    def forward(params: Stacked, x: Tensor, count: Tensor | None) -> Passed:
        one, first = convolve(x, params["conv1.weight"], params["conv1.bias"])
        pooled, second = convolve(one, params["conv2.weight"], params["conv2.bias"], pool=True)
        flat = pooled.flatten(2)
        keep1 = _kept(flat, dropout[0], count is not None)
        flat = flat * keep1
        h1 = dense(flat, params["fc1.weight"], params["fc1.bias"]).relu()
        keep2 = _kept(h1, dropout[1], count is not None)
        h2 = h1 * keep2
        logits = dense(h2, params["fc2.weight"], params["fc2.bias"])
        return Passed(logits, {}, (first, second, pooled, flat, keep1, h1, keep2, h2))

    def back(params: Stacked, tape: Tape, grads: Tensor) -> Found:
        first, second, pooled, flat, keep1, h1, keep2, h2 = tape
        found: dict[str, Tensor | Product] = {}
        found["fc2.weight"], found["fc2.bias"] = dense_back(grads, h2)
        grads = torch.where(h1 > 0, (grads @ params["fc2.weight"]) * keep2, 0.0)
        found["fc1.weight"], found["fc1.bias"] = dense_back(grads, flat)
        grads = ((grads @ params["fc1.weight"]) * keep1).view(pooled.shape)
        found["conv2.weight"], found["conv2.bias"], grads = convolve_back(grads, second, inputs=True)
        found["conv1.weight"], found["conv1.bias"], _ = convolve_back(grads, first, inputs=False)
        return found

    return Form(forward, back)


def _kept(x: Tensor, rate: float, training: bool) -> Tensor | float:
    """What dropout multiplies by."""
    if not training or rate == 0:
        return 1.0
    return (torch.rand(x.shape, device=x.device) >= rate).to(x.dtype) / (1 - rate)


def form_of(model: nn.Module) -> Form | None:
    """The hand-written form of a model, or None where there is none for it."""
    if type(model) is Logistic:
        return logistic_form()
    if type(model) is LeNet:
        return lenet_form()
    return cnn_form(model.dropout) if type(model) is SmallCNN else None


@functools.cache
def form_gradients(form: Form, precision: str = "fp32") -> GradientFunction:
    """The gradient function of a form; with "bf16" everything but the weights' sums is computed in half precision."""
    half = precision == "bf16"

    def gradients(params: Stacked, buffers: Stacked, x: Tensor, y: Tensor, count: Tensor) -> Gradients:
        used = {name: value.bfloat16() for name, value in params.items()} if half else params
        logits, after, tape = form.forward({**used, **buffers}, x.bfloat16() if half else x, count)
        grads, total, hits = loss_back(logits, y, count)
        found = form.back(used, tape, grads)
        return {name: _single(found[name]) for name in params}, after, total, hits

    return gradients


def _single(found: Tensor | Product) -> Tensor | Product:
    return found if isinstance(found, Product) else found.to(wide_type(found))
