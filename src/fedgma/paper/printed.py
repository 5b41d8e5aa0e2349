"""The numbers that the paper prints, and the settings that each belongs to."""

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from fedgma.paper.catalogue import Experiment, Part
from fedgma.paper.plans import same

DATASETS = {
    "mnist": "MNIST",
    "fmnist": "FMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "tinyimagenet": "TinyImageNet",
    "femnist": "FEMNIST",
    "fedcmnist": "FedCMNIST",
}
ALGORITHMS = {"fedavg": "FedAvg", "fedprox": "FedProx", "fedadam": "FedAdam", "fedyogi": "FedYogi"}
MODELS = {"lenet": "LeNet", "resnet18-gn": "ResNet18", "resnet18-bn": "ResNet18", "logistic": "logistic_regression"}
NORMS = {"resnet18-gn": "group", "resnet18-bn": "batch"}
ARMS = {"mean": "AVG", "gma": "GMA"}
NOT_IID = {"label_skew": ("yes",), "iid": ("no",), "natural": ("na", "yes"), "quantity": ("na",)}
SKEWS = {"natural": "real", "quantity": "quantity"}
DID_NOT_LEARN = 0.1  # chance level as a share, printed among percentages
NUMBERS = ("mean", "value")
UNREAD = (*NUMBERS, "std", "note", "aggregation", "metric", "experiment")  # columns that do not identify a cell

Row = Mapping[str, str]


class Number(NamedTuple):
    """One printed number, and its standard deviation if it is printed."""

    value: float
    deviation: float | None


@cache
def read_printed(file: str) -> tuple[Row, ...]:
    """The rows of a printed table, unchanged.

    >>> read_printed("table_clients.csv")[0]["mean"]
    '88.1'
    """
    text = (resources.files("fedgma.paper") / "printed" / file).read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def printed_rows(experiment: Experiment) -> list[Row]:
    """All printed rows of an experiment."""
    tables = [(table, row) for table in experiment.printed for row in read_printed(table.file)]
    return [row for table, row in tables if all(row[name] == value for name, value in table.where.items())]


def matches(row: Row, settings: Mapping[str, Any], part: Part, split: str = "test") -> bool:
    """Whether a printed row describes a run with these (flat) settings on this split."""
    if not part.printed or row["aggregation"] != ARMS.get(settings["aggregator"]):
        return False
    if row.get("metric", "test_accuracy_pct") != f"{split}_accuracy_pct":
        return False
    columns = {**_columns(settings), **{name: (value,) for name, value in part.printed_as.items()}}
    named = {name: value for name, value in row.items() if name not in UNREAD and value}
    return all(any(same(candidate, value) for candidate in columns.get(name, ())) for name, value in named.items())


def number_of(rows: Sequence[Row], settings: Mapping[str, Any], part: Part, split: str = "test") -> Number | None:
    """The printed number of a run; None if there is none."""
    for row in rows:
        if matches(row, settings, part, split):
            value = next(float(row[name]) for name in NUMBERS if row.get(name))
            return Number(value, float(row["std"]) if row.get("std") else None)
    return None


def _columns(settings: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """A run in the columns of the printed tables: column -> matching values."""
    partition, model = settings["partition.name"], settings["model"]
    coloured = {"label_skew": "mixed", "iid": "feature"}.get(partition)
    skew = coloured if settings["shift.name"] == "colour" else SKEWS.get(partition)
    return {
        "dataset": (DATASETS.get(settings["dataset"]),),
        "noniid": NOT_IID.get(partition, ()),
        "clients": (settings["partition.clients"],),
        "sampled": (settings["clients_per_round"],),
        "algorithm": (ALGORITHMS.get(settings["algorithm"]),),
        "model": (MODELS.get(model),),
        "norm": (NORMS.get(model),),
        "rho": (settings["momentum"],),
        "eta_g": (settings["server_learning_rate"],),
        "eta_l": (settings["client_learning_rate"],),
        "local_epochs": (settings["local_epochs"],),
        "skew": (skew,),
    }
