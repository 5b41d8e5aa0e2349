"""Group and batch normalisation over lanes, with the shortcut and ReLU that follow and the backward pass written out.

Batch normalisation is group normalisation with one channel a group whose moments are pooled over the samples of a lane.
Padding has no share in them and leaves with the offset alone, so it reaches neither statistics nor gradients and every
count has the same shape. Activations are [lane, sample, row, column, channel], statistics float32 or wider. On a GPU
group normalisation is one kernel each way (`kernels.group_norms_gpu`), which a compiler takes as it is.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedgma.training.fast import gpu
from fedgma.training.fast.layers import wide_type
from fedgma.training.gradients import Product
from fedgma.training.stacked import Stacked

MOST = 32768  # values of a group that one pass takes

_library: Any = torch.library.Library("fedgma", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "group_norm(Tensor x, Tensor weight, Tensor bias, Tensor? beside, int groups, float epsilon, bool relu)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "group_norm_back(Tensor grads, Tensor? more, Tensor? out, Tensor x, Tensor mean, Tensor scale, Tensor weight,"
    " Tensor bias, bool relu) -> (Tensor, Tensor, Tensor, Tensor)"
)


class Norm(NamedTuple):
    """What is normalised together: so many groups of a sample's channels, or for None a channel of the whole batch."""

    groups: int | None
    epsilon: float
    momentum: float = 0.0  # of the running statistics


class Normal(NamedTuple):
    """What a normalisation keeps: its input, mean and 1 / deviation of every sample's groups, and what came of it."""

    x: Tensor
    mean: Tensor  # [lane, sample or 1, 1, 1, group, 1]; [lane, sample, group] by the kernel
    scale: Tensor
    variance: Tensor | None  # none by the kernel
    share: Tensor | None  # [lane, sample, 1, 1, 1, 1]: the part of a sample in its batch, where batches are normalised
    out: Tensor | None = None  # of ReLU, if it followed
    added: bool = False  # whether there was something beside


def norm_of(model: nn.Module) -> Norm | None:
    """How a model normalises, if it does so in one way that is written out here."""
    kinds = (nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LayerNorm)
    found = {_norm(part) for part in model.modules() if isinstance(part, kinds)}
    return found.pop() if len(found) == 1 else None


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
    beside: Tensor | None = None,
    relu: bool = False,
) -> tuple[Tensor, Normal]:
    """The normalised input, scaled and moved, with what is `beside` it added and ReLU if asked for.

    `count` is how many samples of a lane are real, None in evaluation.
    """
    weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
    if norm.groups is not None and _by_kernel(norm.groups, x):
        out, mean, scale = torch.ops.fedgma.group_norm(x, weight, bias, beside, norm.groups, norm.epsilon, relu)
        return out, Normal(x, mean, scale, None, None, out if relu else None, beside is not None)
    mean, variance, share = _moments(norm, x, state, name, count)
    scale = torch.rsqrt(variance + norm.epsilon)
    kept = Normal(x, mean, scale if share is None else scale * (share > 0), variance, share)
    out = (_unit(norm, kept) * _wide(weight) + _wide(bias)).to(x.dtype)
    out = out if beside is None else out + beside
    out = out.relu() if relu else out
    return out, kept._replace(out=out if relu else None, added=beside is not None)


