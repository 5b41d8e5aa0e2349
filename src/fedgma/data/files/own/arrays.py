"""A data set from a user's arrays: layouts are unified, labels numbered, a test part split off, everything checked."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedgma.data.files.dataset import Dataset, Split, check_split, split_test
from fedgma.data.files.npy import read_npz
from fedgma.data.files.own.numbering import number_clients, number_labels
from fedgma.data.files.own.roles import Parts, parts_of
from fedgma.data.files.own.samples import as_numpy
from fedgma.data.files.own.tables import remarks_on
from fedgma.data.files.own.targets import guess, with_targets
from fedgma.data.files.reader import source_of
from fedgma.documents import PathLike
from fedgma.errors import DataError

Test = tuple[npt.ArrayLike, npt.ArrayLike | None] | tuple[npt.ArrayLike, npt.ArrayLike | None, npt.ArrayLike]
CHANNELS = (1, 3)


def from_arrays(
    x: npt.ArrayLike,
    y: npt.ArrayLike | None,
    *,
    test: Test | None = None,
    client: npt.ArrayLike | None = None,
    classes: tuple[str, ...] | None = None,
    name: str = "own",
    test_share: float = 0.2,
    seed: int = 0,
    target: str = "class",
) -> Dataset:
    """A data set from arrays: uint8 images [n, h, w], [n, c, h, w] or [n, h, w, c], or float features of any shape.

    Labels and client ids are integers or texts. `test` is (x, y), or (x, y, client) to test each client on its own
    samples. Without it, a random share of each class becomes the test set. `target` is the kind of the targets `y`:
    "class", "float", "labels", "tokens" (see `targets`), or "any" for the kind that they look like.

    >>> data = from_arrays(np.zeros((10, 8, 8), np.uint8), ["cat", "ant"] * 5)
    >>> data.train.x.shape, sorted(data.test.y.tolist()), data.classes
    ((8, 1, 8, 8), [0, 1], ('ant', 'cat'))
    """
    x_test, y_test, client_test = (*test, None)[:3] if test is not None else (None, None, None)
    parts = Parts(x, y, client, x_test, y_test, client_test, classes)
    return dataset_of(parts, name, test_share=test_share, seed=seed, target=target)


def dataset_of(
    parts: Parts,
    name: str,
    *,
    test_share: float = 0.2,
    seed: int = 0,
    target: str = "class",
    files: tuple[Path, ...] = (),
    own: bool = False,
) -> Dataset:
    """A data set from the parts of a user's data, and from the `files` that they were read from.

    With `own`, each client is tested on its own samples, and a test part is split off client by client.
    """
    parts = Parts(*map(as_numpy, parts))
    if parts.columns is not None:
        parts = parts._replace(remarks=(*parts.remarks, *remarks_on(parts.x, parts.columns)))
    if _is_empty(parts.x_test):
        raise DataError(f"{name}: the test part has no samples; without one, a fifth of the samples is for testing")
    kind = target if target != "any" else "tokens" if parts.y is None else guess(parts.y)
    if kind != "class":
        return _with_targets(parts, kind, name, test_share, seed, files, own)
    has_test = parts.x_test is not None
    if parts.client is None and parts.client_test is not None:
        raise DataError(f"{name}: the test samples have client ids, but the training samples have none; add theirs")
    labels = number_labels([parts.y, parts.y_test] if has_test else [parts.y], parts.classes, name)
    (client, client_test), clients = number_clients([parts.client, parts.client_test], name)
    samples, layout = _samples(parts.x, name)
    train = check_split(name, "train", Split(samples, labels.parts[0], client), len(labels.classes))
    if has_test:
        test = Split(_samples(parts.x_test, name)[0], labels.parts[1], client_test)
    else:
        train, test = split_test(train, train.client if own and train.client is not None else train.y, test_share, seed)
    check_split(name, "test", test, len(labels.classes))
    if train.x.shape[1:] != test.x.shape[1:] or train.x.dtype != test.x.dtype:
        raise DataError(
            f"{name}: training and test samples must have the same shape and type, got "
            f"{train.x.dtype}{list(train.x.shape[1:])} and {test.x.dtype}{list(test.x.shape[1:])}"
        )
    if len(labels.classes) == 1:
        raise DataError(f"{name}: all labels are {labels.classes[0]}; a classification needs two classes or more")
    reading = tuple(remark for remark in (layout, labels.remark, clients) if remark is not None)
    source = source_of(train, test, name, files)
    own = own or client_test is not None
    return Dataset(name, train, test, labels.classes, source, parts.remarks, reading=reading, own_tests=own)


def _is_empty(x: Any) -> bool:
    """Whether samples were handed over, but none."""
    return x.shape[:1] == (0,) if isinstance(x, np.ndarray) else isinstance(x, list | tuple) and not x


def _with_targets(
    parts: Parts, kind: str, name: str, test_share: float, seed: int, files: tuple[Path, ...], own: bool
) -> Dataset:
    """A data set whose targets are not classes; clients are numbered as for classes."""
    (client, client_test), clients = number_clients([parts.client, parts.client_test], name)

    def read(x: Any) -> tuple[Any, str | None]:
        return (x, None) if kind == "tokens" else _samples(x, name)

    test = None if parts.x_test is None else (read(parts.x_test)[0], parts.y_test)
    samples, layout = read(parts.x)
    shared: Any = {"client": client, "classes": parts.classes, "name": name, "test_share": test_share, "seed": seed}
    data = with_targets(samples, parts.y, kind, test=test, by_client=own, files=files, **shared)
    if client_test is not None:
        data = data._replace(test=data.test._replace(client=client_test))
    reading = tuple(remark for remark in (layout, clients) if remark is not None)
    return data._replace(notes=parts.remarks, reading=reading, own_tests=own or client_test is not None)


def load_npz(path: PathLike, *, test_share: float = 0.2, seed: int = 0, target: str = "class") -> Dataset:
    """Load an .npz file with `x` and `y`, and optionally `client`, `x_test`, `y_test`, `client_test`, `classes`.

    Other usual names, such as `x_train` and `labels`, are known too. A file of tokens may hold the samples alone.
    """
    path = Path(path)
    parts = parts_of(read_npz(path), path.name, unlabelled=target in ("tokens", "any"))
    return dataset_of(parts, path.stem, test_share=test_share, seed=seed, target=target, files=(path,))


def _samples(x: npt.ArrayLike, name: str) -> tuple[Any, str | None]:
    """Samples as uint8 images [n, c, h, w] or as float32 features, and a remark if axes were moved."""
    array = np.asarray(x)
    if not array.ndim:
        raise DataError(f"{name}: x must have an axis of samples, got a single {array.dtype}")
    last = array.ndim == 4 and array.shape[1] not in CHANNELS and array.shape[3] in CHANNELS
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes an infinity, which is refused
            array = array.astype(np.float32)
        remark = "the images have channels last, which are moved to the front" if last else None
        return (np.ascontiguousarray(array.transpose(0, 3, 1, 2)), remark) if last else (array, None)
    if array.dtype != np.uint8:
        raise DataError(
            f"{name}: x must be uint8 images or float features, got {array.dtype}; "
            "convert it, with x.astype('uint8') or x.astype('float32')"
        )
    if array.ndim == 3:
        return array[:, None], None
    return (np.ascontiguousarray(array.transpose(0, 3, 1, 2)) if last else array), None
