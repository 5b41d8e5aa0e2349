"""Defaults that depend on a user's data: partition, clients and model that fit them, each with the reason."""

from typing import NamedTuple

import numpy as np

from fedgma.data.files import Dataset
from fedgma.data.files.dataset import only_tested
from fedgma.data.partitions import PARTITIONS
from fedgma.data.splits import divide
from fedgma.errors import ConfigError
from fedgma.experiments.settings import Settings
from fedgma.experiments.settings.partition import PartitionSettings, details
from fedgma.statistics.labels import counted

USUAL = 100  # clients
ENOUGH = 10  # samples of a client, where the usual number of clients is too large
CLASSES = 2  # of a client
ONE_SIDED = 1.4  # times the share of a class among equal ones: the largest class has more than its share
LARGE = 100.0  # targets that are larger than this make training with the usual rates diverge
WIDE, NARROW = 20.0, 1e-3  # features whose largest value is beyond these train badly with the usual rates
SCALED = "scale the features, for example to mean 0 and standard deviation 1, or training may diverge or learn nothing"


class Fitted(NamedTuple):
    """Settings that fit the data, and sentences on what was chosen and why."""

    settings: Settings
    remarks: tuple[str, ...]


def fit(settings: Settings, data: Dataset, shape: tuple[int, ...]) -> Fitted:
    """Fill in what is still open with values that fit the data; `shape` is that of a model's input."""
    part, remark = fit_partition(settings.partition, data)
    clients = part.clients if part.clients is not None else _owners(data) - part.held_out
    update = {"partition": part, "clients_per_round": settings.clients_per_round or min(10, clients)}
    remarks = [*describe(data), f"partition: {remark}"]
    if settings.model is None:
        update["model"] = usual_model(shape)
        remarks.append(f"model: {update['model']}, for samples of shape {list(shape)}")
    return Fitted(settings.model_copy(update=update), tuple(remarks))


def describe(data: Dataset) -> list[str]:
    """Sentences on a user's data: how much there is, and how it was understood."""
    train, test = len(data.train.y), len(data.test.y)
    shape = list(data.train.x.shape[1:])
    outputs = f"{len(data.classes)} classes" if data.target == "class" else counted(len(data.classes), "output")
    lines = [f"{train} training and {test} test samples of shape {shape}, {outputs}"]
    lines += [*data.reading, *data.notes, *_without_training(data), *_only_tested(data), *_one_sided(data)]
    if data.train.x.dtype == np.float32:
        largest = float(np.abs(data.train.x).max(initial=0))
        lines += [f"values reach {largest:.3g}: {SCALED}"] if largest > WIDE else []
        lines += [f"no value is above {largest:.3g}: {SCALED}"] if largest < NARROW else []
    if data.target == "float" and (largest := float(np.abs(data.train.y).max(initial=0))) > LARGE:
        lines.append(f"targets reach {largest:.3g}: scale them, or training may diverge or learn nothing")
    return [f"{data.name}: {line}" for line in lines]


def usual_model(shape: tuple[int, ...]) -> str:
    """The model for samples of a shape: LeNet for images that are large enough, a small CNN for others, else an MLP.

    >>> usual_model((1, 28, 28)), usual_model((3, 8, 8)), usual_model((13,))
    ('lenet', 'cnn', 'mlp')
    """
    if len(shape) != 3 or min(shape[1:]) < 6:
        return "mlp"
    return "lenet" if min(shape[1:]) >= 12 else "cnn"


def _without_training(data: Dataset) -> list[str]:
    """A remark on clients all of whose samples were drawn for testing, as happens to those with one or two."""
    if data.own_tests or data.train.client is None or data.test.client is None:
        return []
    train, test = set(data.train.client.tolist()), set(data.test.client.tolist())
    if not (lost := len(test - train)):
        return []
    return [f"{lost} of {len(test | train)} clients have test samples only and do not train"]


def _only_tested(data: Dataset) -> list[str]:
    """Remarks on classes that no training sample has."""
    return only_tested(data.train.y, data.test.y, data.classes) if data.target == "class" else []


