"""Hand-written gradients of the small models over lanes: logistic regression, LeNet and the small CNN.

A form is a model as two functions of stacked parameters: forward to logits and a tape, and back from the gradient of
the logits. No form lets padding reach the real samples of a batch. Tests compare every form with the generic path
(`gradients.lane_gradients`). A form is made once per process, so that it is compiled once.

Buys, over the generic path on an H200: LeNet 1.6 with 10 lanes and 6.9 with 640, the small CNN 2.5,
logistic regression 1.03; in lanes on a CPU logistic regression 2.1 (`benchmarks/bench_parts.py`, there with `--tiny`).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedgma.training.fast import head, together
from fedgma.training.fast.convolutions import convolve, convolve_back, convolve_back_in_pieces
from fedgma.training.fast.head import Passes, layers_of
from fedgma.training.fast.layers import Pieces, Product, dense, dense_back, loss_back, wide_type
from fedgma.training.fast.together import Together
from fedgma.training.gradients import GradientFunction, Gradients, LaneGradients, Part, Place
from fedgma.training.gradients import Product as AnyProduct
from fedgma.training.stacked import Stacked

Tape = tuple[Any, ...]
Sums = dict[str, Product | Pieces]


class Passed(NamedTuple):
    """The result of a forward pass: logits, new values of buffers, and what the backward pass needs."""

    logits: Tensor
    buffers: Stacked
    tape: Tape


class Form(NamedTuple):
    """A model over lanes: `forward(state, x, count)` and `back(params, tape, grads)`.

    The state is parameters and buffers; `count` is the number of real samples of each lane, None in evaluation. `order`
    gives parameters the order in memory that bfloat16 passes read them in; their shapes stay. `met` tells, for images
    [..., row, column], where the entries lie that such images meet, of parameters with others: training reads these
    alone, so both functions take whole parameters or these parts. Where training has kernels that reach over the loss,
    `whole(params, x, y, count, smoothing)` takes the place of both passes; it gives gradients that are not summed yet,
    the sum of losses and the hits.
    """

    forward: Callable[[Stacked, Tensor, Tensor | None], Passed]
    back: Callable[[Stacked, Tape, Tensor], LaneGradients] | None = None
    order: Callable[[Stacked], Stacked] | None = None
    met: Callable[[torch.Size], Mapping[str, Place]] | None = None
    whole: Callable[[Stacked, Tensor, Tensor, Tensor, float], tuple[Sums, Tensor, Tensor]] | None = None


@functools.cache
def logistic_form() -> Form:
    """One dense layer."""

    def forward(params: Stacked, x: Tensor, count: Tensor | None) -> Passed:
        flat = x.flatten(2)
        return Passed(dense(flat, params["linear.weight"], params["linear.bias"]), {}, (flat,))

    def back(params: Stacked, tape: Tape, grads: Tensor) -> LaneGradients:
        weight, bias = dense_back(grads, tape[0])
        return {"linear.weight": weight, "linear.bias": bias}

    return Form(forward, back)


@functools.cache
def lenet_form() -> Form:
    """Two convolutions with pooling and three dense layers."""
    names = ("fc1", "fc2", "fc3")

    def convolved(params: Stacked, x: Tensor) -> tuple[Tensor, Tape]:
        small, first = convolve(x, params["conv1.weight"], params["conv1.bias"], padding=2, pool=True)
        pooled, second = convolve(small, params["conv2.weight"], params["conv2.bias"], pool=True)
        return pooled, (first, second)

    def gradients_of(found: Passes, pooled: Tensor, tape: Tape) -> Sums:
        sums: dict[str, Product | Pieces] = {}
        for name, grads, x in zip(names, found.grads, found.inputs, strict=True):
            sums[f"{name}.weight"], sums[f"{name}.bias"] = Product(grads, x), Pieces(grads)
        (first, second), grads = tape, found.inner.view(pooled.shape)
        sums["conv2.weight"], sums["conv2.bias"], grads = convolve_back_in_pieces(grads, second, inputs=True)
        sums["conv1.weight"], sums["conv1.bias"], _ = convolve_back_in_pieces(grads, first, inputs=False)
        return sums

    def forward(params: Stacked, x: Tensor, count: Tensor | None) -> Passed:
        return Passed(head.forward(convolved(params, x)[0].flatten(2), layers_of(params, names))[0], {}, ())

    def whole(params: Stacked, x: Tensor, y: Tensor, count: Tensor, smoothing: float) -> tuple[Sums, Tensor, Tensor]:
        pooled, tape = convolved(params, x)
        found = head.passes(pooled.flatten(2), layers_of(params, names), y, count, smoothing)
        return gradients_of(found, pooled, tape), found.total, found.hits

    return Form(forward, whole=whole)


@functools.cache
def cnn_form(dropout: tuple[float, float]) -> Form:
    """Two convolutions, one pooling, two dense layers with dropout."""

    def forward(params: Stacked, x: Tensor, count: Tensor | None) -> Passed:
        activations, first = convolve(x, params["conv1.weight"], params["conv1.bias"])
        pooled, second = convolve(activations, params["conv2.weight"], params["conv2.bias"], pool=True)
        flat = pooled.flatten(2)
        keep1 = _dropout_mask(flat, dropout[0], count is not None)
        flat = flat * keep1
        h1 = dense(flat, params["fc1.weight"], params["fc1.bias"]).relu()
        keep2 = _dropout_mask(h1, dropout[1], count is not None)
        h2 = h1 * keep2
        logits = dense(h2, params["fc2.weight"], params["fc2.bias"])
        return Passed(logits, {}, (first, second, pooled, flat, keep1, h1, keep2, h2))

    def back(params: Stacked, tape: Tape, grads: Tensor) -> LaneGradients:
        first, second, pooled, flat, keep1, h1, keep2, h2 = tape
        gradients: dict[str, Tensor | AnyProduct] = {}
        gradients["fc2.weight"], gradients["fc2.bias"] = dense_back(grads, h2)
        grads = torch.where(h1 > 0, (grads @ params["fc2.weight"]) * keep2, 0.0)
        gradients["fc1.weight"], gradients["fc1.bias"] = dense_back(grads, flat)
        grads = ((grads @ params["fc1.weight"]) * keep1).view(pooled.shape)
        gradients["conv2.weight"], gradients["conv2.bias"], grads = convolve_back(grads, second, inputs=True)
        gradients["conv1.weight"], gradients["conv1.bias"], _ = convolve_back(grads, first, inputs=False)
        return gradients

    return Form(forward, back)


def _dropout_mask(x: Tensor, rate: float, training: bool) -> Tensor | float:
    """What dropout multiplies by."""
    if not training or rate == 0:
        return 1.0
    drawn: Tensor = torch.ops.fedgma.uniform(x) if x.dtype == torch.bfloat16 else _uniform(x)
    return (drawn >= rate).to(x.dtype) / (1 - rate)


def _uniform(x: Tensor) -> Tensor:
    return torch.rand(x.shape, device=x.device)


# An operator that the compiler does not look into: a kernel in which it draws random numbers for bfloat16 activations
# with channels last does not compile (torch 2.11).
_library: Any = torch.library.Library("fedgma", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("uniform(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
for _device in ("CPU", "CUDA"):
    _library.impl("uniform", _uniform, _device)
_library.impl("uniform", lambda x: x.new_empty(x.shape, dtype=torch.float32), "Meta")


@functools.cache
def form_gradients(form: Form, precision: str = "fp32", smoothing: float = 0.0) -> GradientFunction:
    """The gradient function of a form; in "bf16" activations and products are bfloat16, sums over samples float32.

    `smoothing` is that of the labels.
    """
    half = precision == "bf16"

    def gradients(params: Stacked, buffers: Stacked, x: Tensor, y: Tensor, count: Tensor) -> Gradients:
        places = {} if form.met is None else form.met(x.shape)
        met = {name: value[..., *places[name]] if name in places else value for name, value in params.items()}
        used = {name: value.bfloat16() for name, value in met.items()} if half else met
        x = x.bfloat16() if half else x
        if form.whole is not None:
            sums, total, hits = form.whole(used, x, y, count, smoothing)
            kept = Together({name: sums[name] for name in params}, count)
            return (kept if together.by_kernel(used) else _wide(kept.each())), {}, total, hits
        assert form.back is not None
        logits, after, tape = form.forward({**used, **buffers}, x, count)
        grads, total, hits = loss_back(logits, y, count, smoothing)
        by_name = _wide(form.back(used, tape, grads))
        found = {name: _placed(by_name[name], places.get(name), value) for name, value in params.items()}
        return found, after, total, hits

    return gradients


def _wide(gradients: LaneGradients) -> LaneGradients:
    return {n: g.to(wide_type(g)) if isinstance(g, Tensor) else g for n, g in gradients.items()}


def _placed(gradient: Tensor | AnyProduct, place: Place | None, weight: Tensor) -> Tensor | AnyProduct:
    """A gradient, with its place where it is a part of the whole."""
    if place is None or not isinstance(gradient, Tensor):
        return gradient
    return Part(gradient, place, weight.shape)
