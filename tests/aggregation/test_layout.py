"""A stack of tensors looked at as a whole, and views of its results."""

import pytest
import torch

from fedgma.aggregation.kernels.layout import common_layout, layout_of, views

SHAPES = [(2, 3), (4,), (), (0,), (0, 2), (1, 2, 2), (1,)]


def stack(shapes=SHAPES, clients=3):
    return [torch.zeros(clients, *shape) for shape in shapes]


def test_views_have_the_shapes_and_entries_of_the_arrays():
    layout = common_layout(stack())
    assert (layout.clients, layout.sizes) == (3, [6, 4, 1, 0, 0, 4, 1])
    flat = torch.arange(16.0)
    parts = views(flat, layout)
    assert [tuple(part.shape) for part in parts] == SHAPES
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), flat)
    assert all(part.is_contiguous() for part in parts)
    parts[5][0, 1, 1] = -1
    assert flat[14] == -1


def test_a_view_is_used_as_a_tensor_of_its_own():
    """A change of one that autograd follows leaves the others without a gradient."""
    matrix, vector, *_ = views(torch.ones(16), common_layout(stack()))
    factor = torch.tensor(2.0, requires_grad=True)
    for part in (matrix, vector):
        part.mul_(factor)
    vector.sum().backward()
    assert factor.grad == 4


def test_the_same_shapes_have_one_layout():
    assert common_layout(stack()) is common_layout(stack())
    assert common_layout(stack()) is not common_layout(stack(clients=2))


@pytest.mark.parametrize("shapes", [((3, 2), (2, 2)), ((3, 2), ()), ((), ()), ((0, 2),)])
def test_a_layout_of_unequal_numbers_of_clients_has_none(shapes):
    assert layout_of(shapes).clients == 0


ODD = {
    "wider": lambda: torch.zeros(3, 2).double(),
    "elsewhere": lambda: torch.zeros(3, 2, device="meta"),
    "in pieces": lambda: torch.zeros(2, 3).t(),
    "sparse": lambda: torch.zeros(3, 2).to_sparse(),
    "sparse rows": lambda: torch.zeros(3, 2).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.zeros(2)] * 3),
    "a list": lambda: [0.0, 0.0],
}


@pytest.mark.filterwarnings("ignore:.*(beta|prototype):UserWarning")
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_an_array_unlike_the_others_is_no_part_of_a_layout(odd):
    assert common_layout([*stack(), odd()]) is None
    assert common_layout([odd(), *stack()]) is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e5m2])
def test_only_floating_types_of_16_to_64_bits_have_a_layout(dtype):
    assert common_layout([torch.zeros(3, 2).to(dtype)]) is None
