"""Layers over lanes with their backward passes written out: batched matrix products, channels last.

Activations are [lane, sample, row, column, channel]. A convolution becomes one matrix product a lane over windows that
hold the inputs of `block` neighbouring outputs of a row: block 1 copies every input k * k times (im2col), a wider block
copies less and multiplies by some zeros. Gradients of the weights are summed in pieces, so that a few lanes fill a GPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgma.trainers.gradients import Product

PIECES = 256  # products that a weight gradient is split into at least, where the batch allows


class Tape(NamedTuple):
    """What a convolution keeps for its backward pass."""

    windows: Tensor  # [lane, sample, row, block, kernel * width * channel]
    matrix: Tensor  # [lane, kernel * width * channel, block * out]
    kernel: int
    block: int
    channels: int


def windows(x: Tensor, kernel: int, block: int) -> Tensor:
    """The inputs of every `block` outputs: [lane, sample, row, column / block, kernel * width * channel]."""
    width = block + kernel - 1
    found = x.unfold(2, kernel, 1).unfold(3, width, block)  # [l, b, row, column, c, kernel, width]
    return found.permute(0, 1, 2, 3, 5, 6, 4).flatten(4)


def fold(grads: Tensor, kernel: int, block: int, channels: int) -> Tensor:
    """The reverse of `windows`: every input gathers the gradients of its copies."""
    lanes, samples, rows, columns, _ = grads.shape
    width = block + kernel - 1
    parts = grads.view(lanes, samples, rows, columns, kernel, width, channels)
    total: Tensor | None = None
    for begin in range(0, width, block):
        piece = parts[..., begin : begin + block, :]
        if piece.shape[-2] < block:
            piece = F.pad(piece, (0, 0, 0, block - piece.shape[-2]))
        for row in range(kernel):
            flat = piece[:, :, :, :, row].reshape(lanes, samples, rows, columns * block, channels)
            right = kernel - 1 - begin  # negative where the last piece reaches past the edge
            moved = F.pad(flat, (0, 0, begin, right, row, kernel - 1 - row))
            total = moved if total is None else total + moved
    assert total is not None
    return total


def banded(weight: Tensor, block: int) -> Tensor:
    """Weights [lane, out, in, k, k] as the matrix that windows meet: [lane, k * width * in, block * out]."""
    lanes, outs, ins, kernel, _ = weight.shape
    taps = weight.permute(0, 3, 4, 2, 1)  # [l, dy, dx, in, out]
    if block == 1:
        return taps.reshape(lanes, kernel * kernel * ins, outs)
    width = block + kernel - 1
    shift = torch.arange(width, device=weight.device)[:, None] - torch.arange(block, device=weight.device)
    inside = ((shift >= 0) & (shift < kernel))[:, None, :, None]
    spread = taps[:, :, shift.clamp(0, kernel - 1)].permute(0, 1, 2, 4, 3, 5)  # [l, dy, width, in, block, out]
    return torch.where(inside, spread, 0.0).reshape(lanes, kernel * width * ins, block * outs)


def unband(grads: Tensor, kernel: int, block: int, channels: int) -> Tensor:
    """The gradient of the weights [lane, out, in, k, k] from that of their matrix."""
    lanes, width = len(grads), block + kernel - 1
    parts = grads.view(lanes, kernel, width, channels, block, -1)
    if block == 1:
        return parts[:, :, :, :, 0].permute(0, 4, 3, 1, 2)
    place = torch.arange(block, device=grads.device)
    taps = [parts[:, :, place + dx, :, place].sum(0) for dx in range(kernel)]  # each [l, dy, in, out]
    return torch.stack(taps, 2).permute(0, 4, 3, 1, 2)


def convolve(x: Tensor, weight: Tensor, block: int) -> tuple[Tensor, Tape]:
    """A convolution of every lane with weights of its own, without bias; `x` is padded already."""
    lanes, outs, channels, kernel, _ = weight.shape
    seen, matrix = windows(x, kernel, block), banded(weight, block)
    flat = seen.flatten(1, 3) @ matrix
    rows, columns = seen.shape[2], seen.shape[3] * block
    return flat.view(lanes, x.shape[1], rows, columns, outs), Tape(seen, matrix, kernel, block, channels)


def convolve_back(grads: Tensor, tape: Tape, *, inputs: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient of the weights, and of the input where it is wanted."""
    lanes, samples, rows, columns, outs = grads.shape
    flat = grads.reshape(lanes, samples, rows * columns // tape.block, tape.block * outs)
    weight = unband(split_products(tape.windows, flat), tape.kernel, tape.block, tape.channels)
    if not inputs:
        return weight, None
    copies = (flat.flatten(1, 2) @ tape.matrix.transpose(1, 2)).view(tape.windows.shape)
    return weight, fold(copies, tape.kernel, tape.block, tape.channels)


def split_products(left: Tensor, right: Tensor) -> Tensor:
    """left^T @ right over samples and places, [lane, sample, ..., n] each, summed in pieces: float32 [lane, n, m]."""
    lanes, pieces = len(left), _pieces(*left.shape[:2])
    parts = [x.reshape(lanes * pieces, -1, x.shape[-1]) for x in (left, right)]
    products = parts[0].transpose(1, 2) @ parts[1]
    return products.view(lanes, pieces, *products.shape[1:]).sum(1, dtype=torch.float32)


def _pieces(lanes: int, samples: int) -> int:
    """Into how many pieces to cut a batch, so that there are enough products to fill the device."""
    divisors = [size for size in range(1, samples + 1) if samples % size == 0]
    return next((size for size in divisors if lanes * size >= PIECES), samples)


def relu_pool(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """2x2 max pooling, bias [lane, channel] and ReLU in one pass; also the largest values without bias.

    The bias comes after the pooling, which changes nothing (rounding is monotone) and touches a quarter of the values.
    """
    lanes, samples, rows, columns, channels = x.shape
    most = x.view(lanes, samples, rows // 2, 2, columns // 2, 2, channels).amax((3, 5))
    return (most + bias[:, None, None, None]).clamp(min=0), most


def relu_pool_back(grads: Tensor, x: Tensor, pooled: Tensor, most: Tensor) -> Tensor:
    """The gradient goes to the first of the largest, as torch does it, and nowhere where ReLU cut it off."""
    lanes, samples, rows, columns, channels = x.shape
    parts = x.view(lanes, samples, rows // 2, 2, columns // 2, 2, channels)
    free, found = pooled > 0, []
    for corner in range(4):
        here = free & (parts[:, :, :, corner // 2, :, corner % 2] == most)
        free = free & ~here
        found.append(torch.where(here, grads, 0.0))
    top, bottom = torch.stack(found[:2], 4), torch.stack(found[2:], 4)  # [l, b, row, column, 2, channel]
    return torch.stack([top, bottom], 3).view(x.shape)


def dense(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A dense layer of every lane: [lane, sample, in] to [lane, sample, out]."""
    return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))


def bias_back(grads: Tensor, pooled: Tensor) -> Tensor:
    """The gradient of a bias under ReLU, from that of its output [lane, sample, row, column, channel]."""
    return torch.where(pooled > 0, grads, 0.0).sum((1, 2, 3), dtype=torch.float32)


def dense_back(grads: Tensor, x: Tensor) -> tuple[Product, Tensor]:
    """Gradients of weight and bias."""
    return Product(grads, x), grads.sum(1, dtype=torch.float32)


def loss_back(logits: Tensor, y: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of every lane's mean loss, its loss sum and its hits; rows past `count` are padding."""
    real = torch.arange(y.shape[1], device=y.device) < count[:, None]
    logs = torch.log_softmax(logits.float(), -1)
    total = -torch.where(real, logs.gather(2, y[..., None])[..., 0], 0.0).sum(1)
    hits = (real & (logits.argmax(-1) == y)).sum(1)
    wanted = torch.arange(logits.shape[-1], device=y.device) == y[..., None]
    grads = (logs.exp() - wanted.float()) / count.clamp(min=1)[:, None, None]
    return torch.where(real[..., None], grads, 0.0).to(logits.dtype), total, hits


def channels_last(x: Tensor, padding: int = 0) -> Tensor:
    """[lane, sample, channel, row, column] as [lane, sample, row, column, channel], with a border of zeros."""
    return F.pad(x.permute(0, 1, 3, 4, 2), (0, 0, padding, padding, padding, padding))
