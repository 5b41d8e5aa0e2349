"""The lane form of ResNet18 with group or batch normalisation, its backward pass written out.

Convolutions are one call a lane (`operators`); normalisation with the shortcut and ReLU that follow it, which hold this
network back, are done for all lanes at once (`normalisations`). A gradient that two paths bring to one place travels as
two parts until it is read. Activations are [lane, sample, row, column, channel].
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from fedgma.training.fast.layers import dense, dense_back, split_products
from fedgma.training.fast.normalisations import Norm, Normal, normal_back, normalise, running
from fedgma.training.fast.torch_ops import convolve, convolve_inputs, convolve_weights
from fedgma.training.fast.written import Form, Passed, Tape
from fedgma.training.gradients import Found, Product
from fedgma.training.stacked import Stacked

ALIGNED = 8  # entries a row that matrix units read fast
BLOCKS = tuple(
    (f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1) for stage in range(1, 5) for block in (0, 1)
)


class Block(NamedTuple):
    """What a residual block keeps, beside its normalisations."""

    x: Tensor
    inner: Tensor
    out: Tensor


Parts = tuple[Tensor, ...]  # of one gradient
Layer = Callable[..., Tensor]  # a normalisation by its name, with what follows it
LayerBack = Callable[[Parts, str], tuple[Tensor, Tensor]]  # to the gradients of its input and of what was added


@functools.cache
def residual_form(norm: Norm) -> Form:
    """ResNet18 that normalises in one way everywhere."""

    def forward(state: Stacked, x: Tensor, count: Tensor | None) -> Passed:
        normals: dict[str, Normal] = {}

        def layer(x: Tensor, name: str, *, beside: Tensor | None = None, relu: bool = True) -> Tensor:
            out, normals[name] = normalise(norm, x, state, name, count, beside=beside, relu=relu)
            return out

        seen = windows(x.permute(0, 1, 3, 4, 2))
        h = layer((seen.flatten(1, 3) @ stem_matrix(state)).view(*seen.shape[:4], -1), "norm1")
        blocks = []
        for at, stride in BLOCKS:
            blocks.append(block_of(state, at, h, stride, layer))
            h = blocks[-1].out
        pooled = h.mean((2, 3))
        logits, after = dense(pooled, state["fc.weight"], state["fc.bias"]), {}
        if count is not None:
            for name, kept in normals.items():
                after.update(running(norm, kept, state, name, count))
        return Passed(logits, after, (seen, blocks, pooled, normals))

    def back(params: Stacked, tape: Tape, grads: Tensor) -> Found:
        seen, blocks, pooled, normals = tape
        found: dict[str, Tensor | Product] = {}

        def layer(parts: Parts, name: str) -> tuple[Tensor, Tensor]:
            return normal_back(norm, parts, normals[name], params, name, found)

        found["fc.weight"], found["fc.bias"] = dense_back(grads, pooled)
        rows, columns = blocks[-1].out.shape[2:4]
        pooled_grads = grads @ params["fc.weight"] / (rows * columns)
        parts: Parts = (pooled_grads[:, :, None, None].expand(blocks[-1].out.shape),)
        for (at, stride), kept in zip(reversed(BLOCKS), reversed(blocks), strict=True):
            parts = block_back(params, at, parts, kept, stride, layer, found)
        matrix = split_products(seen, layer(parts, "norm1")[0])  # [lane, 9 * in and zeros, out]
        lanes, outs, inputs, *_ = params["conv1.weight"].shape
        found["conv1.weight"] = matrix[:, : 9 * inputs].view(lanes, 3, 3, inputs, outs).permute(0, 4, 3, 1, 2)
        return found

    return Form(forward, back)


def block_of(params: Stacked, at: str, x: Tensor, stride: int, layer: Layer) -> Block:
    """A residual block."""
    inner = layer(convolve(x, _last(params[f"{at}.conv1.weight"]), stride), f"{at}.norm1")
    beside = x
    if stride > 1:
        beside = layer(project(x, params[f"{at}.shortcut.0.weight"]), f"{at}.shortcut.1", relu=False)
    out = layer(convolve(inner, _last(params[f"{at}.conv2.weight"])), f"{at}.norm2", beside=beside)
    return Block(x, inner, out)


def block_back(
    params: Stacked,
    at: str,
    grads: Parts,
    kept: Block,
    stride: int,
    layer: LayerBack,
    found: dict[str, Tensor | Product],
) -> Parts:
    """The gradient of a block's input; those of its weights go into `found`."""
    down, beside = layer(grads, f"{at}.norm2")
    found[f"{at}.conv2.weight"] = _torch_order(convolve_weights(down, kept.inner))
    rows, columns = kept.inner.shape[2:4]
    down = convolve_inputs(down, _last(params[f"{at}.conv2.weight"]), rows, columns)
    down, _ = layer((down,), f"{at}.norm1")
    found[f"{at}.conv1.weight"] = _torch_order(convolve_weights(down, kept.x, stride))
    rows, columns = kept.x.shape[2:4]
    down = convolve_inputs(down, _last(params[f"{at}.conv1.weight"]), rows, columns, stride)
    if stride == 1:
        return down, beside
    beside, _ = layer((beside,), f"{at}.shortcut.1")
    name = f"{at}.shortcut.0.weight"
    matrix = split_products(kept.x[:, :, ::2, ::2].contiguous(), beside)  # [lane, in, out]
    found[name] = matrix.transpose(1, 2)[..., None, None]
    flat = (beside.flatten(1, 3) @ params[name].flatten(2)).view(*beside.shape[:4], -1)
    pairs = F.pad(flat[:, :, :, None, :, None], (0, 0, 0, 1, 0, 0, 0, 1))  # zeros between rows and columns
    return (down + pairs.view(down.shape),)


def windows(x: Tensor) -> Tensor:
    """The 3x3 neighbourhood of every place: [lane, sample, row, column, 9 * channel and zeros]."""
    taps = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)  # [..., channel, down, across]
    return F.pad(taps.permute(0, 1, 2, 3, 5, 6, 4).flatten(4), (0, -9 * x.shape[4] % ALIGNED))


def stem_matrix(params: Stacked) -> Tensor:
    """The first convolution's weights as windows meet them: [lane, 9 * in and zeros, out]."""
    matrix = params["conv1.weight"].permute(0, 3, 4, 2, 1).flatten(1, 3)
    return F.pad(matrix, (0, 0, 0, -matrix.shape[1] % ALIGNED))


def project(x: Tensor, weight: Tensor) -> Tensor:
    """A 1x1 convolution of every other row and column."""
    half = x[:, :, ::2, ::2]
    return (half.flatten(1, 3) @ weight.flatten(2).transpose(1, 2)).view(*half.shape[:4], -1)


def _last(weight: Tensor) -> Tensor:
    """[lane, out, in, row, column] with the inputs last."""
    return weight.permute(0, 1, 3, 4, 2).contiguous()


def _torch_order(weight: Tensor) -> Tensor:
    return weight.permute(0, 1, 4, 2, 3)
