"""On a GPU: the kernels of convolutions, dense layers and steps, and written normalisation, against autograd."""

import pytest
import torch

import convolution_3x3_cases as squares
import group_norm_cases as norms
import head_cases as heads
from convolution_cases import Case, by_kernels, draw, wanted
from fedgma.training.cuda_graphs import float32_precision
from fedgma.training.fast import gpu, head
from fedgma.training.fast.torch_ops import convolve, convolve_inputs, convolve_weights

pytestmark = pytest.mark.gpu
LAYERS = [
    Case(3, 4, 1, 28, 28, 6, 5, 2, True),
    Case(3, 4, 6, 14, 14, 16, 5, 0, True, last=True),
    Case(2, 3, 3, 32, 32, 32, 3, 0, False),
    Case(2, 3, 32, 30, 30, 64, 3, 0, True, last=True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("case", "family"),
    [(LAYERS[0], "thread"), (LAYERS[1], "thread"), *((layer, "matrix") for layer in LAYERS[1:])],
)
def test_the_fused_convolutions_have_the_gradients_of_autograd(case, family, dtype):
    given = draw(case, "cuda", dtype)
    with float32_precision("tf32"):  # whole numbers this small are exact in it
        fused = gpu.kernels(f"conv_{family}")
        found = by_kernels(fused, case, *given, pieces=1 if case.samples % 2 else 2)
    for one, other in zip(found, wanted(case, *given), strict=True):
        assert torch.equal(one, other.to(one.dtype))


@pytest.mark.parametrize(("case", "family"), [(LAYERS[1], "thread"), (LAYERS[2], "matrix"), (LAYERS[3], "matrix")])
def test_the_fused_convolutions_keep_float32_where_it_is_asked_for(case, family):
    generator, given = torch.Generator("cuda").manual_seed(0), draw(case, "cuda")
    for value in (given[0], given[3]):  # bits that TF32 drops; sums with them are exact, so the same corners win
        value += torch.randint(0, 9, value.shape, generator=generator, device="cuda") / 4096
    with float32_precision("fp32"):
        found = by_kernels(gpu.kernels(f"conv_{family}"), case, *given)
    for one, other in zip(found, wanted(case, *given), strict=True):
        assert (one - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float64, 1e-12)])
@pytest.mark.parametrize(("side", "channels"), [(32, 64), (16, 128), (8, 64), (4, 512), (2, 256), (1, 512), (7, 12)])
def test_written_group_normalisation_has_the_gradients_of_autograd(side, channels, dtype, bound):
    for relu, beside, parts in ((False, False, 1), (True, False, 1), (True, True, 1), (True, True, 2)):
        case = norms.Case(2, 3, side, channels, 2, relu, beside, parts)
        drawn = norms.draw(case, "cuda", dtype)
        off = norms.distances(norms.wanted(case, *drawn), norms.found_by_form(case, *drawn))
        assert max(off.values()) < bound, (case, off)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("side", "inputs", "outs"),
    [(32, 64, 64), (16, 64, 128), (8, 64, 64), (8, 256, 512), (4, 128, 128), (32, 8, 32), (16, 24, 40)],
)
@pytest.mark.parametrize("samples", [16, 50, 3])
def test_the_convolutions_of_resnets_are_exact_there(side, inputs, outs, stride, samples):
    case = squares.Case(3, samples, side, side, inputs, outs, stride)
    x, weight, grads = squares.draw(case, "cuda", torch.bfloat16)
    found = [
        convolve(x, weight, stride),
        convolve_inputs(grads, weight, side, side, stride),
        convolve_weights(grads, x, stride),
    ]
    for name, one, other in zip(("out", "x", "weight"), squares.wanted(case, x, weight, grads), found, strict=True):
        assert torch.equal(one.to(torch.bfloat16), other), name  # sums of whole numbers, rounded once


@pytest.mark.parametrize("lanes", [1, 70])  # of every count: few and many are cut otherwise
@pytest.mark.parametrize("case", [*heads.CASES, heads.Case(10, 576, 47, (10, 0, 3), 0.1)], ids=str)
def test_dense_layers_with_their_loss_keep_float32_there(case, lanes):
    case = case._replace(counts=case.counts * lanes)
    given = heads.draw(case, "cuda")
    with float32_precision("fp32"):
        heads.check_head(case, head._fused(*given, case.smoothing), heads.wanted(case, *given), bound=1e-5)


@pytest.mark.parametrize("moving", [True, False])
@pytest.mark.parametrize("counts", [(12, 0, 1), (0, 3) * 100])
def test_a_step_from_sums_keeps_float32_and_idle_lanes_there(counts, moving):
    with float32_precision("fp32"):
        heads.check_step(torch.ops.fedgma.sgd_step, len(counts), counts, moving, "cuda", bound=1e-5)
