"""3x3 convolutions of many lanes, each with its own weights, as operators that the compiler does not look into.

In bfloat16 on an H100, one kernel of our own does all lanes (`gpu.conv_3x3`). Elsewhere each lane is one call of cuDNN,
since no library is fast at convolutions with separate weights for every group. Lanes take turns on a few streams, so
that lanes too small to fill the device run side by side. Activations are [lane, sample, row, column, channel], weights
[lane, out, row, column, in].

Buys: not measured since; row "lanes on four streams" of `benchmarks/bench_parts.py` does.
"""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgma.training.fast import gpu
from fedgma.training.fast.layers import pieces_of

STREAMS = 4
ROOM = 200_000  # bytes of shared memory that our kernels need

_library: Any = torch.library.Library("fedgma", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("convolve(Tensor x, Tensor weight, int stride) -> Tensor")
_library.define("convolve_inputs(Tensor grads, Tensor weight, int rows, int columns, int stride) -> Tensor")
_library.define("convolve_weights(Tensor grads, Tensor x, int stride) -> Tensor")


def convolve(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
    """A convolution with a border of zeros."""
    return torch.ops.fedgma.convolve(x, weight, stride)  # type: ignore[no-any-return]


def convolve_inputs(grads: Tensor, weight: Tensor, rows: int, columns: int, stride: int = 1) -> Tensor:
    """The gradient of the input [lane, sample, rows, columns, in]."""
    return torch.ops.fedgma.convolve_inputs(grads, weight, rows, columns, stride)  # type: ignore[no-any-return]


def flipped(weight: Tensor) -> Tensor:
    """Weights flipped, inputs and outputs exchanged: a convolution with them takes gradients back to the input."""
    return weight.flip(2, 3).permute(0, 4, 2, 3, 1).contiguous()


def convolve_weights(grads: Tensor, x: Tensor, stride: int = 1) -> Tensor:
    """The gradient of the weights."""
    return torch.ops.fedgma.convolve_weights(grads, x, stride)  # type: ignore[no-any-return]


def _own(x: Tensor, out: Tensor, stride: int) -> ModuleType | None:
    """Our own kernels, if they do a layer with such inputs and outputs; else cuDNN does."""
    return gpu.kernels("conv_3x3") if does(x, x.shape, out.shape[4], stride) else None


def does(like: Tensor, shape: Sequence[int], outs: int, stride: int) -> bool:
    """Whether our own kernels do a convolution of inputs of this shape, on the device and in the type of `like`."""
    rows, columns, inputs = shape[2:]
    if like.device.type != "cuda" or like.dtype != torch.bfloat16 or rows % stride or columns % stride:
        return False
    own = gpu.kernels("conv_3x3") if _copies_blocks(like.device) else None
    return own is not None and own.fits(rows // stride, columns // stride, inputs, outs, stride)


def by_own_kernels() -> bool:
    """Whether our own kernels do bfloat16 on the present GPU; the compiler asks once."""
    return "conv_3x3" in gpu.KERNELS and torch.cuda.is_available() and _copies_blocks(torch.device("cuda"))


# as `torch.compiler.assume_constant_result` does, which would import the compiler: that takes longer than fedgma itself
by_own_kernels._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _copies_blocks(device: torch.device) -> bool:
    """Whether a GPU has the units that our kernels copy blocks of images with, and room for them: an H100 or B200."""
    room = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0) and room >= ROOM


def _convolve(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    out = _output(x, weight, stride)
    if own := _own(x, out, stride):
        own.forward(x, weight, out, own.tile_of(out), stride=stride)
        return out

    def lane(i: int) -> None:
        image, filters, target = _first(x[i]), _first(weight[i]), _first(out[i])
        if x.is_cuda:
            flags = (False, torch.backends.cudnn.deterministic, torch.backends.cudnn.allow_tf32)
            torch.ops.aten.cudnn_convolution.out(image, filters, [1, 1], [stride] * 2, [1, 1], 1, *flags, out=target)
        else:
            target.copy_(F.conv2d(image, filters, stride=stride, padding=1))

    _each(len(x), x.device, lane)
    return out


def _convolve_inputs(grads: Tensor, weight: Tensor, rows: int, columns: int, stride: int) -> Tensor:
    out = grads.new_empty((*grads.shape[:2], rows, columns, weight.shape[4]))
    if own := _own(out, grads, stride):
        own.backward_inputs(grads, weight, out, own.tile_of(out), stride=stride)
        return out
    if stride == 1:  # a forward convolution is what libraries do best
        return _convolve(grads, flipped(weight), 1)

    def lane(i: int) -> None:
        like = _first(out[i])
        like.copy_(_backward(_first(grads[i]), like, _first(weight[i]), stride, [True, False, False])[0])

    _each(len(grads), grads.device, lane)
    return out


def _convolve_weights(grads: Tensor, x: Tensor, stride: int) -> Tensor:
    out = grads.new_empty((len(grads), grads.shape[4], 3, 3, x.shape[4]))
    if own := _own(x, grads, stride):
        return _own_weights(own, grads, x, out, stride)

    def lane(i: int) -> None:
        like = _first(out[i])
        like.copy_(_backward(_first(grads[i]), _first(x[i]), like, stride, [False, True, False])[1])

    _each(len(grads), grads.device, lane)
    return out


def _own_weights(own: ModuleType, grads: Tensor, x: Tensor, out: Tensor, stride: int) -> Tensor:
    """The gradient of the weights by our kernels; in pieces of the batch where few lanes would not fill the device."""
    tile, taps = own.tile_of_weights(grads.shape[4], x.shape[4])
    pieces = pieces_of(len(x) * own.programs(tile, taps, out), own.tiles(tile, grads), least=own.PROGRAMS)
    if pieces == 1:
        own.backward_weights(grads, x, out[:, None], tile, taps=taps, stride=stride)
        return out
    parts = out.new_empty((len(out), pieces, *out.shape[1:]), dtype=torch.float32)
    own.backward_weights(grads, x, parts, tile, taps=taps, stride=stride)
    return parts.sum(1).to(out.dtype)


def _backward(grads: Tensor, x: Tensor, weight: Tensor, stride: int, wanted: list[bool]) -> tuple[Tensor, ...]:
    geometry = ([stride] * 2, [1, 1], [1, 1])  # stride, padding, dilation
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        grads, x, weight, None, *geometry, False, [0, 0], 1, wanted
    )


def _first(x: Tensor) -> Tensor:
    """A view with channels before rows and columns, as torch orders the axes."""
    return x.permute(0, 3, 1, 2)


def _each(lanes: int, device: torch.device, work: Callable[[int], None]) -> None:
    """Do every lane's work; on a GPU on a few streams in turn, so that small pieces of it run side by side."""
    if device.type != "cuda":
        for lane in range(lanes):
            work(lane)
        return
    main, streams = torch.cuda.current_stream(device), _streams(device)
    for begin, stream in enumerate(streams[:lanes]):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            for lane in range(begin, lanes, len(streams)):
                work(lane)
    for stream in streams[:lanes]:
        main.wait_stream(stream)


@functools.cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(STREAMS)]  # type: ignore[no-untyped-call]


def _output(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    lanes, samples, rows, columns, _ = x.shape
    return x.new_empty((lanes, samples, -(-rows // stride), -(-columns // stride), weight.shape[1]))


for _device in ("CPU", "CUDA"):
    _library.impl("convolve", lambda x, w, s: _convolve(x.contiguous(), w.contiguous(), s), _device)
    _library.impl(
        "convolve_inputs", lambda g, w, r, c, s: _convolve_inputs(g.contiguous(), w.contiguous(), r, c, s), _device
    )
    _library.impl("convolve_weights", lambda g, x, s: _convolve_weights(g.contiguous(), x.contiguous(), s), _device)

# for the compiler: shapes, and that results are contiguous
_library.impl("convolve", _output, "Meta")
_library.impl("convolve_inputs", lambda g, w, r, c, s: g.new_empty((*g.shape[:2], r, c, w.shape[4])), "Meta")
_library.impl("convolve_weights", lambda g, x, s: g.new_empty((len(g), g.shape[4], 3, 3, x.shape[4])), "Meta")