def _one_sided(data: Dataset) -> list[str]:
    """A remark on a class that has so many test samples that a model which always names it looks good."""
    if data.target != "class" or not len(data.test.y):
        return []
    counts = np.bincount(data.test.y)
    share = float(counts.max() / counts.sum())
    if share < ONE_SIDED / max(2, len(data.classes)):
        return []
    return [f"a model that always says {data.classes[int(counts.argmax())]!r} is right in {share:.0%} of the tests"]


def fit_partition(part: PartitionSettings, data: Dataset) -> tuple[PartitionSettings, str]:
    """A partition that fits the data, and what it is and why."""
    owners = _owners(data)
    if part.name == "natural" or (part.name is None and owners):
        return _natural(part, owners, "label_skew divides by class" if data.target == "class" else "iid mixes them")
    part = part.model_copy(update={"name": part.name or ("label_skew" if data.target == "class" else "iid")})
    fitted, why = _divided(part, data) if part.name in PARTITIONS else (_with_clients(part, data), "")
    unused = f"; the {owners} clients that the data name are not used" if owners else ""
    return fitted, f"{fitted.name}, {counted(fitted.clients or 0, 'client')}{why}{unused}"


def _natural(part: PartitionSettings, owners: int, other: str) -> tuple[PartitionSettings, str]:
    """A client for each owner, or for each group of owners."""
    why = f"natural, because the data name {owners} clients; partition.name={other} instead"
    if part.name is not None:
        why = f"natural, {owners} clients that the data name"
    if owners and part.clients is not None and part.clients > owners - part.held_out:
        raise ConfigError(
            f"partition.clients: the data name {owners} clients, which cannot make {part.clients}; "
            f"leave partition.clients out; partition.name={other} instead"
        )
    grouped = "" if part.clients is None else f", in {part.clients} groups"
    return part.model_copy(update={"name": "natural"}), f"{why}{grouped}"


def _divided(part: PartitionSettings, data: Dataset) -> tuple[PartitionSettings, str]:
    """The first choice of clients and mode that the samples can be divided by, and what is unusual about it."""
    samples, refusal = len(data.train.y), None
    few = max(2, samples // ENOUGH)
    numbers = [part.clients] if part.clients is not None else [USUAL] if samples >= USUAL * ENOUGH else [USUAL, few]
    held = part.classes_per_client or (
        min(CLASSES, len(np.unique(data.train.y))) if part.name == "label_skew" else None
    )
    for clients in numbers:
        for mode in (part.mode,) if part.mode or part.name != "label_skew" else ("exact", "shards"):
            if mode == "shards" and len(numbers) > 1 and clients == USUAL and part.mode is None:
                continue  # fewer clients before clients of a few samples
            candidate = part.model_copy(update={"clients": clients, "mode": mode, "classes_per_client": held})
            try:
                divide(data, str(part.name), clients, seed=part.seed or 0, **details(candidate))
            except ConfigError as error:
                refusal = refusal or error
                continue
            return candidate, _reason(candidate, part, refusal, samples)
    raise refusal or ConfigError(f"partition: {samples} samples cannot be divided")


def _reason(chosen: PartitionSettings, part: PartitionSettings, refusal: ConfigError | None, samples: int) -> str:
    if refusal is None:
        return ""
    mode = f" with mode={chosen.mode}" if part.mode is None and chosen.mode == "shards" else ""
    few = f" of about {ENOUGH} samples" if part.clients is None and chosen.clients == samples // ENOUGH else ""
    return f"{few}{mode}, because {str(refusal).partition(';')[0]}"


def _with_clients(part: PartitionSettings, data: Dataset) -> PartitionSettings:
    usual = USUAL if len(data.train.y) >= USUAL * ENOUGH else max(2, len(data.train.y) // ENOUGH)
    return part.model_copy(update={"clients": part.clients or usual})


def _owners(data: Dataset) -> int:
    return 0 if data.train.client is None else len(np.unique(data.train.client))
