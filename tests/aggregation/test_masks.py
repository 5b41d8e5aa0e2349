"""Masks at their edges: how votes become a mask, and which numbers are thresholds."""

import math

import numpy as np
import pytest
import torch

import fedgma
from fedgma.aggregation.masks import (
    MASKS,
    agreement,
    check_tau,
    hard_mask,
    reversing_mask,
    sign_test_mask,
    significant_votes,
    signs,
    soft_mask,
    vote_type,
    votes_needed,
)

VALUES = [3.0, 0.5, 5e-324, 0.0, -0.0, -5e-324, -0.5, -3.0]


@pytest.mark.parametrize("convert", [np.array, lambda values: torch.tensor(values, dtype=torch.float64)])
def test_signs_are_plus_one_zero_or_minus_one_in_one_byte(convert):
    found = signs(convert(VALUES))
    assert found.tolist() == [1, 1, 1, 0, 0, -1, -1, -1]
    assert str(found.dtype).endswith("int8")


@pytest.mark.parametrize("tau", [0, 1, 0.0, 1.0, 0.4, np.float64(0.4), np.int64(1)])
def test_any_number_from_zero_to_one_is_a_threshold(tau):
    assert check_tau(tau) == float(tau)
    assert type(check_tau(tau)) is float


@pytest.mark.parametrize("tau", [-1e-9, 1 + 1e-9, 2, -1, True, False, "1", None, [0.4], 1j])
def test_anything_else_is_none(tau):
    with pytest.raises(fedgma.ConfigError, match="tau must be a number from 0 to 1"):
        check_tau(tau)


@pytest.mark.parametrize("clients", [10, 1000, 100_000])
def test_a_threshold_is_met_within_a_billionth(clients):
    votes = 4 * clients // 10
    assert votes_needed(0.4 + 0.9e-9, clients) == votes
    assert votes_needed(0.4 + 1.2e-9, clients) == votes + 1
    assert votes_needed(0.4 - 0.9e-9, clients) == votes


def test_no_votes_are_needed_for_a_threshold_of_zero_whatever_the_number_of_clients():
    assert [votes_needed(0.0, clients) for clients in (1, 10, 10**10)] == [0, 0, 0]


def test_agreement_is_in_float64_unless_another_type_is_asked_for():
    votes = np.array([3, -1], np.int8)
    assert agreement(votes, 3).dtype == np.float64
    assert agreement(votes, 3, "float32").dtype == np.float32


def test_a_soft_mask_keeps_the_agreement_below_the_threshold_and_a_hard_one_nothing():
    votes = np.array([5, -4, 3, -2, 1, 0], np.int8)
    assert soft_mask(0.8)(votes, 5, "float64").tolist() == [1.0, 1.0, 0.6, 0.4, 0.2, 0.0]
    assert hard_mask(0.8)(votes, 5, "float64").tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert (MASKS["soft"], MASKS["hard"]) == (soft_mask, hard_mask)


@pytest.mark.parametrize("library", [np, torch])
@pytest.mark.parametrize("clients", [10, 126])  # 127 fits the type of the votes, 128 does not
def test_a_threshold_that_no_vote_can_reach_reverses_every_entry(library, clients):
    votes = library.asarray([clients, -clients, 0], dtype=library.int8)
    for threshold in (clients + 1, clients + 2, 1000):
        assert reversing_mask(threshold)(votes, clients, "float32").tolist() == [-1.0, -1.0, -1.0]
    assert reversing_mask(clients)(votes, clients, "float32").tolist() == [1.0, 1.0, -1.0]


def test_a_threshold_of_zero_votes_reverses_nothing():
    assert reversing_mask(0)(np.array([0, 1], np.int8), 3, "float64").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("threshold", [-1, 0.5, 2.0, True, "2", None])
def test_only_a_whole_number_is_a_number_of_votes(threshold):
    with pytest.raises(fedgma.ConfigError, match="threshold must be a whole number of votes"):
        reversing_mask(threshold)


def test_numpys_whole_numbers_are_numbers_of_votes():
    assert reversing_mask(np.int64(2)).threshold == 2


@pytest.mark.parametrize(
    ("clients", "kind"),
    [
        (2**7 - 2, "int8"),
        (2**7 - 1, "int16"),
        (2**15 - 2, "int16"),
        (2**15 - 1, "int32"),
        (2**31 - 2, "int32"),
        (2**31 - 1, "int64"),
        (2**63 - 2, "int64"),
    ],
)
def test_one_more_than_the_number_of_clients_fits_the_type_of_the_votes(clients, kind):
    assert vote_type(clients) == kind
    assert np.iinfo(kind).max >= clients + 1


@pytest.mark.parametrize("clients", [1, 2, 5, 9, 10, 30])
@pytest.mark.parametrize("level", [0.01, 0.05, 0.35, 0.9])
def test_a_sign_test_passes_votes_that_fair_coins_seldom_reach(clients, level):
    chance = dict.fromkeys(range(clients + 2), 0.0)
    for heads in range(clients + 1):
        chance[abs(2 * heads - clients)] += math.comb(clients, heads) / 2**clients
    passed = [votes for votes in chance if sum(p for other, p in chance.items() if other >= votes) <= level]
    reached = [votes for votes in range(clients % 2, clients + 1, 2) if votes >= significant_votes(level, clients)]
    assert reached == [votes for votes in passed if votes % 2 == clients % 2 and votes <= clients]


def test_a_significance_level_is_tau_where_the_number_of_clients_is_fixed():
    votes = np.arange(-10, 11, 2, dtype=np.int8)
    masks = [function(votes, 10, "float64") for function in (sign_test_mask(0.05), soft_mask(0.8))]
    np.testing.assert_array_equal(*masks)
    assert sign_test_mask(0.05).needed(10**6) == 1960


@pytest.mark.parametrize("level", [0, 1, -0.1, "0.05", True, math.nan])
def test_a_level_that_is_no_probability_is_refused(level):
    with pytest.raises(fedgma.errors.ConfigError, match="level"):
        fedgma.sign_test(level)