def _moments(
    norm: Norm, x: Tensor, state: Stacked, name: str, count: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Mean, variance and shares that an input is normalised by."""
    if norm.groups is None and count is None:
        mean, variance = (state[f"{name}.running_{kind}"][:, None, None, None, :, None] for kind in ("mean", "var"))
        return mean, variance, None
    variance, mean = torch.var_mean(_parts(norm, x), (2, 3, 5), correction=0, keepdim=True)
    if norm.groups is not None or count is None:
        return mean, variance, None
    share = shares(x.shape[1], count, mean.dtype)
    together = _pooled(mean, share)
    return together, _pooled(variance + (mean - together).square(), share), share


def normal_back(
    norm: Norm, grads: Sequence[Tensor], kept: Normal, params: Stacked, name: str, found: dict[str, Tensor | Product]
) -> tuple[Tensor, Tensor]:
    """The gradients of the input and of what was beside it; those of scale and offset go into `found`.

    The gradient of the output may come in two parts, which are added.
    """
    if norm.groups is not None and _by_kernel(norm.groups, kept.x):
        first, second = (*grads, None)[:2]
        state = (kept.x, kept.mean, kept.scale, params[f"{name}.weight"], params[f"{name}.bias"])
        out = kept.out if kept.added else None
        inner, beside, plain, along = torch.ops.fedgma.group_norm_back(first, second, out, *state, kept.out is not None)
        found[f"{name}.bias"], found[f"{name}.weight"] = plain.sum(1), along.sum(1)
        return inner, beside
    beside = grads[0] if len(grads) == 1 else grads[0] + grads[1]
    if kept.out is not None:
        beside = torch.where(kept.out > 0, beside, 0.0)
    lanes, samples, rows, columns, channels = kept.x.shape
    wide, flat = beside.to(wide_type(beside)), _unit(norm, kept)
    plain, along = wide.sum((2, 3)), (wide * flat).sum((2, 3))  # [lane, sample, channel]
    found[f"{name}.bias"], found[f"{name}.weight"] = plain.sum(1), along.sum(1)
    weight, size = params[f"{name}.weight"].to(wide.dtype), channels // (norm.groups or channels)

    def spread(each: Tensor) -> Tensor:
        return each.expand(-1, -1, -1, -1, -1, size).reshape(lanes, -1, 1, 1, channels)

    def level(sums: Tensor) -> Tensor:
        each = (sums * weight[:, None]).view(lanes, samples, 1, 1, -1, size).sum(5, keepdim=True)
        return spread(_pooled(each / (rows * columns * size), kept.share))

    moved = wide * _wide(weight) - level(plain) - flat * level(along)
    return (spread(kept.scale) * moved).to(beside.dtype), beside


def running(norm: Norm, kept: Normal, buffers: Stacked, name: str, count: Tensor) -> Stacked:
    """The running statistics of a batch normalisation after this batch; none for groups."""
    if norm.groups is not None or kept.variance is None:
        return {}
    rows, columns = kept.x.shape[2:4]
    seen = (count * (rows * columns))[:, None].to(kept.mean.dtype)
    new = {"mean": kept.mean.flatten(1), "var": kept.variance.flatten(1) * (seen / (seen - 1).clamp(min=1))}
    after = {f"{name}.running_{kind}": value for kind, value in new.items()}
    after = {key: torch.lerp(buffers[key], value, norm.momentum) for key, value in after.items()}
    return {**after, f"{name}.num_batches_tracked": buffers[f"{name}.num_batches_tracked"] + 1}


def shares(samples: int, count: Tensor, kind: torch.dtype = torch.float32) -> Tensor:
    """The part of every sample in the batch of its lane: 1 / count, and 0 for padding.

    >>> shares(3, torch.tensor([2, 0])).flatten(1)
    tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    real = torch.arange(samples, device=count.device) < count[:, None]
    return (real.to(kind) / count.clamp(min=1)[:, None])[:, :, None, None, None, None]


def _pooled(each: Tensor, share: Tensor | None) -> Tensor:
    """The mean over the real samples of a batch; what belongs to one sample alone stays as it is."""
    return each if share is None else (each * share).sum(1, keepdim=True)


def _unit(norm: Norm, kept: Normal) -> Tensor:
    return ((_parts(norm, kept.x) - kept.mean) * kept.scale).view(kept.x.shape)


def _parts(norm: Norm, x: Tensor) -> Tensor:
    """The channels of activations in their groups: [lane, sample, row, column, group, channel]."""
    return x.to(wide_type(x)).view(*x.shape[:4], norm.groups or x.shape[4], -1)


def _wide(per_channel: Tensor) -> Tensor:
    """[lane, channel] to multiply activations by."""
    return per_channel[:, None, None, None]


# with the kernels


def _by_kernel(groups: int, x: Tensor) -> bool:
    """Whether a GPU normalises these groups in one pass."""
    _, _, rows, columns, channels = x.shape
    there = gpu.TRITON and x.device.type == "cuda" and x.dtype != torch.float64
    return there and fits(rows * columns, channels // groups)


def fits(places: int, size: int) -> bool:
    """Whether the kernel takes groups of so many channels: powers of two that the registers of a program hold.

    >>> fits(1024, 32), fits(49, 32), fits(4096, 32)
    (True, False, False)
    """
    return places.bit_count() == 1 and size.bit_count() == 1 and places * size <= MOST


def _quick(
    x: Tensor, weight: Tensor, bias: Tensor, beside: Tensor | None, groups: int, epsilon: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    fused = gpu.kernels("group_norm")
    assert fused is not None
    out, mean, scale = found = _outputs(x, weight, bias, beside, groups, epsilon, relu)
    given = (_solid(value) for value in (x, weight, bias, beside))
    fused.forward(*given, out, mean, scale, epsilon=epsilon, relu=relu)
    return found


def _outputs(
    x: Tensor, weight: Tensor, bias: Tensor, beside: Tensor | None, groups: int, epsilon: float, relu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty((*x.shape[:2], groups), dtype=torch.float32)
    return x.new_empty(x.shape), mean, torch.empty_like(mean)


def _quick_back(
    grads: Tensor, more: Tensor | None, out: Tensor | None, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor,
    bias: Tensor, relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    fused = gpu.kernels("group_norm")
    assert fused is not None
    inner, beside, plain, along = found = _gradients(grads, more, out, x, mean, scale, weight, bias, relu)
    given = (_solid(value) for value in (grads, more, out, x, mean, scale, weight, bias))
    mask = fused.NONE if not relu else fused.OWN if out is None else fused.OUT
    fused.backward(*given, beside, inner, plain, along, mask=mask)
    return found


def _gradients(
    grads: Tensor, more: Tensor | None, out: Tensor | None, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor,
    bias: Tensor, relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Places for the gradients of x, of what was beside it (empty where nothing was), of offset and scale by sample."""
    plain = x.new_empty((*x.shape[:2], x.shape[4]), dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape if relu and out is not None else 0), plain, torch.empty_like(plain)


def _solid(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.contiguous()


for _device, _forward, _back in (("CUDA", _quick, _quick_back), ("Meta", _outputs, _gradients)):
    _library.impl("group_norm", _forward, _device)
    _library.impl("group_norm_back", _back, _device)
