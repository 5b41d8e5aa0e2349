import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgma.data.partitions import PARTITIONS, client_dirichlet, dirichlet, iid, label_skew, natural, quantity, split
from fedgma.data.skew import class_counts
from fedgma.errors import ConfigError


def is_exact(partition, samples):
    """Every sample is used once."""
    return np.array_equal(np.sort(np.concatenate(partition.clients)), np.arange(samples))


def labels_of(counts, seed=0):
    return np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))


@st.composite
def exact_requests(draw):
    """(N, k, classes) with N * k a multiple of the class count."""
    classes = draw(st.integers(1, 12))
    k = draw(st.integers(1, classes))
    step = classes // np.gcd(classes, k)
    return int(draw(st.integers(1, 8)) * step), k, classes


@settings(deadline=None)
@given(exact_requests(), st.integers(0, 10**6))
def test_exact_skew_gives_every_client_k_distinct_classes_and_uses_every_sample_once(request_, seed):
    clients, k, classes = request_
    copies = clients * k // classes
    labels = labels_of(np.random.default_rng(seed).integers(copies, copies + 30, classes), seed)
    partition = label_skew(labels, clients, classes_per_client=k, seed=seed)
    assert is_exact(partition, len(labels))
    held = class_counts(partition, labels, classes) > 0
    assert (held.sum(axis=1) == k).all()
    assert (held.sum(axis=0) == copies).all()


