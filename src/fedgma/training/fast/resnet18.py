"""Hand-written gradients of ResNet18 with group or batch normalisation over lanes.

Convolutions are operators (`torch_ops`): one kernel for all lanes, or one call per lane. For the small maps of the
ImageNet network they are one product for all lanes (`windows`). Normalisation with the shortcut and ReLU that follow it
is done for all lanes at once (`normalisations`). A gradient that arrives by two paths stays two tensors until it is
read. Activations are [lane, sample, row, column, channel].

Buys, over the generic path on an H200: 2.3 with 10 lanes of group normalisation in bfloat16.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgma.training.fast import torch_ops
from fedgma.training.fast import windows as small
from fedgma.training.fast.layers import dense, dense_back, split_products
from fedgma.training.fast.normalisations import Norm, Saved, norm_of, normalise, normalise_back, running
from fedgma.training.fast.written import Form, Passed, Tape
from fedgma.training.gradients import LaneGradients, Place, Product
from fedgma.training.models import ResNet18
from fedgma.training.stacked import Stacked

ALIGNED = 8  # row lengths that are multiples of this are fast for matrix units
BLOCKS = tuple(
    (f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1) for stage in range(1, 5) for block in (0, 1)
)  # name and stride


class Convolutions(NamedTuple):
    """3x3 convolutions of all lanes and their gradients."""

    forward: Callable[..., Tensor]
    inputs: Callable[..., Tensor]
    weights: Callable[..., Tensor]


EVERY_TAP = (slice(0, 3), slice(0, 3))
SMALL = 4  # sides of a map, below which products with windows are faster than kernels
BY_LANE = Convolutions(torch_ops.convolve, torch_ops.convolve_inputs, torch_ops.convolve_weights)
TOGETHER = Convolutions(small.convolve, small.convolve_inputs, small.convolve_weights)


ByMap = Callable[..., Convolutions]  # of a layer's inputs, and its stride


class Block(NamedTuple):
    """Activations that a residual block keeps: its input, the one between its convolutions, and its output."""

    x: Tensor
    inner: Tensor
    out: Tensor


Parts = tuple[Tensor, ...]  # tensors whose sum is one gradient
Layer = Callable[..., Tensor]  # a normalisation, by its name, with shortcut and ReLU
LayerBack = Callable[[Parts, str], tuple[Tensor, Tensor]]  # to the gradients of its input and of the shortcut


def form_of(model: ResNet18) -> Form | None:
    """The form of a ResNet18, or None where its normalisation is not written out or its images cannot be halved."""
    _, height, width = model.shape
    norm = norm_of(model)
    part = 32 if model.imagenet else 8  # strides halve the images five or three times
    whole = height % part == 0 and width % part == 0
    return residual_form(norm, model.imagenet) if norm is not None and whole else None


def convolutions_of(imagenet: bool, x: Tensor, stride: int = 1) -> Convolutions:
    """How a layer with such inputs is convolved."""
    large = min(x.shape[2:4]) // stride >= SMALL and x.dtype == torch.bfloat16 and x.device.type == "cuda"
    return BY_LANE if not imagenet or (large and torch_ops.by_own_kernels()) else TOGETHER


@functools.cache
def residual_form(norm: Norm, imagenet: bool = False) -> Form:
    """ResNet18 with one kind of normalisation everywhere, for small images or as for ImageNet."""
    by = functools.partial(convolutions_of, imagenet)
    kernel, step = (7, 2) if imagenet else (3, 1)  # of the stem

    def forward(state: Stacked, x: Tensor, count: Tensor | None) -> Passed:
        norms: dict[str, Saved] = {}

        def layer(x: Tensor, name: str, *, shortcut: Tensor | None = None, relu: bool = True) -> Tensor:
            out, norms[name] = normalise(norm, x, state, name, count, shortcut=shortcut, relu=relu)
            return out

        seen = stem_windows(x.permute(0, 1, 3, 4, 2), kernel, step)
        h = layer((seen.flatten(1, 3) @ stem_matrix(state)).view(*seen.shape[:4], -1), "norm1")
        h, taps = small.pool(h) if imagenet else (h, None)
        blocks = []
        for name, stride in BLOCKS:
            blocks.append(block_of(state, name, h, stride, layer, by))
            h = blocks[-1].out
        pooled = h.mean((2, 3))
        logits, after = dense(pooled, state["fc.weight"], state["fc.bias"]), {}
        if count is not None:
            for name, saved in norms.items():
                after.update(running(norm, saved, state, name, count))
        return Passed(logits, after, (seen, taps, blocks, pooled, norms))

    def back(params: Stacked, tape: Tape, grads: Tensor) -> LaneGradients:
        seen, taps, blocks, pooled, norms = tape
        gradients: dict[str, Tensor | Product] = {}

        def layer(parts: Parts, name: str) -> tuple[Tensor, Tensor]:
            return normalise_back(norm, parts, norms[name], params, name, gradients)

        gradients["fc.weight"], gradients["fc.bias"] = dense_back(grads, pooled)
        rows, columns = blocks[-1].out.shape[2:4]
        pooled_grads = grads @ params["fc.weight"] / (rows * columns)
        parts: Parts = (pooled_grads[:, :, None, None].expand(blocks[-1].out.shape),)
        for (name, stride), saved in zip(reversed(BLOCKS), reversed(blocks), strict=True):
            parts = block_back(params, name, parts, saved, stride, layer, by, gradients)
        parts = parts if taps is None else (small.pool_back(parts[0] + parts[1], taps),)
        matrix = split_products(seen, layer(parts, "norm1")[0])  # [lane, taps * in and zeros, out]
        lanes, outs, inputs, *_ = params["conv1.weight"].shape
        used = matrix[:, : kernel**2 * inputs].view(lanes, kernel, kernel, inputs, outs)
        gradients["conv1.weight"] = used.permute(0, 4, 3, 1, 2)
        return gradients

    return Form(forward, back, _in_order, met if imagenet else None)


def met(shape: torch.Size) -> dict[str, Place]:
    """Where the taps lie that some position of the image meets, of the network as for ImageNet.

    Its last maps are small: of images of 32 x 32, it has one pixel, so of nine taps one is ever used.

    >>> met(torch.Size([32, 32]))["layer4.1.conv2.weight"]
    (slice(1, 2, None), slice(1, 2, None))
    """
    rows, columns = shape[-2] // 4, shape[-1] // 4
    places = {}
    for name, stride in BLOCKS:
        for layer, step in (("conv1", stride), ("conv2", 1)):
            taps = small.used_taps(rows, columns, step)
            rows, columns = rows // step, columns // step
            if taps != EVERY_TAP:
                places[f"{name}.{layer}.weight"] = taps
    return places


def block_of(params: Stacked, name: str, x: Tensor, stride: int, layer: Layer, by: ByMap) -> Block:
    """A residual block."""
    inner = layer(by(x, stride).forward(x, _inputs_last(params[f"{name}.conv1.weight"]), stride), f"{name}.norm1")
    shortcut = x
    if stride > 1:
        shortcut = layer(project(x, params[f"{name}.shortcut.0.weight"]), f"{name}.shortcut.1", relu=False)
    outer = by(inner).forward(inner, _inputs_last(params[f"{name}.conv2.weight"]))
    return Block(x, inner, layer(outer, f"{name}.norm2", shortcut=shortcut))


def block_back(
    params: Stacked,
    name: str,
    grads: Parts,
    saved: Block,
    stride: int,
    layer: LayerBack,
    by: ByMap,
    gradients: dict[str, Tensor | Product],
) -> Parts:
    """The gradient of a block's input; those of its weights are put into `gradients`."""
    main, shortcut = layer(grads, f"{name}.norm2")
    gradients[f"{name}.conv2.weight"] = _torch_order(by(saved.inner).weights(main, saved.inner))
    rows, columns = saved.inner.shape[2:4]
    main = by(saved.inner).inputs(main, _inputs_last(params[f"{name}.conv2.weight"]), rows, columns)
    main, _ = layer((main,), f"{name}.norm1")
    gradients[f"{name}.conv1.weight"] = _torch_order(by(saved.x, stride).weights(main, saved.x, stride))
    rows, columns = saved.x.shape[2:4]
    main = by(saved.x, stride).inputs(main, _inputs_last(params[f"{name}.conv1.weight"]), rows, columns, stride)
    if stride == 1:
        return main, shortcut
    shortcut, _ = layer((shortcut,), f"{name}.shortcut.1")
    weight = params[f"{name}.shortcut.0.weight"]
    matrix = split_products(saved.x[:, :, ::2, ::2].contiguous(), shortcut)  # [lane, in, out]
    gradients[f"{name}.shortcut.0.weight"] = matrix.transpose(1, 2)[..., None, None]
    return (main + project_back(shortcut, weight).view(main.shape),)


