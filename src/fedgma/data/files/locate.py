"""Load a data set by name: from the cache, the user's folders, a Debian package or the downloads, in that order."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedgma.data.files.cache import Cached, cache_folder, discard, open_cached, store
from fedgma.data.files.dataset import Dataset, Source, check_counts, check_split
from fedgma.data.files.download import download_folder
from fedgma.data.files.embedded import load_mini
from fedgma.data.files.own import load_images, load_npz
from fedgma.data.files.reader import Found, check_sha256
from fedgma.data.files.registry import SPECS, Place, Spec
from fedgma.data.files.writers import digits, hold_out_writers, without_repeats
from fedgma.data.shifts import Colour, Rotation
from fedgma.errors import ConfigError, DataError, IntegrityError

Folders = Sequence[str | os.PathLike[str]]


class Candidate(NamedTuple):
    """Files of a data set, found but not read."""

    kind: str
    place: Place
    found: Found


def load(name: str, *, folders: Folders | None = None, cache: Path | None = None) -> Dataset:
    """The data set of that name, or the user's own at that path.

    Looks in the cache, in `folders` (default: those of `$FEDGMA_DATA`), in the folder of a Debian package and among
    what `fedgma data get` has fetched. Nothing is downloaded here.

    >>> load("fmnist-mini").classes[:2]
    ('T-shirt/top', 'Trouser')
    """
    if name == "fmnist-mini":
        return load_mini()
    if name in DERIVED:
        base, make = DERIVED[name]
        return make(load_base(base, folders=folders, cache=cache))._replace(name=name)
    if name in SPECS:
        return load_base(name, folders=folders, cache=cache)
    if (path := Path(name).expanduser()).suffix == ".npz" and path.is_file():
        return load_npz(path)
    if os.sep in name and path.is_dir():
        return load_images(path)
    raise ConfigError(
        f"unknown data set {name!r}; known: {', '.join(names())}; or the path of an .npz or picture folder"
    )


def names() -> tuple[str, ...]:
    """All data sets that have a name."""
    return tuple(sorted({"fmnist-mini", *SPECS, *DERIVED}))


def base_name(name: str) -> str:
    """The set whose files a set is made of: `mnist` for `fedcmnist`, itself for most.

    >>> base_name("fedcmnist"), base_name("cifar10")
    ('mnist', 'cifar10')
    """
    return DERIVED[name][0] if name in DERIVED else name


class Available(NamedTuple):
    """A data set and whether this machine has it."""

    name: str
    about: str
    where: str  # in words: where its files are, or what to do to have them
    here: bool


def availability(folders: Folders | None = None, cache: Path | None = None) -> Iterator[Available]:
    """Every data set, and whether it is here; nothing is read."""
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
        yield Available(name, about, *_whereabouts(base, spec, paths, cache))


def _whereabouts(name: str, spec: Spec, folders: Sequence[Path], cache: Path) -> tuple[str, bool]:
    """Where the files of a set are, or what to do to have them; and whether they are here."""
    try:
        candidate = next(_candidates(name, spec, folders, cache), None)
    except DataError as error:
        return str(error), True
    if candidate is not None:
        return f"{candidate.kind}: {candidate.found.files[0].name}", True
    return (f"fedgma data get {name}" if spec.remote else f"needs {spec.looked_for}"), False


def load_base(name: str, *, folders: Folders | None = None, cache: Path | None = None) -> Dataset:
    """A data set as its files hold it."""
    spec, cache = SPECS[name], cache_folder() if cache is None else cache
    candidate = next(_candidates(name, spec, _user_folders(folders), cache), None)
    cached = _sound(cache, name, candidate is None)
    if cached is not None and (candidate is None or cached.origin == _origin(candidate.found)):
        return cached.dataset
    if candidate is None:
        raise DataError(
            f"{name} was not found in the cache or in {_where(folders)}; looked for {spec.looked_for}; set FEDGMA_DATA "
            "to the folder that holds it" + (f", or run: fedgma data get {name}" if spec.remote else "")
        )
    dataset = _read(name, spec, candidate)
    store(cache, dataset, _origin(candidate.found))
    return dataset


def _sound(cache: Path, name: str, must: bool) -> Cached | None:
    """What the cache holds; damage is an error only where nothing else can take its place."""
    try:
        return open_cached(cache, name)
    except IntegrityError:
        if must:
            raise
        discard(cache, name)
        return None


def _user_folders(folders: Folders | None) -> list[Path]:
    if folders is None:
        folders = [part for part in os.environ.get("FEDGMA_DATA", "").split(os.pathsep) if part]
    paths = [Path(folder).expanduser() for folder in folders]
    for path in paths:
        if not _is_folder(path):
            raise DataError(f"the data folder {str(path)!r} does not exist or cannot be read")
    return paths


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir() and os.access(path, os.R_OK | os.X_OK)
    except (OSError, ValueError):
        return False


def _candidates(name: str, spec: Spec, folders: Sequence[Path], cache: Path) -> Iterator[Candidate]:
    kinds = [*(("folder", folder) for folder in folders), *(("debian", folder) for folder in spec.system)]
    for kind, folder in (*kinds, ("download", download_folder(cache, name))):
        for place in spec.places if folder.is_dir() else ():
            if (found := place.find(folder)) is not None:
                yield Candidate(kind, place, found)


def _origin(found: Found) -> Mapping[str, int]:
    """Names and sizes: enough to see that a cached set was made from other files."""
    return {path.name: path.stat().st_size if path.is_file() else -1 for path in found.files}


def _read(name: str, spec: Spec, candidate: Candidate) -> Dataset:
    digest = check_sha256(candidate.found)
    raw = candidate.found.read()
    classes = raw.classes if len(raw.classes) == len(spec.classes) else spec.classes
    for part, split, counts in (("train", raw.train, candidate.place.train), ("test", raw.test, candidate.place.test)):
        check_split(name, part, split, len(classes))
        if split.x.shape[1:] != spec.shape:
            raise DataError(f"{name} ({part}): images should be {spec.shape}, not {split.x.shape[1:]}")
        if counts is not None:
            check_counts(name, part, split, counts)
    files = candidate.found.files
    label = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
    return Dataset(name, raw.train, raw.test, classes, Source(candidate.kind, label, digest), raw.notes)


def _where(folders: Folders | None) -> str:
    paths = _user_folders(folders)
    return ", ".join(str(path) for path in paths) if paths else "any folder (FEDGMA_DATA is not set)"


def _writers_apart(dataset: Dataset) -> Dataset:
    return hold_out_writers(without_repeats(dataset))


DERIVED: Mapping[str, tuple[str, Callable[[Dataset], Dataset]]] = {
    "fedcmnist": ("mnist", lambda mnist: mnist._replace(shift=Colour())),
    "fedrotmnist": ("mnist", lambda mnist: mnist._replace(shift=Rotation())),
    "femnist": ("femnist-by-sample", lambda femnist: _writers_apart(digits(femnist))),
    "femnist-62": ("femnist-by-sample", _writers_apart),
}

ABOUT = {
    "fedcmnist": "MNIST in colours that go with the digit, and mean nothing in the test",
    "fedrotmnist": "MNIST turned by an angle of each client",
    "femnist": "FEMNIST digits by writer, tested on writers whom no client knows",
    "femnist-62": "FEMNIST, all 62 classes, by writer, tested on other writers",
}
