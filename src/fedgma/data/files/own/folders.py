"""A user's files and folders: a file of arrays or a table, a folder of files by client, a folder of images by class."""

import functools
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedgma.data.files.dataset import Dataset, Labels
from fedgma.data.files.images import FORMATS, decode
from fedgma.data.files.npy import map_npy, read_npz
from fedgma.data.files.own.arrays import dataset_of
from fedgma.data.files.own.clients import join_clients, stack_parts
from fedgma.data.files.own.roles import (
    CLASSES,
    CLIENTS,
    LABELS,
    SAMPLES,
    TEST,
    TRAIN,
    VALID,
    Parts,
    find,
    parts_of,
    plain,
)
from fedgma.data.files.own.tables import UnpreparedError, aligned, parts_of_table, read_csv, read_parquet_table
from fedgma.data.files.own.text import SUFFIXES as TEXTS
from fedgma.data.files.reader import largest
from fedgma.documents import PathLike
from fedgma.errors import ConfigError, DataError

PICTURES = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
LARGEST_IMAGE = 1 << 26  # bytes of a file
SHOWN = 6  # names in a remark
READERS: dict[str, Callable[[Path, bool], Parts]] = {  # by the end of a file's name; whether labels may be absent
    ".npz": lambda path, unlabelled: parts_of(read_npz(path), path.name, unlabelled=unlabelled),
    ".csv": lambda path, unlabelled: parts_of_table(read_csv(path), path.name),
    ".tsv": lambda path, unlabelled: parts_of_table(read_csv(path), path.name),
    ".parquet": lambda path, unlabelled: parts_of_table(read_parquet_table(path), path.name),
}
SUFFIXES = (*READERS, ".npy")


def has_arrays(path: Path) -> bool:
    """Whether a path is a file of arrays or a table, or a folder that holds such files."""
    return path.suffix.lower() in SUFFIXES or bool(_data_files(path) or _data_files(path / "train"))


def load_own(path: PathLike, *, target: str = "class") -> Dataset:
    """The user's data at a path: a file, or a folder of files or of images; `target` is as in `from_arrays`."""
    path = Path(path)
    if path.is_dir():
        return load_folder(path, target=target) if has_arrays(path) and not _has_images(path) else load_images(path)
    suffix = path.suffix.lower()
    if suffix == ".npy":
        prefix = _npy_role(path.stem)[0]
        files = [file for file in _files(path.parent, ".npy") if _npy_role(file.stem)[0] == prefix]
        parts = _npy_parts(files, path.name, _may_lack_labels(target))
        return dataset_of(parts, path.stem, files=(path, *(f for f in files if f != path)), target=target)
    if suffix not in READERS:
        known = ", ".join(SUFFIXES)
        raise ConfigError(f"dataset: {path.name} has an unknown ending; known: {known}, or a folder of files or images")
    try:
        parts = READERS[suffix](path, _may_lack_labels(target))
    except UnpreparedError as error:
        hint = f"`fedgma data prepare {shlex.quote(path.name)}{error.options}` makes a file of a table as it is"
        raise DataError(f"{error}; {hint}") from None
    return dataset_of(parts, path.stem, files=(path,), target=target)


def load_folder(folder: PathLike, *, target: str = "class") -> Dataset:
    """Load a folder of data files: one file for each client, or files named after `train` and `test`."""
    folder = Path(folder)
    name, unlabelled = folder.resolve().name, _may_lack_labels(target)
    made = functools.partial(dataset_of, name=name, files=(folder,), target=target)
    train, test = ((folder / part) for part in ("train", "test"))
    if _data_files(train):
        tests = _read_all(test, unlabelled) if test.is_dir() else {}
        return made(join_clients(_read_all(train, unlabelled), tests, name), own=True)
    parts = _read_all(folder, unlabelled)
    if len(parts) == 1:
        return made(next(iter(parts.values())))
    if all(plain(key) in (*TRAIN, *TEST, *VALID) for key in parts):
        return made(_by_split(parts, name))
    if all(part.client is not None for part in parts.values()):  # pieces of one table that names the clients
        return made(stack_parts(list(parts.values()), name))
    return made(join_clients(parts, {}, name), own=True)


