"""Data sets with a writer for every sample: keep the digits, drop repeats, hold out writers for testing."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fedgma.data.files.dataset import Dataset, Labels, Split
from fedgma.errors import ConfigError, DataError
from fedgma.seeds import generator

TRAINING, ALL = 3000, 3550  # writers, in the paper's FEMNIST experiment


def keep_digits(dataset: Dataset) -> Dataset:
    """Keep the ten digits, which are the first ten classes."""
    train, test = (_select(split, split.y < 10) for split in (dataset.train, dataset.test))
    return dataset._replace(train=train, test=test, classes=dataset.classes[:10])


def drop_repeats(dataset: Dataset) -> Dataset:
    """Drop repeated images of the same writer, so that no test image is also a training image."""
    seen: set[tuple[int, bytes]] = set()
    train, test = (_select(split, np.fromiter(_is_first(split, seen), bool)) for split in (dataset.train, dataset.test))
    dropped = len(dataset.train.y) - len(train.y), len(dataset.test.y) - len(test.y)
    note = f"dropped {dropped[0]} training and {dropped[1]} test pictures that their writer's data holds twice"
    return dataset._replace(train=train, test=test, notes=(*dataset.notes, note) if any(dropped) else dataset.notes)


def _is_first(split: Split, seen: set[tuple[int, bytes]]) -> Iterator[bool]:
    for image, writer in zip(split.x, _writers(split), strict=True):
        key = int(writer), image.tobytes()
        yield key not in seen
        seen.add(key)


def hold_out_writers(dataset: Dataset, training: int | None = None, *, seed: int = 0) -> Dataset:
    """Choose the training writers; all samples of the other writers become the test set.

    The default number is 3,000 if more writers have training samples; else all of them, if other writers remain for
    testing; else 3,000 of every 3,550. Test samples of training writers become `more_tests["same_writers"]`.
    """
    train_writers = np.unique(_writers(dataset.train))
    all_writers = np.union1d(train_writers, _writers(dataset.test))
    if training is None:
        training = _default_training(len(train_writers), len(all_writers))
    if not 1 <= training <= len(train_writers):
        raise ConfigError(f"expected 1 to {len(train_writers)} training writers, got {training}")
    chosen = generator(seed, "writers").permutation(train_writers)[:training]
    train_mask, test_mask = np.isin(_writers(dataset.train), chosen), np.isin(_writers(dataset.test), chosen)
    test = _join(_select(dataset.train, ~train_mask), _select(dataset.test, ~test_mask))
    same = _select(dataset.test, test_mask)
    note = f"{training} training writers, {len(all_writers) - training} held out"
    return dataset._replace(
        train=_select(dataset.train, train_mask),
        test=test,
        more_tests={**dataset.more_tests, "same_writers": same} if len(same.y) else dataset.more_tests,
        notes=(*dataset.notes, note),
    )


def _default_training(train_writers: int, all_writers: int) -> int:
    if train_writers > TRAINING:
        return TRAINING
    return train_writers if all_writers > train_writers else max(1, train_writers * TRAINING // ALL)


def _writers(split: Split) -> Labels:
    if split.client is None:
        raise DataError("expected a data set with a writer for each sample, but this one has no writers")
    return split.client


def _select(split: Split, mask: npt.NDArray[np.bool_]) -> Split:
    return Split(split.x[mask], split.y[mask], None if split.client is None else split.client[mask])


def _join(first: Split, second: Split) -> Split:
    client = np.concatenate([_writers(first), _writers(second)])
    return Split(np.concatenate([first.x, second.x]), np.concatenate([first.y, second.y]), client)
