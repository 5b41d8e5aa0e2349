import numpy as np
import pytest
import torch

from fedgma.data.client_views import Rotated
from fedgma.data.colour_probe import colour_probe
from fedgma.data.federation import federate
from fedgma.data.files import Dataset, Source, Split, load
from fedgma.data.partitions import iid
from fedgma.data.shifts import Colour, Rotation, client_colouring, distinct_colours, held_out_colouring
from fedgma.errors import ConfigError, DataError

LABELS = np.arange(2000) % 10


def grey_squares() -> Dataset:
    """Ten classes of one white picture: all that differs is the colour given to it."""
    x = np.full((2000, 1, 4, 4), 255, np.uint8)
    return Dataset("squares", Split(x, LABELS), Split(x, LABELS), tuple("0123456789"), Source("arrays", "squares", ""))


def clients_of(shift, clients=20):
    return client_colouring(shift, LABELS, clients, 10, seed=0, part="train")


def test_base_colours_are_bright_and_distinct():
    colours = distinct_colours(20, seed=0)
    distance = np.linalg.norm(colours[:, None] - colours, axis=-1) + 9 * np.eye(20)
    assert (colours.max(axis=1) == 1).all()
    assert distance[:10, :10].min() > 0.5  # jitter moves a colour by at most 0.18
    assert distance.min() > 0.3


def test_every_client_varies_the_shared_colours_in_its_own_way():
    foreground = clients_of(Colour(jitter=0.1)).foreground[:, :, 0]
    base = distinct_colours(20, seed=0)[:10]
    assert np.abs(foreground - base).max() <= 0.1 + 1e-6
    assert len({client.tobytes() for client in foreground}) == 20


def test_a_clients_colours_do_not_depend_on_how_many_clients_there_are():
    few, many = clients_of(Colour(), 3), clients_of(Colour(), 30)
    assert np.array_equal(few.foreground, many.foreground[:3])
    assert np.array_equal(few.flip, many.flip[:3])


def test_unseen_test_colours_are_no_training_clients_colours():
    shift = Colour()
    seen = clients_of(shift, 100).foreground[:, :, 0].reshape(-1, 3)
    unseen = held_out_colouring(shift, LABELS, 10, seed=0).foreground[0, :, 0]
    assert np.linalg.norm(seen[:, None] - unseen, axis=-1).min() > 0.2


def test_unseen_test_colours_are_independent_of_the_label():
    other = held_out_colouring(Colour(), LABELS, 10, seed=0).other
    table = np.zeros((10, 10))
    np.add.at(table, (LABELS, other), 1)
    assert ((table - 20) ** 2 / 20).sum() < 130  # chi-square with 81 degrees of freedom: p > 0.0005


def test_permuted_test_colours_are_the_base_colours_of_other_digits():
    shift = Colour(test_coloring="permuted")
    colouring = held_out_colouring(shift, LABELS, 10, seed=0)
    base = distinct_colours(20, seed=0)[:10]
    shown = colouring.foreground[0, :, 0]
    match = np.abs(shown[:, None] - base).sum(-1).argmin(1)
    assert sorted(match.tolist()) == list(range(10))
    assert (match != np.arange(10)).all()
    assert np.array_equal(colouring.other, LABELS)


def test_random_test_colours_are_base_colours_whatever_the_label():
    colouring = held_out_colouring(Colour(test_coloring="random"), LABELS, 10, seed=0)
    assert np.array_equal(colouring.foreground[0, :, 0], distinct_colours(20, seed=0)[:10])
    assert not np.array_equal(colouring.other, LABELS)


def test_private_palettes_have_nothing_in_common():
    foreground = clients_of(Colour(palette="private"), 50).foreground[:, :, 0]
    assert foreground[:, 3].std(axis=0).min() > 0.15


def test_a_flipped_image_takes_the_colour_of_another_digit_as_often_as_its_client_flips():
    fed = federate(grey_squares(), iid(LABELS, 2), shift=Colour(flip_low=0.3, flip_high=0.3, jitter=0))
    index = torch.arange(2000)
    colour = fed.train.show(index, fed.train.client_of)[..., 0, 0]
    expected = torch.from_numpy(distinct_colours(20, seed=0)[:10])[fed.train.y]
    flipped = ((colour - expected).abs().sum(-1) > 1e-5).float().mean()
    assert 0.26 < float(flipped) < 0.34


def test_without_flips_an_image_shows_the_colour_its_client_has_for_the_digit():
    shift = Colour(flip_low=0, flip_high=0)
    fed = federate(grey_squares(), iid(LABELS, 4), shift=shift)
    x = fed.train.show(torch.tensor([7, 7]), torch.tensor([0, 3]))
    foreground = clients_of(shift, 4).foreground
    np.testing.assert_allclose(x[:, :, 0, 0].numpy(), foreground[[0, 3], 7, 0], rtol=1e-6)