def _may_lack_labels(target: str) -> bool:
    """Whether samples are enough: the next tokens are the targets."""
    return target in ("tokens", "any")


def load_images(folder: PathLike, *, mode: str = "RGB", test_share: float = 0.2, seed: int = 0) -> Dataset:
    """Load images of one size: `folder/CLASS/*.png`, or `folder/train/CLASS/...` and `folder/test/CLASS/...`.

    `mode` is "RGB" or "L" (grey). Without `test`, the folder `val` or `valid` is the test part.
    """
    if mode not in ("RGB", "L"):
        raise ConfigError(f"unknown image mode {mode!r}; known: L, RGB")
    folder = Path(folder)
    folders = _folders(folder)
    train, test = find(folders, TRAIN[1:]), find(folders, (*TEST, *VALID))
    tops = [folder / train, folder / test] if train is not None and test is not None else [folder]
    named = sorted({name for top in tops for name in _folders(top)})
    if not named:
        raise DataError(
            f"{folder.name} must hold one folder of images for each class, or data files ({', '.join(SUFFIXES)}), "
            "one for each client; got neither"
        )
    classes = [name for name in named if any(_pictures(top / name) for top in tops)]
    read = [_read_images(top, classes, mode) for top in tops]
    tests = read[1] if len(read) > 1 else (None, None)
    remarks = _unused(tops, named, classes, [name for name in folders if name not in (train, test)])
    parts = Parts(*read[0], x_test=tests[0], y_test=tests[1], classes=tuple(classes), remarks=remarks)
    return dataset_of(parts, folder.resolve().name, test_share=test_share, seed=seed, files=(folder,))


def _folders(folder: Path) -> list[str]:
    return sorted(sub.name for sub in folder.iterdir() if sub.is_dir() and sub.name[0] != ".")


def _pictures(folder: Path) -> list[Path]:
    return _files(folder, *PICTURES)


def _unused(tops: list[Path], named: list[str], classes: list[str], others: list[str]) -> tuple[str, ...]:
    """Remarks on folders without images, and on files in the folders of classes that are not read."""
    empty = [name for name in named if name not in classes] + (others if len(tops) > 1 else [])
    inside = [entry for top in tops for name in classes for entry in _entries(top / name) if entry.name[0] != "."]
    left = sorted(f"{entry.parent.name}/{entry.name}" for entry in inside if not _is_picture(entry))
    folders = [f"not used: {', '.join(empty[:SHOWN])}{' ...' if len(empty) > SHOWN else ''}"] if empty else []
    more = f" and {len(left) - 1} more in folders of classes" if len(left) > 1 else ""
    return (*folders, *([f"not used, since it is no image: {left[0]}{more}"] if left else []))


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in PICTURES and path.is_file()


def _read_images(top: Path, classes: list[str], mode: str) -> tuple[npt.NDArray[np.uint8], Labels]:
    images, labels = [], []
    for label, name in enumerate(classes):
        for file in _pictures(top / name):
            if file.stat().st_size > (limit := largest(LARGEST_IMAGE)):
                raise DataError(f"{file.name} must hold at most {limit} bytes, got {file.stat().st_size}")
            images.append(_decode(file, mode))
            labels.append(label)
    if not images:
        raise DataError(f"{top.name} holds no images{_instead(top)}; known formats: {', '.join(FORMATS)}")
    sizes = {image.shape for image in images}
    if len(sizes) > 1:
        listed = " and ".join(f"{width} x {height}" for _, height, width in sorted(sizes)[:2])
        raise DataError(f"{top.name} holds images of {len(sizes)} sizes, such as {listed}; resize them to one")
    return np.stack(images), np.array(labels, np.int64)


