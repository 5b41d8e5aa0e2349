"""Dense layers with their loss, and steps of SGD from sums: by torch in float64, and what kernels are compared with.

Run as a script under TRITON_INTERPRET=1 it takes the GPU kernels through triton's interpreter (`test_head`).
"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from fedgma.training.fast import head, together


class Case(NamedTuple):
    samples: int
    features: int
    classes: int
    counts: tuple[int, ...]  # of every lane
    smoothing: float = 0.0


CASES = [
    Case(5, 24, 10, (5, 3)),
    Case(20, 37, 62, (20, 0, 7), 0.1),
    Case(64, 16, 2, (64,)),
    Case(32, 400, 10, (32, 1)),
]
BOUND = 2e-6


def draw(case, device="cpu", dtype=torch.float32):
    """Input, weights and biases, labels and counts; padding is large, so that nobody can overlook it."""
    generator = torch.Generator().manual_seed(2)
    some = lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)  # noqa: E731
    lanes, sizes = len(case.counts), (case.features, 120, 84, case.classes)
    x, count = some(lanes, case.samples, case.features), torch.tensor(case.counts, device=device)
    x[torch.arange(case.samples, device=device) >= count[:, None]] = 1e4
    pairs = list(zip(sizes[1:], sizes[:-1], strict=True))
    weights, biases = [some(lanes, *pair) / pair[1] ** 0.5 for pair in pairs], [some(lanes, out) for out, _ in pairs]
    y = torch.randint(case.classes, (lanes, case.samples), generator=generator).to(device)
    return x, weights, biases, y, count


def inside(case, value):
    """An output [lane, sample, ...] with zeros for padding."""
    padding = torch.arange(case.samples) >= torch.tensor(case.counts)[:, None]
    return value.masked_fill(padding[..., None].to(value.device), 0)


def doubled(values):
    return [value.double() if torch.is_tensor(value) and value.is_floating_point() else value for value in values]


def wanted(case, x, weights, biases, y, count):
    return head._plain(x.double(), doubled(weights), doubled(biases), y, count, case.smoothing)


def off(one, other):
    """The relative distance, without the worst lane of fifty: a ReLU may stand at zero within rounding."""
    one, other = one.double().flatten(1), other.flatten(1)
    lanes = (one - other).norm(dim=1) / other.norm(dim=1).clamp(min=1e-30)
    return lanes.sort().values[-1 - len(lanes) // 50]


def check_head(case, found, expected, bound=BOUND):
    """Kernels against float64; gradients of padding are zero."""
    names = ("h1", "h2", "g1", "g2", "g3", "inner")
    for name, one, other in zip(names, found[:6], expected[:6], strict=True):
        pair = (inside(case, one), inside(case, other))
        assert off(*pair) <= bound, (case, name)
        assert name[0] == "h" or torch.equal(one, pair[0])
    torch.testing.assert_close(found[6].double(), expected[6], rtol=bound, atol=case.samples * bound)
    assert torch.equal(found[7], expected[7])


class Step(NamedTuple):
    """Arguments of a step of SGD, all but the counts."""

    weights: list
    velocities: list
    lefts: list
    rights: list
    lr: torch.Tensor
    momentum: torch.Tensor


SHAPES = [  # of a parameter, terms of its sum, and its inputs if it is a product
    ((120, 40), 12, 40),
    ((84,), 12, None),
    ((10, 84), 12, 84),
    ((16, 6, 5, 5), 8, None),
    ((6, 1, 5, 5), 32, None),
    ((3,), 5, None),
]


def draw_step(lanes, moving, device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    some = lambda *shape: torch.randn(shape, generator=generator).to(device, dtype)  # noqa: E731
    weights = [some(lanes, *shape) for shape, *_ in SHAPES]
    velocities = [some(lanes, *shape) for shape, *_ in SHAPES] if moving else []
    lefts = [some(lanes, terms, *(shape[:1] if ins else shape)) for shape, terms, ins in SHAPES]
    rights = [some(lanes, terms, ins) if ins else None for _, terms, ins in SHAPES]
    return Step(weights, velocities, lefts, rights, some(lanes).abs(), some(lanes).abs())


def copied(step, kind=None):
    """The step with tensors of its own, perhaps in another type."""
    own = lambda value: None if value is None else value.clone().to(kind or value.dtype)  # noqa: E731
    return Step(*([own(v) for v in part] if isinstance(part, list) else own(part) for part in step))


def check_step(call, lanes, counts, moving, device="cpu", bound=BOUND):
    """A step in float32 against torch's in float64; lanes without samples keep their bits."""
    count, given = torch.tensor(counts, device=device), draw_step(lanes, moving, device)
    found, expected = copied(given), copied(given, torch.float64)
    call(*found, count)
    together._plain(*expected, count)
    for begun, one, other in zip(
        given.weights + given.velocities, found.weights + found.velocities, expected.weights + expected.velocities,
        strict=True,
    ):  # fmt: skip
        assert off(one, other) <= bound
        assert torch.equal(one[count == 0], begun[count == 0])
        assert not torch.equal(one[count > 0], begun[count > 0])


def main():
    for case in CASES:
        given = draw(case)
        check_head(case, head._fused(*given, case.smoothing), wanted(case, *given))
    for moving in (True, False):
        check_step(together._fused, 3, (12, 0, 1), moving)


if __name__ == "__main__":
    main()
