"""Which array of a user's file is which: samples, labels, client ids, and their test parts, by the usual names."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedgma.errors import DataError

SAMPLES = ("x", "data", "images", "image", "img", "imgs", "features", "inputs", "samples", "pixels")
LABELS = ("y", "labels", "label", "targets", "target", "class")
CLIENTS = (
    "client",
    "clients",
    "client_id",
    "client_ids",
    "user",
    "user_id",
    "writer",
    "writer_id",
    "owner",
    "owner_id",
    "subject",
    "subject_id",
)
CLASSES = ("classes", "class_names", "label_names", "target_names")
TRAIN, TEST, VALID = ("", "train", "training"), ("test", "testing"), ("val", "valid", "validation")
UNNAMED = ("arr_0", "arr_1")  # what numpy calls the arrays of np.savez("mine.npz", x, y)


class Parts(NamedTuple):
    """A user's data as they came: nothing is checked or numbered yet."""

    x: Any
    y: Any
    client: Any = None
    x_test: Any = None
    y_test: Any = None
    client_test: Any = None
    classes: tuple[str, ...] | None = None
    remarks: tuple[str, ...] = ()
    columns: tuple[str, ...] | None = None  # of a table: the names of the features, as x has them


def plain(name: str) -> str:
    """A name without case, spaces and signs.

    >>> plain("X_train"), plain("Train Images")
    ('xtrain', 'trainimages')
    """
    return re.sub(r"[^a-z0-9]", "", name.lower())


def find(names: Iterable[str], spellings: Iterable[str], parts: Iterable[str] = ("",)) -> str | None:
    """The first name that is a known spelling, alone or with the name of a part before or after it.

    >>> find(["Y_Train", "x_train"], SAMPLES, TRAIN), find(["test_images"], SAMPLES, TEST)
    ('x_train', 'test_images')
    """
    known = {plain(name): name for name in reversed(list(names))}
    for part in parts:
        for base in map(plain, spellings):
            for spelling in (base + part, part + base):
                if spelling in known:
                    return known[spelling]
    return None


def parts_of(arrays: Mapping[str, Any], where: str, *, unlabelled: bool = False) -> Parts:
    """The parts of a mapping of arrays, such as an .npz file; raises `DataError` if samples or labels are missing.

    With `unlabelled` there may be no labels.

    >>> parts_of({"x_train": [1], "y_train": [2], "X_test": [3], "Y_test": [4]}, "mine.npz").x_test
    [3]
    """
    if set(arrays) == set(UNNAMED):
        return Parts(arrays[UNNAMED[0]], arrays[UNNAMED[1]], remarks=("x is the first array and y is the second",))
    names = {
        "x": find(arrays, SAMPLES, TRAIN),
        "y": find(arrays, LABELS, TRAIN),
        "client": find(arrays, CLIENTS, TRAIN),
        "x_test": find(arrays, SAMPLES, (*TEST, *VALID)),
        "y_test": find(arrays, LABELS, (*TEST, *VALID)),
        "client_test": find(arrays, CLIENTS, (*TEST, *VALID)),
        "classes": find(arrays, CLASSES),
    }
    _check_complete(names, arrays, where, unlabelled=unlabelled)
    held = {role: arrays[name] for role, name in names.items() if name is not None}
    if "classes" in held:
        held["classes"] = tuple(map(str, np.asarray(held["classes"]).reshape(-1).tolist()))
    unused = sorted(set(arrays) - set(names.values()))
    return Parts(**{"y": None, **held}, remarks=(f"not used: {', '.join(unused)}",) if unused else ())


def _check_complete(
    names: Mapping[str, str | None], arrays: Mapping[str, Any], where: str, *, unlabelled: bool
) -> None:
    pairs = ["x", "y"] + (["x_test", "y_test"] if names["x_test"] or names["y_test"] else [])
    if unlabelled and names["y"] is None and names["y_test"] is None:
        pairs = [role for role in pairs if role.startswith("x")]
    for role in pairs:
        if names[role] is None:
            kind = "samples" if role.startswith("x") else "labels"
            others = {"x": "x_train or data", "y": "y_train, labels or target"}.get(role, f"{role[0]}_val")
            raise DataError(
                f"{where} has no array {role!r} for the {kind} (or {others}); "
                f"it holds {', '.join(sorted(arrays)) or 'nothing'}"
            )
