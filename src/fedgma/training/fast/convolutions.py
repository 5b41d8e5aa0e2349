"""Convolution, bias, ReLU and 2x2 max pooling as one operation over lanes with separate weights, and its gradients.

Activations are [lane, sample, channel, row, column], weights [lane, out, in, k, k]. On a GPU the forward pass, the
input gradient and the weight gradient are one kernel each (`gpu.conv_thread` for layers with few outputs,
`gpu.conv_matrix` for the others). Elsewhere torch's grouped convolutions do the work. Between the passes one byte per
output is kept: the corner of the pooling window that held the maximum.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgma.training.fast import gpu
from fedgma.training.fast.layers import Pieces, pieces_of, wide_type

CUT = 4  # the corner of an output that ReLU set to zero
FEW = 32  # outputs below which threads are faster than matrix units

_library: Any = torch.library.Library("fedgma", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "relu_convolve(Tensor x, Tensor weight, Tensor bias, int padding, bool pool) -> (Tensor, Tensor)",
    tags=(torch.Tag.flexible_layout,),  # else the compiler makes a second x for the backward pass
)
_library.define(
    "relu_convolve_back(Tensor grads, Tensor corners, Tensor x, Tensor weight, int padding, bool pool, int pieces,"
    " bool inputs) -> (Tensor, Tensor, Tensor)"
)


class Saved(NamedTuple):
    """What the forward pass keeps for the backward passes."""

    x: Tensor
    weight: Tensor
    corners: Tensor  # uint8, of every output: which corner held the maximum (0 to 3), or CUT
    padding: int
    pool: bool


def convolve(x: Tensor, weight: Tensor, bias: Tensor, *, padding: int = 0, pool: bool = False) -> tuple[Tensor, Saved]:
    """A convolution with ReLU, and with pooling if asked for.

    >>> image, weight = torch.arange(16.0).view(1, 1, 1, 4, 4), torch.ones(1, 1, 1, 1, 1)
    >>> out, saved = convolve(image, weight, torch.tensor([[-6.0]]), pool=True)
    >>> out.flatten().tolist(), saved.corners.flatten().tolist()
    ([0.0, 1.0, 7.0, 9.0], [4, 3, 3, 3])
    """
    out, corners = torch.ops.fedgma.relu_convolve(x, weight, bias, padding, pool)
    return out, Saved(x, weight, corners, padding, pool)


def convolve_back(grads: Tensor, saved: Saved, *, inputs: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of weight, bias and input (empty without `inputs`), from the gradient of the output."""
    weights, biases, inner = convolve_back_in_pieces(grads, saved, inputs=inputs)
    return weights.tensor(), biases.tensor(), inner


def convolve_back_in_pieces(grads: Tensor, saved: Saved, *, inputs: bool) -> tuple[Pieces, Pieces, Tensor]:
    """The same, with the gradients of weight and bias as they are summed: by piece of the batch."""
    x, weight, corners, padding, pool = saved
    if corners.stride(2) == 1:
        grads = grads.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    pieces = _pieces(saved) if x.is_cuda and _family(weight.shape[1]) in gpu.KERNELS else 1
    weights, biases, inner = torch.ops.fedgma.relu_convolve_back(
        grads, corners, x, weight, padding, pool, pieces, inputs
    )
    return Pieces(weights), Pieces(biases), inner


