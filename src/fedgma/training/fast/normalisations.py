"""Group and batch normalisation over lanes, together with the shortcut and the ReLU that follow, and their gradients.

Batch normalisation is group normalisation with one channel per group and moments pooled over the samples of a lane.
Padding has no share in the moments and is normalised to the offset alone, so it reaches neither statistics nor
gradients, and batches of every size have the same shape. Activations are [lane, sample, row, column, channel],
statistics float32 or wider. It is plain torch for the compiler to fuse; in bfloat16 on a GPU, group normalisation is
one kernel each way (`gpu.group_norm`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedgma.training.fast import gpu
from fedgma.training.fast.layers import wide_type
from fedgma.training.gradients import Product
from fedgma.training.stacked import Stacked

MOST = 32768  # values in a group that one pass can hold

_library: Any = torch.library.Library("fedgma", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "group_norm(Tensor x, Tensor weight, Tensor bias, Tensor? shortcut, int groups, float epsilon, bool relu)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "group_norm_back(Tensor grads, Tensor? more, Tensor? out, Tensor x, Tensor mean, Tensor scale, Tensor weight,"
    " Tensor bias, bool relu) -> (Tensor, Tensor, Tensor, Tensor)"
)


class Norm(NamedTuple):
    """How a model normalises: so many groups of each sample's channels, or for None each channel of the batch."""

    groups: int | None
    epsilon: float
    momentum: float = 0.0  # of the running statistics


class Saved(NamedTuple):
    """What the forward pass keeps: its input, the mean and 1 / deviation of every group, and its output."""

    x: Tensor
    mean: Tensor  # [lane, sample or 1, 1, 1, group, 1]; by the kernel [lane, sample, group]
    scale: Tensor
    variance: Tensor | None  # None by the kernel
    share: Tensor | None  # [lane, sample, 1, 1, 1, 1]: each sample's share of its batch, where batches are normalised
    out: Tensor | None = None  # after ReLU, if there was one
    added: bool = False  # whether there was a shortcut


def norm_of(model: nn.Module) -> Norm | None:
    """How a model normalises, or None where it does so in several ways or in one that is not written out here."""
    kinds = (nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LayerNorm)
    norms = {_norm(part) for part in model.modules() if isinstance(part, kinds)}
    return norms.pop() if len(norms) == 1 else None


def _norm(part: nn.Module) -> Norm | None:
    if type(part) is nn.GroupNorm and part.affine:
        return Norm(part.num_groups, part.eps)
    if type(part) is nn.BatchNorm2d and part.affine and part.track_running_stats and part.momentum is not None:
        return Norm(None, part.eps, part.momentum)
    return None


def normalise(
    norm: Norm,
    x: Tensor,
    state: Stacked,
    name: str,
    count: Tensor | None,
    *,
    shortcut: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, Saved]:
    """The normalised input times weight plus bias, plus the shortcut if any, through ReLU if asked for.

    `count` is the number of real samples of each lane, None in evaluation.
    """
    weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
    if norm.groups is not None and by_kernel(norm.groups, x):
        out, mean, scale = torch.ops.fedgma.group_norm(x, weight, bias, shortcut, norm.groups, norm.epsilon, relu)
        return out, Saved(x, mean, scale, None, None, out if relu else None, shortcut is not None)
    mean, variance, share = _moments(norm, x, state, name, count)
    scale = torch.rsqrt(variance + norm.epsilon)
    saved = Saved(x, mean, scale if share is None else scale * (share > 0), variance, share)
    out = _unit(norm, saved) * _wide(weight) + _wide(bias)
    out = out if shortcut is None else out + shortcut  # still wide: rounding would decide which units are off
    out = (out.relu() if relu else out).to(x.dtype)
    return out, saved._replace(out=out if relu else None)


