"""What is promised of the real data sets, on the real files."""

import hashlib
import struct

import numpy as np
import pytest
import torch

from fedgma.data.colour_probe import colour_probe
from fedgma.data.federation import federate
from fedgma.data.files.dataset import histogram
from fedgma.data.files.registry import MNIST_TEST, MNIST_TRAIN
from fedgma.data.skew import class_counts
from fedgma.data.splits import divide

pytestmark = pytest.mark.full_data

LABEL_SKEW = {"mnist": 2, "fmnist": 2, "cifar10": 2, "fedcmnist": 2, "cifar100": 10, "tinyimagenet": 20}
FULL_LABELS = {"cifar100": np.arange(50_000) % 100, "tinyimagenet": np.arange(100_000) % 200}  # not all images are here


def test_mnist_is_the_known_one(real):
    mnist = real("mnist")
    assert histogram(mnist.train, 10) == MNIST_TRAIN
    assert histogram(mnist.test, 10) == MNIST_TEST == (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009)
    raw = struct.pack(">4I", 0x803, 60_000, 28, 28) + mnist.train.x.tobytes()
    assert hashlib.md5(raw).hexdigest() == "6bbc9ace898e44ae57da46a324031adb"  # of the original file, unzipped


def test_fashion_mnist_is_complete(real):
    fmnist = real("fmnist")
    assert histogram(fmnist.train, 10) == (6000,) * 10
    assert histogram(fmnist.test, 10) == (1000,) * 10
    assert fmnist.source.kind == "debian"


def test_the_embedded_set_is_a_part_of_fashion_mnist(real):
    from fedgma.data.files import load

    whole, mini = real("fmnist"), load("fmnist-mini")
    for part in ("train", "test"):
        known = {image.tobytes(): label for image, label in zip(*getattr(whole, part)[:2], strict=True)}
        small = getattr(mini, part)
        assert all(known.get(image.tobytes()) == label for image, label in zip(small.x, small.y, strict=True))


def test_cifar10_is_complete_and_has_the_known_channel_means(real):
    cifar = real("cifar10")
    assert histogram(cifar.train, 10) == (5000,) * 10
    assert histogram(cifar.test, 10) == (1000,) * 10
    pool = federate(cifar, divide(cifar, "iid", 10)).train
    np.testing.assert_allclose(pool.mean.flatten(), [0.4914, 0.4822, 0.4465], atol=5e-5)
    np.testing.assert_allclose(pool.std.flatten(), [0.2470, 0.2435, 0.2616], atol=5e-5)
    assert cifar.classes[:3] == ("airplane", "automobile", "bird")


def test_the_part_of_tinyimagenet_says_that_it_is_a_part(real):
    tiny = real("tinyimagenet")
    assert histogram(tiny.train, 200) == (40,) * 200
    assert histogram(tiny.test, 200) == (20,) * 200
    assert "40 of 500" in tiny.notes[0]


def test_mnist_writers_are_539_and_297_others(real):
    data = real("mnist-writers")
    train, test = np.unique(data.train.client), np.unique(data.test.client)
    assert (len(train), len(test), len(np.intersect1d(train, test))) == (539, 297, 0)
    sizes = divide(data, "natural").sizes
    assert (sizes.min(), np.median(sizes), sizes.max()) == (19, 116, 131)


def test_femnist_digits_are_tested_on_held_out_writers(real):
    by_sample, femnist = real("femnist-by-sample"), real("femnist")
    assert (len(by_sample.train.y), len(by_sample.test.y)) == (54_503, 6_254 + 9_259)
    digits = by_sample.train.y[by_sample.train.y < 10]
    assert np.bincount(digits).tolist() == [3791, 4200, 3842, 3928, 3732, 3610, 3851, 3995, 3775, 3817]
    assert not set(femnist.train.client.tolist()) & set(femnist.test.client.tolist())
    assert (len(np.unique(femnist.train.client)), len(femnist.test.y)) == (385, 3079)
    same = femnist.more_tests["same_writers"]
    assert set(same.client.tolist()) <= set(femnist.train.client.tolist())


@pytest.mark.parametrize("clients", [500, 100, 10])
@pytest.mark.parametrize("name", LABEL_SKEW)
def test_label_skew_of_every_row_of_the_paper(real, name, clients):
    k = LABEL_SKEW[name]
    if name in FULL_LABELS:
        from fedgma.data.partitions import label_skew

        labels = FULL_LABELS[name]
        partition = label_skew(labels, clients, classes_per_client=k)
    else:
        data = real(name)
        labels, partition = data.train.y, divide(data, "label_skew", clients, classes_per_client=k)
    held = class_counts(partition, labels, int(labels.max()) + 1) > 0
    assert (held.sum(axis=1) == k).all()
    shard = len(labels) // (clients * k)
    assert partition.sizes.max() - partition.sizes.min() <= shard
    assert np.array_equal(np.sort(np.concatenate(partition.clients)), np.arange(len(labels)))


@pytest.mark.parametrize("clients", [100, 10])
def test_quantity_skew_of_cifar10(real, clients):
    data = real("cifar10")
    partition = divide(data, "quantity", clients, beta=0.5)
    assert np.array_equal(np.sort(np.concatenate(partition.clients)), np.arange(50_000))
    assert partition.sizes.min() >= 1
    assert partition.sizes.max() > 2 * np.median(partition.sizes)


@pytest.mark.parametrize(
    "name", ["mnist", "fmnist", "cifar10", "femnist", "femnist-62", "mnist-writers", "tinyimagenet"]
)
def test_no_test_image_is_a_training_image(real, name):
    data = real(name)
    train = {hashlib.blake2b(image.tobytes(), digest_size=16).digest() for image in data.train.x}
    assert len(train) == len(data.train.y)  # and no training picture is there twice, to leak into validation
    assert not any(hashlib.blake2b(image.tobytes(), digest_size=16).digest() in train for image in data.test.x)


@pytest.mark.parametrize(
    ("name", "partition", "clients"),
    [("mnist", "label_skew", 500), ("cifar10", "dirichlet", 100), ("femnist", "natural", None), ("fmnist", "iid", 10)],
)
def test_train_validation_and_test_are_disjoint(real, name, partition, clients):
    data = real(name)
    fed = federate(data, divide(data, partition, clients), validation=0.1)
    used = np.concatenate([*fed.clients, *fed.validation])
    assert len(np.unique(used)) == len(used) == len(data.train.y)
    assert 0.07 < sum(map(len, fed.validation)) / len(used) < 0.11
    assert fed.train.x.data_ptr() != fed.test.x.data_ptr()


@pytest.mark.parametrize("partition", ["iid", "label_skew"])
def test_colour_predicts_the_digit_on_training_clients_and_not_in_the_test_environment(real, partition):
    data = real("fedcmnist")
    probe = colour_probe(federate(data, divide(data, partition, 100)))
    assert probe.train > 0.8
    assert probe.seen is not None
    assert probe.seen > 0.8
    assert abs(probe.test - 0.1) < 0.03


def test_no_two_training_clients_share_a_colouring(real):
    data = real("fedcmnist")
    fed = federate(data, divide(data, "iid", 500))
    foreground = fed.train.view.foreground
    assert foreground.shape == (500, 10, 2, 3)
    assert len(torch.unique(foreground.flatten(1), dim=0)) == 500
