"""Group and batch normalisation over lanes, with the backward pass written out.

Batch normalisation is group normalisation with one channel a group whose moments are pooled over the samples of a lane.
Padding has no share in them and leaves with the offset alone, so it reaches neither statistics nor gradients and every
count has the same shape. Activations are [lane, sample, row, column, channel], statistics float32 or wider.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedgma.trainers.cohorts import Stacked
from fedgma.trainers.gradients import Product
from fedgma.trainers.layers import wide_type


class Norm(NamedTuple):
    """What is normalised together: so many groups of a sample's channels, or for None a channel of the whole batch."""

    groups: int | None
    epsilon: float
    momentum: float = 0.0  # of the running statistics


class Normal(NamedTuple):
    """What a normalisation keeps: its input, and mean and 1 / deviation of every sample's groups."""

    x: Tensor
    mean: Tensor  # [lane, sample or 1, 1, 1, group, 1]
    scale: Tensor
    variance: Tensor
    share: Tensor | None  # [lane, sample, 1, 1, 1, 1]: the part of a sample in its batch, where batches are normalised


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


def normalise(norm: Norm, x: Tensor, state: Stacked, name: str, count: Tensor | None) -> tuple[Tensor, Normal]:
    """The normalised input, scaled and moved; `count` is how many samples of a lane are real, None in evaluation."""
    mean, variance, share = _moments(norm, x, state, name, count)
    scale = torch.rsqrt(variance + norm.epsilon)
    kept = Normal(x, mean, scale if share is None else scale * (share > 0), variance, share)
    return (_unit(norm, kept) * _wide(state[f"{name}.weight"]) + _wide(state[f"{name}.bias"])).to(x.dtype), kept


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
    norm: Norm, grads: Tensor, kept: Normal, params: Stacked, name: str, found: dict[str, Tensor | Product]
) -> Tensor:
    """The gradient of the input; those of scale and offset go into `found`."""
    lanes, samples, rows, columns, channels = grads.shape
    wide, flat = grads.to(wide_type(grads)), _unit(norm, kept)
    plain, along = wide.sum((2, 3)), (wide * flat).sum((2, 3))  # [lane, sample, channel]
    found[f"{name}.bias"], found[f"{name}.weight"] = plain.sum(1), along.sum(1)
    weight, size = params[f"{name}.weight"].to(wide.dtype), channels // (norm.groups or channels)

    def spread(each: Tensor) -> Tensor:
        return each.expand(-1, -1, -1, -1, -1, size).reshape(lanes, -1, 1, 1, channels)

    def level(sums: Tensor) -> Tensor:
        each = (sums * weight[:, None]).view(lanes, samples, 1, 1, -1, size).sum(5, keepdim=True)
        return spread(_pooled(each / (rows * columns * size), kept.share))

    moved = wide * _wide(weight) - level(plain) - flat * level(along)
    return (spread(kept.scale) * moved).to(grads.dtype)


def running(norm: Norm, kept: Normal, buffers: Stacked, name: str, count: Tensor) -> Stacked:
    """The running statistics of a batch normalisation after this batch; none for groups."""
    if norm.groups is not None:
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