def _pieces(saved: Saved) -> int:
    """How many pieces the batch is split into for the weight gradient, so that its programs fill a GPU."""
    lanes, outs, channels, kernel, _ = saved.weight.shape
    samples, _, rows, columns = saved.corners.shape[1:]
    if _family(outs) == "conv_matrix":
        return pieces_of(lanes * -(-channels * kernel**2 // 64), samples, least=1024)
    programs = lanes * channels * -(-outs // 4)  # one warp each; below some 192 positions its final sum costs too much
    return pieces_of(programs, samples, least=min(4096, programs * (samples * rows * columns // 192)))


def _family(outs: int) -> str:
    """The kernels for a layer with so many outputs."""
    return "conv_matrix" if outs >= FEW else "conv_thread"


def _channels_last(outs: int) -> bool:
    """Whether outputs lie in memory with their channels next to each other, as matrix units read them."""
    return _family(outs) == "conv_matrix" and "conv_matrix" in gpu.KERNELS


def _outputs(x: Tensor, weight: Tensor, bias: Tensor, padding: int, pool: bool) -> tuple[Tensor, Tensor]:
    """Empty tensors for the output and its corners."""
    lanes, samples, _, *sides = x.shape
    rows, columns = ((side + 2 * padding - weight.shape[3] + 1) // (2 if pool else 1) for side in sides)
    shape = [lanes, samples, weight.shape[1], rows, columns]
    last = _channels_last(weight.shape[1])
    return _empty(x, shape, last), _empty(x, shape, last, torch.uint8)


def _gradients(
    grads: Tensor, corners: Tensor, x: Tensor, weight: Tensor, padding: int, pool: bool, pieces: int, inputs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for the gradients of weight and bias, by piece of the batch, and of the input."""
    lanes, outs, *sides = weight.shape
    weights = x.new_empty((lanes, pieces, outs, *sides), dtype=wide_type(x))
    biases = x.new_empty((lanes, pieces, outs), dtype=wide_type(x))
    return weights, biases, _empty(x, list(x.shape), x.stride(2) == 1) if inputs else x.new_empty(0)


def _empty(like: Tensor, shape: list[int], last: bool, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of that shape; with `last` its channels are the last axis in memory."""
    lanes, samples, channels, rows, columns = shape
    if not last:
        return like.new_empty(shape, dtype=dtype)
    return like.new_empty((lanes, samples, rows, columns, channels), dtype=dtype).permute(0, 1, 4, 2, 3)


# by torch: lanes are the groups of one convolution


def _plain(x: Tensor, weight: Tensor, bias: Tensor, padding: int, pool: bool) -> tuple[Tensor, Tensor]:
    values = F.conv2d(_groups(x), weight.flatten(0, 1), bias.flatten(), padding=padding, groups=len(x)).relu()
    corner: Tensor | int = 0
    if pool:
        columns = values.shape[3]
        values, index = F.max_pool2d(values, 2, return_indices=True)
        corner = index // columns % 2 * 2 + index % columns % 2
    out, corners = _outputs(x, weight, bias, padding, pool)
    out.copy_(_lanes(values, len(x)))
    corners.copy_(_lanes(torch.where(values > 0, corner, CUT), len(x)))
    return out, corners


def _plain_back(
    grads: Tensor, corners: Tensor, x: Tensor, weight: Tensor, padding: int, pool: bool, pieces: int, inputs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    weights, biases, inner = _gradients(grads, corners, x, weight, padding, pool, pieces, inputs)
    if pieces > 1:  # a piece of the batch is treated as a lane
        grads, corners, x = (part.reshape(len(x) * pieces, -1, *part.shape[2:]) for part in (grads, corners, x))
        weight = weight.repeat_interleave(pieces, 0)
    spread = _groups(_spread(grads, corners, x, weight, padding, pool))
    of_input, of_weight, of_bias = torch.ops.aten.convolution_backward(
        spread, _groups(x), weight.flatten(0, 1), [spread.shape[1]], [1, 1], [padding] * 2, [1, 1], False, [0, 0],
        len(x), [inputs, True, True],
    )  # fmt: skip
    weights.copy_(of_weight.view(weights.shape))
    biases.copy_(of_bias.view(biases.shape))
    if inputs:
        inner.copy_(_lanes(of_input, len(x)).reshape(inner.shape))
    return weights, biases, inner


def _spread(grads: Tensor, corners: Tensor, x: Tensor, weight: Tensor, padding: int, pool: bool) -> Tensor:
    """The gradient before ReLU and pooling: the gradient of an output goes to the corner that held the maximum."""
    if not pool:
        return torch.where(corners == 0, grads, 0.0)
    parts = [torch.where(corners == corner, grads, 0.0) for corner in range(4)]
    rows = [torch.stack(pair, -1).flatten(-2) for pair in (parts[:2], parts[2:])]
    spread = torch.stack(rows, -2).flatten(-3, -2)
    # pooling drops an odd row or column at the end
    dropped = [x.shape[axis] + 2 * padding - weight.shape[3] + 1 - spread.shape[axis] for axis in (3, 4)]
    return F.pad(spread, (0, dropped[1], 0, dropped[0]))


def _groups(x: Tensor) -> Tensor:
    """[lane, sample, channel, ...] as [sample, lane * channel, ...]."""
    return x.transpose(0, 1).flatten(1, 2)


def _lanes(x: Tensor, lanes: int) -> Tensor:
    """[sample, lane * channel, ...] as [lane, sample, channel, ...]."""
    return x.view(len(x), lanes, -1, *x.shape[2:]).transpose(0, 1)


# by the GPU kernels


def _fused(x: Tensor, weight: Tensor, bias: Tensor, padding: int, pool: bool) -> tuple[Tensor, Tensor]:
    kernels = gpu.kernels(_family(weight.shape[1]))
    if kernels is None:
        return _plain(x, weight, bias, padding, pool)
    out, corners = _outputs(x, weight, bias, padding, pool)
    kernels.forward(x, weight, bias, out, corners, padding=padding, pool=pool)
    return out, corners


def _fused_back(
    grads: Tensor, corners: Tensor, x: Tensor, weight: Tensor, padding: int, pool: bool, pieces: int, inputs: bool
) -> tuple[Tensor, Tensor, Tensor]:
    family = _family(weight.shape[1])
    kernels = gpu.kernels(family)
    if kernels is None:
        return _plain_back(grads, corners, x, weight, padding, pool, pieces, inputs)
    weights, biases, inner = _gradients(grads, corners, x, weight, padding, pool, pieces, inputs)
    where: Tensor | None = corners
    if family == "conv_matrix" and (pool or inputs):
        grads, where = kernels.spread(grads, corners, pool=pool), None
    kernels.backward_weights(grads, where, x, weights, biases, padding=padding, pool=pool)
    if inputs:
        kernels.backward_inputs(grads, where, weight, inner, padding=padding, pool=pool)
    return weights, biases, inner


for _device, _forward, _back in (
    ("CPU", _plain, _plain_back),
    ("CUDA", _fused, _fused_back),
    ("Meta", _outputs, _gradients),  # for the compiler: shapes and memory layout
):
    _library.impl("relu_convolve", _forward, _device)
    _library.impl("relu_convolve_back", _back, _device)
