"""The lane form of ResNet18 with group normalisation: convolutions lane by lane, the rest over all lanes at once.

A convolution of one client's batch fills a GPU by itself where images are large, so the wide stages call one for each
lane (grouped convolutions are slow); in the deep stages images are small, and one batched matrix product over windows
does all lanes. Normalisation, ReLU and shortcuts, which hold this network back, are compiled over the lane axis. The
backward pass is automatic. Activations are [lane, sample, row, column, channel].
"""

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F

from fedgma.models import ResNet18
from fedgma.trainers.cohorts import Stacked
from fedgma.trainers.gradients import GradientFunction, Gradients

BATCHED_FROM = 4  # the first stage whose convolutions are batched products; 0 is the stem, 5 is none


def residual_gradients(model: ResNet18, precision: str = "fp32", batched_from: int = BATCHED_FROM) -> GradientFunction:
    """The gradient function of a ResNet18 with group normalisation."""
    half, groups = precision == "bf16", int(model.norm1.num_groups)  # type: ignore[arg-type]

    def objective(params: Stacked, x: Tensor, y: Tensor, count: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        used = {name: value.bfloat16() for name, value in params.items()} if half else params
        logits = logits_of(used, x.bfloat16() if half else x, groups, batched_from).float()
        real = torch.arange(y.shape[1], device=y.device) < count[:, None]
        losses = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
        total = torch.where(real, losses, 0.0).sum(1)
        hits = (real & (logits.argmax(-1) == y)).sum(1)
        return (total / count.clamp(min=1)).sum(), (
            total.detach(),
            hits,
        )  # lanes share nothing: a sum has their gradients

    def gradients(params: Stacked, buffers: Stacked, x: Tensor, y: Tensor, count: Tensor) -> Gradients:
        grads, (total, hits) = grad(objective, has_aux=True)(params, x, y, count)
        return grads, {}, total, hits

    return gradients


def logits_of(params: Stacked, x: Tensor, groups: int, batched_from: int) -> Tensor:
    """Images [lane, sample, channel, row, column] to logits [lane, sample, class]."""

    def normal(name: str, h: Tensor) -> Tensor:
        return normalise(h, params[f"{name}.weight"], params[f"{name}.bias"], groups)

    x = x.permute(0, 1, 3, 4, 2)
    x = normal("norm1", convolve(x, params["conv1.weight"], 1, batched=batched_from == 0)).relu()
    for stage in range(1, 5):
        for block in range(2):
            at = f"layer{stage}.{block}"
            stride, batched = 2 if stage > 1 and block == 0 else 1, stage >= batched_from
            inner = convolve(x, params[f"{at}.conv1.weight"], stride, batched=batched)
            inner = normal(f"{at}.norm1", inner).relu()
            inner = normal(f"{at}.norm2", convolve(inner, params[f"{at}.conv2.weight"], 1, batched=batched))
            if stride == 2:
                x = normal(f"{at}.shortcut.1", project(x[:, :, ::2, ::2], params[f"{at}.shortcut.0.weight"]))
            x = (inner + x).relu()
    return torch.baddbmm(params["fc.bias"][:, None], x.mean((2, 3)), params["fc.weight"].transpose(1, 2))


def convolve(x: Tensor, weight: Tensor, stride: int, *, batched: bool) -> Tensor:
    """A 3x3 convolution with a border of zeros, every lane with its own weights [lane, out, in, 3, 3]."""
    if not batched:
        pairs = zip(x.unbind(0), weight.unbind(0), strict=True)
        made = [F.conv2d(one.permute(0, 3, 1, 2), own, stride=stride, padding=1) for one, own in pairs]
        return torch.stack([one.permute(0, 2, 3, 1) for one in made])
    lanes, samples, rows, columns, _ = x.shape
    tall, wide = -(-rows // stride), -(-columns // stride)
    padded = F.pad(x, (0, 0, 1, 1, 1, 1))
    parts = [
        padded[:, :, dy : dy + (tall - 1) * stride + 1 : stride, dx : dx + (wide - 1) * stride + 1 : stride]
        for dy in range(3)
        for dx in range(3)
    ]
    matrix = weight.permute(0, 3, 4, 2, 1).flatten(1, 3)  # [lane, 9 * in, out]
    return (torch.cat(parts, -1).flatten(1, 3) @ matrix).view(lanes, samples, tall, wide, -1)


def project(x: Tensor, weight: Tensor) -> Tensor:
    """A 1x1 convolution."""
    return (x.flatten(1, 3) @ weight.flatten(2).transpose(1, 2)).view(*x.shape[:-1], -1)


def normalise(x: Tensor, weight: Tensor, bias: Tensor, groups: int) -> Tensor:
    """Group normalisation of every sample, with statistics in float32."""
    lanes, samples, rows, columns, channels = x.shape
    parts = x.float().view(lanes, samples, rows * columns, groups, channels // groups)
    variance, mean = torch.var_mean(parts, (2, 4), correction=0, keepdim=True)
    flat = ((parts - mean) * torch.rsqrt(variance + 1e-5)).view(x.shape)
    wide = (lanes, 1, 1, 1, channels)
    return (flat * weight.view(wide) + bias.view(wide)).to(x.dtype)
