"""3x3 convolutions and pooling of small images, for all lanes at once, as products with windows of the images.

A window is the neighbourhood of a position of the output, written as a row; a convolution is the product of all windows
of a lane and its weights. Images of few positions are too little work for one call per lane (`torch_ops`). Taps that
lie in the border of zeros at every position are left out: where an image is one pixel, one of nine is used. Activations
are [lane, sample, row, column, channel], weights [lane, out, row, column, in]. It is plain torch for the compiler to
fuse.

Buys, over one call of cuDNN per lane on an H200: 1.5 with 10 lanes, 2.4 with 80 (`benchmarks/bench_parts.py`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgma.training.fast.layers import pieces_of, wide_type

TILE = 128  # rows and columns of a product that one multiprocessor computes


def windows(x: Tensor, kernel: int = 3, stride: int = 1) -> Tensor:
    """The neighbourhood of every position: [lane, sample, row, column, down, across, channel]."""
    border = kernel // 2
    taps = F.pad(x, (0, 0, border, border, border, border)).unfold(2, kernel, stride).unfold(3, kernel, stride)
    return taps.permute(0, 1, 2, 3, 5, 6, 4)


def convolve(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
    """A convolution with a border of zeros."""
    seen = _rows(x, stride)
    products = seen.flatten(1, 3) @ _matrix(weight, x.shape[2], x.shape[3], stride).transpose(1, 2)
    return products.view(*seen.shape[:4], -1)


def convolve_inputs(grads: Tensor, weight: Tensor, rows: int, columns: int, stride: int = 1) -> Tensor:
    """The gradient of the input [lane, sample, rows, columns, in]."""
    downs, acrosses = _used(rows, stride), _used(columns, stride)
    products = grads.flatten(1, 3) @ _matrix(weight, rows, columns, stride)
    parts = products.view(*grads.shape[:4], len(downs), len(acrosses), -1).to(wide_type(products))
    lines = _fold({tap: parts[:, :, :, :, :, place] for place, tap in enumerate(acrosses)}, 3, stride)
    return _fold({tap: lines[:, :, :, :, place] for place, tap in enumerate(downs)}, 2, stride).to(grads.dtype)


def convolve_weights(grads: Tensor, x: Tensor, stride: int = 1) -> Tensor:
    """The gradient of the weights of the used taps: [lane, out, down, across, in].

    The batch is split into pieces, so that a few lanes are enough work for a GPU.
    """
    downs, acrosses = _used(x.shape[2], stride), _used(x.shape[3], stride)
    seen, (lanes, samples), outs = _rows(x, stride), x.shape[:2], grads.shape[4]
    pieces = pieces_of(lanes * -(-outs // TILE) * -(-seen.shape[4] // TILE), samples)
    left, right = (part.reshape(lanes * pieces, -1, part.shape[4]) for part in (grads, seen))
    products = (left.transpose(1, 2) @ right).view(lanes, pieces, outs, -1)
    gradient = products.sum(1, dtype=wide_type(products)) if pieces > 1 else products[:, 0]
    return gradient.view(lanes, outs, len(downs), len(acrosses), -1)


def pool(x: Tensor) -> tuple[Tensor, Tensor]:
    """3x3 max pooling with stride 2 of values that are not negative, and the tap that held each maximum.

    >>> out, taps = pool(torch.tensor([[0.0, 1.0], [2.0, 0.0]]).view(1, 1, 2, 2, 1))
    >>> out.flatten().tolist(), taps.flatten().tolist()
    ([2.0], [7])
    """
    seen = windows(x, stride=2)
    out, *others = (seen[:, :, :, :, tap // 3, tap % 3] for tap in range(9))
    taps = torch.zeros_like(out, dtype=torch.uint8)
    for tap, value in enumerate(others, 1):
        taps = torch.where(value > out, tap, taps)
        out = torch.maximum(out, value)
    return out, taps


def pool_back(grads: Tensor, taps: Tensor) -> Tensor:
    """The gradient of the input of `pool`, whose sides are even."""
    wide = grads.to(wide_type(grads))

    def line(down: int) -> Tensor:
        return _fold({across: torch.where(taps == 3 * down + across, wide, 0.0) for across in range(3)}, 3, 2)

    return _fold({down: line(down) for down in range(3)}, 2, 2).to(grads.dtype)


def used_taps(rows: int, columns: int, stride: int = 1) -> tuple[slice, slice]:
    """The taps of a convolution, down and across, that meet an image of this size at some position.

    >>> used_taps(1, 2)
    (slice(1, 2, None), slice(0, 3, None))
    """
    downs, acrosses = _used(rows, stride), _used(columns, stride)
    return slice(downs.start, downs.stop), slice(acrosses.start, acrosses.stop)


def _used(side: int, stride: int) -> range:
    """The taps along a side that meet the image at some position.

    >>> list(_used(1, 1)), list(_used(2, 2)), list(_used(2, 1))
    ([1], [1, 2], [0, 1, 2])
    """
    return range(0 if -(-side // stride) > 1 else 1, 3 if side > 1 else 2)


def _rows(x: Tensor, stride: int) -> Tensor:
    """The used part of every window as a row: [lane, sample, row, column, tap x channel]."""
    return windows(x, stride=stride)[:, :, :, :, *used_taps(x.shape[2], x.shape[3], stride)].flatten(4)


def _matrix(weight: Tensor, rows: int, columns: int, stride: int) -> Tensor:
    """The weights of the used taps, given all or these alone: [lane, out, tap x in]."""
    used = used_taps(rows, columns, stride)
    return (weight[:, :, *used] if weight.shape[2:4] == (3, 3) else weight).flatten(2)


def _fold(parts: Mapping[int, Tensor], axis: int, stride: int) -> Tensor:
    """Add the gradients of every tap where they belong along an axis: output r reads input `stride` * r + tap - 1."""
    before, middle, after = parts.get(0), parts[1], parts.get(2)
    if before is not None:
        before = _moved(before, axis, forward=False)
    if stride == 1:
        after = None if after is None else _moved(after, axis, forward=True)
        return sum((part for part in (before, after) if part is not None), middle)
    assert after is not None  # images are halved, so a side has two pixels at least
    odd = after if before is None else after + before
    return torch.stack([middle, odd], axis + 1).flatten(axis, axis + 1)


def _moved(x: Tensor, axis: int, *, forward: bool) -> Tensor:
    """The tensor moved by one place along an axis, with a zero in the free place."""
    size = x.shape[axis]
    zero = torch.zeros_like(x.narrow(axis, 0, 1))
    kept = x.narrow(axis, 0 if forward else 1, size - 1)
    return torch.cat([zero, kept] if forward else [kept, zero], axis)
