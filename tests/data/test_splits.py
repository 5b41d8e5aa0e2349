import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgma.data.files import load
from fedgma.data.partitions import Partition, dirichlet, label_skew, quantity
from fedgma.data.skew import class_counts, gini, measure
from fedgma.data.splits import divide, hold_out, matching_tests
from fedgma.errors import ConfigError, DataError


@settings(deadline=None)
@given(st.floats(0, 0.9), st.integers(0, 1000))
def test_validation_and_training_share_nothing_and_lose_nothing(share, seed):
    labels = np.arange(300) % 7
    whole = quantity(labels, 20, seed=seed)
    rest, held = hold_out(whole, share, labels, seed=seed)
    for before, train, validation in zip(whole.clients, rest.clients, held, strict=True):
        assert np.array_equal(np.sort(np.concatenate([train, validation])), before)
        assert len(train) >= 1
        assert abs(len(validation) - share * len(before)) <= 1


def test_validation_has_the_class_mix_of_the_client():
    labels = np.repeat([0, 1], [80, 20])
    _, (held,) = hold_out(Partition((np.arange(100),)), 0.25, labels)
    assert np.bincount(labels[held]).tolist() == [20, 5]


def test_a_share_of_one_is_refused():
    with pytest.raises(ConfigError, match="at least 0 and below 1"):
        hold_out(Partition((np.arange(3),)), 1.0, np.zeros(3, int))


def test_a_clients_test_set_has_its_class_mix():
    labels, test_labels = np.arange(2000) % 10, np.arange(1000) % 10
    partition = dirichlet(labels, 10, alpha=0.3, seed=0)
    tests = matching_tests(partition, labels, test_labels, size=100)
    mixes = class_counts(partition, labels, 10) / partition.sizes[:, None]
    for mix, index in zip(mixes, tests, strict=True):
        assert len(np.unique(index)) == len(index) == 100
        assert np.abs(np.bincount(test_labels[index], minlength=10) - 100 * mix).max() <= 1


def test_a_clients_test_set_shrinks_where_a_class_is_rare():
    labels, test_labels = np.array([0, 0, 1, 1]), np.repeat([0, 1], [100, 3])
    (index,) = matching_tests(Partition((np.arange(4),)), labels, test_labels, size=50)
    assert np.bincount(test_labels[index]).tolist() == [3, 3]


def test_a_class_absent_from_the_test_set_leaves_an_empty_test_set():
    (index,) = matching_tests(Partition((np.arange(2),)), np.array([1, 1]), np.zeros(5, int))
    assert index.tolist() == []


def test_a_set_without_owners_has_no_natural_partition():
    with pytest.raises(DataError, match="needs an owner id for each sample, but fmnist-mini has none"):
        divide(load("fmnist-mini"), "natural")


def test_a_partition_by_number_needs_the_number():
    with pytest.raises(ConfigError, match="needs a number of clients"):
        divide(load("fmnist-mini"), "iid")


def test_skew_statistics_with_two_classes_per_client():
    labels = np.arange(1000) % 10
    skew = measure(label_skew(labels, 10), labels, 10)
    assert (skew.classes_min, skew.classes_max, skew.effective_clients, skew.size_gini) == (2, 2, 10, 0)
    assert skew.hellinger_mean == pytest.approx(np.sqrt(1 - np.sqrt(0.2)))  # 1 - sum sqrt(1/2 * 1/10), twice
    assert skew.jensen_shannon_mean == pytest.approx(0.781, abs=1e-3)


def test_skew_statistics_of_equal_mixes_are_zero():
    labels = np.array([0, 1, 0, 1])
    skew = measure(Partition((np.array([0, 1]), np.array([2, 3]))), labels, 2)
    assert skew.jensen_shannon_max == skew.hellinger_max == 0


def test_one_client_with_everything_counts_as_one():
    labels = np.zeros(10, int)
    skew = measure(Partition((np.arange(10), np.empty(0, np.int64))), labels, 2)
    assert skew.effective_clients == 1
    assert gini(np.array([10, 0])) == 0.5
