"""Figures of votes, of numbers small enough to check by eye."""

import pytest
import torch

from fedgma.simulation.batched.votes import count, count_zeros, lay_out, look, passing

LAYERS = lay_out([("a.weight", torch.Size([3])), ("b.weight", torch.Size([2]))], torch.device("cpu"))
NEEDED, BELOW = torch.tensor([0, 1, 1, 2, 2]), torch.tensor(float("nan"))  # tau 0.4


def figures(votes, mean, mask=None, zeros=(0, 0), before=None):
    votes, clients = torch.tensor(votes), torch.tensor(4)
    rule = None if mask is None else (NEEDED, BELOW)
    mask = None if mask is None else torch.tensor(mask)
    counts = count(
        votes, clients, LAYERS, torch.tensor(mean), mask, most=5, zeros=torch.tensor(zeros), rule=rule, before=before
    )
    return counts.statistics()


def test_shares_of_unanimous_undecided_and_zero_entries_are_those_of_each_layer():
    found = figures([4, -4, 0, 2, 1], [1.0] * 5, [1.0, 1.0, 0.0, 1.0, 0.25], zeros=(2, 1))
    assert (found.whole.unanimous, found.whole.undecided) == pytest.approx((2 / 5, 1 / 5))
    assert (found.layers["a"].unanimous, found.layers["b"].undecided) == pytest.approx((2 / 3, 0))
    assert found.whole.zeros == pytest.approx(3 / 20)  # of five entries of four clients
    assert found.layers["a"].zeros == pytest.approx(2 / 12)


def test_the_cosine_is_between_the_masked_and_the_plain_step():
    found = figures([4, 0, 4, 4, 4], [3.0, 4.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0, 1.0])
    assert (found.ratio, found.cosine) == pytest.approx((3 / 5, 3 / 5))
    assert figures([4] * 5, [0.0] * 5, [1.0] * 5)[1:3] == (1, 1)  # nothing moves, nothing is held back
    assert figures([0] * 5, [1.0] * 5, [0.0] * 5)[1:3] == (0, 1)  # everything is


def test_flips_and_overlap_are_counted_against_the_earlier_look():
    before = torch.tensor(3), torch.tensor([True, False, False, True, True])
    found = figures([4, 1, 4, 0, 2], [1.0] * 5, [1.0] * 5, before=before).stability
    assert found.since == 3
    assert found.flipped == pytest.approx(2 / 5)  # the third came up, the fourth went down
    assert found.overlap == pytest.approx(1 / 3)  # the second, of second, third and fourth
    nobody = figures([4] * 5, [1.0] * 5, [1.0] * 5, before=(torch.tensor(3), torch.ones(5, dtype=torch.bool))).stability
    assert (nobody.flipped, nobody.overlap) == (0, 1)


def test_zeros_of_a_client_that_does_not_count_are_not_counted():
    zeros = torch.zeros(3, 2, dtype=torch.int64)
    updates = torch.tensor([[0.0, -0.0, 1.0, 0.0, 2.0]] * 4)
    count_zeros(zeros, torch.tensor([0, 0, 2, 2]), LAYERS, updates, torch.tensor([True, False, True, True]))
    assert zeros.tolist() == [[2, 1], [0, 0], [4, 2]]


def test_a_round_without_a_counted_client_is_no_look():
    votes, rule = torch.tensor([4, 0]), NEEDED
    first = look(votes, torch.tensor(0), rule, 1, None)
    second = look(votes, torch.tensor(4), rule, 5, first)
    third = look(-votes.flip(0), torch.tensor(0), rule, 10, second)
    assert [int(since) for since, _ in (first, second, third)] == [0, 5, 5]
    assert third[1].tolist() == [True, False]


def test_passing_is_decided_by_the_clients_that_counted():
    votes = torch.tensor([1, -1, 0])
    assert passing(votes, torch.tensor(2), NEEDED).tolist() == [True, True, False]
    assert passing(votes, torch.tensor(4), NEEDED).tolist() == [False, False, False]
