"""D14 to D17: partitions that come out empty, batches of one sample, samples counted twice, missing classes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedgma.data.files import from_arrays
from fedgma.data.partitions import dirichlet, iid, label_skew, natural, quantity, split
from fedgma.errors import ConfigError
from fedgma.experiments.play import run
from rows import row


def is_exact(partition, samples):
    """Whether every sample belongs to one client."""
    return np.array_equal(np.sort(np.concatenate([*partition.clients, partition.held_out])), np.arange(samples))


@row(
    "D14",
    "a Dirichlet draw that leaves a client without samples",
    happens="drawn again up to ten times, then samples are moved to it from the largest clients",
    seen="a note in the record: `repaired: moved 7 samples to 2 clients below 10`",
)
@given(
    st.sampled_from([(dirichlet, "alpha"), (quantity, "beta")]),
    st.integers(1, 100),
    st.floats(1e-3, 1e3) | st.sampled_from([5e-324, 1e-300, 1e30]),
    st.integers(0, 10),
    st.integers(0, 10**6),
)
def test_d14_every_draw_ends_and_every_client_has_its_least_size(kind, clients, value, least, seed):
    partitioner, name = kind
    partition = partitioner(np.repeat(np.arange(10), 100), clients, min_size=least, seed=seed, **{name: value})
    assert is_exact(partition, 1000)
    assert partition.sizes.min() >= least


@row("D14")
@pytest.mark.parametrize("name", ["iid", "dirichlet", "quantity", "label_skew"])
@pytest.mark.parametrize("clients", [0, -1, 101, 10**9, 10**30])
def test_d14_an_impossible_number_of_clients_is_refused_before_memory_is_taken(name, clients):
    least = {"min_size": 0} if name in ("dirichlet", "quantity") else {}
    with pytest.raises(ConfigError, match="client"):
        split(name, np.zeros(100, int), clients, **least)


class Normalised(nn.Module):
    """A model whose batch normalisation needs two samples."""

    def __init__(self, shape, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.BatchNorm1d(4), nn.Linear(4, classes))

    def forward(self, x):
        return self.layers(x)


class Convolved(nn.Module):
    """A model whose batch normalisation has several values per channel in one image."""

    def __init__(self, shape, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, classes))

    def forward(self, x):
        return self.layers(x)


def small(test_labels=(0, 1)):
    """Eleven images of two classes."""
    pixels = np.random.default_rng(0).integers(0, 255, (11 + len(test_labels), 6, 6), np.uint8)
    return from_arrays(pixels[:11], np.arange(11) % 2, test=(pixels[11:], np.array(test_labels)))


def trained(model, data, partition="iid", clients=5, batch_size=2):
    settings = {"aggregator": "gma", "seed": 0, "rounds": 2, "batch_size": batch_size, "evaluate_every": 1}
    settings |= {"partition": {"name": partition, "clients": clients}, "clients_per_round": clients}
    return run(settings, data=data, model=model).runs[0].rounds


@row(
    "D15",
    "fewer samples than a batch, or one sample left for the last batch",
    happens="an epoch ends in a smaller batch; a model that cannot train on one sample leaves a last batch of one out, "
    "and never samples a client that has one sample alone",
    seen="a warning: `model Net cannot train on one sample: a last batch of one is left out`",
)
@pytest.mark.parametrize("model", ["logistic", Convolved])
@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_d15_small_batches_train(model, batch_size):
    rounds = trained(model, small(), batch_size=batch_size)
    assert [line["counted"] for line in rounds] == [5, 5]
    assert all(np.isfinite(line["train"]["loss"]) for line in rounds)


@row("D15")
def test_d15_batch_normalisation_of_one_value_leaves_that_batch_out(caplog):
    rounds = trained(Normalised, small(), batch_size=2)  # four clients of two samples, one of three
    assert [line["counted"] for line in rounds] == [5, 5]
    assert "a last batch of one is left out" in caplog.text
    with pytest.raises(ConfigError, match="batch_size: model own:Normalised needs batches of two samples or more"):
        trained(Normalised, small(), batch_size=1)
    assert len(trained(Normalised, small(), clients=1, batch_size=11)) == 2


@row("D15")
def test_d15_a_client_of_one_sample_is_never_sampled_where_the_model_needs_two():
    owners = np.array([0] * 10 + [1])
    data = small()._replace(train=small().train._replace(client=owners))
    settings = {"aggregator": "gma", "seed": 0, "rounds": 2, "batch_size": 3, "clients_per_round": 2}
    lines = run({**settings, "partition": "natural"}, data=data, model=Normalised).runs[0].rounds
    assert [line["counted"] for line in lines] == [1, 1]


@row(
    "D16",
    "a sample counted twice, or lost",
    happens="every partition uses each sample once; tested for all of them",
    seen="nothing",
)
@given(st.integers(1, 40), st.integers(0, 10**6))
def test_d16_every_partition_is_disjoint_and_complete(clients, seed):
    labels, owners = np.arange(400) % 4, np.random.default_rng(seed).integers(0, 60, 400)
    parts = [iid(labels, clients, seed=seed), label_skew(labels, clients, mode="shards", seed=seed)]
    parts += [dirichlet(labels, clients, min_size=1, seed=seed), quantity(labels, clients, seed=seed)]
    parts += [label_skew(labels, 2 * clients, seed=seed), natural(owners, clients, held_out=5, seed=seed)]
    assert all(is_exact(partition, 400) for partition in parts)


@row(
    "D17",
    "clients of one class, or a class that the test set lacks",
    happens="all scores are defined: a client without test samples of its classes is left out of the client scores",
    seen="nothing; no warnings",
)
@pytest.mark.parametrize("test_labels", [(0, 0, 0), (1,), (0, 1)])
def test_d17_missing_classes_leave_scores_defined(test_labels):
    rounds = trained("logistic", small(test_labels), partition="label_skew", clients=5)
    for line in rounds:
        assert 0 <= line["test"]["accuracy"] <= 1
        assert np.isfinite(line["test"]["loss"])
        assert all(value is None or 0 <= value <= 1 for value in line.get("clients", {}).values())
