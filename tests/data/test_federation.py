import numpy as np
import torch

from fedgma.datasets import load
from fedgma.datasets.sets import Dataset, Source, Split
from fedgma.federation import federate
from fedgma.partitions import iid, label_skew


def small() -> Dataset:
    x = np.arange(6 * 2 * 2 * 2, dtype=np.uint8).reshape(6, 2, 2, 2)
    y = np.array([0, 1, 0, 1, 0, 1])
    return Dataset("small", Split(x, y), Split(x[:2], y[:2]), ("a", "b"), Source("arrays", "small", ""))


def test_a_batch_is_scaled_and_normalised_by_the_training_channels():
    dataset = small()
    fed = federate(dataset, iid(dataset.train.y, 2))
    images = dataset.train.x / 255
    mean, std = images.mean((0, 2, 3)), images.std((0, 2, 3))
    x, y = fed.train.batch(torch.tensor([4, 1]), torch.tensor([0, 0]))
    expected = (images[[4, 1]] - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-4, atol=1e-6)
    assert y.tolist() == [0, 1]


def test_the_test_pool_uses_the_training_statistics():
    dataset = small()
    fed = federate(dataset, iid(dataset.train.y, 2))
    one = torch.tensor([1])
    assert torch.equal(fed.train.batch(one, one)[0], fed.test.batch(one, one)[0])


def test_an_index_of_any_shape_gives_a_batch_of_that_shape():
    mini = load("fmnist-mini")
    fed = federate(mini, label_skew(mini.train.y, 10))
    index = torch.arange(24).reshape(2, 3, 4)
    x, y = fed.train.batch(index, torch.arange(2)[:, None, None])
    assert x.shape == (2, 3, 4, 1, 28, 28)
    assert x.dtype == torch.float32
    assert torch.equal(y, fed.train.y[index])


def test_the_normalised_training_set_has_mean_zero_and_deviation_one():
    mini = load("fmnist-mini")
    fed = federate(mini, iid(mini.train.y, 10))
    x, _ = fed.train.batch(torch.arange(10000), torch.zeros(1, dtype=torch.int64))
    assert abs(float(x.mean())) < 1e-4
    assert abs(float(x.std()) - 1) < 1e-3


def test_features_are_used_as_they_are():
    x = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    split = Split(x, np.array([0, 1]))
    fed = federate(Dataset("f", split, split, ("a", "b"), Source("arrays", "f", "")), iid(split.y, 2))
    assert fed.train.batch(torch.tensor([1]), torch.tensor([0]))[0].tolist() == [[3.0, 4.0]]


def test_the_home_of_a_sample_is_its_client():
    mini = load("fmnist-mini")
    fed = federate(mini, label_skew(mini.train.y, 10))
    assert fed.train.home[fed.clients[7]].unique().tolist() == [7]