def _moments(
    norm: Norm, x: Tensor, state: Stacked, name: str, count: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Mean and variance to normalise by, and the samples' shares of their batch."""
    if norm.groups is None and count is None:
        mean, variance = (state[f"{name}.running_{kind}"][:, None, None, None, :, None] for kind in ("mean", "var"))
        return mean, variance, None
    variance, mean = torch.var_mean(_grouped(norm, x), (2, 3, 5), correction=0, keepdim=True)
    if norm.groups is not None or count is None:
        return mean, variance, None
    share = shares(x.shape[1], count, mean.dtype)
    of_batch = _pooled(mean, share)
    return of_batch, _pooled(variance + (mean - of_batch).square(), share), share


def normalise_back(
    norm: Norm,
    grads: Sequence[Tensor],
    saved: Saved,
    params: Stacked,
    name: str,
    gradients: dict[str, Tensor | Product],
) -> tuple[Tensor, Tensor]:
    """The gradients of the input and of the shortcut; those of weight and bias are put into `gradients`.

    The gradient of the output may be given in two parts, which are added.
    """
    if norm.groups is not None and by_kernel(norm.groups, saved.x):
        first, second = (*grads, None)[:2]
        state = (saved.x, saved.mean, saved.scale, params[f"{name}.weight"], params[f"{name}.bias"])
        out = saved.out if saved.added else None
        inner, outer, *sums = torch.ops.fedgma.group_norm_back(first, second, out, *state, saved.out is not None)
        gradients[f"{name}.bias"], gradients[f"{name}.weight"] = (values.sum(1) for values in sums)
        return inner, outer
    wide = sum((part.to(wide_type(part)) for part in grads[1:]), grads[0].to(wide_type(grads[0])))
    if saved.out is not None:
        wide = torch.where(saved.out > 0, wide, 0.0)
    inner, plain, scaled = _input_gradient(norm, wide, saved, params[f"{name}.weight"])
    outer, inner = wide.to(grads[0].dtype), inner.to(grads[0].dtype)
    gradients[f"{name}.bias"], gradients[f"{name}.weight"] = plain.sum(1), scaled.sum(1)
    return inner, outer


def _input_gradient(norm: Norm, grads: Tensor, saved: Saved, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the input; sums of the gradient, and of its product with the normalised input, by channel."""
    lanes, samples, rows, columns, channels = saved.x.shape
    unit = _unit(norm, saved)
    plain, scaled = grads.sum((2, 3)), (grads * unit).sum((2, 3))  # [lane, sample, channel]
    weight, size = weight.to(grads.dtype), channels // (norm.groups or channels)

    def spread(per_group: Tensor) -> Tensor:
        return per_group.expand(-1, -1, -1, -1, -1, size).reshape(lanes, -1, 1, 1, channels)

    def mean(sums: Tensor) -> Tensor:
        per_group = (sums * weight[:, None]).view(lanes, samples, 1, 1, -1, size).sum(5, keepdim=True)
        return spread(_pooled(per_group / (rows * columns * size), saved.share))

    centred = grads * _wide(weight) - mean(plain) - unit * mean(scaled)
    return spread(saved.scale) * centred, plain, scaled


def running(norm: Norm, saved: Saved, buffers: Stacked, name: str, count: Tensor) -> Stacked:
    """The running statistics of a batch normalisation after this batch; none for group normalisation."""
    if norm.groups is not None or saved.variance is None:
        return {}
    rows, columns = saved.x.shape[2:4]
    seen = (count * (rows * columns))[:, None].to(saved.mean.dtype)
    new = {"mean": saved.mean.flatten(1), "var": saved.variance.flatten(1) * (seen / (seen - 1).clamp(min=1))}
    after = {f"{name}.running_{kind}": value for kind, value in new.items()}
    after = {key: torch.lerp(buffers[key], value, norm.momentum) for key, value in after.items()}
    return {**after, f"{name}.num_batches_tracked": buffers[f"{name}.num_batches_tracked"] + 1}


def shares(samples: int, count: Tensor, kind: torch.dtype = torch.float32) -> Tensor:
    """Every sample's share of the batch of its lane: 1 / count, and 0 for padding.

    >>> shares(3, torch.tensor([2, 0])).flatten(1)
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    real = torch.arange(samples, device=count.device) < count[:, None]
    return (real.to(kind) / count.clamp(min=1)[:, None])[:, :, None, None, None, None]


def _pooled(per_sample: Tensor, share: Tensor | None) -> Tensor:
    """The mean over the real samples of a batch; without shares every sample keeps its own value."""
    return per_sample if share is None else (per_sample * share).sum(1, keepdim=True)


def _unit(norm: Norm, saved: Saved) -> Tensor:
    """The input, normalised."""
    return ((_grouped(norm, saved.x) - saved.mean) * saved.scale).view(saved.x.shape)


def _grouped(norm: Norm, x: Tensor) -> Tensor:
    """Activations with their channels in groups: [lane, sample, row, column, group, channel]."""
    return x.to(wide_type(x)).view(*x.shape[:4], norm.groups or x.shape[4], -1)


def _wide(per_channel: Tensor) -> Tensor:
    """[lane, channel], to multiply activations by."""
    return per_channel[:, None, None, None]


# group normalisation by the GPU kernels


def by_kernel(groups: int, x: Tensor) -> bool:
    """Whether a GPU kernel normalises these groups: in bfloat16, of powers of two that registers hold."""
    _, _, rows, columns, channels = x.shape
    available = "group_norm" in gpu.KERNELS and x.device.type == "cuda" and x.dtype == torch.bfloat16
    sizes = (rows * columns, channels // groups)
    return available and all(size.bit_count() == 1 for size in sizes) and sizes[0] * sizes[1] <= MOST


def _fused(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, groups: int, epsilon: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    kernels = gpu.kernels("group_norm")
    assert kernels is not None
    out, mean, scale = _outputs(x, weight, bias, shortcut, groups, epsilon, relu)
    inputs = (_contiguous(value) for value in (x, weight, bias, shortcut))
    kernels.forward(*inputs, out, mean, scale, epsilon=epsilon, relu=relu)
    return out, mean, scale


def _outputs(
    x: Tensor, weight: Tensor, bias: Tensor, shortcut: Tensor | None, groups: int, epsilon: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty tensors for the output, and for mean and scale of every group."""
    mean = x.new_empty((*x.shape[:2], groups), dtype=torch.float32)
    return x.new_empty(x.shape), mean, torch.empty_like(mean)


def _fused_back(
    grads: Tensor, more: Tensor | None, out: Tensor | None, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor,
    bias: Tensor, relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    kernels = gpu.kernels("group_norm")
    assert kernels is not None
    inner, outer, plain, scaled = _gradients(grads, more, out, x, mean, scale, weight, bias, relu)
    inputs = (_contiguous(value) for value in (grads, more, out, x, mean, scale, weight, bias))
    mask = kernels.NONE if not relu else kernels.BY_INPUT if out is None else kernels.BY_OUTPUT
    kernels.backward(*inputs, outer, inner, plain, scaled, mask=mask)
    return inner, outer, plain, scaled


def _gradients(
    grads: Tensor, more: Tensor | None, out: Tensor | None, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor,
    bias: Tensor, relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Empty tensors for the gradients of x, of the shortcut (none without one), of bias and weight by sample."""
    plain = x.new_empty((*x.shape[:2], x.shape[4]), dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape if relu and out is not None else 0), plain, torch.empty_like(plain)


def _contiguous(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.contiguous()


for _device, _forward, _back in (("CUDA", _fused, _fused_back), ("Meta", _outputs, _gradients)):
    _library.impl("group_norm", _forward, _device)
    _library.impl("group_norm_back", _back, _device)
