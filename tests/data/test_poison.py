"""Poisoned data: only malicious clients see it, and it is what they were to be shown."""

import numpy as np
import pytest
import torch

from fedgma.data.federation import federate
from fedgma.data.files import from_arrays, load
from fedgma.data.partitions import iid
from fedgma.data.poison import BACKDOOR, TRIGGER, flip_labels, open_backdoor
from fedgma.errors import DataError

MALICIOUS = np.array([False, True, False, False])


@pytest.fixture(scope="module")
def clean():
    mini = load("fmnist-mini")
    return federate(mini, iid(mini.train.y, 4, seed=1))


def shown(federation, client):
    """The raw images and labels of a client's samples."""
    index = torch.from_numpy(federation.clients[client])
    return federation.train.x[index], federation.train.y[index]


@pytest.mark.parametrize("poison", [flip_labels, open_backdoor])
def test_honest_clients_keep_their_samples(clean, poison):
    poisoned = poison(clean, MALICIOUS)
    for client in np.flatnonzero(~MALICIOUS):
        for before, after in zip(shown(clean, client), shown(poisoned, client), strict=True):
            assert torch.equal(before, after)
    assert torch.equal(poisoned.test.y, clean.test.y)


def test_flipped_labels_are_reversed_and_their_images_kept(clean):
    (x, y), (images, labels) = shown(clean, 1), shown(flip_labels(clean, MALICIOUS), 1)
    assert torch.equal(images, x)
    assert torch.equal(labels, 9 - y)


def test_a_share_of_an_attackers_images_has_the_trigger_and_the_target(clean):
    (x, y), (images, labels) = shown(clean, 1), shown(open_backdoor(clean, MALICIOUS, target=3, share=0.25), 1)
    corner = images[..., -TRIGGER:, -TRIGGER:]
    stamped = (images != x).flatten(1).any(1) | ((corner == 255).flatten(1).all(1) & (labels == 3))
    assert int(stamped.sum()) == round(0.25 * len(x))
    assert (corner[stamped] == 255).all()
    assert (labels[stamped] == 3).all()
    assert torch.equal(images[~stamped], x[~stamped])
    assert torch.equal(labels[~stamped], y[~stamped])
    outside = images.clone()
    outside[..., -TRIGGER:, -TRIGGER:] = x[..., -TRIGGER:, -TRIGGER:]
    assert torch.equal(outside, x)


def test_the_success_of_a_backdoor_is_counted_on_images_of_other_classes(clean):
    pool = open_backdoor(clean, MALICIOUS, target=3).more_tests[BACKDOOR]
    others = clean.test.y != 3
    assert len(pool) == int(others.sum())
    assert (pool.y == 3).all()
    assert torch.equal(pool.x[..., :-TRIGGER, :], clean.test.x[others][..., :-TRIGGER, :])
    assert (pool.x[..., -TRIGGER:, -TRIGGER:] == 255).all()


def test_federations_of_all_seeds_share_one_poisoned_split(clean):
    others = np.array([True, False, True, False])
    first, second = flip_labels(clean, MALICIOUS), flip_labels(clean, others)
    assert torch.equal(first.train.x, second.train.x)
    assert torch.equal(first.train.y, second.train.y)


def test_a_backdoor_needs_images_and_a_known_class(clean):
    with pytest.raises(DataError, match=r"attack\.target must be a class from 0 to 9, got 10"):
        open_backdoor(clean, MALICIOUS, target=10)
    features = from_arrays(np.zeros((20, 5), np.float32), [0, 1] * 10)
    with pytest.raises(DataError, match="a backdoor needs images"):
        open_backdoor(federate(features, iid(features.train.y, 4)), MALICIOUS)
