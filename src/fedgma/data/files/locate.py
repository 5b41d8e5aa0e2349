"""Loads a data set by name from the cache, the user's folders, a Debian package or the downloads, in that order."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedgma.data.files.cache import Cached, cache_folder, discard, open_cached, store
from fedgma.data.files.dataset import Dataset, Source, check_counts, check_split
from fedgma.data.files.download import download_folder
from fedgma.data.files.embedded import load_mini
from fedgma.data.files.own.folders import has_arrays, load_own
from fedgma.data.files.own.text import LENGTH, is_text, load_text
from fedgma.data.files.reader import FoundFiles, check_sha256
from fedgma.data.files.registry import SPECS, FileFormat, Spec
from fedgma.data.files.writers import drop_repeats, hold_out_writers, keep_digits
from fedgma.data.shifts import Colour, Rotation
from fedgma.documents import PathLike
from fedgma.errors import ConfigError, DataError, IntegrityError

Folders = Sequence[PathLike]


class Candidate(NamedTuple):
    """Files of a data set that were found but not read."""

    kind: str
    file_format: FileFormat
    files: FoundFiles


def load(
    name: PathLike,
    *,
    folders: Folders | None = None,
    cache: PathLike | None = None,
    target: str = "class",
    length: int = LENGTH,
    unit: str = "window",
) -> Dataset:
    """Load the data set of that name, or the user's data at that path.

    Looks in the cache, in `folders` (default: those of `$FEDGMA_DATA`), in the folder of a Debian package and among
    the downloads of `fedgma data get`. Does not download anything. `target` is the kind of the targets in a user's
    file, as in `from_arrays`; `length` and `unit` are those of `text.load_text`.

    >>> load("fmnist-mini").classes[:2]
    ('T-shirt/top', 'Trouser')
    """
    name, cache = os.fspath(name), None if cache is None else Path(cache)
    if name == "fmnist-mini":
        return load_mini()
    if name in DERIVED:
        base, make = DERIVED[name]
        return make(load_base(base, folders=folders, cache=cache))._replace(name=name)
    if name in SPECS:
        return load_base(name, folders=folders, cache=cache)
    path = existing(name)
    tokens = target == "tokens" and path is not None and not has_arrays(path)
    if path is not None and (tokens or is_text(path)):
        return load_text(path, length=length, unit=unit)
    if path is not None:
        return load_own(path, target=target)
    raise ConfigError(f"unknown data set {name!r}; known: {', '.join(names())}; or the path of your own file or folder")


def existing(name: str, folder: Path = Path()) -> Path | None:
    """The file or folder of that name, or None; also for a name that no file can have, or with an unknown `~user`."""
    if not name:
        return None
    try:
        path = folder / Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):
        return None


def names() -> tuple[str, ...]:
    """Names of all known data sets."""
    return tuple(sorted({"fmnist-mini", *SPECS, *DERIVED}))


def base_name(name: str) -> str:
    """The set whose files a set is read from: `mnist` for `fedcmnist`, the name itself for most.

    >>> base_name("fedcmnist"), base_name("cifar10")
    ('mnist', 'cifar10')
    """
    return DERIVED[name][0] if name in DERIVED else name


class Available(NamedTuple):
    """A data set and whether this machine has it."""

    name: str
    about: str
    where: str  # where its files are, or how to get them
    here: bool


def availability(folders: Folders | None = None, cache: Path | None = None) -> Iterator[Available]:
    """Every data set, and whether this machine has it; reads no data."""
    cache, paths = cache_folder() if cache is None else cache, _user_folders(folders)
    for name in names():
        base = base_name(name)
        if name == "fmnist-mini":
            yield Available(name, "a stratified part of Fashion-MNIST, 10,000 + 2,000", "in the package", True)
            continue
        spec = SPECS[base]
        about = spec.about if name == base else ABOUT[name]
        if (cache / "datasets" / base).is_dir():
            yield Available(name, about, "cached", True)
            continue
        yield Available(name, about, *_describe_location(base, spec, paths, cache))


def _describe_location(name: str, spec: Spec, folders: Sequence[Path], cache: Path) -> tuple[str, bool]:
    """Where the files of a set are, or how to get them; and whether this machine has them."""
    try:
        candidate = next(_candidates(name, spec, folders, cache), None)
    except DataError as error:
        return str(error), True
    if candidate is not None:
        return f"{candidate.kind}: {candidate.files.paths[0].name}", True
    return (f"fedgma data get {name}" if spec.remote else f"needs {spec.looked_for}"), False


def load_base(name: str, *, folders: Folders | None = None, cache: Path | None = None) -> Dataset:
    """Load a data set that has its own files."""
    spec, cache = SPECS[name], cache_folder() if cache is None else cache
    candidate = next(_candidates(name, spec, _user_folders(folders), cache), None)
    cached = _open_valid(cache, name, candidate is None)
    if cached is not None and (candidate is None or cached.origin == _origin(candidate.files)):
        return cached.dataset
    if candidate is None:
        raise DataError(
            f"{name} was not found in the cache or in {_where(folders)}; looked for {spec.looked_for}; set FEDGMA_DATA "
            "to the folder that holds it" + (f", or run: fedgma data get {name}" if spec.remote else "")
        )
    dataset = _read(name, spec, candidate)
    store(cache, dataset, _origin(candidate.files))
    return dataset


def _open_valid(cache: Path, name: str, required: bool) -> Cached | None:
    """The cached set; a damaged one is discarded, or raises if it is `required` since there are no other files."""
    try:
        return open_cached(cache, name)
    except IntegrityError:
        if required:
            raise
        discard(cache, name)
        return None


def _user_folders(folders: Folders | None) -> list[Path]:
    if folders is None:
        folders = [part for part in os.environ.get("FEDGMA_DATA", "").split(os.pathsep) if part]
    paths = []
    for folder in folders:
        path = existing(os.fspath(folder))
        if path is None or not path.is_dir() or not os.access(path, os.R_OK | os.X_OK):
            raise DataError(f"the data folder {str(folder)!r} does not exist or cannot be read")
        paths.append(path)
    return paths


def _candidates(name: str, spec: Spec, folders: Sequence[Path], cache: Path) -> Iterator[Candidate]:
    kinds = [*(("folder", folder) for folder in folders), *(("debian", folder) for folder in spec.system)]
    for kind, folder in (*kinds, ("download", download_folder(cache, name))):
        for file_format in spec.formats if folder.is_dir() else ():
            if (files := file_format.find(folder)) is not None:
                yield Candidate(kind, file_format, files)


def _origin(files: FoundFiles) -> Mapping[str, int]:
    """Names and sizes of the files; they show whether a cached set was read from other files."""
    return {path.name: path.stat().st_size if path.is_file() else -1 for path in files.paths}


def _read(name: str, spec: Spec, candidate: Candidate) -> Dataset:
    digest = check_sha256(candidate.files)
    raw = candidate.files.read()
    classes = raw.classes if len(raw.classes) == len(spec.classes) else spec.classes
    expected = candidate.file_format
    for part, split, counts in (("train", raw.train, expected.train), ("test", raw.test, expected.test)):
        check_split(name, part, split, len(classes))
        if split.x.shape[1:] != spec.shape:
            raise DataError(f"{name} ({part}): images must have shape {spec.shape}, got {split.x.shape[1:]}")
        if counts is not None:
            check_counts(name, part, split, counts)
    paths = candidate.files.paths
    label = paths[0].name if len(paths) == 1 else f"{paths[0].name} and {len(paths) - 1} more"
    return Dataset(name, raw.train, raw.test, classes, Source(candidate.kind, label, digest), raw.notes)


def _where(folders: Folders | None) -> str:
    paths = _user_folders(folders)
    return ", ".join(str(path) for path in paths) if paths else "any folder (FEDGMA_DATA is not set)"


def _separate_writers(dataset: Dataset) -> Dataset:
    return hold_out_writers(drop_repeats(dataset))


DERIVED: Mapping[str, tuple[str, Callable[[Dataset], Dataset]]] = {
    "fedcmnist": ("mnist", lambda mnist: mnist._replace(shift=Colour())),
    "fedrotmnist": ("mnist", lambda mnist: mnist._replace(shift=Rotation())),
    "femnist": ("femnist-by-sample", lambda femnist: _separate_writers(keep_digits(femnist))),
    "femnist-62": ("femnist-by-sample", _separate_writers),
}

ABOUT = {
    "fedcmnist": "MNIST with colours that depend on the digit in training, but not in the test set",
    "fedrotmnist": "MNIST rotated by a different angle at each client",
    "femnist": "FEMNIST digits by writer, tested on held-out writers",
    "femnist-62": "FEMNIST, all 62 classes, by writer, tested on held-out writers",
}
