"""Convolution, bias, ReLU and 2x2 max pooling of many lanes, each with weights of its own, and the way back.

Activations are [lane, sample, channel, row, column], weights [lane, out, in, k, k]. On a GPU each of the three passes
is one kernel (`kernels.convolutions_*_gpu`), which reads and writes any order of memory; elsewhere torch's grouped
convolutions do it. A compiler takes the passes as they are. Between them a byte an output is kept: the corner that won.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgma.training.fast import gpu
from fedgma.training.fast.layers import pieces_of, wide_type

CUT = 4  # the corner of an output that ReLU cut off
FEW = 32  # outputs under which threads are faster than matrix units

_library: Any = torch.library.Library("fedgma", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("relu_convolve(Tensor x, Tensor weight, Tensor bias, int padding, bool pool) -> (Tensor, Tensor)")
_library.define(
    "relu_convolve_back(Tensor grads, Tensor corners, Tensor x, Tensor weight, int padding, bool pool, int pieces,"
    " bool inputs) -> (Tensor, Tensor, Tensor)"
)


class Seen(NamedTuple):
    """What a convolution keeps for its backward passes."""

    x: Tensor
    weight: Tensor
    corners: Tensor  # uint8, of every output: which corner won, or CUT
    padding: int
    pool: bool


def convolve(x: Tensor, weight: Tensor, bias: Tensor, *, padding: int = 0, pool: bool = False) -> tuple[Tensor, Seen]:
    """A convolution with ReLU, and pooling if asked for.

    >>> image, weight = torch.arange(16.0).view(1, 1, 1, 4, 4), torch.ones(1, 1, 1, 1, 1)
    >>> out, seen = convolve(image, weight, torch.tensor([[-6.0]]), pool=True)
    >>> out.flatten().tolist(), seen.corners.flatten().tolist()
    ([0.0, 1.0, 7.0, 9.0], [4, 3, 3, 3])
    """
    out, corners = torch.ops.fedgma.relu_convolve(x, weight, bias, padding, pool)
    return out, Seen(x, weight, corners, padding, pool)


def convolve_back(grads: Tensor, seen: Seen, *, inputs: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of weight, bias and input (empty if it is not wanted), from that of the output."""
    x, weight, corners, padding, pool = seen
    if corners.stride(2) == 1:
        grads = grads.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    weights, biases, inner = torch.ops.fedgma.relu_convolve_back(
        grads, corners, x, weight, padding, pool, _pieces(seen) if x.is_cuda else 1, inputs
    )
    return weights.sum(1), biases.sum(1), inner