def _instead(top: Path) -> str:
    """What a folder without images holds."""
    files = [file for file in top.rglob("*") if file.is_file() and file.name[0] != "."]
    if any(file.suffix.lower() in TEXTS for file in files):
        return ", but texts, which task=next_token reads"
    if deep := [file for file in files if _is_picture(file)]:
        return f" in folders of classes, as in {top.name}/CLASS, but {deep[0].relative_to(top).as_posix()}"
    return f", but such files as {files[0].name}" if files else ""


def _decode(file: Path, mode: str) -> npt.NDArray[np.uint8]:
    try:
        return decode(file.read_bytes(), mode)
    except DataError as error:
        raise DataError(f"{file.parent.name}/{file.name}: {error}; replace or remove it") from None


def _files(folder: Path, *suffixes: str) -> list[Path]:
    """The files of a folder with these endings, in the order of their names; hidden ones are left out."""
    if not folder.is_dir():
        return []
    return sorted(f for f in folder.iterdir() if f.suffix.lower() in suffixes and f.name[0] != "." and f.is_file())


def _has_images(folder: Path) -> bool:
    """Whether a folder holds folders of images, by class or by split and class."""
    files = (file for pattern in ("*/*", "train/*/*") for file in folder.glob(pattern))
    return any(file.suffix.lower() in PICTURES for file in files)


def _data_files(folder: Path) -> list[Path]:
    return _files(folder, *SUFFIXES)


def _read_all(folder: Path, unlabelled: bool) -> dict[str, Parts]:
    """The parts of every file of a folder, by its name without its ending; of .npy files, by what precedes x or y."""
    parts: dict[str, Parts] = {}
    groups: dict[str, list[Path]] = {}
    for file in _data_files(folder):
        if file.suffix.lower() == ".npy":
            groups.setdefault(_npy_role(file.stem)[0], []).append(file)
        elif file.stem in parts:
            raise DataError(f"{folder.name} has several files named {file.stem!r}; keep one for each client")
        else:
            parts[file.stem] = READERS[file.suffix.lower()](file, unlabelled)
    return parts | {prefix: _npy_parts(files, folder.name, unlabelled) for prefix, files in groups.items()}


def _npy_role(stem: str) -> tuple[str, str]:
    """What stands before the role in a name, and the role: ("anna", "x_test") for `anna_x_test`."""
    starts = [0, *(i + 1 for i, sign in enumerate(stem) if sign in "_-. ")]
    for start in starts:
        rest = stem[start:]
        bases = find([rest], (*SAMPLES, *LABELS, *CLIENTS), (*TRAIN, *TEST, *VALID)) or find([rest], CLASSES)
        if bases is not None:
            return stem[: max(start - 1, 0)], rest
    raise DataError(
        f"{stem}.npy is neither samples nor labels by its name; name such files x.npy and y.npy, "
        "or anna_x.npy and anna_y.npy for a client"
    )


def _npy_parts(files: Iterable[Path], where: str, unlabelled: bool) -> Parts:
    return parts_of({_npy_role(file.stem)[1]: map_npy(file) for file in files}, where, unlabelled=unlabelled)


def _by_split(parts: Mapping[str, Parts], where: str) -> Parts:
    """The parts of files that are named after splits, as one."""
    train, test = find(parts, TRAIN), find(parts, (*TEST, *VALID))
    if train is None or test is None:
        raise DataError(f"{where} must hold a file named train and one named test, got {', '.join(sorted(parts))}")
    unused = sorted(set(parts) - {train, test})
    remarks = (*parts[train].remarks, *([f"not used: {', '.join(unused)}"] if unused else []))
    first, second = aligned([parts[train], parts[test]], where)
    return first._replace(x_test=second.x, y_test=second.y, client_test=second.client, remarks=remarks)
