"""Partitions of Flower Datasets as clients: stand-ins with the part of its interface that is used; the real ones."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest

import fedgma
from fedgma.data.files import from_data
from fedgma.data.files.own.tables import columns_of
from fedgma.errors import DataError


class Table:
    """A table as `datasets` has it: names of columns, and columns by name."""

    def __init__(self, size, label=0):
        self.column_names = ["image", "label", "writer_id"]
        image = np.zeros((size, 4, 4), np.uint8) + label
        self.columns = {"image": image, "label": np.arange(size) % 3, "writer_id": np.arange(size)}

    def __getitem__(self, name):
        return self.columns[name]


class Plain(dict):
    """Columns as lists."""

    columns = property(list)


class Partitioner:
    """Partitions of 6, 9 and 0 samples."""

    num_partitions = 3

    def load_partition(self, number):
        return Table((6, 9, 0)[number], label=number)


class Federated:
    """Knows the number of its partitions only once one was loaded, as the real one does."""

    def __init__(self, *divided, splits=("train", "test")):
        self.partitioners = {name: SimpleNamespace() for name in divided}
        self.splits = splits

    def load_partition(self, number, split):
        self.partitioners[split].num_partitions = 3
        return Table((6, 9, 3)[number], label=number)

    def load_split(self, split):
        if split not in self.splits:
            raise ValueError(f"the given split {split} is not present")
        return Table(12)


def test_a_partition_is_a_client():
    data = from_data(Partitioner())
    everybody = np.concatenate([data.train.client, data.test.client])
    assert np.bincount(everybody).tolist() == [6, 9]  # nobody can train on nothing
    assert (data.train.x[:, 0, 0, 0] == data.train.client).all()
    assert data.classes == ("0", "1", "2")


def test_a_federated_data_set_brings_its_test_split():
    data = from_data(Federated("train"))
    assert np.bincount(data.train.client).tolist() == [6, 9, 3]
    assert (len(data.test.y), data.test.client, data.own_tests) == (12, None, False)


def test_a_test_split_that_is_partitioned_tests_each_client_on_its_own_samples():
    data = from_data(Federated("train", "test"))
    assert np.bincount(data.test.client).tolist() == [6, 9, 3]
    assert data.own_tests


def test_without_a_test_split_one_is_made():
    data = from_data(Federated("train", splits=("train",)))
    assert len(data.train.y) + len(data.test.y) == 18


def test_partitions_without_samples_are_refused():
    empty = SimpleNamespace(num_partitions=2, load_partition=lambda number: Table(0))
    with pytest.raises(DataError, match="none of the 2 partitions"):
        from_data(empty)


def test_columns_of_single_numbers_are_features():
    rows = {"x": [np.int64(5), np.int64(6)], "label": [np.int64(0), np.int64(1)]}  # as `datasets` hands them out
    assert {name: column.dtype.kind for name, column in columns_of(Plain(rows)).items()} == {"x": "i", "label": "i"}


def test_an_experiment_runs_on_it():
    settings = {"model": "logistic", "rounds": 1, "aggregator": "mean", "seed": 0, "client_test_size": 0}
    outcome = fedgma.run({**settings, "clients_per_round": 2}, data=Federated("train"))
    assert outcome.runs[0].settings["partition.name"] == "natural"
    assert outcome.runs[0].rounds[0]["counted"] == 2


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_real_ones(tmp_path):  # `datasets` leaves files open
    flower = pytest.importorskip("flwr_datasets", reason="flwr-datasets is not installed")
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(
        {"x": np.arange(60, dtype=np.float32).reshape(30, 2).tolist(), "label": [0, 1, 2] * 10}
    )
    partitioner = flower.partitioner.IidPartitioner(num_partitions=4)
    partitioner.dataset = table
    assert np.bincount(from_data(partitioner, "mine").train.client).sum() == 24
    rows = "x,label\n" + "".join(f"{number},{number % 3}\n" for number in range(30))
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text(rows)
    federated = flower.FederatedDataset(dataset=str(tmp_path), partitioners={"train": 5})
    data = from_data(federated)
    assert (np.bincount(data.train.client).tolist(), len(data.test.y)) == ([6] * 5, 30)
    gc.collect()  # while the warnings of those files are ignored