def stem_windows(x: Tensor, kernel: int, stride: int) -> Tensor:
    """The neighbourhood of every position of the stem's output: [lane, sample, row, column, taps * in and zeros]."""
    taps = small.windows(x, kernel, stride).flatten(4)
    return F.pad(taps, (0, -taps.shape[4] % ALIGNED))


def stem_matrix(params: Stacked) -> Tensor:
    """The first convolution's weights, to multiply windows by: [lane, taps * in and zeros, out]."""
    matrix = params["conv1.weight"].permute(0, 3, 4, 2, 1).flatten(1, 3)
    return F.pad(matrix, (0, 0, 0, -matrix.shape[1] % ALIGNED))


def project(x: Tensor, weight: Tensor) -> Tensor:
    """A 1x1 convolution with stride 2."""
    half = x[:, :, ::2, ::2]
    return (half.flatten(1, 3) @ weight.flatten(2).transpose(1, 2)).view(*half.shape[:4], -1)


def project_back(grads: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the input of `project`, with zeros in the rows and columns between."""
    flat = (grads.flatten(1, 3) @ weight.flatten(2)).view(*grads.shape[:4], -1)
    return F.pad(flat[:, :, :, None, :, None], (0, 0, 0, 1, 0, 0, 0, 1))


def _in_order(params: Stacked) -> Stacked:
    """Weights of 3x3 convolutions with their inputs next to each other in memory, as `convolve` takes them."""
    return {name: _torch_order(_inputs_last(v)) if v.shape[3:] == (3, 3) else v for name, v in params.items()}


def _inputs_last(weight: Tensor) -> Tensor:
    """[lane, out, in, row, column] as [lane, out, row, column, in]."""
    return weight.permute(0, 1, 3, 4, 2).contiguous()


def _torch_order(weight: Tensor) -> Tensor:
    return weight.permute(0, 1, 4, 2, 3)
