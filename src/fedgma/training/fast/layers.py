"""Dense layers and the loss over lanes, with their backward passes written out as batched matrix products.

Gradients of weights that many samples and places share are summed in pieces, so that a few lanes fill a GPU.
"""

import torch
from torch import Tensor

from fedgma.training.gradients import Product

PIECES = 256  # products that a weight gradient is split into at least, where the batch allows


def split_products(left: Tensor, right: Tensor) -> Tensor:
    """left^T @ right over samples and places, [lane, sample, ..., n] each, summed in pieces: [lane, n, m]."""
    lanes, pieces = len(left), pieces_of(*left.shape[:2])
    parts = [x.reshape(lanes * pieces, -1, x.shape[-1]) for x in (left, right)]
    products = parts[0].transpose(1, 2) @ parts[1]
    return products.view(lanes, pieces, *products.shape[1:]).sum(1, dtype=wide_type(left))


def pieces_of(products: int, samples: int, least: int = PIECES) -> int:
    """Into how many pieces to cut a batch, so that there are enough products to fill the device.

    >>> pieces_of(10, samples=32), pieces_of(1600, samples=32)
    (32, 1)
    """
    divisors = [size for size in range(1, samples + 1) if samples % size == 0]
    return next((size for size in divisors if products * size >= least), samples)


def dense(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A dense layer of every lane: [lane, sample, in] to [lane, sample, out]."""
    return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))


def dense_back(grads: Tensor, x: Tensor) -> tuple[Product, Tensor]:
    """Gradients of weight and bias."""
    return Product(grads, x), grads.sum(1, dtype=wide_type(grads))


def loss_back(logits: Tensor, y: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of every lane's mean loss, its loss sum and its hits; rows past `count` are padding."""
    real = torch.arange(y.shape[1], device=y.device) < count[:, None]
    logs = torch.log_softmax(logits, -1, dtype=wide_type(logits))
    total = -torch.where(real, logs.gather(2, y[..., None])[..., 0], 0.0).sum(1)
    hits = (real & (logits.argmax(-1) == y)).sum(1)
    wanted = torch.arange(logits.shape[-1], device=y.device) == y[..., None]
    grads = (logs.exp() - wanted.to(logs.dtype)) / count.clamp(min=1)[:, None, None]
    return torch.where(real[..., None], grads, 0.0).to(logits.dtype), total, hits


def wide_type(x: Tensor) -> torch.dtype:
    """What sums over values of this type are kept in: float32 for half and single precision, float64 for double."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
