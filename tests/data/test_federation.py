import numpy as np
import pytest
import torch

from fedgma.data.federation import federate, place
from fedgma.data.files import load
from fedgma.data.files.dataset import Dataset, Source, Split
from fedgma.data.partitions import iid, label_skew
from fedgma.data.pools import channel_statistics, view_moments
from fedgma.data.shifts import Colour, Rotation


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


def test_features_are_not_normalised():
    x = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    split = Split(x, np.array([0, 1]))
    fed = federate(Dataset("f", split, split, ("a", "b"), Source("arrays", "f", "")), iid(split.y, 2))
    assert fed.train.batch(torch.tensor([1]), torch.tensor([0]))[0].tolist() == [[3.0, 4.0]]


def test_a_sample_belongs_to_its_client():
    mini = load("fmnist-mini")
    fed = federate(mini, label_skew(mini.train.y, 10))
    assert fed.train.client_of[fed.clients[7]].unique().tolist() == [7]


def test_federations_of_a_placed_set_share_its_images():
    mini = load("fmnist-mini")
    placed = place(mini)
    first = federate(placed, iid(mini.train.y, 10))
    second = federate(placed, label_skew(mini.train.y, 100), shift=Colour(), seed=3)
    assert first.train.x.data_ptr() == second.train.x.data_ptr()
    assert first.test.x.data_ptr() == second.test.x.data_ptr() == second.more_tests["seen"].x.data_ptr()


@pytest.mark.parametrize("shift", [None, Colour(), Colour("private", "foreground_background"), Rotation()])
def test_channel_statistics_are_those_of_the_images_as_they_are_seen(shift):
    mini = load("fmnist-mini")
    fed = federate(mini, label_skew(mini.train.y, 10), shift=shift)
    mean, std = channel_statistics(view_moments(fed.train))
    torch.testing.assert_close(fed.train.mean, mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fed.train.std, std, rtol=1e-5, atol=1e-6)


def test_validation_and_client_tests_come_with_the_federation():
    mini = load("fmnist-mini")
    fed = federate(mini, label_skew(mini.train.y, 10), validation=0.2, client_test_size=50)
    assert [len(index) for index in fed.validation] == [200] * 10
    assert fed.client_tests is not None
    for mine, tests in zip(fed.clients, fed.client_tests, strict=True):
        assert set(fed.test.y[tests].tolist()) == set(fed.train.y[mine].tolist())
        assert len(tests) == 50


def test_two_federations_of_one_seed_are_equal_and_of_another_differ():
    mini = load("fmnist-mini")
    partition, index = iid(mini.train.y, 10), torch.arange(50)
    same, again, other = (federate(mini, partition, shift=Colour(), seed=s).train for s in (1, 1, 2))
    assert torch.equal(same.batch(index, same.client_of[index])[0], again.batch(index, again.client_of[index])[0])
    assert not torch.equal(same.show(index, same.client_of[index]), other.show(index, other.client_of[index]))


@pytest.mark.parametrize("name", ["mnist", "fedcmnist"])
def test_validation_samples_form_a_pool_in_the_colours_of_their_clients(name):
    grey_dataset = load("fmnist-mini")
    shift = Colour() if name == "fedcmnist" else None
    federation = federate(grey_dataset, iid(grey_dataset.train.y, 4), shift=shift, validation=0.25)
    held = np.sort(np.concatenate(federation.validation))
    pool = federation.more_tests["validation"]
    assert len(pool) == len(held)
    place = torch.arange(len(held))
    seen, labels = pool.batch(place, pool.client_of)
    wanted, known = federation.train.batch(torch.from_numpy(held), federation.train.client_of[held])
    assert torch.equal(seen, wanted)
    assert torch.equal(labels, known)
    assert not set(held.tolist()) & set(np.concatenate(federation.clients).tolist())
