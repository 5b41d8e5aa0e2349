"""Sets with a natural owner of every sample: digits only, repeats dropped, and test writers whom no client knows."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fedgma.data.files.dataset import Dataset, Labels, Split
from fedgma.errors import ConfigError, DataError
from fedgma.seeds import generator

TRAINING, ALL = 3000, 3550  # writers, in the paper's FEMNIST experiment


def digits(dataset: Dataset) -> Dataset:
    """The ten digits of a set whose first ten classes they are."""
    train, test = (_take(split, split.y < 10) for split in (dataset.train, dataset.test))
    return dataset._replace(train=train, test=test, classes=dataset.classes[:10])


def without_repeats(dataset: Dataset) -> Dataset:
    """Drop every picture that its writer's data holds already, so that no test picture was trained on."""
    seen: set[tuple[int, bytes]] = set()
    train, test = (_take(split, np.fromiter(_fresh(split, seen), bool)) for split in (dataset.train, dataset.test))
    dropped = len(dataset.train.y) - len(train.y), len(dataset.test.y) - len(test.y)
    note = f"dropped {dropped[0]} training and {dropped[1]} test pictures that their writer's data holds twice"
    return dataset._replace(train=train, test=test, notes=(*dataset.notes, note) if any(dropped) else dataset.notes)


def _fresh(split: Split, seen: set[tuple[int, bytes]]) -> Iterator[bool]:
    for image, writer in zip(split.x, _writers(split), strict=True):
        key = int(writer), image.tobytes()
        yield key not in seen
        seen.add(key)


def hold_out_writers(dataset: Dataset, training: int | None = None, *, seed: int = 0) -> Dataset:
    """Choose the training writers; the test set becomes everything the others wrote.

    By default: 3,000 where there are more; else all that have training samples, if others are there for testing; else
    3,000 of every 3,550. The training writers' own test part is kept as `more_tests["same_writers"]`.
    """
    authors = np.unique(_writers(dataset.train))
    everyone = np.union1d(authors, _writers(dataset.test))
    if training is None:
        training = _usual(len(authors), len(everyone))
    if not 1 <= training <= len(authors):
        raise ConfigError(f"{training} training writers were asked for, but {len(authors)} have training samples")
    chosen = generator(seed, "writers").permutation(authors)[:training]
    ours, theirs = np.isin(_writers(dataset.train), chosen), np.isin(_writers(dataset.test), chosen)
    test = _join(_take(dataset.train, ~ours), _take(dataset.test, ~theirs))
    same = _take(dataset.test, theirs)
    note = f"{training} training writers, {len(everyone) - training} held out"
    return dataset._replace(
        train=_take(dataset.train, ours),
        test=test,
        more_tests={**dataset.more_tests, "same_writers": same} if len(same.y) else dataset.more_tests,
        notes=(*dataset.notes, note),
    )


def _usual(authors: int, everyone: int) -> int:
    if authors > TRAINING:
        return TRAINING
    return authors if everyone > authors else max(1, authors * TRAINING // ALL)


def _writers(split: Split) -> Labels:
    if split.client is None:
        raise DataError("this data set does not say who wrote a sample")
    return split.client


def _take(split: Split, mask: npt.NDArray[np.bool_]) -> Split:
    return Split(split.x[mask], split.y[mask], None if split.client is None else split.client[mask])


def _join(first: Split, second: Split) -> Split:
    client = np.concatenate([_writers(first), _writers(second)])
    return Split(np.concatenate([first.x, second.x]), np.concatenate([first.y, second.y]), client)
