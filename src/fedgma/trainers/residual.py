"""The lane form of ResNet18 with group normalisation, its backward pass written out.

Convolutions are one call a lane (`operators`); normalisation, ReLU and shortcuts, which hold this network back, are
compiled over all lanes and pass over memory as rarely as can be: one look for the sums over positions, from which the
gradients of scale, offset and input all follow, and one to write. Activations are [lane, sample, row, column, channel].
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgma.trainers.cohorts import Stacked
from fedgma.trainers.forms import Form, Tape
from fedgma.trainers.gradients import Found, Product
from fedgma.trainers.layers import dense, dense_back, split_products
from fedgma.trainers.operators import convolve, convolve_inputs, convolve_weights

EPSILON = 1e-5
BLOCKS = tuple(
    (f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1) for stage in range(1, 5) for block in (0, 1)
)


class Normal(NamedTuple):
    """What a normalisation keeps: its input, and mean and 1 / deviation of every sample's groups."""

    x: Tensor
    mean: Tensor  # float32 [lane, sample, 1, 1, group, 1]
    scale: Tensor


class Block(NamedTuple):
    """What a residual block keeps."""

    x: Tensor
    first: Normal
    inner: Tensor
    second: Normal
    shortcut: Normal | None
    out: Tensor


@functools.cache
def residual_form(groups: int) -> Form:
    """ResNet18 with so many groups in every normalisation."""

    def forward(params: Stacked, x: Tensor, training: bool) -> tuple[Tensor, Tape]:
        seen = windows(x.permute(0, 1, 3, 4, 2))
        stem, normal = normalise((seen.flatten(1, 3) @ stem_matrix(params)).view(*seen.shape[:4], -1), params, "norm1")
        h = stem = stem.relu()
        blocks = []
        for at, stride in BLOCKS:
            h, kept = block_of(params, at, h, stride)
            blocks.append(kept)
        pooled = h.mean((2, 3))
        return dense(pooled, params["fc.weight"], params["fc.bias"]), (seen, normal, stem, blocks, pooled)

    def back(params: Stacked, tape: Tape, grads: Tensor) -> Found:
        seen, normal, stem, blocks, pooled = tape
        found: dict[str, Tensor | Product] = {}
        found["fc.weight"], found["fc.bias"] = dense_back(grads, pooled)
        rows, columns = blocks[-1].out.shape[2:4]
        grads = (grads @ params["fc.weight"] / (rows * columns))[:, :, None, None].expand(blocks[-1].out.shape)
        for (at, stride), kept in zip(reversed(BLOCKS), reversed(blocks), strict=True):
            grads = block_back(params, at, grads, kept, stride, found)
        grads = normal_back(torch.where(stem > 0, grads, 0.0), normal, params, "norm1", found)
        matrix = split_products(seen, grads)  # [lane, 9 * in, out]
        lanes, _, outs = matrix.shape
        found["conv1.weight"] = matrix.view(lanes, 3, 3, -1, outs).permute(0, 4, 3, 1, 2)
        return found

    def normalise(x: Tensor, params: Stacked, name: str) -> tuple[Tensor, Normal]:
        parts = x.float().view(*x.shape[:4], groups, -1)
        variance, mean = torch.var_mean(parts, (2, 3, 5), correction=0, keepdim=True)
        kept = Normal(x, mean, torch.rsqrt(variance + EPSILON))
        return (unit(kept) * _wide(params[f"{name}.weight"]) + _wide(params[f"{name}.bias"])).to(x.dtype), kept

    def unit(kept: Normal) -> Tensor:
        parts = kept.x.float().view(*kept.x.shape[:4], groups, -1)
        return ((parts - kept.mean) * kept.scale).view(kept.x.shape)

    def normal_back(
        grads: Tensor, kept: Normal, params: Stacked, name: str, found: dict[str, Tensor | Product]
    ) -> Tensor:
        lanes, samples, rows, columns, channels = grads.shape
        wide, flat = grads.float(), unit(kept)
        plain, along = wide.sum((2, 3)), (wide * flat).sum((2, 3))  # [lane, sample, channel]
        found[f"{name}.bias"], found[f"{name}.weight"] = plain.sum(1), along.sum(1)
        weight = params[f"{name}.weight"].float()

        def level(sums: Tensor) -> Tensor:
            each = (sums * weight[:, None]).view(lanes, samples, groups, -1).sum(3, keepdim=True)
            spread = each / (rows * columns * (channels // groups))
            return spread.expand(-1, -1, -1, channels // groups).reshape(lanes, samples, 1, 1, channels)

        scale = kept.scale.expand(-1, -1, -1, -1, -1, channels // groups).reshape(lanes, samples, 1, 1, channels)
        return (scale * (wide * _wide(weight) - level(plain) - flat * level(along))).to(grads.dtype)

    def block_of(params: Stacked, at: str, x: Tensor, stride: int) -> tuple[Tensor, Block]:
        inner, first = normalise(convolve(x, _last(params[f"{at}.conv1.weight"]), stride), params, f"{at}.norm1")
        inner = inner.relu()
        out, second = normalise(convolve(inner, _last(params[f"{at}.conv2.weight"])), params, f"{at}.norm2")
        beside, shortcut = x, None
        if stride == 2:
            beside, shortcut = normalise(project(x, params[f"{at}.shortcut.0.weight"]), params, f"{at}.shortcut.1")
        out = (out + beside).relu()
        return out, Block(x, first, inner, second, shortcut, out)

    def block_back(
        params: Stacked, at: str, grads: Tensor, kept: Block, stride: int, found: dict[str, Tensor | Product]
    ) -> Tensor:
        grads = torch.where(kept.out > 0, grads, 0.0)
        down = normal_back(grads, kept.second, params, f"{at}.norm2", found)
        found[f"{at}.conv2.weight"] = _torch_order(convolve_weights(down, kept.inner))
        rows, columns = kept.inner.shape[2:4]
        down = convolve_inputs(down, _last(params[f"{at}.conv2.weight"]), rows, columns)
        down = normal_back(torch.where(kept.inner > 0, down, 0.0), kept.first, params, f"{at}.norm1", found)
        found[f"{at}.conv1.weight"] = _torch_order(convolve_weights(down, kept.x, stride))
        rows, columns = kept.x.shape[2:4]
        down = convolve_inputs(down, _last(params[f"{at}.conv1.weight"]), rows, columns, stride)
        if kept.shortcut is None:
            return down + grads
        beside = normal_back(grads, kept.shortcut, params, f"{at}.shortcut.1", found)
        name = f"{at}.shortcut.0.weight"
        matrix = split_products(kept.x[:, :, ::2, ::2].contiguous(), beside)  # [lane, in, out]
        found[name] = matrix.transpose(1, 2)[..., None, None]
        flat = (beside.flatten(1, 3) @ params[name].flatten(2)).view(*beside.shape[:4], -1)
        pairs = F.pad(flat[:, :, :, None, :, None], (0, 0, 0, 1, 0, 0, 0, 1))  # zeros between rows and columns
        return down + pairs.view(down.shape)

    return Form(forward, back)


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


def _wide(per_channel: Tensor) -> Tensor:
    """[lane, channel] to multiply activations by."""
    return per_channel[:, None, None, None]