def test_two_foreground_and_two_background_colours_per_class():
    dataset = grey_squares()
    dataset.train.x[:, :, :, 2:] = 0  # the right half is background
    fed = federate(dataset, iid(LABELS, 1), shift=Colour("shared", "foreground_background", flip_low=0, flip_high=0))
    sevens = torch.arange(7, 2000, 10)
    x = fed.train.show(sevens, torch.zeros_like(sevens))
    assert len(torch.unique(x[:, :, 0, 0].round(decimals=4), dim=0)) == 2
    assert len(torch.unique(x[:, :, 0, 3].round(decimals=4), dim=0)) == 2
    assert 0 < float(x[:, :, 0, 3].max()) <= 0.6


def test_a_colour_probe_reads_the_label_on_training_clients_and_guesses_in_the_test_environment():
    probe = colour_probe(federate(grey_squares(), iid(LABELS, 10), shift=Colour()))
    assert probe.train > 0.7
    assert probe.seen is not None
    assert probe.seen > 0.7
    assert 0.05 < probe.test < 0.15


def test_coloured_batches_are_normalised_by_what_the_clients_see():
    mini = load("fmnist-mini")
    fed = federate(mini, iid(mini.train.y, 20), shift=Colour())
    x, _ = fed.train.batch(torch.arange(10000), fed.train.client_of)
    assert x.shape == (10000, 3, 28, 28)
    assert x.mean((0, 2, 3)).abs().max() < 1e-3
    assert (x.std((0, 2, 3)) - 1).abs().max() < 1e-3


def test_five_hundred_coloured_clients_share_one_copy_of_the_images():
    mini = load("fmnist-mini")
    fed = federate(mini, iid(mini.train.y, 500), shift=Colour())
    tables = sum(t.numel() * t.element_size() for t in fed.train.view)
    assert fed.train.x.shape == (10000, 1, 28, 28)
    assert fed.train.x.dtype == torch.uint8
    assert tables < fed.train.x.numel() / 10
    assert fed.more_tests["seen"].x.data_ptr() == fed.test.x.data_ptr()


def test_clients_rotate_their_images_anticlockwise_by_evenly_spaced_angles():
    x = torch.rand(1, 1, 5, 5)
    quarter = Rotated(torch.tensor([0.0, 90.0]))
    index = torch.tensor([0])
    np.testing.assert_allclose(quarter(x, index, index, torch.tensor([0])), x, atol=1e-6)
    np.testing.assert_allclose(quarter(x, index, index, torch.tensor([1])), torch.rot90(x, 1, (2, 3)), atol=1e-5)


def test_the_rotated_test_environment_is_an_angle_that_no_client_has():
    mini = load("fmnist-mini")
    fed = federate(mini, iid(mini.train.y, 6), shift=Rotation())
    index = torch.arange(5)
    upright = fed.test.x[index].float() / 255
    np.testing.assert_allclose(fed.test.show(index, index), torch.rot90(upright, 1, (2, 3)), atol=1e-5)
    np.testing.assert_allclose(fed.train.show(index, 0 * index), fed.train.x[index].float() / 255, atol=1e-5)


@pytest.mark.parametrize("shift", [None, Colour(), Colour("private", "foreground_background"), Rotation()])
def test_a_batch_compiles_as_one_graph(shift):
    mini = load("fmnist-mini")
    pool = federate(mini, iid(mini.train.y, 5), shift=shift).train
    index, client = torch.arange(6).reshape(2, 3), torch.tensor([[1], [4]])
    whole = torch.compile(pool.batch, fullgraph=True, backend="eager")  # fullgraph: no host sync, no branch on values
    torch.testing.assert_close(whole(index, client)[0], pool.batch(index, client)[0])


def test_only_grey_images_can_be_coloured():
    split = Split(np.zeros((10, 3, 2, 2), np.uint8), np.arange(10))
    dataset = Dataset("rgb", split, split, tuple("0123456789"), Source("arrays", "rgb", ""))
    with pytest.raises(DataError, match="only grey images"):
        federate(dataset, iid(split.y, 2), shift=Colour())


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Colour(palette="own"), "unknown palette 'own'; known: shared, private"),
        (lambda: Colour(coloring="back"), "unknown coloring"),
        (lambda: Colour(test_coloring="new"), "unknown test_coloring"),
        (lambda: Colour(jitter=-0.1), "jitter must be between 0 and 1"),
        (lambda: Colour(flip_low=0.5, flip_high=0.2), "flip_low <= flip_high"),
        (lambda: Rotation(low=10, high=0), "low <= high"),
    ],
)
def test_an_invalid_shift_is_refused(make, reason):
    with pytest.raises(ConfigError, match=reason):
        make()
