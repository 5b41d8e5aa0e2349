"""What ranks share: lanes by their cost, rows of any type, questions and bytes of the first rank."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgma.errors import ConfigError
from fedgma.training.ranks import ALONE, _check_same, agreed, cuts, from_first, gather
from thread_ranks import on_ranks


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 9))
def test_parts_of_lanes_are_consecutive_and_cost_about_the_same(costs, parts):
    edges = cuts(np.array(costs), parts)
    assert (edges[0], edges[-1], len(edges)) == (0, len(costs), parts + 1)
    assert edges == sorted(edges)
    shares = [sum(costs[begin:end]) for begin, end in pairwise(edges)]
    assert max(shares) <= sum(costs) / parts + max(costs)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_rows_of_any_type_come_in_the_order_of_the_ranks(size):
    whole = {
        "flag": torch.tensor([True, False, True, True]),
        "half": torch.arange(8).view(4, 2).to(torch.bfloat16),
        "count": torch.arange(4) * 2**40,
        "wide": torch.arange(24.0, dtype=torch.float64).view(4, 3, 2),
        "none": torch.zeros(4, 0),
        "large": torch.arange(4.0 * 2**15).view(4, 2**15),
    }
    edges = cuts(np.array([5, 1, 1, 1]), size)

    def work(ranks):
        begin, end = edges[ranks.rank : ranks.rank + 2]
        return gather(ranks, edges, [value[begin:end] for value in whole.values()])

    for found in on_ranks(size, work):
        for value, came in zip(whole.values(), found, strict=True):
            assert came.dtype == value.dtype
            assert torch.equal(came, value)


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_pieces_are_computed_by_one_rank_each_and_known_to_all(pieces):
    def work(ranks):
        done = []

        def square(piece):
            done.append(piece)
            return torch.full((2, 3), float(piece * piece)), torch.tensor([piece % 2 == 0])

        return done, list(ranks.map(square, list(range(pieces))))

    answers = on_ranks(2, work)
    for _, found in answers:
        assert [(float(a[0, 0]), bool(b)) for a, b in found] == [(p * p, p % 2 == 0) for p in range(pieces)]
    done = [piece for own, _ in answers for piece in own]
    assert sorted(done) == (sorted(range(pieces)) if pieces >= 2 else [0, 0])


def test_the_first_rank_answers_for_all():
    assert on_ranks(3, lambda ranks: agreed(ranks, lambda: ranks.rank == 0)()) == [True] * 3
    assert on_ranks(3, lambda ranks: agreed(ranks, lambda: ranks.rank == 1)()) == [False] * 3
    assert on_ranks(3, lambda ranks: from_first(ranks, str(ranks.rank).encode())) == [b"0"] * 3
    assert on_ranks(2, lambda ranks: from_first(ranks, b"")) == [b""] * 2
    assert from_first(ALONE, b"one") == b"one"
    assert agreed(ALONE, lambda: True)()


def test_ranks_that_began_from_different_weights_are_named():
    _check_same(torch.tensor([7, 7, 7]), [0, 1, 2, 3])
    with pytest.raises(ConfigError, match="ranks 0 and 2 computed different models"):
        _check_same(torch.tensor([7, 7, 7, 8]), [0, 2, 3, 4])
