"""Reads a user's data: two arrays, an .npz file, or a folder of images by class."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedgma.data.files.dataset import Dataset, Labels, Source, Split, check_split, get_array, integers
from fedgma.data.files.images import FORMATS, decode
from fedgma.data.files.npy import read_npz
from fedgma.data.files.reader import largest, sha256_of
from fedgma.data.files.targets import guess, with_targets
from fedgma.errors import ConfigError, DataError
from fedgma.seeds import generator

Pair = tuple[npt.ArrayLike, npt.ArrayLike | None]
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
MOST_CLASSES = 100_000
LARGEST_IMAGE = 1 << 26  # bytes of a file


def from_arrays(
    x: npt.ArrayLike,
    y: npt.ArrayLike | None,
    *,
    test: Pair | None = None,
    client: npt.ArrayLike | None = None,
    classes: tuple[str, ...] | None = None,
    name: str = "own",
    test_share: float = 0.2,
    seed: int = 0,
    target: str = "class",
) -> Dataset:
    """A data set from arrays: uint8 images [n, h, w], [n, c, h, w] or [n, h, w, c], or float features of any shape.

    Without `test`, a random share of each class becomes the test set. `target` is the kind of the targets `y`: "class",
    "float", "labels", "tokens" (see `targets`), or "any" for the kind that they look like.

    >>> data = from_arrays(np.zeros((10, 8, 8), np.uint8), [0, 1] * 5)
    >>> data.train.x.shape, sorted(data.test.y.tolist())
    ((8, 1, 8, 8), [0, 1])
    """
    kind = target if target != "any" else "tokens" if y is None else guess(y)
    if kind != "class":
        pairs = [(x if kind == "tokens" else _images(x, name), y) for x, y in [(x, y), *([test] if test else [])]]
        more = pairs[1] if test else None
        shared: Any = {"client": client, "classes": classes, "name": name, "test_share": test_share, "seed": seed}
        return with_targets(*pairs[0], kind, test=more, **shared)
    samples = Split(_images(x, name), integers(y, name), None if client is None else integers(client, name))
    given_test = None if test is None else Split(_images(test[0], name), integers(test[1], name))
    if classes is None:
        classes = _numbered([samples.y, *([] if given_test is None else [given_test.y])], name)
    check_split(name, "train", samples, len(classes))
    train, test_split = (samples, given_test) if given_test is not None else _split_test(samples, test_share, seed)
    check_split(name, "test", test_split, len(classes))
    if train.x.shape[1:] != test_split.x.shape[1:] or train.x.dtype != test_split.x.dtype:
        raise DataError(
            f"{name}: training and test samples must have the same shape and type, got "
            f"{train.x.dtype}{list(train.x.shape[1:])} and {test_split.x.dtype}{list(test_split.x.shape[1:])}"
        )
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for s in (train, test_split) for a in s[:2]))
    return Dataset(name, train, test_split, classes, Source("arrays", name, digest.hexdigest()))


def load_npz(path: Path, *, test_share: float = 0.2, seed: int = 0, target: str = "class") -> Dataset:
    """Load an .npz file with `x` and `y`, and optionally `client`, `x_test` and `y_test`, `classes`.

    `target` is the kind of its targets, as in `from_arrays`; a file of tokens may hold `x` alone.
    """
    arrays = read_npz(path)
    test = None
    alone = target in ("tokens", "any") and "y" not in arrays  # the next tokens are the targets
    if "x_test" in arrays or "y_test" in arrays:
        y_test = None if alone else get_array(arrays, "y_test", path.name)
        test = get_array(arrays, "x_test", path.name), y_test
    classes = tuple(map(str, arrays["classes"].reshape(-1))) if "classes" in arrays else None
    x, y = get_array(arrays, "x", path.name), None if alone else get_array(arrays, "y", path.name)
    shared: Any = {"classes": classes, "name": path.stem, "test_share": test_share, "seed": seed, "target": target}
    data = from_arrays(x, y, test=test, client=arrays.get("client"), **shared)
    return data._replace(source=Source("folder", path.name, sha256_of([path])))


def load_images(folder: Path, *, mode: str = "RGB", test_share: float = 0.2, seed: int = 0) -> Dataset:
    """Load images of one size: `folder/CLASS/*.png`, or `folder/train/CLASS/...` and `folder/test/CLASS/...`.

    `mode` is "RGB" or "L" (grey).
    """
    if mode not in ("RGB", "L"):
        raise ConfigError(f"unknown image mode {mode!r}; known: L, RGB")
    has_test_folder = (folder / "train").is_dir() and (folder / "test").is_dir()
    tops = [folder / "train", folder / "test"] if has_test_folder else [folder]
    classes = sorted({sub.name for top in tops for sub in top.iterdir() if sub.is_dir()})
    if not classes:
        raise DataError(f"{folder.name} must hold one folder of images for each class, got none")
    parts = [_read_folder(top, classes, mode) for top in tops]
    test = parts[1] if has_test_folder else None
    name = folder.resolve().name
    data = from_arrays(*parts[0], test=test, classes=tuple(classes), name=name, test_share=test_share, seed=seed)
    return data._replace(source=Source("folder", name, sha256_of([folder])))


def _read_folder(top: Path, classes: list[str], mode: str) -> tuple[npt.NDArray[np.uint8], Labels]:
    images, labels = [], []
    for label, name in enumerate(classes):
        for file in sorted((top / name).glob("*")):
            if file.suffix.lower() in SUFFIXES:
                if file.stat().st_size > (limit := largest(LARGEST_IMAGE)):
                    raise DataError(f"{file.name} must hold at most {limit} bytes, got {file.stat().st_size}")
                images.append(decode(file.read_bytes(), mode))
                labels.append(label)
    if not images:
        raise DataError(f"{top.name} holds no images; known formats: {', '.join(FORMATS)}")
    sizes = {image.shape for image in images}
    if len(sizes) > 1:
        raise DataError(f"{top.name} holds images of {len(sizes)} sizes; resize them to one")
    return np.stack(images), np.array(labels, np.int64)


def _images(x: npt.ArrayLike, name: str) -> Any:
    array = np.asarray(x)
    if not array.ndim:
        raise DataError(f"{name}: x must have an axis of samples, got a single {array.dtype}")
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes an infinity, which is refused
            return array.astype(np.float32)
    if array.dtype != np.uint8:
        raise DataError(f"{name}: x must be uint8 images or float features, got {array.dtype}")
    if array.ndim == 3:
        return array[:, None]
    if array.ndim == 4 and array.shape[1] not in (1, 3) and array.shape[3] in (1, 3):
        return np.ascontiguousarray(array.transpose(0, 3, 1, 2))
    return array


def _numbered(labels: Sequence[Labels], name: str) -> tuple[str, ...]:
    """Names of classes that have none: their numbers."""
    count = max(int(y.max(initial=0)) for y in labels) + 1
    if count > MOST_CLASSES:
        raise DataError(f"{name}: labels must be below {MOST_CLASSES}, got {count - 1}; number the classes from 0")
    return tuple(map(str, range(count)))


def _split_test(samples: Split, share: float, seed: int) -> tuple[Split, Split]:
    if not 0 < share < 1:
        raise ConfigError(f"test_share must be between 0 and 1, got {share}")
    rng = generator(seed, "own", "test")
    in_test = np.zeros(len(samples.y), bool)
    for label in np.unique(samples.y):
        members = np.flatnonzero(samples.y == label)
        in_test[rng.permutation(members)[: round(share * len(members))]] = True
    parts = []
    for mask in (~in_test, in_test):
        parts.append(Split(samples.x[mask], samples.y[mask], None if samples.client is None else samples.client[mask]))
    return parts[0], parts[1]
