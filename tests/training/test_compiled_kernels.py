"""The kernels of LeNet and the small CNN pass triton's compiler for an H100; no GPU is needed."""

import pytest
import torch

from fedgma.training.cuda_graphs import float32_precision
from fedgma.training.fast import gpu, head, together
from gpu_compiler import compile_kernels
from head_cases import draw_step
from interpreted import needs_triton

# triton 3.9 announces that it will stop to join products and sums of threads by itself
quiet = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
pytestmark = [pytest.mark.slow, needs_triton, quiet]
PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
LANES = 10


@pytest.fixture(params=PRECISIONS)
def kind(request):
    with float32_precision(request.param):
        yield PRECISIONS[request.param]


def empty(*shape, kind=torch.float32, last=False):
    if not last:
        return torch.empty(LANES, *shape, dtype=kind, device="meta")
    samples, channels, rows, columns = shape
    return torch.empty(LANES, samples, rows, columns, channels, dtype=kind, device="meta").permute(0, 1, 4, 2, 3)


@pytest.mark.parametrize(
    ("family", "layer"),
    [  # channels, side, outputs, kernel, padding, pooling, channels last
        ("thread", (1, 28, 6, 5, 2, True, False)),
        ("thread", (6, 14, 16, 5, 0, True, False)),
        ("matrix", (3, 32, 32, 3, 0, False, False)),
        ("matrix", (32, 30, 64, 3, 0, True, True)),
    ],
)
def test_convolutions_compile(family, layer, kind):
    channels, side, outs, kernel, padding, pool, last = layer
    kernels, options = gpu.kernels(f"conv_{family}"), {"padding": padding, "pool": pool}
    size = (side + 2 * padding - kernel + 1) // (2 if pool else 1)
    x = empty(32, channels, side, side, kind=kind, last=last)
    weight, bias = empty(outs, channels, kernel, kernel, kind=kind), empty(outs, kind=kind)
    out = empty(32, outs, size, size, kind=kind, last=family == "matrix")
    corners = empty(32, outs, size, size, kind=torch.uint8, last=family == "matrix")
    parts, biases = empty(8, outs, channels, kernel, kernel), empty(8, outs)

    def passes():
        kernels.forward(x, weight, bias, out, corners, **options)
        kernels.backward_inputs(out, corners, weight, torch.empty_like(x), **options)
        kernels.backward_weights(out, corners, x, parts, biases, **options)

    assert len(compile_kernels(passes)) >= 3


@pytest.mark.parametrize(("features", "classes", "samples"), [(400, 10, 32), (576, 62, 64), (400, 47, 10)])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
@pytest.mark.parametrize("lanes", [10, 640])  # few and many are cut otherwise
def test_dense_layers_with_their_loss_compile(features, classes, samples, precision, lanes):
    sizes = (features, 120, 84, classes)
    some = lambda *shape, kind=torch.float32: torch.empty(lanes, *shape, dtype=kind, device="meta")  # noqa: E731
    weights = [some(out, ins) for out, ins in zip(sizes[1:], sizes[:-1], strict=True)]
    biases = [some(out) for out in sizes[1:]]
    y, count = some(samples, kind=torch.int64), some(kind=torch.int64)

    def passes():
        head._fused(some(samples, features), weights, biases, y, count, 0.1)

    with float32_precision(precision):
        assert len(compile_kernels(passes)) == 3


@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_a_step_from_sums_compiles(moving, precision):
    given, rates = draw_step(LANES, moving, "meta"), torch.empty(LANES, device="meta")
    count = torch.empty(LANES, dtype=torch.int64, device="meta")
    with float32_precision(precision):
        assert len(compile_kernels(lambda: together._fused(*given[:4], rates, rates, count))) == 1
