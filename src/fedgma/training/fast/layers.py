"""Dense layers and the loss over lanes, with their backward passes written out as batched matrix products.

The weight gradient of a dense layer stays a pair of factors (`Product`). A step without momentum, proximal term or
clipping then subtracts the product from the weights in one pass and never stores the gradient.

Buys, on an H200: 1.1 for the small CNN, 50 lanes, TF32, by gradients that are not multiplied out
(`benchmarks/bench_parts.py`).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

PIECES = 256  # matrix products that a weight gradient is split into at least, where the batch allows

_library: Any = torch.library.Library("fedgma", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("subtract_product(Tensor(a!) weight, Tensor left, Tensor right) -> ()")


class Product(NamedTuple):
    """The weight gradient of a dense layer as its two factors."""

    left: Tensor  # [lane, sample, out]
    right: Tensor  # [lane, sample, in]

    def tensor(self) -> Tensor:
        """The gradient [lane, out, in]."""
        product = self.left.transpose(1, 2) @ self.right
        return product.to(wide_type(product))

    def subtract_from(self, weight: Tensor, rates: Tensor) -> None:
        """Subtract `rates` [lane] times the gradient from the weights, in place."""
        per_lane = rates[:, None, None]
        if self.left.dtype == weight.dtype:
            torch.ops.fedgma.subtract_product(weight, self.left * per_lane, self.right)
        else:
            weight.sub_(self.tensor() * per_lane)


class Pieces(NamedTuple):
    """The gradient of another parameter as the pieces that it is the sum of: of the batch, or single samples."""

    parts: Tensor  # [lane, piece, ...]

    def tensor(self) -> Tensor:
        """The gradient [lane, ...]."""
        return self.parts.sum(1, dtype=wide_type(self.parts))


def _subtract_product(weight: Tensor, left: Tensor, right: Tensor) -> None:
    torch.baddbmm(weight, left.transpose(1, 2), right, alpha=-1, out=weight)


for _device in ("CPU", "CUDA"):
    _library.impl("subtract_product", _subtract_product, _device)
_library.impl("subtract_product", lambda weight, left, right: None, "Meta")  # for the compiler: no new tensor


def split_products(left: Tensor, right: Tensor) -> Tensor:
    """left^T @ right of every lane, summed over samples and positions: [lane, sample, ..., n] and m to [lane, n, m].

    The batch is split into pieces, so that a few lanes are enough work for a GPU.
    """
    lanes, pieces = len(left), pieces_of(*left.shape[:2])
    factors = [x.reshape(lanes * pieces, -1, x.shape[-1]) for x in (left, right)]
    products = factors[0].transpose(1, 2) @ factors[1]
    return products.view(lanes, pieces, *products.shape[1:]).sum(1, dtype=wide_type(left))


def pieces_of(products: int, samples: int, least: int = PIECES) -> int:
    """How many pieces to split a batch into, so that there are at least so many products where the batch allows.

    >>> pieces_of(10, samples=32), pieces_of(1600, samples=32)
    (32, 1)
    """
    divisors = [size for size in range(1, samples + 1) if samples % size == 0]
    return next((size for size in divisors if products * size >= least), samples)


def dense(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A dense layer of every lane: [lane, sample, in] to [lane, sample, out]."""
    return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))


def dense_back(grads: Tensor, x: Tensor) -> tuple[Product, Tensor]:
    """Gradients of weight and bias, from those of the output."""
    return Product(grads, x), grads.sum(1, dtype=wide_type(grads))


def loss_back(logits: Tensor, y: Tensor, count: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of every lane's mean loss in its logits, loss sum and hits [lane, 1]; rows past `count` are padding.

    Of each label, the share `smoothing` is spread evenly over all classes.
    """
    real = torch.arange(y.shape[1], device=y.device) < count[:, None]
    logs = torch.log_softmax(logits, -1, dtype=wide_type(logits))
    chosen = logs.gather(2, y[..., None])[..., 0]
    if smoothing:
        chosen = (1 - smoothing) * chosen + smoothing * logs.mean(-1)
    total = -torch.where(real, chosen, 0.0).sum(1)
    hits = (real & (logits.argmax(-1) == y)).sum(1, keepdim=True)
    targets = (torch.arange(logits.shape[-1], device=y.device) == y[..., None]).to(logs.dtype)
    if smoothing:
        targets = (1 - smoothing) * targets + smoothing / logits.shape[-1]
    grads = (logs.exp() - targets) / count.clamp(min=1)[:, None, None]
    return torch.where(real[..., None], grads, 0.0).to(logits.dtype), total, hits


def wide_type(x: Tensor) -> torch.dtype:
    """The type that sums over values of this type are kept in: float64 for double, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