def _pieces(seen: Seen) -> int:
    """Into how many pieces to cut the batch for the weight gradient: its kernels' programs should fill a GPU."""
    lanes, outs, channels, kernel, _ = seen.weight.shape
    samples, _, rows, columns = seen.corners.shape[1:]
    if _by_matrix(outs):
        return pieces_of(lanes * -(-channels * kernel**2 // 64), samples, least=1024)
    programs = lanes * channels * -(-outs // 4)  # of a warp each; under some 128 positions its last sum costs too much
    return pieces_of(programs, samples, least=min(4096, programs * (samples * rows * columns // 128)))


def _by_matrix(outs: int) -> bool:
    """Whether a GPU's matrix units take a layer of so many outputs."""
    return outs >= FEW


def _family(outs: int) -> str:
    """The kernels that take a layer of so many outputs."""
    return "conv_matrix" if _by_matrix(outs) else "conv_thread"


def _outputs(x: Tensor, weight: Tensor, bias: Tensor, padding: int, pool: bool) -> tuple[Tensor, Tensor]:
    lanes, samples, _, *sides = x.shape
    rows, columns = ((side + 2 * padding - weight.shape[3] + 1) // (2 if pool else 1) for side in sides)
    shape = [lanes, samples, weight.shape[1], rows, columns]
    last = _by_matrix(weight.shape[1])  # matrix units read channels side by side, threads columns
    return _empty(x, shape, last), _empty(x, shape, last, torch.uint8)


def _gradients(
    grads: Tensor, corners: Tensor, x: Tensor, weight: Tensor, padding: int, pool: bool, pieces: int, inputs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    lanes, outs, *sides = weight.shape
    weights = x.new_empty((lanes, pieces, outs, *sides), dtype=wide_type(x))
    biases = x.new_empty((lanes, pieces, outs), dtype=wide_type(x))
    return weights, biases, _empty(x, list(x.shape), x.stride(2) == 1) if inputs else x.new_empty(0)


def _empty(like: Tensor, shape: list[int], last: bool, dtype: torch.dtype | None = None) -> Tensor:
    """An array of that shape, its channels last in memory if so wished."""
    lanes, samples, channels, rows, columns = shape
    if not last:
        return like.new_empty(shape, dtype=dtype)
    return like.new_empty((lanes, samples, rows, columns, channels), dtype=dtype).permute(0, 1, 4, 2, 3)


# without the kernels: lanes are the groups of one convolution


def _plain(x: Tensor, weight: Tensor, bias: Tensor, padding: int, pool: bool) -> tuple[Tensor, Tensor]:
    found = F.conv2d(_groups(x), weight.flatten(0, 1), bias.flatten(), padding=padding, groups=len(x)).relu()
    corners: Tensor | int = 0
    if pool:
        columns = found.shape[3]
        found, index = F.max_pool2d(found, 2, return_indices=True)
        corners = index // columns % 2 * 2 + index % columns % 2
    out, kept = _outputs(x, weight, bias, padding, pool)
    out.copy_(_lanes(found, len(x)))
    kept.copy_(_lanes(torch.where(found > 0, corners, CUT), len(x)))
    return out, kept


def _plain_back(
    grads: Tensor, corners: Tensor, x: Tensor, weight: Tensor, padding: int, pool: bool, pieces: int, inputs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    weights, biases, inner = _gradients(grads, corners, x, weight, padding, pool, pieces, inputs)
    if pieces > 1:  # each is like a lane
        grads, corners, x = (part.reshape(len(x) * pieces, -1, *part.shape[2:]) for part in (grads, corners, x))
        weight = weight.repeat_interleave(pieces, 0)
    spread = _groups(_spread(grads, corners, x, weight, padding, pool))
    found, of_weight, of_bias = torch.ops.aten.convolution_backward(
        spread, _groups(x), weight.flatten(0, 1), [spread.shape[1]], [1, 1], [padding] * 2, [1, 1], False, [0, 0],
        len(x), [inputs, True, True],
    )  # fmt: skip
    weights.copy_(of_weight.view(weights.shape))
    biases.copy_(of_bias.view(biases.shape))
    if inputs:
        inner.copy_(_lanes(found, len(x)).reshape(inner.shape))
    return weights, biases, inner


def _spread(grads: Tensor, corners: Tensor, x: Tensor, weight: Tensor, padding: int, pool: bool) -> Tensor:
    """The gradient of the convolution itself: all that came to an output goes to the corner that won."""
    if not pool:
        return torch.where(corners == 0, grads, 0.0)
    parts = [torch.where(corners == corner, grads, 0.0) for corner in range(4)]
    rows = [torch.stack(pair, -1).flatten(-2) for pair in (parts[:2], parts[2:])]
    found = torch.stack(rows, -2).flatten(-3, -2)
    # pooling drops an odd row or column at the end
    dropped = [x.shape[axis] + 2 * padding - weight.shape[3] + 1 - found.shape[axis] for axis in (3, 4)]
    return F.pad(found, (0, dropped[1], 0, dropped[0]))


def _groups(x: Tensor) -> Tensor:
    """[lane, sample, channel, ...] as [sample, lane * channel, ...]."""
    return x.transpose(0, 1).flatten(1, 2)


def _lanes(x: Tensor, lanes: int) -> Tensor:
    """[sample, lane * channel, ...] as [lane, sample, channel, ...]."""
    return x.view(len(x), lanes, -1, *x.shape[2:]).transpose(0, 1)


# with the kernels


def _quick(x: Tensor, weight: Tensor, bias: Tensor, padding: int, pool: bool) -> tuple[Tensor, Tensor]:
    fused = gpu.kernels(_family(weight.shape[1]))
    if fused is None:
        return _plain(x, weight, bias, padding, pool)
    out, corners = _outputs(x, weight, bias, padding, pool)
    fused.forward(x, weight, bias, out, corners, padding=padding, pool=pool)
    return out, corners


def _quick_back(
    grads: Tensor, corners: Tensor, x: Tensor, weight: Tensor, padding: int, pool: bool, pieces: int, inputs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    fused = gpu.kernels(_family(weight.shape[1]))
    if fused is None:
        return _plain_back(grads, corners, x, weight, padding, pool, pieces, inputs)
    weights, biases, inner = _gradients(grads, corners, x, weight, padding, pool, pieces, inputs)
    where: Tensor | None = corners
    if _by_matrix(weight.shape[1]) and (pool or inputs):
        grads, where = fused.spread(grads, corners, pool=pool), None
    fused.backward_weights(grads, where, x, weights, biases, padding=padding, pool=pool)
    if inputs:
        fused.backward_inputs(grads, where, weight, inner, padding=padding, pool=pool)
    return weights, biases, inner


for _device, _forward, _back in (
    ("CPU", _plain, _plain_back),
    ("CUDA", _quick, _quick_back),
    ("Meta", _outputs, _gradients),  # what a compiler needs to know: shapes and order in memory
):
    _library.impl("relu_convolve", _forward, _device)
    _library.impl("relu_convolve_back", _back, _device)