@settings(deadline=None)
@given(exact_requests(), st.integers(0, 10**6))
def test_exact_skew_of_balanced_classes_gives_sizes_within_one_shard(request_, seed):
    clients, k, classes = request_
    copies = clients * k // classes
    labels = labels_of([copies * 3 + 1] * classes)
    sizes = label_skew(labels, clients, classes_per_client=k, seed=seed).sizes
    assert sizes.max() - sizes.min() <= max(3, k)


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 10**6))
def test_iid_sizes_differ_by_at_most_one_and_the_first_clients_have_more(clients, seed):
    labels = np.zeros(200, int)
    partition = iid(labels, clients, seed=seed)
    assert is_exact(partition, 200)
    assert partition.sizes.tolist() == sorted(partition.sizes.tolist(), reverse=True)
    assert partition.sizes[0] - partition.sizes[-1] <= 1


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([dirichlet, quantity]),
    st.integers(1, 100),
    st.floats(1e-3, 1e3) | st.sampled_from([1e-300, 1e300, 1e308]),
    st.integers(0, 10),
    st.integers(0, 10**6),
)
def test_no_dirichlet_draw_hangs_loses_a_sample_or_leaves_a_client_too_small(partitioner, clients, value, least, seed):
    labels = labels_of([100] * 10)
    name = "alpha" if partitioner is dirichlet else "beta"
    partition = partitioner(labels, clients, min_size=least, seed=seed, **{name: value})
    assert is_exact(partition, 1000)
    assert partition.sizes.min() >= least


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.floats(1e-3, 1e3) | st.sampled_from([1e-300, 1e300]), st.integers(0, 10**6))
def test_a_draw_for_each_client_gives_equal_sizes_and_says_what_is_shared(clients, alpha, seed):
    labels = labels_of([20, 50, 30])
    partition = client_dirichlet(labels, clients, alpha=alpha, seed=seed)
    assert partition.sizes.tolist() == [100 // clients] * clients
    held = np.bincount(np.concatenate(partition.clients), minlength=100)
    for name in range(3):  # a class starts over only when it is used up
        assert np.ptp(held[labels == name]) <= 1
    shared, unused = (held > 1).sum(), (held == 0).sum()
    assert partition.notes == (f"{shared} of 100 samples are used more than once, {unused} not at all",)


def test_a_client_that_draws_one_class_keeps_to_it():
    labels = labels_of([100] * 10)
    strong = class_counts(client_dirichlet(labels, 10, alpha=1e-3, seed=1), labels, 10)
    assert ((strong > 0).sum(axis=1) == 1).all()
    assert (strong.sum(axis=0) > 100).any()  # two clients drew the same class
    weak = class_counts(client_dirichlet(labels, 10, alpha=1e3, seed=1), labels, 10)
    assert weak.min() > 0


def test_a_repair_is_noted_and_deterministic():
    labels = labels_of([50] * 10)
    first, second = (dirichlet(labels, 50, alpha=0.01, min_size=10, seed=3) for _ in range(2))
    assert first.notes[0].startswith("repaired: moved ")
    assert all(np.array_equal(a, b) for a, b in zip(first.clients, second.clients, strict=True))
    assert first.sizes.tolist() == [10] * 50


def test_a_draw_that_is_large_enough_is_not_repaired():
    assert dirichlet(labels_of([500] * 10), 5, alpha=100, seed=0).notes == ()


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_a_partition_depends_on_its_seed_and_on_nothing_else(name):
    labels = np.arange(1000) % 10
    settings_ = {"held_out": 3} if name == "natural" else {}
    clients = 5
    same, again, other = (split(name, labels, clients, seed=s, **settings_) for s in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(same.clients, again.clients, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(same.clients, other.clients, strict=True))


def test_small_alpha_is_strong_skew_and_large_alpha_is_none():
    labels = labels_of([1000] * 10)
    strong, weak = (dirichlet(labels, 10, alpha=alpha, seed=0) for alpha in (0.05, 1000))
    assert (class_counts(strong, labels, 10) > 100).sum() < 30
    assert class_counts(weak, labels, 10).min() > 70


def test_shards_are_equal_and_hold_about_k_classes():
    labels = labels_of([580, 670, 600, 600, 590, 540, 590, 620, 585, 625])
    partition = label_skew(labels, 50, classes_per_client=2, mode="shards", seed=0)
    assert is_exact(partition, len(labels))
    assert partition.sizes.max() - partition.sizes.min() <= 2
    held = (class_counts(partition, labels, 10) > 0).sum(axis=1)
    assert held.min() >= 1
    assert held.max() <= 4


def test_natural_gives_one_client_per_owner_in_the_order_of_their_ids():
    partition = natural(np.array([30, 10, 30, 20]))
    assert [index.tolist() for index in partition.clients] == [[1], [3], [0, 2]]


def test_held_out_owners_are_in_no_client():
    ids = np.repeat(np.arange(20), 5)
    partition = natural(ids, held_out=4, seed=1)
    training = {int(ids[i]) for index in partition.clients for i in index}
    assert len(partition.clients) == 16
    assert len(partition.held_out) == 20
    assert not training & set(ids[partition.held_out].tolist())


def test_owners_can_be_grouped_into_clients():
    ids = np.repeat(np.arange(20), 5)
    partition = natural(ids, 4, held_out=4, seed=1)
    assert partition.sizes.tolist() == [20] * 4
    assert all(len(set(ids[index].tolist())) == 4 for index in partition.clients)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda y: label_skew(y, 7, classes_per_client=2), "14 shards, which 10 classes cannot share equally"),
        (lambda y: label_skew(y, 10, classes_per_client=11), "between 1 and the 10 classes"),
        (lambda y: label_skew(y, 100, classes_per_client=2), "has 10 samples but is divided into 20 shards"),
        (lambda y: label_skew(y, 10, mode="shard"), "unknown mode 'shard'"),
        (
            lambda y: label_skew(y, 60, classes_per_client=2, mode="shards"),
            "60 clients x 2 shards need .* got 100 samples",
        ),
        (lambda y: dirichlet(y, 20, min_size=10), "20 clients of at least 10 samples need 200 samples, got 100"),
        (lambda y: dirichlet(y, 2, alpha=0), "alpha must be a positive number"),
        (lambda y: quantity(y, 2, beta=float("nan")), "beta must be a positive number"),
        (lambda y: iid(y, 0), "at least 1 client"),
        (lambda y: natural(y, held_out=10), "leave at least one of the 10 owners"),
        (lambda y: natural(y, 11), "10 owners cannot make 11 clients"),
        (lambda y: split("idd", y, 2), "unknown partition 'idd'; known: client_dirichlet, dirichlet, iid"),
        (lambda y: split("iid", y, 2, alpha=1), "partition 'iid'.*alpha"),
    ],
)
def test_an_impossible_request_is_refused_with_its_reason(call, reason):
    with pytest.raises(ConfigError, match=reason):
        call(np.repeat(np.arange(10), 10))
