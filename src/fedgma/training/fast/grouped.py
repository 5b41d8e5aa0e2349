"""3x3 convolutions of any module in lanes: what the compiler puts in place of grouped convolutions.

`vmap` turns a convolution with separate weights for every lane into one with a group for each lane, which no library is
fast at. In bfloat16 on an H100 the compiler is given these two functions for it. They take the lanes apart again and
call the operators of `torch_ops`, whose kernels do all lanes at once.

Buys, on an H200: 1.8 for a VGG of six convolutions, 10 lanes (15.2 against 8.3 ms a round, in two calls; the jobs VGG
of `benchmarks/bench_lanes.py` measure both).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgma.training.fast.torch_ops import convolve, convolve_inputs, convolve_weights, does

NARROW = 8  # channels that a lane has at least; fewer are filled up with zeros
Table = dict[Any, Callable[..., Any]]


def with_lanes(table: Table) -> Table:
    """A table of decompositions, in which convolutions with a group for each lane are done by our operators."""
    aten = torch.ops.aten
    ours: Table = {aten.convolution.default: convolution, aten.convolution_backward.default: convolution_backward}
    return {**table, **{name: _or_else(work, table.get(name)) for name, work in ours.items()}}


def _or_else(work: Callable[..., Any], before: Callable[..., Any] | None) -> Callable[..., Any]:
    """What comes first and knows what to do."""

    def call(*arguments: Any) -> Any:
        result = work(*arguments)
        return before(*arguments) if result is NotImplemented and before is not None else result

    return call


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Any:
    """`aten.convolution`; NotImplemented for those that are not of lanes, or that our kernels do not do."""
    if not _suits(x, weight, stride, padding, dilation, transposed, groups):
        return NotImplemented
    out = convolve(_images(x, groups), _filters(weight, groups), stride[0])
    out = out.permute(1, 0, 4, 2, 3).flatten(1, 2)
    return out if bias is None else out + bias[:, None, None]


def convolution_backward(
    grads: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    wanted: list[bool],
) -> Any:
    """`aten.convolution_backward`, likewise."""
    if not _suits(x, weight, stride, padding, dilation, transposed, groups):
        return NotImplemented
    (outs, inputs), lanes = weight.shape[:2], groups
    split = _images(grads, lanes)
    of_x = of_weight = of_bias = None
    if wanted[0]:
        rows, columns = x.shape[2:]
        of_x = convolve_inputs(split, _filters(weight, lanes), rows, columns, stride[0])[..., :inputs]
        of_x = of_x.permute(1, 0, 4, 2, 3).flatten(1, 2)
    if wanted[1]:
        of_weight = convolve_weights(split, _images(x, lanes), stride[0])[..., :inputs]
        of_weight = of_weight.permute(0, 1, 4, 2, 3).reshape(outs, inputs, 3, 3)
    if wanted[2]:
        of_bias = grads.sum((0, 2, 3))
    return of_x, of_weight, of_bias


def _suits(
    x: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    groups: int,
) -> bool:
    """Whether this is a 3x3 convolution with a border of zeros, in groups, that our kernels do."""
    plain = x.dim() == 4 and groups > 1 and not transposed and weight.shape[2:] == (3, 3)
    if not plain or [*padding, *dilation] != [1, 1, 1, 1] or stride not in ([1, 1], [2, 2]):
        return False
    inputs = max(weight.shape[1], NARROW)
    return does(x, (groups, len(x), *x.shape[2:], inputs), weight.shape[0] // groups, stride[0])


def _images(x: Tensor, lanes: int) -> Tensor:
    """[sample, lane and channel, row, column] as [lane, sample, row, column, channel]."""
    return _filled(torch.unflatten(x, 1, (lanes, -1)).permute(1, 0, 3, 4, 2))


def _filters(weight: Tensor, lanes: int) -> Tensor:
    """[lane and out, in, row, column] as [lane, out, row, column, in]."""
    return _filled(torch.unflatten(weight, 0, (lanes, -1)).permute(0, 1, 3, 4, 2))


def _filled(x: Tensor) -> Tensor:
    return F.pad(x, (0, max(0, NARROW - x.shape[-1]))).contiguous()
