"""What the host does around the fused pass of a stack of updates: here the pass is a stand-in on the CPU."""

import numpy as np
import pytest
import torch

import fedgma
from fedgma.aggregation import gpu_stack, kernels
from fedgma.aggregation.gate import Gate
from fedgma.aggregation.masks import soft_mask

WEIGHTS = [1, 2, 3, 4, 5]


class Passes:
    """The fused pass by the plain tally; remembers of how many clients each pass was."""

    def __init__(self):
        self.clients = []

    def aggregate(self, arrays, layout, weights, weight, mask):
        assert (layout.clients, len(layout.sizes)) == (len(weights), len(arrays))
        self.clients.append(len(weights))
        rows = {str(k): np.asarray(array).reshape(len(weights), -1).astype(float) for k, array in enumerate(arrays)}
        finite = all(np.isfinite(part).all() for part in rows.values())
        tally = fedgma.Tally()
        tally.add_many({name: np.nan_to_num(part, posinf=0) for name, part in rows.items()}, weights)
        merged = fedgma.finish(tally, mask=mask)
        mean, mask = (torch.cat([torch.as_tensor(v) for v in part.values()]) for part in (merged.mean, merged.mask))
        return mean, mask, torch.tensor([int(not finite)])


@pytest.fixture
def passes(monkeypatch):
    stand_in = Passes()
    monkeypatch.setattr(kernels, "gpu_kernels_for", lambda sample: stand_in if torch.is_tensor(sample) else None)
    return stand_in


def updates(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(5, *shape, generator=generator).to(dtype) for name, shape in (("a", (2, 3)), ("b", ()))}


def plainly(given, weights, **options):
    return fedgma.masked_mean()({name: np.asarray(value) for name, value in given.items()}, weights, **options)


def assert_same(actual, expected):
    for part, other in ((actual.mean, expected.mean), (actual.mask, expected.mask)):
        assert part.keys() == other.keys()
        assert all(np.array_equal(np.asarray(part[name]), other[name]) for name in part)
    assert actual.notes == expected.notes


@pytest.mark.parametrize("weights", [WEIGHTS, tuple(WEIGHTS), np.array(WEIGHTS), np.array(WEIGHTS, np.float32), None])
def test_an_ordinary_stack_is_one_pass(passes, weights):
    assert gpu_stack.begin(updates(), weights, soft_mask(0.4)) is not None
    passes.clients.clear()
    assert_same(fedgma.masked_mean()(updates(), weights), plainly(updates(), weights))
    assert passes.clients == [5]


def test_a_client_that_is_not_finite_is_found_after_the_pass(passes):
    given = updates()
    given["a"][2, 0, 1] = float("inf")
    assert_same(fedgma.masked_mean()(given, WEIGHTS), plainly(given, WEIGHTS))
    assert passes.clients == [5, 5, 4]  # begun, found among all, and without that client


class Own(torch.Tensor):
    """A tensor of a user's own kind."""


OTHERS = [
    ({}, {"clients": list("vwxyz")}),
    ({}, {"weights": [1, 2, 0, 4, 5]}),
    ({}, {"weights": [1, 10**400, 3, 4, 5]}),
    ({}, {"weights": [1, 2, float("nan"), 4, 5]}),
    ({}, {"weights": torch.tensor(WEIGHTS)}),
    ({}, {"buffers": ["b"]}),
    ({}, {"gate": Gate(max_norm=2.5)}),
    ({}, {"like": {"a": np.zeros((2, 3)), "b": np.zeros(())}}),
    ({"a": torch.randn(5, 3, 2).double().transpose(1, 2)}, {}),
    ({"b": torch.randn(5)}, {}),
    ({"b.running_mean": torch.randn(5).double()}, {}),
    ({"b": torch.arange(5)}, {}),
    ({"b": torch.randn(5).double().as_subclass(Own)}, {}),
]


@pytest.mark.parametrize(("changes", "options"), OTHERS, ids=lambda value: ", ".join(value) or "-")
def test_any_other_stack_is_looked_at_first(passes, changes, options):
    given, options = {**updates(), **changes}, {"weights": WEIGHTS, **options}
    assert gpu_stack.begin(given, mask=None, **options) is None
    assert passes.clients == []
    assert_same(fedgma.masked_mean()(given, **options), plainly(given, **options))


@pytest.mark.parametrize(
    ("given", "weights"),
    [
        ({"a": torch.zeros(())}, [1]),
        ({"a": torch.zeros(0, 3)}, []),
        ({"a": torch.randn(2, 3).to_sparse()}, [1, 2]),
        ({"a": torch.zeros(2, 3), "b": torch.randn(2, 3).to_sparse()}, [1, 2]),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3, device="meta")}, [1, 2]),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(3, 3)}, [1, 2]),
        ({"a": torch.zeros(2, 3), 7: torch.zeros(2, 3)}, [1, 2]),
        ({"a": torch.zeros(2, 3)}, [1, 2, 3]),
        ({"a": torch.zeros(2, 3)}, {1, 2}),
        ({"a": torch.zeros(2, 3)}, "12"),
        ({"a": torch.zeros(2, 3, dtype=torch.float8_e5m2)}, [1, 2]),
    ],
)
def test_what_cannot_be_averaged_is_an_error_before_any_pass(passes, given, weights):
    with pytest.raises(fedgma.FedgmaError):
        fedgma.masked_mean()(given, weights)
    assert passes.clients == []


def test_a_pass_is_begun_before_anything_else(passes, monkeypatch):
    """The device works while the host makes a tally."""
    begun = []

    def opened(self, *given, **options):
        begun.append(list(passes.clients))
        return fedgma.Tally(*given, **options)

    rule = fedgma.masked_mean()
    monkeypatch.setattr(type(rule), "open", opened)
    rule(updates(), WEIGHTS, gate=Gate(max_weight=10), buffers=[])
    assert begun == [[5]]


@pytest.mark.parametrize("options", [{"gate": 3}, {"gate": "open"}, {"buffers": "a"}, {"buffers": 3}])
def test_arguments_that_must_be_checked_are_checked_before_any_pass(passes, options):
    with pytest.raises((fedgma.FedgmaError, TypeError)) as plain:
        plainly(updates(), WEIGHTS, **options)
    with pytest.raises(type(plain.value)) as raised:
        fedgma.masked_mean()(updates(), WEIGHTS, **options)
    assert str(raised.value) == str(plain.value)
    assert passes.clients == []


def test_a_client_with_too_large_a_share_is_refused_after_the_pass(passes):
    with pytest.raises(fedgma.FedgmaError, match="has 90"):
        fedgma.masked_mean()({"a": torch.ones(2, 3)}, [1, 10], gate=Gate(max_share=0.6))
