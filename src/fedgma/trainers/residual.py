"""The lane form of ResNet18 with group or batch normalisation, its backward pass written out.

Convolutions are one call a lane (`operators`); normalisation, ReLU and shortcuts, which hold this network back, are
compiled over all lanes and pass over memory as rarely as can be: one look for the sums over positions, from which the
gradients of scale, offset and input all follow, and one to write. Activations are [lane, sample, row, column, channel].
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgma.trainers.cohorts import Stacked
from fedgma.trainers.forms import Form, Passed, Tape
from fedgma.trainers.gradients import Found, Product
from fedgma.trainers.layers import dense, dense_back, split_products
from fedgma.trainers.normalisations import Norm, Normal, normal_back, normalise, running
from fedgma.trainers.operators import convolve, convolve_inputs, convolve_weights

BLOCKS = tuple(
    (f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1) for stage in range(1, 5) for block in (0, 1)
)


class Block(NamedTuple):
    """What a residual block keeps, beside its normalisations."""

    x: Tensor
    inner: Tensor
    out: Tensor


Layer = Callable[[Tensor, str], Tensor]  # a normalisation by its name: input to output, or gradients back


@functools.cache
def residual_form(norm: Norm) -> Form:
    """ResNet18 that normalises in one way everywhere."""

    def forward(state: Stacked, x: Tensor, count: Tensor | None) -> Passed:
        normals: dict[str, Normal] = {}

        def layer(x: Tensor, name: str) -> Tensor:
            out, normals[name] = normalise(norm, x, state, name, count)
            return out

        seen = windows(x.permute(0, 1, 3, 4, 2))
        h = stem = layer((seen.flatten(1, 3) @ stem_matrix(state)).view(*seen.shape[:4], -1), "norm1").relu()
        blocks = []
        for at, stride in BLOCKS:
            blocks.append(block_of(state, at, h, stride, layer))
            h = blocks[-1].out
        pooled = h.mean((2, 3))
        logits, after = dense(pooled, state["fc.weight"], state["fc.bias"]), {}
        if count is not None:
            for name, kept in normals.items():
                after.update(running(norm, kept, state, name, count))
        return Passed(logits, after, (seen, stem, blocks, pooled, normals))

    def back(params: Stacked, tape: Tape, grads: Tensor) -> Found:
        seen, stem, blocks, pooled, normals = tape
        found: dict[str, Tensor | Product] = {}

        def layer(grads: Tensor, name: str) -> Tensor:
            return normal_back(norm, grads, normals[name], params, name, found)

        found["fc.weight"], found["fc.bias"] = dense_back(grads, pooled)
        rows, columns = blocks[-1].out.shape[2:4]
        grads = (grads @ params["fc.weight"] / (rows * columns))[:, :, None, None].expand(blocks[-1].out.shape)
        for (at, stride), kept in zip(reversed(BLOCKS), reversed(blocks), strict=True):
            grads = block_back(params, at, grads, kept, stride, layer, found)
        matrix = split_products(seen, layer(torch.where(stem > 0, grads, 0.0), "norm1"))  # [lane, 9 * in, out]
        lanes, _, outs = matrix.shape
        found["conv1.weight"] = matrix.view(lanes, 3, 3, -1, outs).permute(0, 4, 3, 1, 2)
        return found

    return Form(forward, back)


def block_of(params: Stacked, at: str, x: Tensor, stride: int, layer: Layer) -> Block:
    """A residual block."""
    inner = layer(convolve(x, _last(params[f"{at}.conv1.weight"]), stride), f"{at}.norm1").relu()
    out = layer(convolve(inner, _last(params[f"{at}.conv2.weight"])), f"{at}.norm2")
    beside = x if stride == 1 else layer(project(x, params[f"{at}.shortcut.0.weight"]), f"{at}.shortcut.1")
    return Block(x, inner, (out + beside).relu())


def block_back(
    params: Stacked,
    at: str,
    grads: Tensor,
    kept: Block,
    stride: int,
    layer: Layer,
    found: dict[str, Tensor | Product],
) -> Tensor:
    """The gradient of a block's input; those of its weights go into `found`."""
    grads = torch.where(kept.out > 0, grads, 0.0)
    down = layer(grads, f"{at}.norm2")
    found[f"{at}.conv2.weight"] = _torch_order(convolve_weights(down, kept.inner))
    rows, columns = kept.inner.shape[2:4]
    down = convolve_inputs(down, _last(params[f"{at}.conv2.weight"]), rows, columns)
    down = layer(torch.where(kept.inner > 0, down, 0.0), f"{at}.norm1")
    found[f"{at}.conv1.weight"] = _torch_order(convolve_weights(down, kept.x, stride))
    rows, columns = kept.x.shape[2:4]
    down = convolve_inputs(down, _last(params[f"{at}.conv1.weight"]), rows, columns, stride)
    if stride == 1:
        return down + grads
    beside = layer(grads, f"{at}.shortcut.1")
    name = f"{at}.shortcut.0.weight"
    matrix = split_products(kept.x[:, :, ::2, ::2].contiguous(), beside)  # [lane, in, out]
    found[name] = matrix.transpose(1, 2)[..., None, None]
    flat = (beside.flatten(1, 3) @ params[name].flatten(2)).view(*beside.shape[:4], -1)
    pairs = F.pad(flat[:, :, :, None, :, None], (0, 0, 0, 1, 0, 0, 0, 1))  # zeros between rows and columns
    return down + pairs.view(down.shape)


def windows(x: Tensor) -> Tensor:
    """The 3x3 neighbourhood of every place: [lane, sample, row, column, 9 * channel]."""
    rows, columns = x.shape[2:4]
    padded = F.pad(x, (0, 0, 1, 1, 1, 1))
    return torch.cat([padded[:, :, dy : dy + rows, dx : dx + columns] for dy in range(3) for dx in range(3)], -1)


def stem_matrix(params: Stacked) -> Tensor:
    """The first convolution's weights as windows meet them: [lane, 9 * in, out]."""
    return params["conv1.weight"].permute(0, 3, 4, 2, 1).flatten(1, 3)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """A 1x1 convolution of every other row and column."""
    half = x[:, :, ::2, ::2]
    return (half.flatten(1, 3) @ weight.flatten(2).transpose(1, 2)).view(*half.shape[:4], -1)


def _last(weight: Tensor) -> Tensor:
    """[lane, out, in, row, column] with the inputs last."""
    return weight.permute(0, 1, 3, 4, 2).contiguous()


def _torch_order(weight: Tensor) -> Tensor:
    return weight.permute(0, 1, 4, 2, 3)
